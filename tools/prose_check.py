"""Checks what no linter does: words of prose, verbs of docstrings, sizes of files and folders, names of classes.

    python -m tools.prose_check             # fails where a room has more findings than are recorded
    python -m tools.prose_check --list      # every finding
    python -m tools.prose_check --record    # records what is true now; the diff shows what rose

The record, ``tools/prose_record.json``, may only shrink: it holds what was there before the rule. What has no entry
is not allowed.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.rooms import ROOMS

CODE = (*ROOMS, "tools", "benchmarks", "tests")
PAGES = ("docs", "deploy", "benchmarks")
RECORD = Path(__file__).with_name("prose_record.json")

WORDS = re.compile(
    r"(?<![\w.`])(anew|whoever|somebody|nobody|everybody|foreseen|foresees?|foretells?|learnt)\b(?!`)", re.IGNORECASE
)
"""Words that the project's prose avoids; the same letters in a quoted identifier are no prose."""
BEGINNING = re.compile(r"(?:^\W*|[.:!?]\s+)(Of)\b", re.MULTILINE)
"""A sentence that begins with the preposition; a capital one elsewhere begins no sentence."""

THIRD_PERSON = re.compile(r"[A-Z][a-z]+s\b(?!['-])")
NO_VERBS = (
    "Activations Always Arguments Arrays Arrivals As Attempts Batches Bins Blocks Bytes Characters Class Columns "
    "Components Constants Continuous Coroutines Cosines Decisions Defaults Deltas Directories Elements Embeddings "
    "Equations Estimators Events Exceptions Experts Features Fields Harmless Ids Indices Ingress Instructions Items "
    "Its Jobs Keys Kinds Layers Lengths Less Lines Logits Messages Newcomers Norms Orders Outputs Pairs Parameters "
    "Parts Perhaps Pixels Points Positions Prefixes Processors Quantiles Queries Radians Rankings Replicas Requests "
    "Residents Rows Seconds Slots Slopes Sources Statistics Tables Tensors Texts This Thus Tokens Unless Values "
    "Accounts Vectors Victims Weights Widths Windows Workers"
)
"""Words in s with which docstrings began that are no verbs in the third person."""

MAX_COLUMNS, MAX_LINES, MAX_FILES = 120, 500, 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One place that breaks a rule.

    Attributes:
        entry: What the record counts it under: ``words/actors``, or the very file, folder or class.
        number: How much of it: 1, or a size that may only shrink.
    """

    entry: str
    place: str
    text: str
    number: int = 1


def findings(root: Path) -> list[Finding]:
    """Everything below ``root`` that breaks a rule, whether recorded or not."""
    code = {path: path.read_text() for room in CODE for path in sorted((root / room).rglob("*.py"))}
    pages = [*sorted(root.glob("*.md")), *(page for room in PAGES for page in sorted((root / room).rglob("*.md")))]
    found = []
    for path, text in code.items():
        where = path.relative_to(root)
        for line, sentence in texts(text):
            found += _prose(where, line, sentence)
        if where.parts[0] != "tests":
            found += _verbs(where, text)
        if (lines := text.count("\n")) > MAX_LINES:
            found.append(Finding(f"lines/{where}", str(where), f"{lines} lines, at most {MAX_LINES}", lines))
    for path in pages:
        where = path.relative_to(root)
        for line, sentence in enumerate(path.read_text().splitlines(), 1):
            found += _prose(where, line, sentence)
            if where == Path("README.md") and len(sentence) > MAX_COLUMNS:
                found.append(Finding("columns/README.md", f"{where}:{line}", f"{len(sentence)} columns"))
    in_packages = {
        path.relative_to(root): text for path, text in code.items() if path.relative_to(root).parts[0] in ROOMS
    }
    return found + _folders(in_packages) + _classes(in_packages)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a module and its other literals that hold a space, each with its first line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def _prose(where: Path, line: int, text: str) -> list[Finding]:
    room = where.parts[0] if len(where.parts) > 1 else "pages"
    rules = (("words", WORDS), ("of", BEGINNING))
    return [
        Finding(f"{rule}/{room}", f"{where}:{line + text.count(chr(10), 0, match.start(1))}", _around(text, match))
        for rule, pattern in rules
        for match in pattern.finditer(text)
    ]


def _verbs(where: Path, source: str) -> list[Finding]:
    """Returns the docstrings of functions that begin with anything but a verb; a property's may name what it is."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (text := ast.get_docstring(node)):
            continue
        decorators = {name.id for name in node.decorator_list if isinstance(name, ast.Name)}
        verb = THIRD_PERSON.match(text)
        if not decorators & {"property", "cached_property"} and (verb is None or verb[0] in NO_VERBS.split()):
            room = "/".join(where.parent.parts[: 2 if where.parts[0] == "services" else 1])
            found.append(Finding(f"verbs/{room}", f"{where}:{node.lineno}", text.split("\n")[0]))
    return found


def _around(text: str, match: re.Match[str]) -> str:
    return " ".join(text[max(0, match.start(1) - 30) : match.end(1) + 40].split())


def _folders(code: dict[Path, str]) -> list[Finding]:
    sizes = Counter(path.parent for path in code)
    return [
        Finding(f"files/{folder}", str(folder), f"{size} files side by side, at most {MAX_FILES}", size)
        for folder, size in sizes.items()
        if size > MAX_FILES
    ]


def _classes(code: dict[Path, str]) -> list[Finding]:
    """Classes at the top of two modules; private ones are their module's own business."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in code.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    return [
        Finding(f"class/{name}", at[0], f"{name} is the name of {len(at)} classes: {', '.join(at)}", len(at))
        for name, at in places.items()
        if len(at) > 1
    ]


def totals(found: list[Finding]) -> dict[str, int]:
    """How much there is under each entry of the record."""
    counts: Counter[str] = Counter()
    for each in found:
        counts[each.entry] += each.number
    return dict(sorted(counts.items()))


def excess(found: list[Finding], recorded: dict[str, int]) -> list[str]:
    """What goes beyond the record: one line for each entry, then its findings."""
    lines = []
    for entry, number in totals(found).items():
        if number > (allowed := recorded.get(entry, 0)):
            lines.append(f"{entry}: {number}, recorded {allowed}")
            lines += [f"  {each.place}: {each.text}" for each in found if each.entry == entry]
    return lines


def main(argv: list[str] | None = None, root: Path = RECORD.parents[1], record: Path = RECORD) -> int:
    """Returns the exit status: 1 where anything goes beyond the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="Record what is true now.")
    parser.add_argument("--list", action="store_true", help="Print every finding.")
    options = parser.parse_args(argv)
    found, recorded = findings(root), json.loads(record.read_text()) if record.exists() else {}
    if options.list:
        print("\n".join(f"{each.place}: {each.entry}: {each.text}" for each in found))
        return 0
    beyond = excess(found, recorded)
    if options.record:
        record.write_text(json.dumps(totals(found), indent=1) + "\n")
        print("\n".join(["Recorded, and more than before:", *beyond] if beyond else ["Recorded; nothing rose."]))
        return 0
    shrunk = sum(totals(found).get(entry, 0) < number for entry, number in recorded.items())
    if beyond:
        print("\n".join(["Prose and sizes go beyond the record (CONTRIBUTING.md, Rules):", *beyond]), file=sys.stderr)
    elif shrunk:
        print(f"{shrunk} entries have shrunk: `python -m tools.prose_check --record` keeps it so.")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
