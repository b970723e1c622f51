# Stored forms of keys and values: a part of _kernels.pyx.

cdef extern from "_simd/codec.h" nogil:
    ctypedef struct hm_codec:
        float (*quantize_channels)(
            const float *, size_t, size_t, int, int8_t *, void *, void *) noexcept nogil
        float (*quantize_rows)(
            const float *, size_t, size_t, size_t, int, int8_t *, void *, void *) noexcept nogil
        void (*dequantize_channels)(
            const int8_t *, size_t, size_t, int, const void *, const void *, float *
        ) noexcept nogil
        void (*dequantize_rows)(
            const int8_t *, size_t, size_t, size_t, int, const void *, size_t, const void *,
            size_t, float *) noexcept nogil
        int (*to_bfloat16)(const float *, size_t, uint16_t *) noexcept nogil
        int (*to_float16)(const float *, size_t, uint16_t *) noexcept nogil
        void (*from_bfloat16)(const uint16_t *, size_t, float *) noexcept nogil
        void (*from_float16)(const uint16_t *, size_t, float *) noexcept nogil
    const hm_codec *hm_codec_of(const char *level) noexcept


# Scales and zeros come as the bytes that are stored: of float16, or of float32 where wide.

def quantize_channels(const float[:, ::1] x not None, bint wide, int8_t[:, ::1] q not None,
                      uint8_t[:, ::1] scale not None, uint8_t[:, ::1] zero not None):
    """INT8 with a zero for each of d columns and a scale for each two, ceil(d / 2) of them.

    Returns the largest magnitude: NaN or infinity if x holds one, and then q means nothing. Any
    magnitude needs wide that is neither 0 nor in [2**-8, 65504].
    """
    cdef float peak
    cdef hm_fpenv saved
    with nogil:
        saved = hm_fpenv_enter()
        peak = hm_codec_of(hm_active.name).quantize_channels(
            &x[0, 0], x.shape[0], x.shape[1], wide, &q[0, 0], &scale[0, 0], &zero[0, 0])
        hm_fpenv_leave(saved)
    return peak


def quantize_rows(const float[:, ::1] x not None, Py_ssize_t width, bint wide,
                  int8_t[:, ::1] q not None, uint8_t[:, ::1] scale not None,
                  uint8_t[:, ::1] zero not None):
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


cdef void _widen_int8(const int8_t[:, ::1] q, const uint8_t[:, ::1] scale,
                      const uint8_t[:, ::1] zero, Py_ssize_t width, bint wide, size_t first,
                      size_t rows, float *out) noexcept nogil:
    """Some rows of INT8 as float32; width 0: one zero for each column, one scale for each two."""
    cdef const hm_codec *codec = hm_codec_of(hm_active.name)
    cdef size_t d = q.shape[1], item = 4 if wide else 2, scale_row = 0, zero_row = 0
    cdef hm_fpenv saved = hm_fpenv_enter()
    if width == 0:
        codec.dequantize_channels(&q[first, 0], rows, d, wide, &scale[0, 0], &zero[0, 0], out)
    else:
        if scale.shape[0] > 1:
            scale_row = scale.shape[1] // item
        if zero.shape[0] > 1:
            zero_row = zero.shape[1] // item
        codec.dequantize_rows(
            &q[first, 0], rows, d, width, wide, &scale[first if scale_row else 0, 0], scale_row,
            &zero[first if zero_row else 0, 0], zero_row, out)
    hm_fpenv_leave(saved)


def dequantize(const int8_t[:, ::1] q not None, const uint8_t[:, ::1] scale not None,
               const uint8_t[:, ::1] zero not None, Py_ssize_t width, bint wide,
               float[:, ::1] out not None):
    """out = zero + scale * q, both for each group of width columns, a multiple of 32.

    Either has a row for each row of q, or one for all. Width 0 stands for the layout of
    quantize_channels.
    """
    with nogil:
        _widen_int8(q, scale, zero, width, wide, 0, q.shape[0], &out[0, 0])


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
