"""Build of the compiled kernels; everything else about the package is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent

# For hunting a fault: HYBRIDMEM_CHECKED=1 python setup.py build_ext --inplace --force
CHECKED = bool(os.environ.get("HYBRIDMEM_CHECKED"))
# For tools/sanitize.sh: what gcc and clang call the sanitizers to build with.
SANITIZERS = os.environ.get("HYBRIDMEM_SANITIZE", "")

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": CHECKED,
    "wraparound": False,
    "initializedcheck": CHECKED,
    "cdivision": True,
    "freethreading_compatible": True,
}

# Contraction to FMA would make results depend on the machine; fast-math and -march=native likewise.
UNIX_FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-std=c11"]
MSVC_FLAGS = ["/O2", "/fp:precise", "/std:c11"]


class BuildKernels(build_ext):
    """Choose the compiler's flags once the compiler is known."""

    def build_extensions(self) -> None:
        flags = MSVC_FLAGS if self.compiler.compiler_type == "msvc" else UNIX_FLAGS
        if SANITIZERS:
            sanitize = [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all"]
            flags = [*flags, *sanitize, "-fno-omit-frame-pointer", "-O1", "-g1"]
        for extension in self.extensions:
            if SANITIZERS:
                extension.extra_link_args = [*sanitize, *extension.extra_link_args]
            extension.extra_compile_args = [*flags, *extension.extra_compile_args]
        super().build_extensions()


kernels = Extension(
    "hybridmem._kernels",
    sources=["hybridmem/_kernels.pyx"],
    depends=sorted(
        str(path.relative_to(HERE))
        for pattern in ("_simd/*.h", "*.pxi")
        for path in HERE.glob(f"hybridmem/{pattern}")
    ),
    include_dirs=["hybridmem"],
)
kernels.cython_directives = DIRECTIVES

setup(ext_modules=[kernels], cmdclass={"build_ext": BuildKernels})
