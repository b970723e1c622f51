"""The documentation is true: its code runs, its commands exist, and it names all that is public.

A block that needs more than the core says so in a comment on the line before it:
``<!-- needs: torch transformers -->``. Blocks of one page share their variables, in order. What
a page takes for granted stands in a comment, ``<!-- run first``, code, ``-->``, each on lines of
their own.
"""

from __future__ import annotations

import importlib.util
import inspect
import pydoc
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hybridmem

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

pytestmark = pytest.mark.skipif(
    not all(page.exists() for page in PAGES), reason="needs a copy of the source with its docs"
)


class Block(NamedTuple):
    language: str
    text: str
    line: int
    needs: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, and what runs before them without being shown."""
    block = re.compile(
        r"^(?P<fence>```+) ?(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=fence) *$"
        r"|^<!-- run first\n(?P<hidden>.*?)^-->$",
        re.M | re.S,
    )
    text = page.read_text()
    for found in block.finditer(text):
        before = text[: found.start()]
        needs = re.search(r"<!-- needs: ([\w .-]+) -->\n+\Z", before)
        info = ["python"] if found["hidden"] is not None else found["info"].split()
        yield Block(
            info[0] if info else "",
            found["text"] or found["hidden"] or "",
            before.count("\n") + 1,
            tuple(needs[1].split()) if needs else (),
        )


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(block.language == "python" for block in blocks(p))],
    ids=lambda p: p.name,
)
def test_every_python_block_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    skipped = []
    try:
        for block in blocks(page):
            if block.language != "python":
                continue
            missing = [name for name in block.needs if importlib.util.find_spec(name) is None]
            if missing:
                skipped.append(f"line {block.line} needs {', '.join(missing)}")
                continue
            # Blank lines before it, so that a traceback names the line of the page.
            code = "\n" * block.line + block.text
            exec(compile(code, str(page), "exec"), names)
    finally:
        for value in names.values():
            if isinstance(value, hybridmem.Store):
                value.close()
    if skipped:
        pytest.skip(f"{page.name}: the rest ran, but {'; '.join(skipped)}")


def test_the_tour_prints_what_it_says() -> None:
    from hybridmem import demo

    tool = ROOT / "tools" / "write_outputs.py"
    if not (tool.exists() and demo.DATA.exists()):
        pytest.skip("needs a copy of the source with its tools and the sample")
    space = runpy.run_path(str(tool))
    page = space["PAGE"].read_text()
    assert page.count("```text\n```") == 0
    assert space["renewed"](page) == page, "python tools/write_outputs.py brings it up to date"


def shell_lines() -> list[Any]:
    """Return each command of the shell blocks, with where it stands."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.language not in ("sh", "bash", "console"):
                continue
            text = block.text.replace("\\\n", " ")
            for line in text.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words:
                    found.append(pytest.param(words, id=f"{page.name}:{' '.join(words)}"))
    return found


@pytest.mark.parametrize("words", shell_lines())
def test_every_shell_command_exists(words: list[str]) -> None:
    while re.fullmatch(r"\w+=.*", words[0]):  # variables of the environment
        words = words[1:]
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "hybridmem" or words[:3] == ["python", "-m", "hybridmem"]:
        check_command(arguments if program == "hybridmem" else arguments[2:])
    elif program == "make":
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
        assert {a for a in arguments if "=" not in a} <= targets
    elif program == "pip" or words[1:3] == ["-m", "pip"]:
        check_extras(" ".join(arguments))
    elif program in ("python", "python3") and arguments and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).exists()
    elif program in ("python", "python3") and arguments[:1] == ["-m"]:
        path = ROOT.joinpath(*arguments[1].split("."))
        assert (
            path.with_suffix(".py").exists()
            or (path / "__main__.py").exists()
            or importlib.util.find_spec(arguments[1].split(".")[0])
        )
    else:
        assert program in {"pytest", "cd", "git", "eval"}, f"no one knows the command {program}"


def check_command(arguments: list[str]) -> None:
    """Parse what is given to `hybridmem` as it would, without running it."""
    pytest.importorskip("click", reason="needs click: pip install 'hybridmem[cli]'")
    from hybridmem._commands import commands

    if arguments[:1] in (["--help"], ["--version"]):
        return
    context = commands.make_context("hybridmem", list(arguments), resilient_parsing=True)
    name, command, rest = commands.resolve_command(context, [*arguments])
    assert command is not None
    if "--help" not in rest:
        command.make_context(name, rest, parent=context).close()


def check_extras(text: str) -> None:
    """Check that each extra that is asked for is declared."""
    declared = set(project()["optional-dependencies"])
    for extras in re.findall(r"(?:\.|hybridmem)\[([\w,-]+)\]", text):
        assert set(extras.split(",")) <= declared


def project() -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # before Python 3.11
        import tomli as tomllib  # type: ignore[no-redef]
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_the_reference_names_all_that_is_public() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"auto\w+:: hybridmem\.([\w.]+)", text))
    public = {name for name in hybridmem.__all__ if name != "hdc"}
    public |= {f"hdc.{name}" for name in hybridmem.hdc.__all__} | {"hdc"}
    assert public <= named
    for name in named - public:  # what else is named is there
        assert pydoc.locate(f"hybridmem.{name}"), name


def public_things() -> Iterator[Any]:
    """Yield what a user calls: functions, classes and their methods."""
    for name in hybridmem.__all__:
        thing = getattr(hybridmem, name)
        yield pytest.param(thing, id=name)
        if isinstance(thing, type):
            for attribute in dir(thing):
                inherited = hasattr(Exception, attribute) or attribute in ("errno", "strerror")
                member = getattr(thing, attribute)
                if not attribute.startswith("_") and not inherited and callable(member):
                    yield pytest.param(member, id=f"{name}.{attribute}")


@pytest.mark.parametrize("thing", list(public_things()))
def test_everything_public_has_a_docstring(thing: Any) -> None:
    assert inspect.getdoc(thing)


def test_tables_of_retrieval_are_those_that_were_measured() -> None:
    tool = ROOT / "tools" / "write_retrieval_docs.py"
    space = runpy.run_path(str(tool))
    page = (ROOT / "docs" / "retrieval.md").read_text()
    assert page.count("<!-- table: ") == 12
    assert page == space["renewed"](page), (
        "docs/retrieval.md: python tools/write_retrieval_docs.py brings its tables up to date"
    )


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[\w-]+)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_are_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {
        line.strip()
        for found in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S)
        for line in found.splitlines()
        if line.strip() and not line.startswith(":")
    }
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}


def test_versions_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {hybridmem.__version__}\n" in citation
    assert hybridmem.__version__ in (ROOT / "CHANGELOG.md").read_text()
