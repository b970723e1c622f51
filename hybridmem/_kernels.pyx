"""Compiled kernels. One call per batch; the caller checks shapes, contents are taken as they are.

    _kernels.pyx, *.pxi    arguments, memory, the GIL
        |
    _simd/search.h, project.h      loops that are the same for every instruction set
        |
    hm_active (_simd/dispatch.h)   one table of functions per instruction set, chosen at import:
        scalar.h | popcnt.h | avx2.h | avx512.h | neon.h

Every function has a plain-numpy twin in tests/twins.py. All instruction sets give the same bits.
The compiler directives are in setup.py, with a switch for bounds checks.
"""

import os

from libc.stddef cimport size_t
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "_simd/dispatch.h" nogil:
    ctypedef struct hm_kernels:
        const char *name
        void (*mean)(const float *, size_t, size_t, double *, float *) noexcept nogil
        int (*copy_finite)(const float *, float *, size_t) noexcept nogil
        size_t late_expand
        void (*late_prepare)(const uint8_t *, size_t, size_t, uint8_t *) noexcept nogil
    enum: HM_MAX_LEVELS
    const hm_kernels *hm_active
    const hm_kernels hm_table_scalar
    size_t hm_levels(const hm_kernels **out) noexcept
    int hm_select_level(const char *name) noexcept
    void *hm_alloc(size_t size) noexcept
    void hm_free(void *p) noexcept

cdef extern from "_simd/fpenv.h" nogil:
    ctypedef unsigned long long hm_fpenv
    hm_fpenv hm_fpenv_enter() noexcept
    void hm_fpenv_leave(hm_fpenv saved) noexcept

cdef extern from "_simd/project.h" nogil:
    void hm_project_row(
        const hm_kernels *k, const float *x, size_t d, const uint64_t *flips, size_t padded,
        size_t folded, size_t bits, float *scaled, float *y, uint8_t *out,
        float *values) noexcept
    void hm_round_row(const float *x, size_t n, int most, int8_t *out) noexcept

cdef extern from "_simd/search.h" nogil:
    ctypedef struct hm_late_block:
        const uint8_t *groups
        const uint32_t *used
        size_t lanes
        size_t bytes
    void hm_hamming_topk(
        const hm_kernels *k, const uint8_t *rows, const uint8_t *alive, size_t n,
        const uint8_t *queries, size_t m, size_t bytes, size_t k, int64_t first_slot,
        uint32_t *best_distance, int64_t *best_slot) noexcept
    void hm_hamming_all(
        const hm_kernels *k, const uint8_t *rows, size_t n, const uint8_t *query, size_t bytes,
        uint32_t *out) noexcept
    void hm_hamming_at(
        const hm_kernels *k, const uint8_t *rows, const int64_t *at, size_t n,
        const uint8_t *query, size_t bytes, uint32_t *out) noexcept
    const hm_kernels *hm_late_kernels(
        const hm_kernels *best, const hm_kernels *scalar, size_t bytes) noexcept
    void hm_late_topk(
        const hm_kernels *k, const hm_late_block *block, const uint8_t *alive, size_t n,
        const uint8_t *prepared, const int64_t *starts, size_t m, size_t k, int64_t first_slot,
        uint32_t *best_distance, int64_t *best_slot) noexcept
    void hm_late_all(
        const hm_kernels *k, const hm_late_block *block, size_t n, const uint8_t *prepared,
        size_t t, uint32_t *out) noexcept
    void hm_late_at(
        const hm_kernels *k, const hm_late_block *block, const int64_t *at, size_t n,
        const uint8_t *prepared, size_t t, uint32_t *out) noexcept
    void hm_late_tables(
        const int8_t *query, size_t t, size_t bytes, uint8_t *tables, int32_t *sums) noexcept
    void hm_late_dots(
        const hm_kernels *k, const hm_late_block *block, const int64_t *at, size_t n,
        const uint8_t *tables, const int32_t *sums, size_t t, int32_t *out) noexcept
    void hm_late_gated(
        const hm_kernels *k, const hm_late_block *block, const int64_t *at, size_t n,
        const uint8_t *prepared, size_t t, const uint32_t *ends, const uint32_t *limits,
        size_t gates, uint32_t *out) noexcept
    void hm_late_pack(
        const uint8_t *record, size_t used, size_t entry, size_t lanes, size_t bytes,
        uint8_t *groups) noexcept
    size_t hm_select(
        const uint32_t *distance, const uint8_t *alive, size_t n, size_t limit, size_t k,
        uint64_t *counts, int64_t *out) noexcept

