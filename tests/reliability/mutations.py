"""Damaged stores: each answer is the right one or an error of ours, in bounded time and memory.

`python -m tests.reliability.mutations --count 10000` prints what became of the mutants, which are
opened in processes of their own.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hybridmem
from hybridmem.verify import verify

from . import forged
from .apart import apart, peak_memory
from .crashes import Scratch

MB = 1 << 20
Files = dict[str, bytes]

#: What stores are mutated: small ones of every stored form, and one without entries.
SPECIMENS: dict[str, dict[str, Any]] = {
    "float32": {"shard_max_bytes": 1200},
    "one-shard": {},
    "int8": {"quantize_stored": True},
    "bfloat16": {"kv_dtype": "bfloat16", "shard_max_bytes": 1200},
    "tokens": {"hdc_dim": 256, "signature_tokens": 1, "signature_bits": 64},
}
LAYERS = 2
QUERY = np.linspace(-1, 1, 4, dtype=np.float32)


@dataclasses.dataclass
class Commit:
    """The files of a store after a commit, and all that it answers."""

    files: Files
    entries: Mapping[int, tuple[Any, ...]]
    found: list[list[tuple[int, float]]]


def answers(store: Any) -> dict[int, tuple[Any, ...]]:
    """Each entry, less its access count, which no checksum covers."""
    out = {}
    for entry_id in store:
        entry = store.get(entry_id)
        out[entry_id] = (
            entry.layer_idx,
            entry.n_tokens,
            entry.importance,
            entry.timestamp,
            entry.padding,
            entry.signature,
            entry.keys.tobytes(),
            entry.values.tobytes(),
            str(entry.source),
        )
    return out


def searches(store: Any) -> list[list[tuple[int, float]]]:
    return [
        [(hit.entry_id, hit.score) for hit in store.query(QUERY, layer, 5)]
        for layer in range(LAYERS)
    ]


def specimen(path: Path, seed: int, config: dict[str, Any]) -> list[Commit]:
    """Make a store; return its last commits, newest last."""
    rng = np.random.default_rng(seed)
    commits = []

    def commit() -> None:
        files = {entry.name: Path(entry.path).read_bytes() for entry in os.scandir(path)}
        with hybridmem.open(path, "r") as store:
            commits.append(Commit(files, answers(store), searches(store)))

    with hybridmem.create(path, **({"embed_dim": 4, "hdc_dim": 64} | config)) as store:
        for round_ in range(3):
            for i in range(4):
                keys, values = rng.standard_normal((2, 1 + i, 4)).astype(np.float32)
                source = {"text": f"passage {i}", "n": [i]} if i % 2 else None
                store.put(keys, values, i % LAYERS, 1 + i, source=source)
            store.query(QUERY, 0)
            store.flush()
            commit()
            store.delete(2 + 4 * round_)
            store.flush()
            commit()
        store.calibrate(0, keys=rng.standard_normal((9, 4)).astype(np.float32))
        commit()
        store.compact()
        commit()
        store.put([[1.0] * 4], [[2.0] * 4], 0)
        store.flush()
        commit()
    return commits


# --- mutations -----------------------------------------------------------------------------------


class Mutator:
    """Damages the files of a store at random."""

    def __init__(self, seed: int, commits: list[Commit], other: list[Commit]) -> None:
        self.rng = random.Random(seed)
        self.commits = commits
        self.other = other
        self.files = dict(self.rng.choice(commits[-3:]).files)
        self.done: list[str] = []
        self.is_signed = False

    def mutate(self) -> None:
        kinds: list[Callable[[str], None]] = [
            self.flip, self.flip, self.bytes_, self.cut, self.tail, self.remove, self.swap,
            self.stale, self.foreign, self.move, self.shift, self.json, self.json, self.header,
        ]  # fmt: skip
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            name = self.rng.choice(sorted(self.files))
            kind = self.rng.choice(kinds)
            kind(name)
            self.done.append(f"{kind.__name__} {name}")

    def _place(self, data: bytes) -> int:
        return self.rng.randrange(len(data) or 1)

    def flip(self, name: str) -> None:
        data = bytearray(self.files[name] or b"\0")
        for _ in range(self.rng.choice([1, 1, 2, 8])):
            data[self._place(data)] ^= 1 << self.rng.randrange(8)
        self.files[name] = bytes(data)

    def bytes_(self, name: str) -> None:
        data = self.files[name]
        at, length = self._place(data), self.rng.choice([1, 2, 4, 8, 64, 512])
        filling = self.rng.choice([b"\0", b"\xff", b"9", bytes([self.rng.randrange(256)])])
        new = self.rng.choice([filling * length, self.rng.randbytes(length)])
        self.files[name] = data[:at] + new + data[at + length :]

    def cut(self, name: str) -> None:
        data = self.files[name]
        self.files[name] = data[: self.rng.choice([0, self._place(data), len(data) - 1])]

    def tail(self, name: str) -> None:
        data = self.files[name]
        more = self.rng.choice([bytes(48), data, self.rng.randbytes(self.rng.randrange(1, 5000))])
        self.files[name] = data + more

    def remove(self, name: str) -> None:
        if len(self.files) > 1:
            del self.files[name]

    def swap(self, name: str) -> None:
        other = self.rng.choice(sorted(self.files))
        self.files[name], self.files[other] = self.files[other], self.files[name]

    def stale(self, name: str) -> None:
        self._take(name, self.rng.choice(self.commits).files)

    def foreign(self, name: str) -> None:
        self._take(name, self.rng.choice(self.other).files)

    def _take(self, name: str, files: Files) -> None:
        self.files[name] = files.get(name) or files[self.rng.choice(sorted(files))]

    def move(self, name: str) -> None:
        """Copy a block of a file to another place, as a misdirected write does."""
        data = self.files[name]
        length = self.rng.choice([8, 48, 512])
        start, at = self._place(data), self._place(data)
        part = data[start : start + length]
        self.files[name] = data[:at] + part + data[at + len(part) :]

    def shift(self, name: str) -> None:
        data = self.files[name]
        at, length = self._place(data), self.rng.randrange(1, 100)
        self.files[name] = self.rng.choice(
            [data[:at] + data[at + length :], data[:at] + self.rng.randbytes(length) + data[at:]]
        )

    def json(self, _: str) -> None:
        """Change a value of index.json; its checksum too, in every other case."""
        data = self.files.get("index.json", b"")
        try:
            fields = json.loads(data)
            crc = fields.pop("crc32c")
        except (ValueError, KeyError, AttributeError):
            return
        _change(fields, self.rng)
        body = json.dumps(fields).encode()[:-1]
        if self.rng.random() < 0.5:
            self.is_signed = True
            self.files["index.json"] = forged.signed(body)
        else:
            self.files["index.json"] = body + b',\n"crc32c":%s}\n' % json.dumps(crc).encode()

    def header(self, _: str) -> None:
        """Change the header of a shard, and the checksums that cover it."""
        names = [name for name in self.files if name.startswith("shard_")]
        try:
            name = self.rng.choice(sorted(names))
            data = self.files[name]
            end = 8 + int.from_bytes(data[:8], "little")
            members, fields = json.loads(data[8:end]), json.loads(self.files["index.json"])
            del fields["crc32c"]
            number = int(name[6:].split(".")[0])
            [row] = [row for row in fields["shards"] if row[0] == number]
        except (ValueError, KeyError, IndexError, AttributeError, TypeError):
            return
        if not isinstance(members, dict):  # another file stands in its place
            return
        _change(members, self.rng)
        text = json.dumps(members).encode()
        head = len(text).to_bytes(8, "little") + text
        self.files[name] = head + data[end:]
        row[1:3] = len(self.files[name]), forged.crc32c(head)
        self.is_signed = True
        self.files["index.json"] = forged.signed(json.dumps(fields).encode()[:-1])


VALUES: list[Any] = [0, 1, -1, 2, 7, 255, 1024, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
VALUES += [(1 << 63) - 1, (1 << 64) - 1, 1 << 64, 10**30, 0.5, 1e300, True, None, "", "a", "../a"]
VALUES += ["\ud800", [], {}, [[]], [0], [[0, 0]], "F64", "I8"]


def _change(value: Any, rng: random.Random) -> None:
    """Change something, anywhere in a tree of lists and objects."""
    while True:
        places = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            if isinstance(value, dict):
                value["a"] = rng.choice(VALUES)
            else:
                value.append(rng.choice(VALUES))
            return
        at = rng.choice(places)
        if isinstance(value[at], (dict, list)) and rng.random() < 0.8:
            value = value[at]
            continue
        kind = rng.randrange(5)
        if kind == 0:
            del value[at]
        elif kind == 1 and type(value[at]) is int:
            value[at] += rng.choice([1, -1, 64, -64, 1 << 20, 1 << 32])
        elif kind == 2:
            other = rng.choice(places)
            value[at], value[other] = value[other], value[at]
        elif kind == 3 and isinstance(value, dict):
            value[rng.choice(["k_1", "v_2", "k_99", "x", "dead", "seed"])] = value[at]
        else:
            value[at] = rng.choice(VALUES)
        return


# --- the check -----------------------------------------------------------------------------------

WAYS = ("mmap", "pread", "verify", "salvage", "writer")


def look(
    root: Path,
    files: Files,
    way: str,
    commits: list[Commit],
    is_signed: bool,
    foreign: Sequence[Commit] = (),
) -> str:
    """Build a store and do one thing with it: `right`, `refused`, or AssertionError.

    Where index.json is of another store, its commits, this is that store with shards that are not
    its own: what is salvaged must be what was put there.
    """
    path = root / "mem"
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    known = {i: entry for commit in commits for i, entry in commit.entries.items()}
    versions = {
        (i, entry) for commit in [*commits, *foreign] for i, entry in commit.entries.items()
    }
    try:
        if way == "verify":
            is_sound = verify(path).ok
            if is_sound and not is_signed:
                with hybridmem.open(path, "r") as store:
                    _right(store, commits)  # an error here is one that verify has missed
            return "right" if is_sound else "refused"
        if way == "salvage":
            with hybridmem.open(path, "r", salvage=True) as store:
                kept = answers(store)
            if not is_signed:
                wrong = {i for i, entry in kept.items() if (i, entry) not in versions}
                assert not wrong, f"salvaged {wrong}, which are not what was put"
            return "right"
        with hybridmem.open(path, "r+" if way == "writer" else "r", io=_io(way)) as store:
            if is_signed:
                answers(store)
                searches(store)
            else:
                _right(store, commits)
            if way == "writer":
                _go_on(store, known, is_signed)
        return "right"
    except hybridmem.HybridMemError:
        return "refused"


def _io(way: str) -> str:
    return way if way == "pread" else "mmap"


def _right(store: Any, commits: list[Commit]) -> None:
    """Compare every answer with what one commit answers; an error of ours may end it."""
    ids = list(store)
    could_be = [commit for commit in commits if list(commit.entries) == ids]
    assert could_be, f"it has the ids {ids}"
    for entry_id in ids:
        entry = answers(_Only(store, entry_id))[entry_id]
        could_be = [commit for commit in could_be if commit.entries[entry_id] == entry]
        assert could_be, f"entry {entry_id} is {entry}"
    found = searches(store)
    assert any(commit.found == found for commit in could_be), f"it finds {found}"


class _Only:
    """One entry of a store."""

    def __init__(self, store: Any, entry_id: int) -> None:
        self._store, self._id = store, entry_id

    def __iter__(self) -> Any:
        return iter([self._id])

    def get(self, entry_id: int) -> Any:
        return self._store.get(entry_id)


def _go_on(store: Any, known: Mapping[int, Any], is_signed: bool) -> None:
    width = store.config.embed_dim
    if width > 4096:
        return
    try:
        new = store.put([[1.0] * width], [[2.0] * width], 0)
    except ValueError:
        assert is_signed, "refused by limits that it was not made with"
        return
    store.flush()
    store.compact()
    store.evict(3)
    for entry_id in () if is_signed else store:
        if entry_id != new:
            entry = store.get(entry_id)
            assert entry.keys.tobytes() == known[entry_id][6]


@dataclasses.dataclass
class Tally:
    """What became of mutants, and the most memory that one took beyond twice its store."""

    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    worst: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        total = sum(self.outcomes.values())
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.outcomes.items()))
        most = max(0, self.worst) >> 20
        return f"{total} mutants: {counts}; most memory beyond twice the store {most} MB"


Specimens = Mapping[str, Sequence[list[Commit]]]


def _try(numbers: Sequence[int], specimens: Specimens, root: Path) -> list[tuple[str, int, float]]:
    """Look at some mutants: what became of each, the memory it took at most, and the seconds."""
    results = []
    for number in numbers:
        name, way, mutator = _mutant(number, specimens)
        before = peak_memory()
        start = time.monotonic()
        try:
            value = look(root, *_asked(name, way, mutator, specimens))
        except Exception:
            value = "FAILED"
        seconds = time.monotonic() - start
        shutil.rmtree(root / "mem", ignore_errors=True)
        results.append((value, peak_memory() - before, seconds))
    return results


def _mutant(number: int, specimens: Specimens) -> tuple[str, str, Mutator]:
    name = random.Random(number).choice(sorted(specimens))
    mutator = Mutator(number, *specimens[name])
    mutator.mutate()
    return name, WAYS[number % len(WAYS)], mutator


def _asked(name: str, way: str, mutator: Mutator, specimens: Specimens) -> tuple[Any, ...]:
    own, other = specimens[name]
    foreign = other if "foreign index.json" in mutator.done else []
    return mutator.files, way, own, mutator.is_signed, foreign


def _alone(number: int, specimens: Specimens, root: Path, tally: Tally) -> None:
    name, way, mutator = _mutant(number, specimens)
    outcome = apart(look, root, *_asked(name, way, mutator, specimens), address_space=1 << 30)
    shutil.rmtree(root / "mem", ignore_errors=True)
    extra = outcome.grown - 2 * sum(map(len, mutator.files.values()))
    failure = outcome.failure or ("" if extra <= 64 * MB else f"took {extra >> 20} MB more")
    tally.worst = max(tally.worst, extra)
    tally.outcomes[outcome.value if not failure else "FAILED"] += 1
    if failure:
        tally.failures.append(f"mutant {number} ({name}, {way}, {mutator.done}): {failure}")


def run(
    count: int, seed: int, scratch: Scratch, *, together: int = 100, until: float = float("inf")
) -> Tally:
    """Open so many mutants; all failures are in the result.

    Some `together` in one process; where anything is the matter with one of them, each of these
    again in a process of its own.
    """
    specimens = {
        name: [specimen(scratch.new() / "mem", one, config) for one in (1, 2)]
        for name, config in SPECIMENS.items()
    }
    tally = Tally()
    for first in range(seed, seed + count, together):
        if time.monotonic() > until:
            break
        root = scratch.new()
        numbers = range(first, min(first + together, seed + count))
        outcome = apart(
            _try, numbers, specimens, root, address_space=1 << 30, seconds=10 + together
        )
        results = outcome.value or []
        is_fine = len(results) == len(numbers) and all(
            value != "FAILED" and grown <= 64 * MB and seconds < 10
            for value, grown, seconds in results
        )
        if is_fine:
            tally.outcomes.update(value for value, _, _ in results)
            tally.worst = max(tally.worst, outcome.grown)
        else:
            for number in numbers:
                shutil.rmtree(root)
                root.mkdir()
                _alone(number, specimens, root, tally)
        shutil.rmtree(root)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scratch = Scratch()
    try:
        tally = run(options.count, options.seed, scratch)
    finally:
        scratch.remove()
    print(tally)
    if tally.failures:
        raise SystemExit("\n".join(tally.failures[:20]))


if __name__ == "__main__":
    main()
