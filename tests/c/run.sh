#!/bin/sh
# Compile levels.c and run it. A cross-compiler and an emulator test what this machine has not:
#
#   tests/c/run.sh
#   CC=aarch64-linux-gnu-gcc RUN="qemu-aarch64-static -L /usr/aarch64-linux-gnu" tests/c/run.sh
#   CC=s390x-linux-gnu-gcc RUN="qemu-s390x-static -L /usr/s390x-linux-gnu" tests/c/run.sh   (big-endian)
#   RUN="qemu-x86_64-static -cpu Nehalem" tests/c/run.sh                             (no AVX: other levels)
#   CFLAGS="-fsanitize=address,undefined -g" tests/c/run.sh
set -eu
here=$(dirname "$0")
binary=$(mktemp)
trap 'rm -f "$binary"' EXIT
${CC:-cc} -std=c11 -O3 -ffp-contract=off -Wall -Wextra -Werror -Wno-unused-function ${CFLAGS:-} -o "$binary" "$here/levels.c"
${RUN:-} "$binary"
