"""Thin Ray shells: plain async classes, decorated at the edge. They carry messages; they decide nothing."""

from farsight_rooms import check_rooms

check_rooms()
