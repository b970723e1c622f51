#!/usr/bin/env bash
# The tests that reach the kernels, with a build under AddressSanitizer and UndefinedBehaviorSanitizer,
# and the C test of all instruction sets under valgrind where it is installed.
#
# tools/sanitize.sh [more arguments of pytest]
# PYTHON names an interpreter that has the package's test requirements.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

cp -r hybridmem tests docs setup.py pyproject.toml README.md LICENSE MANIFEST.in "$build"
rm -f "$build"/hybridmem/_kernels.c "$build"/hybridmem/_kernels.*.so
cd "$build"
HYBRIDMEM_SANITIZE=address,undefined "$python" setup.py -q build_ext --inplace

run() {
  # Of the two libraries the first must be loaded before the interpreter; leaks are its own affair.
  LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
    PYTHONMALLOC=malloc PYTHONPATH=$build "$@"
}

# That the tools are at work: a read behind the end of an array must end the process.
if run "$python" - <<'EOF' 2>/dev/null
import ctypes
import hybridmem._kernels
ctypes.CDLL(None).memcpy(ctypes.create_string_buffer(8), ctypes.create_string_buffer(8), 4096)
EOF
then
  echo "a read out of bounds went unnoticed: the sanitizers are not at work" >&2
  exit 1
fi

run "$python" -m pytest -q -p no:cacheprovider tests/test_kernels.py tests/test_codec.py \
  tests/test_hdc.py tests/test_index.py tests/contract/test_query.py "$@"

if command -v valgrind >/dev/null; then
  RUN="valgrind -q --error-exitcode=9 --leak-check=full" CC=gcc tests/c/run.sh
else
  echo "valgrind is not installed: that part is left out" >&2
fi