cdef extern from *:
    """
    #if defined(__linux__)
    #include <fcntl.h>
    static void hm_start_writing(int fd, long long offset, long long length) {
        /* Errors come back from the sync that follows. */
        (void)sync_file_range(fd, offset, length, SYNC_FILE_RANGE_WRITE);
    }
    #else
    static void hm_start_writing(int fd, long long offset, long long length) {
        (void)fd, (void)offset, (void)length;
    }
    #endif
    """
    void hm_start_writing(int fd, long long offset, long long length) noexcept nogil

cdef extern from "<string.h>" nogil:
    void *memcpy(void *to, const void *source, size_t size) noexcept
    void *memset(void *p, int value, size_t size) noexcept


# ---------------------------------------------------------------------------------------------
# Instruction sets
# ---------------------------------------------------------------------------------------------

def simd_levels():
    """Names of the instruction sets usable on this machine, slowest first."""
    cdef const hm_kernels *levels[HM_MAX_LEVELS]
    cdef size_t n = hm_levels(levels), i
    return tuple([levels[i].name.decode("ascii") for i in range(n)])


def simd_level():
    """Name of the instruction set in use."""
    return hm_active.name.decode("ascii")


def set_simd_level(str name not None):
    """Use another instruction set from now on, in every thread; ValueError if it is not usable."""
    if not hm_select_level(name.encode("utf-8")):
        raise ValueError(
            f"SIMD level {name!r} is not available on this machine; choose one of "
            f"{', '.join(simd_levels())}")


def _choose_level_at_import():
    wanted = os.environ.get("HYBRIDMEM_SIMD", "").strip()
    if not wanted or wanted == "auto":
        hm_select_level(NULL)
    elif not hm_select_level(wanted.encode("utf-8")):
        raise ImportError(
            f"HYBRIDMEM_SIMD={wanted!r} is not available on this machine; unset it or choose one "
            f"of {', '.join(simd_levels())}")


_choose_level_at_import()


# ---------------------------------------------------------------------------------------------
# Pooling and copies
# ---------------------------------------------------------------------------------------------

def mean_pool(const float[:, ::1] x not None, Py_ssize_t run, float[:, ::1] out not None):
    """Mean of each run of `run` consecutive rows (float64 sums in row order, rounded once)."""
    cdef Py_ssize_t n = x.shape[0], d = x.shape[1], row, count
    cdef double *acc
    cdef hm_fpenv saved
    if n == 0 or d == 0:
        return
    with nogil:
        acc = <double *> hm_alloc(d * sizeof(double))
        if acc != NULL:
            saved = hm_fpenv_enter()
            for row in range(out.shape[0]):
                count = n - row * run if n - row * run < run else run
                hm_active.mean(&x[row * run, 0], count, d, acc, &out[row, 0])
            hm_fpenv_leave(saved)
            hm_free(acc)
    if acc == NULL:
        raise MemoryError


def copy_finite(const float[:, ::1] src not None, float[:, ::1] dst not None):
    """Copy src into dst; False where an element is NaN or infinite."""
    cdef int finite = 1
    if src.shape[0] and src.shape[1]:
        with nogil:
            finite = hm_active.copy_finite(
                &src[0, 0], &dst[0, 0], <size_t> src.shape[0] * <size_t> src.shape[1])
    return bool(finite)


def all_finite(const float[:, ::1] x not None):
    """False where an element is NaN or infinite."""
    cdef int finite = 1
    if x.shape[0] and x.shape[1]:
        with nogil:
            finite = hm_active.copy_finite(
                &x[0, 0], NULL, <size_t> x.shape[0] * <size_t> x.shape[1])
    return bool(finite)


