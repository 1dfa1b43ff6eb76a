"""Lines of an aligned table."""

from typing import Callable, List, Sequence


def table_lines(rows: Sequence[Sequence[str]], others: Callable[[str, int], str] = str.rjust) -> List[str]:
    """A line for each row, columns two spaces apart and without spaces at the end.

    Args:
        rows: the header first, if there is one; all with as many cells.
        others: how columns after the first, which stands on the left, are padded.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(others, row[1:], widths[1:])]).rstrip() for row in rows]
