"""Running a command in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click", reason="needs click: pip install 'hybridmem[cli]'")

from click.testing import CliRunner, Result

from hybridmem._commands import commands


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def document(*arguments: object, code: int = 0) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
    return parsed


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir()}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))