# ---------------------------------------------------------------------------------------------
# Projection
# ---------------------------------------------------------------------------------------------

def project(const float[:, ::1] x not None, const uint64_t[::1] flips not None, Py_ssize_t padded,
            Py_ssize_t folded, Py_ssize_t bits, uint8_t[:, ::1] out,
            float[:, ::1] values=None):
    """Signature of each row of x; see hybridmem.hdc for the projection and the order of flips.

    If out is None, values get the floats whose signs these are, each row times a power of two.
    """
    cdef Py_ssize_t n = x.shape[0], d = x.shape[1], row
    cdef float *scratch
    cdef hm_fpenv saved
    if n == 0:
        return
    with nogil:
        scratch = <float *> hm_alloc((padded + folded) * sizeof(float))
        if scratch != NULL:
            saved = hm_fpenv_enter()
            for row in range(n):
                hm_project_row(
                    hm_active, &x[row, 0], d, &flips[0], padded, folded, bits, scratch,
                    scratch + padded, NULL if out is None else &out[row, 0],
                    NULL if out is not None else &values[row, 0])
            hm_fpenv_leave(saved)
            hm_free(scratch)
    if scratch == NULL:
        raise MemoryError


def round_rows(const float[:, ::1] x not None, int most, int8_t[:, ::1] out not None):
    """Integers next to each row times most / its largest magnitude, ties to even; most <= 127."""
    cdef Py_ssize_t row
    cdef hm_fpenv saved
    if x.shape[0] == 0 or x.shape[1] == 0:
        return
    with nogil:
        saved = hm_fpenv_enter()
        for row in range(x.shape[0]):
            hm_round_row(&x[row, 0], x.shape[1], most, &out[row, 0])
        hm_fpenv_leave(saved)


# ---------------------------------------------------------------------------------------------
# Hamming distances of whole signatures
# ---------------------------------------------------------------------------------------------

def hamming_topk(const uint8_t[:, ::1] sigs not None, const uint8_t[:, ::1] queries not None,
                 const uint8_t[::1] alive not None, int64_t first_slot,
                 uint32_t[:, ::1] best_distance not None, int64_t[:, ::1] best_slot not None):
    """Continue the running top-k of each query over the rows of one block.

    best_distance and best_slot are [m, k], sorted by (distance, slot), at the start filled with
    2**32 - 1 and -1. Row i is slot first_slot + i; rows with alive[i] == 0 are skipped.
    """
    cdef Py_ssize_t n = sigs.shape[0], m = queries.shape[0], k = best_distance.shape[1]
    if n == 0 or m == 0 or k == 0:
        return
    with nogil:
        hm_hamming_topk(hm_active, &sigs[0, 0], &alive[0], n, &queries[0, 0], m, sigs.shape[1], k,
                        first_slot, &best_distance[0, 0], &best_slot[0, 0])


def hamming_all(const uint8_t[:, ::1] sigs not None, const uint8_t[::1] query not None,
                uint32_t[::1] out not None):
    """Distance of one query to every row."""
    if sigs.shape[0] == 0:
        return
    with nogil:
        hm_hamming_all(hm_active, &sigs[0, 0], sigs.shape[0], &query[0], sigs.shape[1], &out[0])


def hamming_at(const uint8_t[:, ::1] sigs not None, const int64_t[::1] rows not None,
               const uint8_t[::1] query not None, uint32_t[::1] out not None):
    """Distance of one query to chosen rows."""
    if rows.shape[0] == 0:
        return
    with nogil:
        hm_hamming_at(hm_active, &sigs[0, 0], &rows[0], rows.shape[0], &query[0], sigs.shape[1],
                      &out[0])


# ---------------------------------------------------------------------------------------------
# Late interaction of sub-signatures
#
# A block holds groups of 64 lanes, groups[g, b, lane]: byte b of 64 sub-signatures side by side.
# An entry takes `lanes` lanes, a power of two up to 64 or a multiple of 64; used[e] of them hold
# its sub-signatures, the rest repeat the first one.
# ---------------------------------------------------------------------------------------------

