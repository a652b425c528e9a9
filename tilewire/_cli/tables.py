"""Tables that commands print: padded lines, never cut or wrapped, so that other programs can read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_GAP = "  "


def table_lines(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> list[str]:
    """Pads cells to the width of their column.

    Args:
        titles: Title of each column.
        rows: Cells of each row, as many as there are titles.
        left: Titles of the columns that stand at the left; numbers, in the others, stand at the right.

    Returns:
        The line of the titles, and one for each row.
    """
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    pads = [str.ljust if title in left else str.rjust for title in titles]
    return [
        _GAP.join(pad(cell, width) for pad, cell, width in zip(pads, cells, widths, strict=True)).rstrip()
        for cells in (titles, *rows)
    ]
