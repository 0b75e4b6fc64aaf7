"""Sizes that steps are padded up to on a GPU: a recording or a compiled kernel of a size serves all steps that fit."""

from __future__ import annotations

from bisect import bisect_left

_NARROWEST = 8
_WIDER = 4


class StepSizes:
    """The sizes for steps of so many sequences, the longest of so many blocks.

    Attributes:
        rows: Numbers of sequences, ascending; the last is the largest.
        widths: Widths of block tables, in blocks, likewise.
    """

    def __init__(self, max_rows: int, max_width: int) -> None:
        self.rows = row_sizes(max_rows)
        self.widths = table_widths(max_width)

    def num_rows(self, number: int) -> int | None:
        """The smallest of ``rows`` that holds so many; None if none does."""
        return _smallest(self.rows, number)

    def width(self, number: int) -> int | None:
        """The smallest of ``widths`` that holds so many; None if none does."""
        return _smallest(self.widths, number)


def row_sizes(limit: int) -> list[int]:
    """Powers of two and, from 16 on, the middle between one and the next, up to ``limit``, which is the last."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < limit:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(power * 2 if sizes[-1] > power or power < 16 else power + power // 2)
    return [*(size for size in sizes if size < limit), limit]


def table_widths(limit: int) -> list[int]:
    """8 blocks, then four times as many each time, up to ``limit``, which is the last.

    Kernels cut the whole width of a table into parts that run side by side: a table far wider than its sequences are
    long leaves them a few parts with work and many without.
    """
    widths = [_NARROWEST]
    while widths[-1] < limit:
        widths.append(widths[-1] * _WIDER)
    return [*(width for width in widths if width < limit), limit]


def _smallest(sizes: list[int], number: int) -> int | None:
    place = bisect_left(sizes, number)
    return sizes[place] if place < len(sizes) else None