cdef const hm_kernels *_late_kernels(size_t size) noexcept nogil:
    return hm_late_kernels(hm_active, &hm_table_scalar, size)


cdef uint8_t *_prepare(
        const hm_kernels *kernels, const uint8_t[:, ::1] queries) except NULL nogil:
    cdef size_t t = queries.shape[0], size = queries.shape[1]
    cdef uint8_t *prepared = <uint8_t *> hm_alloc(t * size * kernels.late_expand)
    if prepared == NULL:
        with gil:
            raise MemoryError
    kernels.late_prepare(&queries[0, 0], t, size, prepared)
    return prepared


cdef hm_late_block _late_block(
        const uint8_t[:, :, ::1] groups, const uint32_t[::1] used, Py_ssize_t lanes) noexcept nogil:
    cdef hm_late_block block
    block.groups = &groups[0, 0, 0]
    block.used = &used[0]
    block.lanes = lanes
    block.bytes = groups.shape[1]
    return block


def late_pack(const uint8_t[:, ::1] records not None, const uint32_t[::1] used not None,
              Py_ssize_t first, Py_ssize_t lanes, uint8_t[:, :, ::1] groups not None):
    """Put the sub-signatures of packed records into a block, as entries first, first + 1, ..."""
    cdef Py_ssize_t i
    if records.shape[0] == 0:
        return
    with nogil:
        for i in range(records.shape[0]):
            hm_late_pack(&records[i, 0], used[i], first + i, lanes, groups.shape[1],
                         &groups[0, 0, 0])


def late_topk(const uint8_t[:, :, ::1] groups not None, const uint32_t[::1] used not None,
              Py_ssize_t lanes, const uint8_t[:, ::1] queries not None,
              const int64_t[::1] starts not None, const uint8_t[::1] alive not None,
              int64_t first_slot, uint32_t[:, ::1] best_distance not None,
              int64_t[:, ::1] best_slot not None):
    """As hamming_topk, for len(alive) entries with sub-signatures.

    Rows starts[q] .. starts[q + 1] of queries are the tokens of query q. The distance is the sum
    over tokens of the smallest Hamming distance to one of the entry's sub-signatures.
    """
    cdef Py_ssize_t n = alive.shape[0], m = best_distance.shape[0], k = best_distance.shape[1]
    cdef const hm_kernels *kernels = _late_kernels(groups.shape[1])
    cdef hm_late_block block
    cdef uint8_t *prepared
    if n == 0 or m == 0 or k == 0:
        return
    with nogil:
        block = _late_block(groups, used, lanes)
        prepared = _prepare(kernels, queries)
        hm_late_topk(kernels, &block, &alive[0], n, prepared, &starts[0], m, k, first_slot,
                     &best_distance[0, 0], &best_slot[0, 0])
        hm_free(prepared)


def late_all(const uint8_t[:, :, ::1] groups not None, const uint32_t[::1] used not None,
             Py_ssize_t lanes, const uint8_t[:, ::1] query not None, uint32_t[::1] out not None):
    """Late-interaction distance of one query (a row per token) to the first len(out) entries."""
    cdef const hm_kernels *kernels = _late_kernels(groups.shape[1])
    cdef hm_late_block block
    cdef uint8_t *prepared
    if out.shape[0] == 0:
        return
    with nogil:
        block = _late_block(groups, used, lanes)
        prepared = _prepare(kernels, query)
        hm_late_all(kernels, &block, out.shape[0], prepared, query.shape[0], &out[0])
        hm_free(prepared)


def late_at(const uint8_t[:, :, ::1] groups not None, const uint32_t[::1] used not None,
            Py_ssize_t lanes, const int64_t[::1] entries not None,
            const uint8_t[:, ::1] query not None, uint32_t[::1] out not None):
    """Late-interaction distance of one query (a row per token) to chosen entries."""
    cdef const hm_kernels *kernels = _late_kernels(groups.shape[1])
    cdef hm_late_block block
    cdef uint8_t *prepared
    if entries.shape[0] == 0:
        return
    with nogil:
        block = _late_block(groups, used, lanes)
        prepared = _prepare(kernels, query)
        hm_late_at(kernels, &block, &entries[0], entries.shape[0], prepared, query.shape[0],
                   &out[0])
        hm_free(prepared)


