"""Ray is imported by those who ask for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hybridmem


def test_nothing_else_imports_ray() -> None:
    code = (
        "import sys, hybridmem, hybridmem.integrations, hybridmem.cli, hybridmem.archive\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_ray_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import hybridmem.integrations.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "needs Ray: pip install 'hybridmem[ray]'" in done.stderr


def test_ray_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridmem.integrations import ray as hm

    from .nodes import ray  # skips without it

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for call in (lambda: hm.create("/mem", partitions=1, embed_dim=4), lambda: hm.open("/mem")):
        with pytest.raises(hybridmem.HybridMemError, match=r"call ray\.init\(\) first"):
            call()
