"""Each rule finds what it is for, and nothing goes beyond the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.prose_check import Finding, findings, main, texts, totals

BANNED = ("anew", "Whoever", "somebody", "nobody", "everybody", "foreseen", "foretell", "learnt")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("word", BANNED)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("core/a.py", '"""Read {}."""\n'),
        ("core/a.py", "x = 1  # read {}\n"),
        ("core/a.py", 'x = f"read {} {{1}}"\n'),
        ("docs/adr/a.md", "\nRead {}.\n"),
        ("README.md", "Read {}"),
    ],
)
def test_words(word: str, name: str, text: str, tmp_path: Path) -> None:
    [found] = findings(tree(tmp_path, {name: text.format(word)}))
    room = {"core": "core", "docs": "docs"}.get(name.split("/")[0], "pages")
    assert (found.entry, found.place.split(":")[0]) == (f"words/{room}", name)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"""{} a thing."""\n', 1),
        ('"""A thing.\n\n    name: {} a thing.\n"""\n', 3),
        ("x = 1\n# {} a thing\n", 2),
        ('x = "Full. {} a thing"\n', 1),
    ],
)
def test_sentences_that_begin_with_of(text: str, line: int, tmp_path: Path) -> None:
    [found] = findings(tree(tmp_path, {"engine/kv/a.py": text.format("O" + "f")}))
    assert (found.entry, found.place) == ("of/engine", f"engine/kv/a.py:{line}")


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("Frees a block.", False),
        ("The block that is free.", True),
        ("Tokens of it.", True),
        ("Frees' block.", True),
        ("Free a block.", True),
    ],
)
@pytest.mark.parametrize(("room", "entry"), [("kvcache", "kvcache"), ("services/ingress", "services/ingress")])
def test_docstrings_begin_with_verbs(text: str, room: str, entry: str, *, is_found: bool, tmp_path: Path) -> None:
    body = f'class A:\n    @property\n    def p(self):\n        """The p."""\n    def f(self):\n        """{text}"""\n'
    found = findings(tree(tmp_path, {f"{room}/a.py": body, "tests/a.py": body}))
    assert [(each.entry, each.place) for each in found] == [(f"verbs/{entry}", f"{room}/a.py:5")] * is_found


def test_sizes(tmp_path: Path) -> None:
    files = {f"core/m{i}.py": "" for i in range(21)} | {"tests/long.py": "\n" * 501, "core/full.py": "\n" * 500}
    found = findings(tree(tmp_path, files | {"README.md": "a" * 121 + "\n" + "a" * 120}))
    assert totals(found) == {"columns/README.md": 1, "files/core": 22, "lines/tests/long.py": 501}
    files = {"core/a.py": "class A: ...\nclass _P: ...\n", "engine/a.py": "\nclass A: ...\nclass _P: ...\n"}
    [found_class] = findings(tree(tmp_path / "classes", files | {"tests/a.py": "class A: ...\n"}))
    told = "A is the name of 2 classes: core/a.py:1, engine/a.py:2"
    assert found_class == Finding("class/A", "core/a.py:1", told, 2)
    source = '"""One two."""\n# three\nx = ("four five" + f"six seven {x}", "eight")\n'
    assert [text.strip() for _, text in texts(source)] == ["three", "One two.", "four five", "six seven"]
    free = [f'x = "{BANNED[3]}"\n', f"def {BANNED[3]}(): ...\n", '"""Renewed, as ``Cell.foreseen`` and `foresee`."""\n']
    for name, text in enumerate([*free, '"""Two of a kind. Often."""\n']):
        assert findings(tree(tmp_path / f"free{name}", {"core/a.py": text})) == []


def test_the_record_may_only_shrink(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, page = tmp_path / "record.json", tmp_path / "docs" / "a.md"
    tree(tmp_path, {"docs/a.md": f"{BANNED[0]}\n{BANNED[1]}\n"})
    assert main([], tmp_path, record) == 1
    assert "words/docs: 2, recorded 0" in capsys.readouterr().err
    assert main(["--record"], tmp_path, record) == 0
    assert json.loads(record.read_text()) == {"words/docs": 2}
    assert main([], tmp_path, record) == 0
    page.write_text(f"{BANNED[0]}\n")
    capsys.readouterr()
    assert main([], tmp_path, record) == 0
    assert "1 entries have shrunk" in capsys.readouterr().out
    assert main(["--record"], tmp_path, record) == 0
    page.write_text(f"{BANNED[0]}\n{BANNED[1]}\n")
    assert main([], tmp_path, record) == 1
    assert f"docs/a.md:2: {BANNED[1]}" in capsys.readouterr().err