def late_dots(const uint8_t[:, :, ::1] groups not None, const uint32_t[::1] used not None,
              Py_ssize_t lanes, const int64_t[::1] entries not None,
              const int8_t[:, ::1] query not None, int32_t[:, ::1] out not None):
    """Largest dot product of each row of the query with a sub-signature of each chosen entry.

    The query is [t, bits], out is [n, t]. A set bit of a sub-signature stands for 1, another for
    -1; the numbers of the query lie between -15 and 15.
    """
    cdef size_t t = query.shape[0]
    cdef hm_late_block block
    cdef uint8_t *tables
    cdef int32_t *sums
    if entries.shape[0] == 0 or t == 0:
        return
    with nogil:
        block = _late_block(groups, used, lanes)
        tables = <uint8_t *> hm_alloc(t * (block.bytes * 32 + sizeof(int32_t)))
        if tables != NULL:
            sums = <int32_t *> (tables + t * block.bytes * 32)
            hm_late_tables(&query[0, 0], t, block.bytes, tables, sums)
            hm_late_dots(hm_active, &block, &entries[0], entries.shape[0], tables, sums, t,
                         &out[0, 0])
            hm_free(tables)
    if tables == NULL:
        raise MemoryError


def late_gated(const uint8_t[:, :, ::1] groups not None, const uint32_t[::1] used not None,
               Py_ssize_t lanes, const int64_t[::1] entries, const uint8_t[:, ::1] query not None,
               const uint32_t[::1] ends not None, const uint32_t[::1] limits not None,
               uint32_t[::1] out not None):
    """As late_at (late_all if entries is None), giving up entries that begin far away.

    After the first ends[g] rows of the query an entry whose distance exceeds limits[g] is given
    up: it gets 2**32 - 1. ends ascend, from 1 to less than the rows of the query.
    """
    cdef const hm_kernels *kernels = _late_kernels(groups.shape[1])
    cdef const int64_t *at = NULL
    cdef hm_late_block block
    cdef uint8_t *prepared
    if out.shape[0] == 0:
        return
    if entries is not None:
        at = &entries[0]
    with nogil:
        block = _late_block(groups, used, lanes)
        prepared = _prepare(kernels, query)
        hm_late_gated(kernels, &block, at, out.shape[0], prepared, query.shape[0], &ends[0],
                      &limits[0], ends.shape[0], &out[0])
        hm_free(prepared)


# ---------------------------------------------------------------------------------------------
# Selection
# ---------------------------------------------------------------------------------------------

def select_smallest(const uint32_t[::1] distances not None, const uint8_t[::1] alive not None,
                    Py_ssize_t limit, int64_t[::1] out not None):
    """Indices of the len(out) smallest live distances, best first, ties to the smaller index.

    No distance may exceed limit. Returns how many there were; time and memory are O(n + limit).
    """
    cdef Py_ssize_t n = distances.shape[0]
    cdef size_t found = 0, size = (<size_t> limit + 1) * sizeof(uint64_t)
    cdef uint64_t *counts
    if n == 0 or out.shape[0] == 0:
        return 0
    with nogil:
        counts = <uint64_t *> hm_alloc(size)
        if counts != NULL:
            memset(counts, 0, size)
            found = hm_select(&distances[0], &alive[0], n, limit, out.shape[0], counts, &out[0])
            hm_free(counts)
    if counts == NULL:
        raise MemoryError
    return found


include "_stored.pxi"
include "_attend.pxi"


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------

def start_writing(int fd, int64_t offset, int64_t length):
    """Have Linux begin to write a part of a file to the disk, and return; nothing elsewhere."""
    with nogil:
        hm_start_writing(fd, offset, length)
