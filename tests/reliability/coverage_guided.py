"""Coverage-guided mutation of what is parsed, with atheris (`pip install atheris`).

`python -m tests.reliability.coverage_guided -max_total_time=600 -timeout=10` looks for an input
that ends in another error than one of ours. index.json and shard headers get checksums that fit, so
that the mutations reach what is behind them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hybridmem"]):
    import hybridmem
    from hybridmem.verify import verify

from . import forged
from .crashes import Scratch
from .mutations import SPECIMENS, answers, searches, specimen

scratch = Scratch()
commits = specimen(scratch.new() / "mem", 1, SPECIMENS["float32"])
files = commits[-1].files
path = scratch.new() / "mem"


def one(data: bytes) -> None:
    """Put the data in the place of a file, or of the header of a shard, and read all."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    kind, data = data[:1], data[1:]
    if kind == b"i":
        (path / "index.json").write_bytes(forged.signed(data))
    elif kind == b"h":
        _, tensors = forged.header(forged.first_shard(path))
        forged.write_shard(path, data, tensors)
    elif kind == b"e":
        (path / "entries.bin").write_bytes(data)
        fields = forged.index(path)
        width = forged.HEAD + fields["config"]["hdc_dim"] // 8
        count = fields["n_entries"] = len(data) // width
        fields["entries_crc32c"] = forged.records_crc(data, width, count)
        fields["dead"] = []
        forged.write_index(path, fields)
    else:
        (path / "index.json").write_bytes(data)
    with contextlib.suppress(hybridmem.HybridMemError):
        verify(path)
    with contextlib.suppress(hybridmem.HybridMemError), hybridmem.open(path, "r") as store:
        answers(store)
        searches(store)


def corpus() -> Path:
    """What the mutations begin with."""
    seeds = scratch.new()
    for number, commit in enumerate(commits):
        body = commit.files["index.json"].rsplit(b",\n", 1)[0]
        (seeds / f"index{number}").write_bytes(b"i" + body)
        (seeds / f"entries{number}").write_bytes(b"e" + commit.files["entries.bin"])
        shard = next(data for name, data in commit.files.items() if name.startswith("shard_"))
        end = 8 + int.from_bytes(shard[:8], "little")
        (seeds / f"header{number}").write_bytes(b"h" + shard[8:end].rstrip())
    return seeds


if __name__ == "__main__":
    atheris.Setup([*sys.argv, "-max_len=8192", os.fspath(corpus())], one)
    atheris.Fuzz()
