"""Numbers, sizes and times as people read them; tables in plain text."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence

__all__ = ["age", "moment", "pairs", "plural", "seconds", "short", "signature", "size", "table"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_NS = 1_000_000_000


def size(n_bytes: float) -> str:
    """Return a number of bytes with a unit, to three figures.

    Examples
    --------
    >>> size(999), size(1536), size(5 * 2**30)
    ('999 B', '1.50 KiB', '5.00 GiB')
    """
    if abs(n_bytes) < 1024:
        return f"{n_bytes:.0f} B"
    power = 1
    # 999.6 KiB would be printed as 1000 KiB: it is 0.98 MiB.
    while abs(n_bytes) / 1024**power >= 999.5 and power < len(_UNITS):
        power += 1
    value = n_bytes / 1024**power
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[power - 1]}"


def plural(n: int, noun: str) -> str:
    """Return a count with its noun.

    Examples
    --------
    >>> plural(1, "token"), plural(2000, "entry")
    ('1 token', '2,000 entries')
    """
    if n != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{n:,} {noun}"


def signature(bits: int, n_tokens: int) -> str:
    """Return what a signature is of: a run of tokens, or where `n_tokens` is 0 a whole entry."""
    of = "token" if n_tokens == 1 else plural(n_tokens, "token")
    return f"{bits:,} bits for each {of}" if n_tokens else f"{bits:,} bits an entry"


def moment(timestamp: int) -> str:
    """Return nanoseconds since the epoch as local date and time."""
    try:
        at = datetime.datetime.fromtimestamp(timestamp / _NS).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"{timestamp} ns"  # a date that no calendar here knows
    return at.isoformat(" ", "seconds")


def age(seconds: float) -> str:
    """Return a time span in its largest unit.

    Examples
    --------
    >>> age(3), age(7200), age(3 * 86400)
    ('3 s', '2 h', '3 d')
    """
    for unit, length in (("y", 365.25 * 86400), ("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def seconds(duration: float) -> str:
    """Return a duration with a unit, to three figures.

    Examples
    --------
    >>> seconds(0.000_012_34), seconds(2)
    ('12.3 us', '2 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if duration * scale >= 1:
            return f"{duration * scale:.3g} {unit}"
    return f"{duration * 1e9:.0f} ns"


def short(words: str | None, width: int = 60) -> str:
    """Return a text of any origin in one line, cut to a width; nothing for None.

    Examples
    --------
    >>> short("what was\\x1b said", 12)
    'what was\ufffd...'
    """
    if words is None:
        return ""
    line = "".join(one if one.isprintable() else "\ufffd" for one in words[: width + 1])
    return line if len(line) <= width else f"{line[: width - 3]}..."


def pairs(rows: Iterable[tuple[str, object]]) -> list[str]:
    """Return lines of names and values, the values under each other."""
    listed = [(name, str(value)) for name, value in rows]
    width = max((len(name) for name, _ in listed), default=0)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in listed]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return lines of a table; columns are set to the right, a last one of words to the left."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(header))]
    return ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in cells]
