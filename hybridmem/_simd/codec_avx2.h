/* Quantising with AVX2, half a strip at a time; codec_avx512.h says what is done and why. */
#ifndef HM_CODEC_AVX2_H
#define HM_CODEC_AVX2_H

#define HM_CODEC_AVX2 HM_TARGET("avx2")

HM_CODEC_AVX2 static void hm_strip_ranges_codec_avx2(const float *x, size_t n, size_t stride,
                                                     float *low, float *high, float *tile) {
    size_t half, row, i;
    for (half = 0; half < HM_STRIP; half += 32) {
        const float *at = x + half;
        __m256 lo[4], hi[4];
        for (i = 0; i < 4; i++) lo[i] = hi[i] = _mm256_loadu_ps(at + 8 * i);
        for (row = 0; row < n; row++, at += stride)
            for (i = 0; i < 4; i++) {
                __m256 v = _mm256_loadu_ps(at + 8 * i);
                if (tile != NULL) _mm256_store_ps(tile + row * HM_STRIP + half + 8 * i, v);
                lo[i] = _mm256_min_ps(lo[i], v);
                hi[i] = _mm256_max_ps(hi[i], v);
            }
        for (i = 0; i < 4; i++) {
            _mm256_storeu_ps(low + half + 8 * i, lo[i]);
            _mm256_storeu_ps(high + half + 8 * i, hi[i]);
        }
    }
}

HM_CODEC_AVX2 HM_INLINE void hm_ranges_avx2(const float *x, size_t w, size_t count, float *low,
                                            float *high) {
    size_t g, i;
    for (g = 0; g < count; g++, x += w) {
        __m256 lo = _mm256_loadu_ps(x), lo2 = _mm256_loadu_ps(x + 8), hi = lo, hi2 = lo2;
        __m128 a, b;
        for (i = 16; i < w; i += 16) {
            __m256 v = _mm256_loadu_ps(x + i), u = _mm256_loadu_ps(x + i + 8);
            lo = _mm256_min_ps(lo, v);
            hi = _mm256_max_ps(hi, v);
            lo2 = _mm256_min_ps(lo2, u);
            hi2 = _mm256_max_ps(hi2, u);
        }
        lo = _mm256_min_ps(lo, lo2);
        hi = _mm256_max_ps(hi, hi2);
        a = _mm_min_ps(_mm256_castps256_ps128(lo), _mm256_extractf128_ps(lo, 1));
        b = _mm_max_ps(_mm256_castps256_ps128(hi), _mm256_extractf128_ps(hi, 1));
        a = _mm_min_ps(a, _mm_movehl_ps(a, a));
        b = _mm_max_ps(b, _mm_movehl_ps(b, b));
        low[g] = _mm_cvtss_f32(_mm_min_ss(a, _mm_movehdup_ps(a)));
        high[g] = _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
    }
}

HM_CODEC_AVX2 HM_INLINE __m256i hm_steps_avx2(const float *x, __m256 by, __m256 zero) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x), zero), by));
}

HM_CODEC_AVX2 HM_INLINE __m256i hm_pack32_avx2(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    return _mm256_permutevar8x32_epi32(bytes, order);
}

HM_CODEC_AVX2 HM_INLINE int hm_odd_avx2(__m256i least) {
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(least, _mm256_set1_epi8(-128))) != 0;
}

HM_CODEC_AVX2 static int hm_strip_quantize_codec_avx2(const float *x, size_t n, size_t stride,
                                                      const float *by, const float *zero, int8_t *q,
                                                      size_t q_stride) {
    __m256i codes, least = _mm256_setzero_si256();
    size_t half, row, i;
    for (half = 0; half < HM_STRIP; half += 32) {
        const float *at = x + half;
        int8_t *to = q + half;
        __m256 s[4], z[4];
        for (i = 0; i < 4; i++) {
            s[i] = _mm256_loadu_ps(by + half + 8 * i);
            z[i] = _mm256_loadu_ps(zero + half + 8 * i);
        }
        for (row = 0; row < n; row++, at += stride, to += q_stride) {
            codes = hm_pack32_avx2(
                hm_steps_avx2(at, s[0], z[0]), hm_steps_avx2(at + 8, s[1], z[1]),
                hm_steps_avx2(at + 16, s[2], z[2]), hm_steps_avx2(at + 24, s[3], z[3]));
            least = _mm256_min_epi8(least, codes);
            _mm256_storeu_si256((__m256i *)to, codes);
        }
    }
    return hm_odd_avx2(least);
}

HM_CODEC_AVX2 HM_INLINE int hm_quantize_avx2(const float *x, size_t w, size_t count, const float *by,
                                             const float *zero, int8_t *q) {
    __m256i codes, least = _mm256_setzero_si256();
    size_t g, i;
    for (g = 0; g < count; g++) {
        __m256 s = _mm256_set1_ps(by[g]), z = _mm256_set1_ps(zero[g]);
        for (i = 0; i < w; i += 32, x += 32, q += 32) {
            codes = hm_pack32_avx2(hm_steps_avx2(x, s, z), hm_steps_avx2(x + 8, s, z),
                                   hm_steps_avx2(x + 16, s, z), hm_steps_avx2(x + 24, s, z));
            least = _mm256_min_epi8(least, codes);
            _mm256_storeu_si256((__m256i *)q, codes);
        }
    }
    return hm_odd_avx2(least);
}

/* 96 columns, the usual width, with loops that are unrolled. */
HM_CODEC_AVX2 static void hm_units_ranges_codec_avx2(const float *x, size_t w, size_t count,
                                                     float *low, float *high) {
    if (w == 96)
        hm_ranges_avx2(x, 96, count, low, high);
    else
        hm_ranges_avx2(x, w, count, low, high);
}

HM_CODEC_AVX2 static int hm_units_quantize_codec_avx2(const float *x, size_t w, size_t count,
                                                      const float *by, const float *zero, int8_t *q) {
    if (w == 96) return hm_quantize_avx2(x, 96, count, by, zero, q);
    return hm_quantize_avx2(x, w, count, by, zero, q);
}

#define HM_CODEC_FN(name) hm_##name##_codec_avx2
#define HM_CODEC_T HM_CODEC_AVX2 static
#include "codec_loops.h"
#undef HM_CODEC_FN
#undef HM_CODEC_T

#endif
