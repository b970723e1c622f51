"""Imports point down only, in the order that docs/architecture.md declares."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hybridmem"
PLAN = ROOT / "docs" / "architecture.md"

pytestmark = pytest.mark.skipif(
    not PLAN.exists(), reason="needs a copy of the source with docs: they declare the order"
)


def declared() -> dict[str, int]:
    """Return the row of each module, counted from the bottom."""
    section = PLAN.read_text().split("\n## The modules\n")[1].split("\n## ")[0]
    rows = [
        re.findall(r"`(\w+)`", line.split("|")[1])
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    levels = {name: at for at, row in enumerate(reversed(rows)) for name in row}
    assert len(levels) == sum(map(len, rows)), "a module is declared twice"
    return levels


def unit(path: Path) -> str:
    """Return the module or package, directly under hybridmem, that a file belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "hybridmem" if parts == ("__init__",) else parts[0]


def imports(tree: ast.AST, package: Sequence[str] = ("hybridmem",)) -> Iterator[tuple[int, str]]:
    """Yield line and unit of each import of ours that runs; those for type checkers do not.

    `package` is that of the module, for relative imports.
    """
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "hybridmem":
                    yield node.lineno, [*name.name.split("."), "hybridmem"][1]
        elif isinstance(node, ast.ImportFrom):
            parts = [*package[: len(package) - node.level + 1]] if node.level else []
            parts += (node.module or "").split(".") if node.module else []
            if parts[0] != "hybridmem":
                continue
            for alias in node.names:
                known = parts[1] if len(parts) > 1 else alias.name
                is_module = (PACKAGE / known).is_dir() or list(PACKAGE.glob(f"{known}.py*"))
                yield node.lineno, known if is_module else "hybridmem"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_its_row() -> None:
    modules = {unit(path) for path in sources()} | {"_kernels"}
    assert modules == set(declared())


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path: Path) -> None:
    levels = declared()
    own = unit(path)
    package = path.relative_to(ROOT).parent.parts
    for line, target in imports(ast.parse(path.read_text()), package):
        inside_package = target == own and path.parent != PACKAGE
        assert inside_package or levels[target] < levels[own], (
            f"{path.relative_to(ROOT)}:{line} imports {target}, which stands no lower than {own}"
        )


def test_an_import_that_points_up_is_seen() -> None:
    found = list(imports(ast.parse("def late():\n    from hybridmem import store, Config\n")))
    assert found == [(2, "store"), (2, "hybridmem")]
    assert list(imports(ast.parse("import hybridmem._commit"))) == [(1, "_commit")]
    assert list(imports(ast.parse("from . import store"))) == [(1, "store")]
    deep = ("hybridmem", "_commands")
    assert list(imports(ast.parse("from ..store import x"), deep)) == [(1, "store")]
    assert list(imports(ast.parse("from . import text"), deep)) == [(1, "_commands")]
    hidden = (
        "if TYPE_CHECKING:\n    from hybridmem.store import Store\nelse:\n    import hybridmem\n"
    )
    assert list(imports(ast.parse(hidden))) == [(4, "hybridmem")]


def test_only_one_module_writes() -> None:
    """Files are made, changed and removed in `_fileio` alone; clients' own files go through it."""
    writing = {"fdatasync", "flock", "fsync", "ftruncate", "makedirs", "mkdir", "open", "pwrite"}
    writing |= {"pwritev", "remove", "rename", "replace", "rmdir", "rmtree", "truncate", "unlink"}
    for path in sources():
        if unit(path) in ("_fileio", "_syscalls", "_windows", "testing", "_commands", "report"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            module = node.func.value
            called = isinstance(module, ast.Name) and module.id in ("os", "shutil", "fcntl")
            assert not (called and node.func.attr in writing), (
                f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}: "
                "that belongs into _fileio"
            )
