"""What the site has beside its pages: a table of vLLM's flags, and ``llms.txt``.

``python -m tools.reference.site`` writes ``llms.txt`` into the built site, and the pages as Markdown for it to lead to.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command

from farsight.services.cli import app
from farsight.services.settings import VLLM_ANSWERS

ROOT = Path(__file__).parents[2]
INDEX = "llms.txt"


def vllm_flags_table() -> str:
    """Returns one row for each flag of vLLM that ``farsight serve`` takes under another name, or answers."""
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    taken = {flag: each.opts[0] for each in serve.params for flag in each.opts[1:] if not flag.startswith("--no-")}
    rows = [f"| `{theirs}` | `{ours}`; this name is taken as well |" for theirs, ours in taken.items()]
    rows += [f"| `--{name.replace('_', '-')}` | {_answer(text)} |" for name, text in VLLM_ANSWERS.items()]
    return "\n".join(["| vLLM | Farsight |", "|---|---|", *sorted(rows)])


def _answer(text: str) -> str:
    text = re.sub(r"(?<!\w)(--[\w-]+(?: int8 or int4)?|\w+\.\w+)", r"`\1`", text)
    return text.removeprefix("none: ") if text.startswith("none: ") else text


def llms_text(docs: Path) -> str:
    """Returns the index of the site's menu for programs (llmstxt.org): each page with its first sentence."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    index = docs / "index.md"
    lines = [f"# {site['site_name']}", "", f"> {_summary(index)}"]
    for section in site["nav"]:
        ((name, entries),) = section.items()
        lines += ["", f"## {name}", ""]
        for path in _pages(entries):
            page = docs / path
            title = page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
            lines.append(f"- [{title}]({path}): {_summary(page)}")
    return "\n".join([*lines, ""])


def _pages(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        elif isinstance(found := next(iter(entry.values())), str):
            yield found
        else:
            yield from _pages(found)


def _summary(page: Path) -> str:
    """Returns the first sentence of a page's first paragraph, without its marks."""
    blocks = page.read_text("utf-8").split("\n\n")[1:]
    prose = next(block for block in blocks if not block.startswith(("#", "|", "```", "<!--", "![", "=== ", "    ")))
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    return re.split(r"(?<=[.?:]) (?=[A-Z`*])", plain)[0]


if __name__ == "__main__":
    docs, built = ROOT / "docs", ROOT / "build" / "site"
    for page in docs.rglob("*.md"):
        shutil.copy(page, built / page.relative_to(docs))
    (built / INDEX).write_text(llms_text(docs), "utf-8")
