"""Ray is imported by those who ask for it."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_else_imports_ray() -> None:
    code = (
        "import sys, hybridmem, hybridmem.integrations, hybridmem.cli, hybridmem.archive\n"
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
