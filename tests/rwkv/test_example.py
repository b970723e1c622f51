"""The example runs, over several lifetimes of its process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import MARKS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rwkv_x_chat.py"

pytestmark = [
    *MARKS,
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLE.exists(), reason="needs a copy of the source"),
]


def chat(folder: Path, *arguments: str) -> str:
    command = [sys.executable, EXAMPLE, "--memory", folder / "memory", "--tokens", "8"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=True, cwd=folder
    )
    return done.stdout


def test_chat_over_three_processes(tmp_path: Path) -> None:
    first = chat(tmp_path, "The key hangs behind the red door. " * 40)
    assert "random weights" in first
    assert "Going on after 0 tokens" in first
    told = int(re.search(r"(\d+) tokens so far", first)[1])
    assert told > 300
    assert int(re.search(r"in (\d+) entries", first)[1]) > 0
    second = chat(tmp_path, "Where is the key?")
    assert f"Going on after {told} tokens" in second
    assert int(re.search(r"(\d+) tokens so far", second)[1]) > told
    assert re.search(r"Forgot the conversation: [1-9]\d* entries", chat(tmp_path, "--forget"))
    assert "Going on after 0 tokens" in chat(tmp_path, "Hello")
