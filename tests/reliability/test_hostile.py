"""An index.json made to do harm, its checksum right: refused, in bounded memory and time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from crc32c import crc32c

import hybridmem

OPEN = """
import resource, sys, hybridmem
limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    hybridmem.open(sys.argv[1], mode="r").close()
except hybridmem.CorruptStoreError:
    pass
else:
    raise SystemExit("it was opened")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit)
"""


def signed(body: bytes) -> bytes:
    """End an index.json in its checksum."""
    return body + b',\n"crc32c":"%08x"}\n' % crc32c(body)


BODIES = {
    "huge list": b'{"n_entries":[' + b"[]," * 5_000_000 + b"0]",
    "deep list": b'{"n_entries":' + b"[" * 100_000 + b"]" * 100_000,
    "deep, but not too deep to parse": b'{"n_entries":' + b"[" * 900 + b"]" * 900,
    "huge number": b'{"n_entries":' + b"9" * 100_000,
    "1e999": b'{"n_entries":1e999',
    "NaN": b'{"n_entries":NaN',
    "a member twice": b'{"n_entries":1,"n_entries":2',
    "many members": b'{"a":1' + b"".join(b',"b%d":1' % i for i in range(100_000)),
    "lone surrogate": b'{"\\ud800":1',
    "zeros": bytes(1 << 20),
}


@pytest.mark.parametrize("name", BODIES)
def test_index_json(name: str, tmp_path: Path) -> None:
    body = BODIES[name]
    (tmp_path / "index.json").write_bytes(signed(body))
    (tmp_path / "entries.bin").write_bytes(b"")
    root = Path(hybridmem.__file__).resolve().parent.parent
    result = subprocess.run(
        [sys.executable, "-c", OPEN, os.fspath(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.fspath(root)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) << 10 <= 2 * len(body) + (64 << 20)
