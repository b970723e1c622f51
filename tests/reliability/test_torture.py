"""The long run, for a moment: each part does its least."""

from __future__ import annotations

import pytest

from . import torture
from .torture import PARTS, Figure, main


@pytest.mark.parametrize("name", [part[0] for part in PARTS if part[0] != "mutants of the code"])
def test_a_part(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--minutes", "0", "--only", name])
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{name}: ")
    assert status == ("OUT OF TIME" in first)
    assert last == (f"not reached: {name}" if status else "all reached")


def test_what_is_missed_or_wrong_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object) -> Figure:
        raise AssertionError("lost")

    figures = Figure("there", 5, 5), Figure("nothing to reach"), Figure("less", 4, 5)
    parts = [(figure.text, 0.1, lambda *_, figure=figure: figure) for figure in figures]
    monkeypatch.setattr(torture, "PARTS", parts)
    assert main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" [")[0] for line in lines[:3]] == [
        "there: there: 5 of 5",
        "nothing to reach: nothing to reach",
        "less: less: 4 of 5 (OUT OF TIME)",
    ]
    assert lines[3] == "not reached: less"
    monkeypatch.setattr(torture, "PARTS", parts[:2])
    assert main([]) == 0
    monkeypatch.setattr(torture, "PARTS", [("wrong", 0.1, wrong), *parts[:1]])
    capsys.readouterr()
    assert main([]) == 1
    told = capsys.readouterr()
    assert "AssertionError: lost" in told.err
    assert [line.rpartition(" [")[0] or line for line in told.out.splitlines()] == [
        "wrong: A FAULT WAS FOUND",
        "there: there: 5 of 5",
        "not reached: wrong",
    ]
