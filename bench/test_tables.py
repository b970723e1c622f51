"""Results as tables, and the check against what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tables


def case(name: str, ratio: float) -> dict[str, Any]:
    return {
        "fullname": name,
        "stats": {"median": 2e-3, "min": 1e-3},
        "extra_info": {
            "title": f"the case {name}",
            "per_round": 2,
            "others": {"a floor": {"seconds": 5e-7, "ratio": ratio, "is_floor": True}},
        },
    }


def written(path: Path, *cases: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"machine_info": {}, "benchmarks": list(cases)}))
    return path


def test_the_last_file_counts(tmp_path: Path) -> None:
    first = written(tmp_path / "1.json", case("b", 1), case("a", 1))
    second = written(tmp_path / "2.json", case("b", 0.25))
    results = tables.read([first, second])
    assert tables.ratios(results) == {"the case a": {"a floor": 1}, "the case b": {"a floor": 0.25}}
    assert tables.compared(results)[2:] == [
        "| the case a | 1 ms | floor: a floor | 0.5 µs | 1.00 |",
        "| the case b | 1 ms | floor: a floor | 0.5 µs | 0.25 |",
    ]


def test_what_is_no_time(tmp_path: Path) -> None:
    memory = case("m", 0.5)
    memory["extra_info"]["taken"] = "20 MB"
    memory["extra_info"]["others"]["a floor"]["taken"] = "10 MB"
    results = tables.read([written(tmp_path / "m.json", memory)])
    row = "| the case m | 20 MB | floor: a floor | 10 MB | 0.50 |"
    assert tables.compared(results)[2:] == [row]


def test_what_became_slower_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "RECORDED", tmp_path / "ratios.json")
    good = str(written(tmp_path / "good.json", case("a", 1), case("b", 3)))
    assert tables.main(["check", good]) == 0  # nothing is recorded yet
    assert tables.main(["record", good]) == 0
    assert tables.main(["check", good]) == 0
    noisy = str(written(tmp_path / "noisy.json", case("a", 0.7), case("b", 9)))
    assert tables.main(["check", noisy]) == 0
    slow = str(written(tmp_path / "slow.json", case("a", 0.6), case("c", 0.1)))
    capsys.readouterr()
    assert tables.main(["check", slow]) == 1
    said = capsys.readouterr().out
    assert "the case a: a floor takes 0.6 times as long, was 1" in said
    assert "1 of 2 cases compared" in said
    assert tables.main(["record", slow]) == 0
    assert tables.main(["check", slow]) == 0
    assert tables.main(["check", good]) == 0  # what is not measured again stays recorded
    assert set(json.loads((tmp_path / "ratios.json").read_text())) == {
        f"the case {name}" for name in "abc"
    }
    assert tables.main(["forget"]) == 2
