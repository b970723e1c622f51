"""Every state in which a crash can leave a disk."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from hybridmem.testing._disk import (
    Change,
    Image,
    Link,
    LostSync,
    Mark,
    Rename,
    Resize,
    Sync,
    Unlink,
    Write,
    build,
)
from hybridmem.testing._recorder import Recorder

__all__ = ["CrashState", "crash_states"]

#: Bytes that a disk, and the kernel's page cache, write as one.
GRANULES = (512, 4096)
_NAMING = (Link, Rename, Unlink)


@dataclasses.dataclass(frozen=True)
class CrashState:
    """What is on the disk after a crash.

    Attributes
    ----------
    length : int
        Changes that were made before the crash; some of the last did not reach the disk.
    mark : str
        The last mark before the crash.
    tree : dict of str to (bytes or None)
        Contents of each file by path; None for a directory.
    how : str
        Which changes did not reach the disk whole, for messages.
    digest : bytes
        Equal for equal trees.
    """

    length: int
    mark: str
    tree: dict[str, bytes | None] = dataclasses.field(repr=False)
    how: str
    digest: bytes = dataclasses.field(repr=False)

    def build(self, root: Path) -> None:
        """Make the files in an empty directory."""
        build(self.tree.items(), root)


def crash_states(
    recorder: Recorder, *, first: int = 0, limit: int = 512, seed: int = 0
) -> Iterator[CrashState]:
    """Yield each different state in which a crash can leave the disk of a recording.

    The crash may come after any number of the recorded changes. Each change that was not synced by
    then has reached the disk, or has not, alone or with any others; a write may have reached it in
    part (up to a multiple of 512 or 4096 bytes, without its first granule, or with zeros in place
    of its bytes); changes of names may have reached it in another order than they were made in.

    Parameters
    ----------
    recorder : Recorder
    first : int, default 0
        The crash comes after at least so many changes.
    limit : int, default 512
        Combinations tried at each point. Where there are more, each change and each pair of them is
        left out and put in alone, and combinations are drawn at random for what is left.
    seed : int, default 0
        Of what is drawn.
    """
    drawn = random.Random(seed)
    synced = recorder.start.copy()
    waiting: list[Change] = []
    seen: set[tuple[str, bytes]] = set()
    mark = ""
    for length in range(len(recorder.log) + 1):
        if length:
            change = recorder.log[length - 1]
            if isinstance(change, Mark):
                mark = change.text
            elif isinstance(change, (Sync, LostSync)):
                waiting = _after_sync(synced, waiting, change)
            else:
                waiting.append(change)
        if length < first:
            continue
        for changes, how in _combinations(waiting, limit, drawn):
            image = synced.copy()
            for change in changes:
                image.apply(change)
            tree = image.tree()
            digest = _digest(tree)
            if (mark, digest) not in seen:
                seen.add((mark, digest))
                yield CrashState(length, mark, tree, how, digest)


def _after_sync(synced: Image, waiting: list[Change], sync: Change) -> list[Change]:
    """Return what still waits after a sync, or a failed one, which loses bytes but no names."""
    is_lost = isinstance(sync, LostSync)
    rest = []
    for change in waiting:
        if change.inode != sync.inode or (is_lost and isinstance(change, _NAMING)):
            rest.append(change)
        elif not is_lost:
            synced.apply(change)
    return rest


def _combinations(
    waiting: Sequence[Change], limit: int, drawn: random.Random
) -> Iterator[tuple[list[Change], str]]:
    """Yield what of the waiting changes reached the disk, in the order in which it did."""
    fates = [_fates(change) for change in waiting]
    total = 1
    for choices in fates:
        total *= len(choices)
    numbers: Iterator[tuple[int, ...]] | Sequence[tuple[int, ...]]
    if total <= limit:
        numbers = itertools.product(*(range(len(choices)) for choices in fates))
    else:
        numbers = _chosen(fates, limit, drawn)
    for picked in numbers:
        changes = [fates[at][number][0] for at, number in enumerate(picked)]
        how = ", ".join(
            f"{waiting[at]!r}: {fates[at][number][1]}" for at, number in enumerate(picked) if number
        )
        reached = [change for change in changes if change is not None]
        yield reached, how
        if sum(isinstance(change, _NAMING) for change in reached) > 1:
            for order in _reordered(reached):
                yield order, f"{how}; names in another order"


def _fates(change: Change) -> list[tuple[Change | None, str]]:
    """Return what may become of a change: the first choice is that it reaches the disk whole."""
    fates: list[tuple[Change | None, str]] = [(change, "whole"), (None, "lost")]
    if isinstance(change, Write):
        start, end = change.offset, change.offset + len(change.data)
        cuts: set[int] = set()
        for granule in GRANULES:
            edges = range(start // granule * granule + granule, end, granule)
            if len(edges) > 6:  # mistakes are at the ends; the middle stands for the rest
                cuts.update([*edges[:3], edges[len(edges) // 2], *edges[-2:]])
            else:
                cuts.update(edges)
        for cut in sorted(cuts):
            part = change.data[: cut - start]
            fates.append((dataclasses.replace(change, data=part), f"cut at {cut}"))
        if cuts:
            first = min(cuts)
            part = change.data[first - start :]
            rest = dataclasses.replace(change, offset=first, data=part)
            fates.append((rest, f"lost before {first}"))
        if end > change.size:  # the new length has reached the disk, the bytes have not
            fates.append((Resize(change.inode, end, only_grow=True), "zeros"))
    return fates


def _chosen(
    fates: Sequence[Sequence[tuple[Change | None, str]]], limit: int, drawn: random.Random
) -> list[tuple[int, ...]]:
    """Choose combinations where there are too many: the likely ones, then some at random."""
    n = len(fates)
    whole, lost = (0,) * n, (1,) * n
    chosen = {whole, lost}
    for base in (whole, lost):
        for at in range(n):
            for number in range(len(fates[at])):
                chosen.add((*base[:at], number, *base[at + 1 :]))
        other = 1 - base[0]
        for a, b in itertools.combinations(range(n), 2):
            pair = list(base)
            pair[a] = pair[b] = other
            chosen.add(tuple(pair))
        for at in range(n):
            chosen.add((*base[:at], *(other,) * (n - at)))
    while len(chosen) < limit:
        chosen.add(tuple(drawn.randrange(len(choices)) for choices in fates))
    return sorted(chosen)


def _reordered(reached: Sequence[Change]) -> Iterator[list[Change]]:
    """Yield other orders of changes of names: backwards, and two neighbours swapped."""
    at = [number for number, change in enumerate(reached) if isinstance(change, _NAMING)]
    orders = [at[::-1]]
    orders += [[*at[:i], at[i + 1], at[i], *at[i + 2 :]] for i in range(len(at) - 1)]
    for order in orders:
        changes = list(reached)
        for place, number in zip(at, order, strict=True):
            changes[place] = reached[number]
        yield changes


def _digest(tree: dict[str, bytes | None]) -> bytes:
    total = blake2b(digest_size=16)
    for path, data in sorted(tree.items()):
        total.update(path.encode() + (b"\0d" if data is None else b"\0f%d\0" % len(data) + data))
    return total.digest()
