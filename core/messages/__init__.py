"""What the actors say to each other. Every type here crosses a process boundary (see ``core.codec``).

Two rules make duplicates and late arrivals harmless (design section 3): a plan is a full snapshot, and every
grant in it is absolute ("may reach length N", never "N more").
"""

from __future__ import annotations

SCHEMA_VERSION = 8
"""Raised when any message changes shape; a message of another version is refused."""
