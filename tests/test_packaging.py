"""What is handed out: the sdist holds what it must, and a wheel built from it works elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hybridmem

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a copy of the source"),
]

MUST = [
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
    "SECURITY.md", "docs/architecture.md", "docs/conf.py", "docs/format.md",
    "hybridmem/_attend.pxi", "hybridmem/_kernels.pyi", "hybridmem/_kernels.pyx",
    "hybridmem/_simd/dispatch.h", "hybridmem/_stored.pxi", "hybridmem/py.typed",
    "hybridmem/store.py", "packaging/conda/recipe.yaml", "pyproject.toml",
    "setup.py", "tests/conftest.py", "tests/test_packaging.py", "tests/contract/__init__.py",
]  # fmt: skip

#: What a person does first, in a process that knows nothing of the source tree.
FIRST_STEPS = """
import pathlib, sys
import numpy as np
import hybridmem

assert pathlib.Path(hybridmem.__file__).is_relative_to(sys.prefix), hybridmem.__file__
keys, values = np.random.default_rng(0).normal(size=(2, 64, 96)).astype("float32")
with hybridmem.create("mem", embed_dim=96) as store:
    number = store.put(keys, values, layer_idx=1)
with hybridmem.open("mem") as store:
    hit, = store.query(keys, layer_idx=1)
    assert hit.entry_id == number and hit.score == 1.0
    assert np.array_equal(hit.keys, keys) and np.array_equal(hit.values, values)
assert not {"torch", "click", "pandas"} & set(sys.modules)
print(hybridmem.__version__, hybridmem.simd_level())
"""


def run(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HYBRIDMEM"))}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist of a clean copy of the source, and a wheel built from that sdist."""
    pytest.importorskip("build", reason="needs build: pip install build")
    base = tmp_path_factory.mktemp("packaging")
    source, out = base / "source", base / "dist"
    unwanted = shutil.ignore_patterns(
        ".*", "*.so", "*.pyc", "*.egg-info", "__pycache__", "_kernels.c", "build", "dist", "venv",
        "results",
    )  # fmt: skip
    shutil.copytree(ROOT, source, ignore=unwanted)
    run(sys.executable, "-m", "build", "--outdir", out, cwd=source)
    return out


def test_the_sdist_holds_what_it_must_and_no_more(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    top = f"hybridmem-{hybridmem.__version__}/"
    assert archive.name == f"{top[:-1]}.tar.gz"
    with tarfile.open(archive) as tar:
        names = {member.name.removeprefix(top) for member in tar.getmembers() if member.isfile()}
    assert not set(MUST) - names
    headers = {f"hybridmem/_simd/{path.name}" for path in (ROOT / "hybridmem/_simd").glob("*.h")}
    assert headers <= names
    made = [n for n in names if n.endswith((".so", ".pyc", ".c")) and not n.startswith("tests/")]
    assert made == []
    assert archive.stat().st_size < 20 << 20


def test_the_wheel_holds_the_package_alone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"hybridmem-{hybridmem.__version__}.dist-info/METADATA").decode()
    assert {name.split("/")[0] for name in names} == {
        "hybridmem",
        f"hybridmem-{hybridmem.__version__}.dist-info",
    }
    assert "hybridmem/py.typed" in names
    assert "hybridmem/_kernels.pyi" in names
    assert [n for n in names if n.startswith("hybridmem/_kernels.") and n.endswith((".so", ".pyd"))]
    assert not [name for name in names if name.endswith((".pyx", ".pxi", ".c", ".h"))]
    needed = {
        line.split(": ")[1].split(">")[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert needed == {"numpy", "safetensors", "crc32c"}
    assert "License-Expression: Apache-2.0" in metadata


def test_the_wheel_works_in_a_new_environment(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    programs = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    run(programs / "python", "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    assert hybridmem.__version__ in run(programs / "python", "-c", FIRST_STEPS, cwd=tmp_path)
    # click is an extra: without it the command says so.
    script = subprocess.run(
        [programs / "hybridmem", "info", "mem"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert script.returncode == 1
    assert "pip install 'hybridmem[cli]'" in script.stderr
    run(programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}[cli]", cwd=tmp_path)
    assert "1 of 64 tokens" in run(programs / "hybridmem", "info", "mem", cwd=tmp_path)


def test_a_copy_of_the_source_that_was_not_built_says_so(tmp_path: Path) -> None:
    not_built = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    shutil.copytree(ROOT / "hybridmem", tmp_path / "hybridmem", ignore=not_built)
    # Without site-packages: an editable installation would lend its compiled part to the copy.
    said = run(sys.executable, "-S", "-c", ASK, cwd=tmp_path)
    assert said.startswith(f"hybridmem in {tmp_path / 'hybridmem'} is a copy of the source whose ")
    assert "pip install -e ." in said


ASK = """
import sys
sys.path.insert(0, "")
try:
    import hybridmem
except ImportError as error:
    print(error)
"""
