/* Quantising with AVX-512 (F, BW). The ranges of 64 columns stay in registers. The minimum drops a NaN,
 * so x * 0 is added up beside it, which is NaN for NaN and infinity. Four registers of integers are
 * packed into one with four shuffles; narrowing stores would take eight.
 */
#ifndef HM_CODEC_AVX512_H
#define HM_CODEC_AVX512_H

#define HM_CODEC_AVX512 HM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2")

HM_CODEC_AVX512 static void hm_strip_ranges_codec_avx512(const float *x, size_t n, size_t stride,
                                                         float *low, float *high, float *tile) {
    const __m512 none = _mm512_setzero_ps();
    __m512 lo[4], hi[4], odd[4];
    size_t row, i;
    for (i = 0; i < 4; i++) {
        lo[i] = hi[i] = _mm512_loadu_ps(x + 16 * i);
        odd[i] = none;
    }
    for (row = 0; row < n; row++, x += stride)
        for (i = 0; i < 4; i++) {
            __m512 v = _mm512_loadu_ps(x + 16 * i);
            HM_PREFETCH(x + 16 * i + HM_STRIP); /* of the next strip */
            if (tile != NULL) _mm512_store_ps(tile + row * HM_STRIP + 16 * i, v);
            lo[i] = _mm512_min_ps(lo[i], v);
            hi[i] = _mm512_max_ps(hi[i], v);
            odd[i] = _mm512_fmadd_ps(v, none, odd[i]);
        }
    for (i = 0; i < 4; i++) {
        _mm512_storeu_ps(low + 16 * i, _mm512_add_ps(lo[i], odd[i]));
        _mm512_storeu_ps(high + 16 * i, _mm512_add_ps(hi[i], odd[i]));
    }
}

HM_CODEC_AVX512 HM_INLINE void hm_range_avx512(const float *x, size_t w, float *low,
                                                        float *high) {
    const __m512 none = _mm512_setzero_ps();
    __m512 lo = _mm512_loadu_ps(x), hi = lo, lo2 = lo, hi2 = lo, odd = none, odd2 = none;
    size_t i;
    for (i = 0; i < w; i += 32) {
        __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
        lo = _mm512_min_ps(lo, a);
        hi = _mm512_max_ps(hi, a);
        odd = _mm512_fmadd_ps(a, none, odd);
        lo2 = _mm512_min_ps(lo2, b);
        hi2 = _mm512_max_ps(hi2, b);
        odd2 = _mm512_fmadd_ps(b, none, odd2);
    }
    odd = _mm512_add_ps(odd, odd2);
    *low = _mm512_reduce_min_ps(_mm512_min_ps(lo, lo2));
    *high = _mm512_reduce_max_ps(_mm512_max_ps(hi, hi2));
    if (_mm512_cmp_ps_mask(odd, odd, _CMP_UNORD_Q)) *high = hm_bits_to_float(UINT32_C(0x7FC00000));
}

HM_CODEC_AVX512 HM_INLINE __m512i hm_steps_avx512(const float *x, __m512 by, __m512 zero) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x), zero), by));
}

HM_CODEC_AVX512 HM_INLINE void hm_pack64_avx512(__m512i a, __m512i b, __m512i c, __m512i d,
                                                int8_t *q) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    _mm512_storeu_si512(q, _mm512_permutexvar_epi32(order, bytes));
}

HM_CODEC_AVX512 static void hm_strip_quantize_codec_avx512(const float *x, size_t n, size_t stride,
                                                           const float *by, const float *zero,
                                                           int8_t *q, size_t q_stride) {
    __m512 s[4], z[4];
    size_t row, i;
    for (i = 0; i < 4; i++) {
        s[i] = _mm512_loadu_ps(by + 16 * i);
        z[i] = _mm512_loadu_ps(zero + 16 * i);
    }
    for (row = 0; row < n; row++, x += stride, q += q_stride)
        hm_pack64_avx512(hm_steps_avx512(x, s[0], z[0]), hm_steps_avx512(x + 16, s[1], z[1]),
                         hm_steps_avx512(x + 32, s[2], z[2]), hm_steps_avx512(x + 48, s[3], z[3]), q);
}

HM_CODEC_AVX512 HM_INLINE void hm_quantize_avx512(const float *x, size_t w, float by,
                                                           float zero, int8_t *q) {
    __m512 s = _mm512_set1_ps(by), z = _mm512_set1_ps(zero);
    size_t i;
    for (i = 0; i + 64 <= w; i += 64)
        hm_pack64_avx512(hm_steps_avx512(x + i, s, z), hm_steps_avx512(x + i + 16, s, z),
                         hm_steps_avx512(x + i + 32, s, z), hm_steps_avx512(x + i + 48, s, z), q + i);
    for (; i < w; i += 16)
        _mm_storeu_si128((__m128i *)(q + i),
                         _mm512_cvtepi32_epi8(hm_steps_avx512(x + i, s, z)));
}

/* 96 columns, the usual width, with loops that are unrolled. */
HM_CODEC_AVX512 static void hm_units_range_codec_avx512(const float *x, size_t w, float *low,
                                                     float *high) {
    if (w == 96)
        hm_range_avx512(x, 96, low, high);
    else
        hm_range_avx512(x, w, low, high);
}

HM_CODEC_AVX512 static void hm_units_quantize_codec_avx512(const float *x, size_t w, float by,
                                                        float zero, int8_t *q) {
    if (w == 96)
        hm_quantize_avx512(x, 96, by, zero, q);
    else
        hm_quantize_avx512(x, w, by, zero, q);
}

#define HM_CODEC_FN(name) hm_##name##_codec_avx512
#define HM_CODEC_T HM_CODEC_AVX512 static
#include "codec_loops.h"
#undef HM_CODEC_FN
#undef HM_CODEC_T

#endif
