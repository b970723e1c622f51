"""The example of three nodes, as its users run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hybridmem

from .nodes import ANY_MEMORY, HOW

pytest.importorskip("ray", reason=HOW)

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_three_nodes.py"


@pytest.mark.skipif(not EXAMPLE.exists(), reason="needs a copy of the source")
def test_example_of_three_nodes(tmp_path: Path) -> None:
    """It runs in a copy of the source that was not built, by what is installed."""
    package = Path(hybridmem.__file__).parent
    not_built = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(package, tmp_path / "hybridmem", ignore=not_built)
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, EXAMPLE, "--entries", "60"],
            cwd=tmp_path,
            env=os.environ | ANY_MEMORY | {"PYTHONPATH": str(package.parent)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        # Ray gives a node 30 s to start, which a busy machine may not make.
        if "timed out during startup" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("60 entries; 20 of 20 found") == 5
    assert done.stdout.count("a node is gone") == 2
    assert "flush: 2 replicas did not commit" in done.stdout
    assert done.stdout.count("made again: partition-") == 2
    assert "query: partition-0002 did not answer" in done.stdout
    assert "query: 40 hits, missing: partition-0002" in done.stdout
    assert "there again: partition-0002" in done.stdout
