"""The command as it is installed, and what runs something of its own: demo, bench."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import hybridmem
from hybridmem._commands import commands, group

from . import ENTRIES
from .helpers import document, run


def program(
    *arguments: object, cwd: Path, module: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, away from the source tree."""
    start = [sys.executable, "-m", "hybridmem"]
    if not module:
        start = [str(Path(sys.executable).with_name("hybridmem"))]
    return subprocess.run(
        [*start, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_python_m_hybridmem(store: Path, tmp_path: Path) -> None:
    done = program("info", store, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["entries"] == ENTRIES - 2
    failed = program("info", "nowhere", cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (4, "")
    assert "no store in" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert program("--version", cwd=tmp_path).stdout == f"hybridmem {hybridmem.__version__}\n"


def test_the_installed_script(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("hybridmem")
    if not script.exists():
        pytest.skip("the package is not installed here, only on the path")
    done = program("--help", cwd=tmp_path, module=False)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: hybridmem ")


def test_without_click_the_command_says_what_to_install(tmp_path: Path) -> None:
    # A module that cannot be imported stands before the real one.
    (tmp_path / "click.py").write_text("raise ImportError('not here')\n")
    done = program("info", "x", cwd=tmp_path, PYTHONPATH=_path_with(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "The hybridmem command needs click: pip install 'hybridmem[cli]'\n"


def _path_with(first: Path) -> str:
    rest = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(first), *([rest] if rest else [])])


def test_a_closed_pipe_is_no_traceback(store: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hybridmem", "ls", str(store)]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert b"Traceback" not in said
    assert process.returncode in (0, 1)


def test_shell_completion_knows_the_commands(tmp_path: Path) -> None:
    done = program(
        cwd=tmp_path,
        _HYBRIDMEM_COMPLETE="bash_complete",
        COMP_WORDS="hybridmem co",
        COMP_CWORD="1",
    )
    assert "compact" in done.stdout


def test_the_documentation_has_the_help_of_every_command() -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "write_cli_docs.py"
    if not tool.exists():
        pytest.skip("needs a copy of the source with its docs")
    space = runpy.run_path(str(tool))
    page = space["PAGE"].read_text()
    assert sorted(space["sections"](page)) == sorted(commands.commands)
    # Versions of click break lines at other places.
    assert space["renewed"](page).split() == page.split(), (
        "python tools/write_cli_docs.py brings it up to date"
    )


def test_the_demo_finds_the_answer_and_prints_its_table(tmp_path: Path) -> None:
    from hybridmem import demo

    if not demo.DATA.exists():
        pytest.skip("this copy of the source came without the sample")
    # One thread: beside other work the threads of numpy would wait for each other.
    done = program("demo", "stores", "--json", cwd=tmp_path, OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {store["index"] for store in result["stores"]} == {"pooled", "tokens"}
    tokens = next(store for store in result["stores"] if store["index"] == "tokens")
    assert sum(tokens["answer_found"]) >= 1
    assert tokens["error_question"] < result["baselines"]["cache only"]["error_question"]
    assert demo.table(result).splitlines()[0].startswith("Model")
    # The stores are kept where they were asked for, and are stores.
    kept = sorted(path.name for path in (tmp_path / "stores").iterdir())
    assert document("info", tmp_path / "stores" / kept[0])["entries"] == tokens["entries"]
    again = program("demo", "stores", cwd=tmp_path)
    assert (again.returncode, "Traceback" in again.stderr) == (1, False)


def test_bench_measures_in_a_store_that_it_takes_away(tmp_path: Path) -> None:
    sizes = ["--width", 16, "--tokens", 4, "--entries", 20, "--layers", 2, "--dir", tmp_path]
    told = document("bench", *sizes, "--kept", "float16")
    assert told["put_bytes"] == 20 * 2 * 4 * 16 * 4
    assert told["entry_bytes"] >= 2 * 4 * 16 * 2 + 552
    assert all(value > 0 for name, value in told.items() if name.endswith("_seconds"))
    assert list(tmp_path.iterdir()) == []
    lines = run("bench", *sizes).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines][:3] == ["entry", "put", "all puts and flush"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_takes_long_shows_the_time_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    begun = time.monotonic()
    with group.working("compact"):
        while not shown.getvalue():
            assert time.monotonic() < begun + 60
            time.sleep(0.05)
    assert time.monotonic() > begun + 0.9  # what is short shows nothing
    assert re.search(r"compact 00:(?!00)\d\d", shown.getvalue())
    threads = set(threading.enumerate())  # one of tqdm's among them, which it keeps
    with pytest.raises(KeyError), group.working("compact"):
        raise KeyError
    assert set(threading.enumerate()) <= threads
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with group.working("compact"):
        time.sleep(1.3)
    assert sys.stderr.getvalue() == ""
