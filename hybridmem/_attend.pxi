# Attention over stored rows: a part of _kernels.pyx.

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


def attend_int8(const float[:, ::1] q not None,
                const int8_t[:, ::1] k not None, const uint8_t[:, ::1] k_scale not None,
                const uint8_t[:, ::1] k_zero not None, Py_ssize_t k_width, bint k_wide,
                const int8_t[:, ::1] v not None, const uint8_t[:, ::1] v_scale not None,
                const uint8_t[:, ::1] v_zero not None, Py_ssize_t v_width, bint v_wide,
                Py_ssize_t heads, Py_ssize_t kv_heads, float scale, float[:, ::1] acc not None,
                float[:, ::1] top not None, float[:, ::1] total not None):
    """As attend, over INT8, of which a few rows at a time are widened.

    Scales, zeros and widths are those of dequantize.
    """
    cdef hm_attention a
    cdef hm_rows some
    cdef size_t d = k.shape[1], n = k.shape[0], first, rows
    cdef float *wide_k = NULL
    cdef float *wide_v
    cdef int ready
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
                _widen_int8(k, k_scale, k_zero, k_width, k_wide, first, rows, wide_k)
                _widen_int8(v, v_scale, v_zero, v_width, v_wide, first, rows, wide_v)
                some = hm_rows(k=wide_k, v=wide_v, n=rows, next=NULL, next_n=0)
                hm_attend_of(hm_active.name)(&a, &some)
                first += rows
        hm_free(wide_k)
        hm_free(a.scores)
    if not ready:
        raise MemoryError


# ---------------------------------------------------------------------------------------------
# Rows by head, as products of one query with all of them read them
# ---------------------------------------------------------------------------------------------

cdef void _write_by_head(const float[:, ::1] keys, const float[:, ::1] values,
                         float[:, ::1] columns, float[:, :, ::1] by_head,
                         Py_ssize_t at) noexcept nogil:
    cdef Py_ssize_t n = keys.shape[0], width = keys.shape[1], size = by_head.shape[2]
    cdef Py_ssize_t left, first, row, column, head
    for left in range(0, width, 16):  # squares of 16, so that whole lines are read and written
        for first in range(0, n, 16):
            for column in range(left, min(left + 16, width)):
                for row in range(first, min(first + 16, n)):
                    columns[column, at + row] = keys[row, column]
    for head in range(by_head.shape[0]):
        for row in range(n):
            memcpy(&by_head[head, at + row, 0], &values[row, head * size], size * sizeof(float))


def write_by_head(const float[:, ::1] keys not None, const float[:, ::1] values not None,
                  float[:, ::1] columns not None, float[:, :, ::1] by_head not None,
                  Py_ssize_t at):
    """Write keys as columns of [width, rows], and values by head into [heads, rows, size]."""
    with nogil:
        _write_by_head(keys, values, columns, by_head, at)


def append_by_head(const float[:, ::1] key not None, const float[:, ::1] value not None,
                   const float[:, ::1] query not None,
                   float[:, ::1] columns not None, float[:, :, ::1] by_head not None,
                   Py_ssize_t at,
                   float[:, :, ::1] own not None, Py_ssize_t own_at, Py_ssize_t query_at):
    """As write_by_head, one row, which goes with its query into own [3, rows, width] too."""
    cdef size_t size = key.shape[1] * sizeof(float)
    with nogil:
        _write_by_head(key, value, columns, by_head, at)
        memcpy(&own[0, own_at, 0], &key[0, 0], size)
        memcpy(&own[1, own_at, 0], &value[0, 0], size)
        memcpy(&own[2, query_at, 0], &query[0, 0], size)
