"""The long run, for a moment: each part does its least."""

from __future__ import annotations

import pytest

from .torture import PARTS, main


@pytest.mark.parametrize("name", [part[0] for part in PARTS if part[0] != "mutants of the code"])
def test_a_part(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--minutes", "0", "--only", name])
    assert capsys.readouterr().out.startswith(f"{name}: ")
