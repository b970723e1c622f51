"""kill -9 under load: nothing acknowledged is lost (a thousand times in the torture run)."""

from __future__ import annotations

from pathlib import Path

from .kills import kill_often


def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    counts = kill_often(tmp_path / "mem", 20)
    assert counts["kills"] == 20
