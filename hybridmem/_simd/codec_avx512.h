/* Quantising with AVX-512 (F, BW). The ranges of 64 columns stay in registers. Minimum and maximum may
 * drop a NaN; its code, like that of all that is compared with infinity, is -128, which no finite value
 * gets, so the codes tell. Four registers of integers are packed into one with four shuffles; narrowing
 * stores would take eight.
 */
#ifndef HM_CODEC_AVX512_H
#define HM_CODEC_AVX512_H

#define HM_CODEC_AVX512 HM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2")

HM_CODEC_AVX512 static void hm_strip_ranges_codec_avx512(const float *x, size_t n, size_t stride,
                                                         float *low, float *high, float *tile) {
    __m512 lo[4], hi[4];
    size_t row, i;
    for (i = 0; i < 4; i++) lo[i] = hi[i] = _mm512_loadu_ps(x + 16 * i);
    for (row = 0; row < n; row++, x += stride)
        for (i = 0; i < 4; i++) {
            __m512 v = _mm512_loadu_ps(x + 16 * i);
            if (tile != NULL) _mm512_store_ps(tile + row * HM_STRIP + 16 * i, v);
            lo[i] = _mm512_min_ps(lo[i], v);
            hi[i] = _mm512_max_ps(hi[i], v);
        }
    for (i = 0; i < 4; i++) {
        _mm512_storeu_ps(low + 16 * i, lo[i]);
        _mm512_storeu_ps(high + 16 * i, hi[i]);
    }
}

HM_CODEC_AVX512 HM_INLINE void hm_ranges_avx512(const float *x, size_t w, size_t count, float *low,
                                                float *high) {
    size_t g, i;
    for (g = 0; g < count; g++, x += w) {
        __m512 lo = _mm512_loadu_ps(x), lo2 = _mm512_loadu_ps(x + 16), hi = lo, hi2 = lo2;
        for (i = 32; i < w; i += 32) {
            __m512 a = _mm512_loadu_ps(x + i), b = _mm512_loadu_ps(x + i + 16);
            lo = _mm512_min_ps(lo, a);
            hi = _mm512_max_ps(hi, a);
            lo2 = _mm512_min_ps(lo2, b);
            hi2 = _mm512_max_ps(hi2, b);
        }
        low[g] = _mm512_reduce_min_ps(_mm512_min_ps(lo, lo2));
        high[g] = _mm512_reduce_max_ps(_mm512_max_ps(hi, hi2));
    }
}

HM_CODEC_AVX512 HM_INLINE __m512i hm_steps_avx512(const float *x, __m512 by, __m512 zero) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(x), zero), by));
}

HM_CODEC_AVX512 HM_INLINE __m512i hm_pack64_avx512(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
    return _mm512_permutexvar_epi32(order, bytes);
}

HM_CODEC_AVX512 HM_INLINE int hm_odd_avx512(__m512i least) {
    return _mm512_cmpeq_epi8_mask(least, _mm512_set1_epi8(-128)) != 0;
}

HM_CODEC_AVX512 static int hm_strip_quantize_codec_avx512(const float *x, size_t n, size_t stride,
                                                          const float *by, const float *zero,
                                                          int8_t *q, size_t q_stride) {
    __m512 s[4], z[4];
    __m512i codes, least = _mm512_setzero_si512();
    size_t row, i;
    for (i = 0; i < 4; i++) {
        s[i] = _mm512_loadu_ps(by + 16 * i);
        z[i] = _mm512_loadu_ps(zero + 16 * i);
    }
    for (row = 0; row < n; row++, x += stride, q += q_stride) {
        codes = hm_pack64_avx512(
            hm_steps_avx512(x, s[0], z[0]), hm_steps_avx512(x + 16, s[1], z[1]),
            hm_steps_avx512(x + 32, s[2], z[2]), hm_steps_avx512(x + 48, s[3], z[3]));
        least = _mm512_min_epi8(least, codes);
        _mm512_storeu_si512(q, codes);
    }
    return hm_odd_avx512(least);
}

/* Two units at a time, whichever groups they are of; `per` units are a group. */
HM_CODEC_AVX512 HM_INLINE int hm_quantize_avx512(const float *x, unsigned per, unsigned units,
                                                 const float *by, const float *zero, int8_t *q) {
    __m512i least = _mm512_setzero_si512(), codes;
    unsigned u;
    for (u = 0; u < units; u += 2, x += 64, q += 64) {
        unsigned a = u / per, b = u + 1 < units ? (u + 1) / per : a;
        const float *y = u + 1 < units ? x + 32 : x;
        __m512 s = _mm512_set1_ps(by[a]), z = _mm512_set1_ps(zero[a]);
        __m512 t = _mm512_set1_ps(by[b]), o = _mm512_set1_ps(zero[b]);
        codes = hm_pack64_avx512(hm_steps_avx512(x, s, z), hm_steps_avx512(x + 16, s, z),
                                 hm_steps_avx512(y, t, o), hm_steps_avx512(y + 16, t, o));
        least = _mm512_min_epi8(least, codes);
        if (y == x)
            _mm256_storeu_si256((__m256i *)q, _mm512_castsi512_si256(codes));
        else
            _mm512_storeu_si512(q, codes);
    }
    return hm_odd_avx512(least);
}

/* 96 columns, the usual width, with loops that are unrolled. */
HM_CODEC_AVX512 static void hm_units_ranges_codec_avx512(const float *x, size_t w, size_t count,
                                                         float *low, float *high) {
    if (w == 96)
        hm_ranges_avx512(x, 96, count, low, high);
    else
        hm_ranges_avx512(x, w, count, low, high);
}

HM_CODEC_AVX512 static int hm_units_quantize_codec_avx512(const float *x, size_t w, size_t count,
                                                          const float *by, const float *zero,
                                                          int8_t *q) {
    unsigned per = (unsigned)(w / HM_UNIT), units = (unsigned)(count * per);
    if (per == 3) return hm_quantize_avx512(x, 3, units, by, zero, q);
    return hm_quantize_avx512(x, per, units, by, zero, q);
}

#define HM_CODEC_FN(name) hm_##name##_codec_avx512
#define HM_CODEC_T HM_CODEC_AVX512 static
#include "codec_loops.h"
#undef HM_CODEC_FN
#undef HM_CODEC_T

#endif
