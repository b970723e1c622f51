"""Compiled kernels. One call per batch; the caller checks shapes, contents are taken as they are.

    _kernels.pyx    arguments, memory, the GIL
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
from libc.stdint cimport int8_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

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
        size_t folded, size_t bits, float *scaled, float *y, uint8_t *out) noexcept

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
    void hm_late_each(
        const hm_kernels *k, const hm_late_block *block, const int64_t *at, size_t n,
        const uint8_t *prepared, size_t t, uint32_t *out) noexcept
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

cdef extern from "_simd/codec.h" nogil:
    ctypedef struct hm_codec:
        float (*quantize_channels)(
            const float *, size_t, size_t, int, int8_t *, float *, float *) noexcept nogil
        float (*quantize_rows)(
            const float *, size_t, size_t, size_t, int, int8_t *, float *, float *) noexcept nogil
        void (*dequantize_channels)(
            const int8_t *, size_t, size_t, int, const float *, const float *, float *
        ) noexcept nogil
        void (*dequantize_rows)(
            const int8_t *, size_t, size_t, size_t, int, const float *, size_t, const float *,
            size_t, float *) noexcept nogil
        int (*to_bfloat16)(const float *, size_t, uint16_t *) noexcept nogil
        int (*to_float16)(const float *, size_t, uint16_t *) noexcept nogil
        void (*from_bfloat16)(const uint16_t *, size_t, float *) noexcept nogil
        void (*from_float16)(const uint16_t *, size_t, float *) noexcept nogil
    const hm_codec *hm_codec_of(const char *level) noexcept

cdef extern from "_simd/attend.h" nogil:
    enum: HM_ATTEND_ROWS
    ctypedef struct hm_attention:
        size_t queries
        size_t heads
        size_t kv_heads
        size_t head_dim
        float scale
        const float *q
        float *acc
        float *top
        float *sum
        float *scores
    ctypedef struct hm_rows:
        const float *k
        const float *v
        size_t n
        const float *next
        size_t next_n
    ctypedef void (*hm_attend_fn)(const hm_attention *, const hm_rows *) noexcept nogil
    hm_attend_fn hm_attend_of(const char *level) noexcept

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
            Py_ssize_t folded, Py_ssize_t bits, uint8_t[:, ::1] out not None):
    """Signature of each row of x; see hybridmem.hdc for the projection and the order of flips."""
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
                hm_project_row(hm_active, &x[row, 0], d, &flips[0], padded, folded, bits, scratch,
                               scratch + padded, &out[row, 0])
            hm_fpenv_leave(saved)
            hm_free(scratch)
    if scratch == NULL:
        raise MemoryError


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


def late_each(const uint8_t[:, :, ::1] groups not None, const uint32_t[::1] used not None,
              Py_ssize_t lanes, const int64_t[::1] entries not None,
              const uint8_t[:, ::1] query not None, uint32_t[:, ::1] out not None):
    """Distance of each token (a row of query, of out) to chosen entries: to their nearest."""
    cdef const hm_kernels *kernels = _late_kernels(groups.shape[1])
    cdef hm_late_block block
    cdef uint8_t *prepared
    if entries.shape[0] == 0:
        return
    with nogil:
        block = _late_block(groups, used, lanes)
        prepared = _prepare(kernels, query)
        hm_late_each(kernels, &block, &entries[0], entries.shape[0], prepared, query.shape[0],
                     &out[0, 0])
        hm_free(prepared)


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


# ---------------------------------------------------------------------------------------------
# Stored forms of keys and values
# ---------------------------------------------------------------------------------------------


def quantize_channels(const float[:, ::1] x not None, bint wide, int8_t[:, ::1] q not None,
                      float[::1] scale not None, float[::1] zero not None):
    """INT8 with a zero for each of d columns and a scale for each two, ceil(d / 2) of them.

    Returns the largest magnitude: NaN or infinity if x holds one, and then q means nothing. Scales
    and zeros are exact in float16, or only in float32 if wide, which any magnitude needs that is
    neither 0 nor in [2**-8, 65504].
    """
    cdef float peak
    cdef hm_fpenv saved
    with nogil:
        saved = hm_fpenv_enter()
        peak = hm_codec_of(hm_active.name).quantize_channels(
            &x[0, 0], x.shape[0], x.shape[1], wide, &q[0, 0], &scale[0], &zero[0])
        hm_fpenv_leave(saved)
    return peak


def quantize_rows(const float[:, ::1] x not None, Py_ssize_t width, bint wide,
                  int8_t[:, ::1] q not None, float[:, ::1] scale not None,
                  float[:, ::1] zero not None):
    """INT8 with a zero and a scale for each group of width columns of each row.

    As quantize_channels; width is a multiple of 32.
    """
    cdef float peak
    cdef hm_fpenv saved
    with nogil:
        saved = hm_fpenv_enter()
        peak = hm_codec_of(hm_active.name).quantize_rows(
            &x[0, 0], x.shape[0], x.shape[1], width, wide, &q[0, 0], &scale[0, 0], &zero[0, 0])
        hm_fpenv_leave(saved)
    return peak


def dequantize_channels(const int8_t[:, ::1] q not None, bint wide,
                        const float[::1] scale not None, const float[::1] zero not None,
                        float[:, ::1] out not None):
    """out = zero + scale * q, with a zero for each column and a scale for each two.

    Scales that are not exact in float16 need wide, for the same rounding.
    """
    cdef hm_fpenv saved
    with nogil:
        saved = hm_fpenv_enter()
        hm_codec_of(hm_active.name).dequantize_channels(
            &q[0, 0], q.shape[0], q.shape[1], wide, &scale[0], &zero[0], &out[0, 0])
        hm_fpenv_leave(saved)


def dequantize_rows(const int8_t[:, ::1] q not None, Py_ssize_t width, bint wide,
                    const float[:, ::1] scale not None, const float[:, ::1] zero not None,
                    float[:, ::1] out not None):
    """out = zero + scale * q, with both for each group of width columns.

    Either has a row for each row of q, or one for all. width is a multiple of 32.
    """
    cdef size_t scale_row = scale.shape[1] if scale.shape[0] > 1 else 0
    cdef size_t zero_row = zero.shape[1] if zero.shape[0] > 1 else 0
    cdef hm_fpenv saved
    with nogil:
        saved = hm_fpenv_enter()
        hm_codec_of(hm_active.name).dequantize_rows(
            &q[0, 0], q.shape[0], q.shape[1], width, wide, &scale[0, 0], scale_row, &zero[0, 0],
            zero_row, &out[0, 0])
        hm_fpenv_leave(saved)


def to_bfloat16(const float[:, ::1] x not None, uint16_t[:, ::1] out not None):
    """Round half to even; False if a value is not finite, before or after."""
    cdef int finite
    with nogil:
        finite = hm_codec_of(hm_active.name).to_bfloat16(
            &x[0, 0], <size_t> x.shape[0] * <size_t> x.shape[1], &out[0, 0])
    return bool(finite)


def to_float16(const float[:, ::1] x not None, uint16_t[:, ::1] out not None):
    """Round half to even, subnormals too; False if a value is not finite, before or after."""
    cdef int finite
    cdef hm_fpenv saved
    with nogil:
        saved = hm_fpenv_enter()
        finite = hm_codec_of(hm_active.name).to_float16(
            &x[0, 0], <size_t> x.shape[0] * <size_t> x.shape[1], &out[0, 0])
        hm_fpenv_leave(saved)
    return bool(finite)


def from_bfloat16(const uint16_t[:, ::1] x not None, float[:, ::1] out not None):
    """Widen exactly."""
    with nogil:
        hm_codec_of(hm_active.name).from_bfloat16(
            &x[0, 0], <size_t> x.shape[0] * <size_t> x.shape[1], &out[0, 0])


def from_float16(const uint16_t[:, ::1] x not None, float[:, ::1] out not None):
    """Widen exactly."""
    cdef hm_fpenv saved
    with nogil:
        saved = hm_fpenv_enter()
        hm_codec_of(hm_active.name).from_float16(
            &x[0, 0], <size_t> x.shape[0] * <size_t> x.shape[1], &out[0, 0])
        hm_fpenv_leave(saved)


# ---------------------------------------------------------------------------------------------
# Attention over stored rows
# ---------------------------------------------------------------------------------------------

cdef int _attention_set(hm_attention *a, const float[:, ::1] q, Py_ssize_t heads,
                        Py_ssize_t kv_heads, float scale, float[:, ::1] acc, float[:, ::1] top,
                        float[:, ::1] total) noexcept nogil:
    a.queries = q.shape[0]
    a.heads = heads
    a.kv_heads = kv_heads
    a.head_dim = q.shape[1] // heads
    a.scale = scale
    a.q = &q[0, 0]
    a.acc = &acc[0, 0]
    a.top = &top[0, 0]
    a.sum = &total[0, 0]
    a.scores = <float *> hm_alloc(a.queries * a.heads * HM_ATTEND_ROWS * sizeof(float))
    return a.scores != NULL


def attend(const float[:, ::1] q not None, keys, values, Py_ssize_t heads, Py_ssize_t kv_heads,
           float scale, float[:, ::1] acc not None, float[:, ::1] top not None,
           float[:, ::1] total not None):
    """Go on with the attention of q over several groups of rows, keys[i] with values[i].

    q is [m, heads * head_dim], keys and values are tuples of [n, kv_heads * head_dim]. acc has the
    shape of q and begins as zeros, top and total are [m, heads] and begin as -inf and 0.
    """
    cdef Py_ssize_t count = len(keys), i
    cdef const float[:, ::1] k, v
    cdef hm_attention a
    cdef hm_rows *some = <hm_rows *> hm_alloc(max(count, 1) * sizeof(hm_rows))
    cdef int ready = some != NULL
    if not ready:
        raise MemoryError
    try:
        for i in range(count):
            k, v = keys[i], values[i]
            some[i].k, some[i].v, some[i].n = &k[0, 0], &v[0, 0], k.shape[0]
            some[i].next, some[i].next_n = NULL, 0
            if i > 0:
                some[i - 1].next, some[i - 1].next_n = some[i].k, some[i].n
        with nogil:
            ready = _attention_set(&a, q, heads, kv_heads, scale, acc, top, total)
            if ready:
                for i in range(count):
                    hm_attend_of(hm_active.name)(&a, &some[i])
                hm_free(a.scores)
        if not ready:
            raise MemoryError
    finally:
        hm_free(some)


def attend_half(const float[:, ::1] q not None, const uint16_t[:, ::1] k not None,
                const uint16_t[:, ::1] v not None, bint bfloat16, Py_ssize_t heads,
                Py_ssize_t kv_heads, float scale, float[:, ::1] acc not None,
                float[:, ::1] top not None, float[:, ::1] total not None):
    """As attend, over float16 or bfloat16 bits, of which a few rows at a time are widened."""
    cdef hm_attention a
    cdef hm_rows some
    cdef size_t d = k.shape[1], n = k.shape[0], first, rows
    cdef float *wide = NULL
    cdef const hm_codec *codec = hm_codec_of(hm_active.name)
    cdef int ready
    cdef hm_fpenv saved
    with nogil:
        ready = _attention_set(&a, q, heads, kv_heads, scale, acc, top, total)
        if ready:
            wide = <float *> hm_alloc(2 * HM_ATTEND_ROWS * d * sizeof(float))
            ready = wide != NULL
        if ready:
            first = 0
            while first < n:
                rows = min(n - first, <size_t> HM_ATTEND_ROWS)
                saved = hm_fpenv_enter()
                if bfloat16:
                    codec.from_bfloat16(&k[first, 0], rows * d, wide)
                    codec.from_bfloat16(&v[first, 0], rows * d, wide + rows * d)
                else:
                    codec.from_float16(&k[first, 0], rows * d, wide)
                    codec.from_float16(&v[first, 0], rows * d, wide + rows * d)
                hm_fpenv_leave(saved)
                some = hm_rows(k=wide, v=wide + rows * d, n=rows, next=NULL, next_n=0)
                hm_attend_of(hm_active.name)(&a, &some)
                first += rows
        hm_free(wide)
        hm_free(a.scores)
    if not ready:
        raise MemoryError


cdef void _widen_int8(const hm_codec *codec, const int8_t[:, ::1] q, const float[:, ::1] scale,
                      const float[:, ::1] zero, Py_ssize_t width, bint wide, size_t first,
                      size_t rows, float *out) noexcept nogil:
    """Rows of INT8 as float32; width 0: one zero for each column, one scale for each two."""
    cdef size_t d = q.shape[1], scale_at, zero_at
    if width == 0:
        codec.dequantize_channels(&q[first, 0], rows, d, wide, &scale[0, 0], &zero[0, 0], out)
        return
    scale_at = first if scale.shape[0] > 1 else 0
    zero_at = first if zero.shape[0] > 1 else 0
    codec.dequantize_rows(
        &q[first, 0], rows, d, width, wide,
        &scale[scale_at, 0], scale.shape[1] if scale.shape[0] > 1 else 0,
        &zero[zero_at, 0], zero.shape[1] if zero.shape[0] > 1 else 0, out)


def attend_int8(const float[:, ::1] q not None,
                const int8_t[:, ::1] k not None, const float[:, ::1] k_scale not None,
                const float[:, ::1] k_zero not None, Py_ssize_t k_width, bint k_wide,
                const int8_t[:, ::1] v not None, const float[:, ::1] v_scale not None,
                const float[:, ::1] v_zero not None, Py_ssize_t v_width, bint v_wide,
                Py_ssize_t heads, Py_ssize_t kv_heads, float scale, float[:, ::1] acc not None,
                float[:, ::1] top not None, float[:, ::1] total not None):
    """As attend, over INT8, of which a few rows at a time are widened.

    k_width and v_width are the columns of a group, as in dequantize_rows; 0 stands for the layout
    of dequantize_channels.
    """
    cdef hm_attention a
    cdef hm_rows some
    cdef size_t d = k.shape[1], n = k.shape[0], first, rows
    cdef float *wide_k = NULL
    cdef float *wide_v
    cdef const hm_codec *codec = hm_codec_of(hm_active.name)
    cdef int ready
    cdef hm_fpenv saved
    with nogil:
        ready = _attention_set(&a, q, heads, kv_heads, scale, acc, top, total)
        if ready:
            wide_k = <float *> hm_alloc(2 * HM_ATTEND_ROWS * d * sizeof(float))
            ready = wide_k != NULL
        if ready:
            wide_v = wide_k + HM_ATTEND_ROWS * d
            first = 0
            while first < n:
                rows = min(n - first, <size_t> HM_ATTEND_ROWS)
                saved = hm_fpenv_enter()
                _widen_int8(codec, k, k_scale, k_zero, k_width, k_wide, first, rows, wide_k)
                _widen_int8(codec, v, v_scale, v_zero, v_width, v_wide, first, rows, wide_v)
                hm_fpenv_leave(saved)
                some = hm_rows(k=wide_k, v=wide_v, n=rows, next=NULL, next_n=0)
                hm_attend_of(hm_active.name)(&a, &some)
                first += rows
        hm_free(wide_k)
        hm_free(a.scores)
    if not ready:
        raise MemoryError


# ---------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------

def start_writing(int fd, int64_t offset, int64_t length):
    """Have Linux begin to write a part of a file to the disk, and return; nothing elsewhere."""
    with nogil:
        hm_start_writing(fd, offset, length)
