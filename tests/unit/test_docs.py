"""The documentation: what it points to is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from farsight.services.cli import app
from tests.command_line import CliRunner

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        name, _, anchor = link.partition("#")
        if name.startswith(("http:", "https:")):
            continue
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_decision_is_in_the_index_or_one_line_of_the_archive() -> None:
    folder = ROOT / "docs" / "adr"
    index, archive = ((folder / name).read_text("utf-8") for name in ("README.md", "archive.md"))
    pages = sorted(page.name for page in folder.glob("0*.md"))
    assert [name for name in LINK.findall(index) if name != "archive.md"] == pages and len(pages) <= 30
    numbers = [*re.findall(r"^- (\d+)\. ", index, re.MULTILINE), *re.findall(r"^- \*\*(\d+)\. ", archive, re.MULTILINE)]
    no_decision = {87}
    assert sorted(map(int, numbers)) == [number for number in range(1, len(numbers) + 2) if number not in no_decision]
    slugs = [page.stem.partition("-")[2] for page in folder.glob("0*.md")]
    assert len(set(slugs)) == len(slugs)
    assert not [each for each in folder.iterdir() if each.suffix != ".md"], "decisions are pages"


NAMED = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|h|cpp|md|json|toml|txt|sh|js|html|ya?ml|svg|png))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Only paths whose first folder is one of the repository's; the change log tells of files that were there once."""
    if page.name == "CHANGELOG.md":
        return
    for path in NAMED.findall(page.read_text("utf-8")):
        if (ROOT / path.partition("/")[0]).is_dir():
            assert (ROOT / path).exists(), path


def test_code_to_copy_imports_each_module_once() -> None:
    for page in PAGES:
        for code in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            modules = re.findall(r"^from (\S+) import", code, re.MULTILINE)
            assert len(set(modules)) == len(modules), f"{page.name}: {modules}"


TROUBLES = re.findall(
    r"^```console\n\$ farsight ([^\n]+)\n(.*?)\n```",
    (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"),
    re.MULTILINE | re.DOTALL,
)


def test_messages_of_troubleshooting_are_those_of_the_commands() -> None:
    assert len(TROUBLES) >= 7
    for line, message in TROUBLES:
        done = CliRunner().invoke(app, shlex.split(line))
        assert done.exit_code in (1, 2) and done.output == f"{message}\n", line


ROWS = re.findall(
    r"^\| (.*\?) \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE
)


def test_there_are_twenty_questions() -> None:
    assert len(ROWS) == 20
    assert len({file for _, file, _ in ROWS}) == 20


@pytest.mark.parametrize(("question", "file", "looked_for"), ROWS, ids=lambda value: None)
def test_the_answer_is_there(question: str, file: str, looked_for: str) -> None:
    assert looked_for in (ROOT / file).read_text("utf-8"), question
