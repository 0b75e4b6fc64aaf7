"""Writes every generated region: ``python -m tools.reference``."""

from __future__ import annotations

from tools.reference.chats_picture import PICTURE, chats_picture
from tools.reference.regions import DOCS, REGIONS, with_regions

for page in REGIONS:
    path = DOCS / page
    path.write_text(with_regions(page, path.read_text("utf-8")), "utf-8")
    print(f"wrote {path.relative_to(DOCS.parent)}")
(DOCS / PICTURE).write_text(chats_picture(DOCS), "utf-8")
print(f"wrote docs/{PICTURE}")
