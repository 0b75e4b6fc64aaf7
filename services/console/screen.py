"""How an answer is shown while it comes: as Markdown on a terminal, as it is in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from farsight.services.console.talk import Piece
from farsight.services.words import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_FENCE = "```"
_REFRESHES = 8
"""A second: what one reads is no smoother with more."""


class GrowingBlocks:
    """Growing Markdown: blocks that are complete, and the rest. A blank line ends a block, unless in a code block."""

    def __init__(self) -> None:
        self.rest = ""

    def add(self, text: str) -> list[str]:
        """Takes further text; returns the blocks that are complete now."""
        self.rest += text
        found: list[str] = []
        begin = at = 0
        in_code = False
        for line in self.rest.splitlines(keepends=True):
            at += len(line)
            if line.lstrip().startswith(_FENCE):
                in_code = not in_code
            elif not in_code and line == "\n" and self.rest[begin:at].strip():
                found.append(self.rest[begin:at])
                begin = at
        self.rest = self.rest[begin:]
        return found


@dataclass(slots=True)
class Shown:
    """What was shown of an answer.

    Attributes:
        ttft_s: Seconds to its first text; None without any.
        took_s: Seconds to its end.
        eta_s: The first prediction of its end, as ``Piece.eta_s``.
        stopped: Whether the user has ended it.
    """

    text: str = ""
    ttft_s: float | None = None
    took_s: float = 0.0
    eta_s: tuple[float, float] | None = None
    stopped: bool = False

    def add(self, piece: Piece, now_s: float) -> None:
        """Takes a piece that comes ``now_s`` seconds after the question."""
        self.text += piece.text
        self.eta_s = self.eta_s or piece.eta_s
        self.took_s = now_s
        if self.ttft_s is None and (piece.text or piece.reasoning):
            self.ttft_s = now_s

    def facts(self, num_tokens: int) -> str:
        """Returns its numbers in one line."""
        if self.ttft_s is None:
            return f"no text, {self.took_s:.1f} s"
        rest_s = self.took_s - self.ttft_s
        pace = f", {(num_tokens - 1) / rest_s:.1f} tokens/s" if num_tokens > 1 and rest_s > 0 else ""
        promised = "" if self.eta_s is None else f", {promise(self.eta_s)} was predicted"
        return f"{counted(num_tokens, 'token')}, the first after {self.ttft_s:.2f} s{pace}{promised}"


def promise(eta_s: tuple[float, float]) -> str:
    """Returns when an answer ends, as it is predicted."""
    return f"about {eta_s[0]:.1f} s (9 of 10 within {eta_s[1]:.1f} s)"


def write_plain(pieces: Iterable[Piece], out: TextIO) -> Shown:
    """Writes the text as it comes, and an end of line."""
    shown, began = Shown(), time.monotonic()
    for piece in pieces:
        shown.add(piece, time.monotonic() - began)
        out.write(piece.text)
        out.flush()
    out.write("\n")
    return shown


def show_markdown(pieces: Iterable[Piece], console: Console) -> Shown:
    """Shows complete blocks for good, and the one that grows below them; Ctrl-C ends the answer."""
    from rich.live import Live
    from rich.markdown import Markdown

    shown, began, blocks, thought = Shown(), time.monotonic(), GrowingBlocks(), ""
    with Live(console=console, transient=True, refresh_per_second=_REFRESHES) as live:
        try:
            for piece in pieces:
                shown.add(piece, time.monotonic() - began)
                thought += piece.reasoning
                for block in blocks.add(piece.text):
                    console.print(Markdown(block))
                live.update(_below(blocks.rest, thought, shown, console.height))
        except KeyboardInterrupt:
            shown.stopped = True
    if blocks.rest.strip():
        console.print(Markdown(blocks.rest))
    return shown


def _below(rest: str, thought: str, shown: Shown, height: int) -> RenderableType:
    """Returns what grows: the last block, or what the model thinks, or when the answer will have ended."""
    from rich.markdown import Markdown
    from rich.text import Text

    lines = (rest or thought).splitlines()
    if len(lines) > height - 4:
        return Text("\n".join(lines[4 - height :]), style="" if rest else "dim")
    if rest:
        return Markdown(rest)
    if not shown.text and not thought:
        return Text("" if shown.eta_s is None else f"ends in {promise(shown.eta_s)}", style="dim")
    return Text(thought if not shown.text else "", style="dim")
