/* x86-64 with AVX-512 VPOPCNTDQ and BITALG (Ice Lake, Zen 4 and later): 64 bytes at a time.
 *
 * XOR, count and add are three instructions for two vector ports (counts go to one of them), so a line
 * of 64 bytes costs 1.5 cycles. Four rows share the loads of a query and one reduction. In late
 * interaction VPOPCNTB counts 64 lanes in place; query bytes are stored four times so that the XOR can
 * broadcast them from memory without a shuffle.
 */
#ifndef HM_AVX512_H
#define HM_AVX512_H

#include <immintrin.h>

#include "avx2.h"

#define HM_AVX512 \
    HM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vpopcntdq,avx512bitalg,avx2,popcnt")

#define HM_T HM_AVX512
#define HM_FN(name) name##_avx512
#define HM_SMALL(name) name##_avx2
#define HM_W 16
#define V __m512
#define V_LOAD(p) _mm512_loadu_ps(p)
#define V_STORE(p, v) _mm512_storeu_ps((p), (v))
#define V_ADD(a, b) _mm512_add_ps((a), (b))
#define V_SUB(a, b) _mm512_sub_ps((a), (b))
#define V_FLIP(v, b) hm_flip_vector_avx512((v), (b))
#define V_INNER(v) hm_inner_avx512(v)
#define V_GE0(v) (unsigned)_mm512_cmp_ps_mask((v), _mm512_setzero_ps(), _CMP_GE_OQ)

HM_T HM_INLINE __m512 hm_flip_vector_avx512(__m512 v, uint32_t bits) {
    __m512i i = _mm512_castps_si512(v);
    i = _mm512_mask_xor_epi32(i, (__mmask16)bits, i, _mm512_set1_epi32(INT32_MIN));
    return _mm512_castsi512_ps(i);
}

/* Sum with the partner in the first lane of each pair, first minus second in the other. */
HM_T HM_INLINE __m512 hm_pairs_avx512(__m512 v, __m512 partner, const int second) {
    return _mm512_mask_sub_ps(_mm512_add_ps(v, partner), (__mmask16)second, partner, v);
}

HM_T HM_INLINE __m512 hm_inner_avx512(__m512 v) {
    v = hm_pairs_avx512(v, _mm512_permute_ps(v, 0xB1), 0xAAAA);
    v = hm_pairs_avx512(v, _mm512_permute_ps(v, 0x4E), 0xCCCC);
    v = hm_pairs_avx512(v, _mm512_shuffle_f32x4(v, v, 0xB1), 0xF0F0);
    return hm_pairs_avx512(v, _mm512_shuffle_f32x4(v, v, 0x4E), 0xFF00);
}

#include "vector_body.h"

#undef HM_T
#undef HM_FN
#undef HM_SMALL
#undef HM_W
#undef V
#undef V_LOAD
#undef V_STORE
#undef V_ADD
#undef V_SUB
#undef V_FLIP
#undef V_INNER
#undef V_GE0

HM_AVX512 HM_INLINE int hm_copy_avx512(const float *src, float *dst, size_t n, const int stream) {
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i largest0 = _mm512_setzero_si512(), largest1 = largest0;
    size_t i;
    for (i = 0; i + 32 <= n; i += 32) {
        __m512i a = _mm512_loadu_si512(src + i), b = _mm512_loadu_si512(src + i + 16);
        if (stream) {
            _mm512_stream_si512((__m512i *)(dst + i), a);
            _mm512_stream_si512((__m512i *)(dst + i + 16), b);
        } else if (dst != NULL) {
            _mm512_storeu_si512(dst + i, a);
            _mm512_storeu_si512(dst + i + 16, b);
        }
        largest0 = _mm512_max_epu32(largest0, _mm512_and_si512(a, magnitude));
        largest1 = _mm512_max_epu32(largest1, _mm512_and_si512(b, magnitude));
    }
    if (stream) _mm_sfence();
    if (_mm512_reduce_max_epu32(_mm512_max_epu32(largest0, largest1)) >= UINT32_C(0x7F800000))
        return 0;
    return hm_copy_finite_scalar(src + i, dst == NULL ? NULL : dst + i, n - i);
}

HM_AVX512 static int hm_copy_finite_avx512(const float *src, float *dst, size_t n) {
    return hm_streams(dst, n) ? hm_copy_avx512(src, dst, n, 1) : hm_copy_avx512(src, dst, n, 0);
}

HM_AVX512 HM_INLINE __m512i hm_count_avx512(__m512i a, __m512i b) {
    return _mm512_popcnt_epi64(_mm512_xor_si512(a, b));
}

/* Sums of the eight 64-bit lanes of four vectors. */
HM_AVX512 HM_INLINE __m128i hm_sum4_avx512(const __m512i *v) {
    __m512i a = _mm512_add_epi64(_mm512_unpacklo_epi64(v[0], v[1]), _mm512_unpackhi_epi64(v[0], v[1]));
    __m512i b = _mm512_add_epi64(_mm512_unpacklo_epi64(v[2], v[3]), _mm512_unpackhi_epi64(v[2], v[3]));
    __m512i c = _mm512_add_epi64(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
    c = _mm512_add_epi64(c, _mm512_shuffle_i64x2(c, c, 0xB1));
    /* 128-bit lanes 0 and 2 now hold (row 0, row 1) and (row 2, row 3) */
    return _mm256_castsi256_si128(
        _mm512_cvtepi64_epi32(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 4, 5, 0, 0, 0, 0), c)));
}

/* Distances of T rows, `bytes` apart, to one query. */
HM_AVX512 HM_INLINE void hm_rows_avx512(const uint8_t *rows, const uint8_t *query, size_t bytes,
                                        const int T, __m512i *sum) {
    size_t i;
    int r;
    for (r = 0; r < T; r++) sum[r] = _mm512_setzero_si512();
    for (i = 0; i + 64 <= bytes; i += 64) {
        __m512i q = _mm512_loadu_si512(query + i);
        for (r = 0; r < T; r++)
            sum[r] = _mm512_add_epi64(
                sum[r], hm_count_avx512(q, _mm512_loadu_si512(rows + (size_t)r * bytes + i)));
    }
    if (i < bytes) {
        __mmask8 rest = (__mmask8)((1u << ((bytes - i) / 8)) - 1);
        __m512i q = _mm512_maskz_loadu_epi64(rest, query + i);
        for (r = 0; r < T; r++)
            sum[r] = _mm512_add_epi64(
                sum[r],
                hm_count_avx512(q, _mm512_maskz_loadu_epi64(rest, rows + (size_t)r * bytes + i)));
    }
}

HM_AVX512 static void hm_hamming_avx512(const uint8_t *rows, size_t n, const uint8_t *queries,
                                        size_t m, size_t bytes, uint32_t *out, size_t out_stride) {
    __m512i sum[4];
    size_t r, q, i;
    for (r = 0; r + 4 <= n; r += 4) {
        const uint8_t *four = rows + r * bytes;
        if (m == 1) { /* bound by memory: in the order in which it lies there */
            for (i = 0; i < 4; i++) {
                hm_fetch_ahead(four + i * bytes, bytes);
                hm_rows_avx512(four + i * bytes, queries, bytes, 1, sum + i);
            }
            _mm_storeu_si128((__m128i *)(out + r), hm_sum4_avx512(sum));
            continue;
        }
        hm_fetch_ahead(four, 4 * bytes);
        for (q = 0; q < m; q++) {
            hm_rows_avx512(four, queries + q * bytes, bytes, 4, sum);
            _mm_storeu_si128((__m128i *)(out + q * out_stride + r), hm_sum4_avx512(sum));
        }
    }
    for (; r < n; r++)
        for (q = 0; q < m; q++) {
            hm_rows_avx512(rows + r * bytes, queries + q * bytes, bytes, 1, sum);
            out[q * out_stride + r] = (uint32_t)_mm512_reduce_add_epi64(sum[0]);
        }
}

/* Query bytes four times over. Of every three bytes the last is replaced by the XOR of all three, as
 * hm_late_lines_avx512 wants it. */
HM_AVX512 static void hm_late_prepare_avx512(const uint8_t *queries, size_t t, size_t bytes,
                                             uint8_t *prepared) {
    size_t token, b;
    for (token = 0; token < t; token++, queries += bytes, prepared += bytes * 4)
        for (b = 0; b < bytes; b++) {
            uint8_t q = queries[b];
            if (b % 3 == 2) q ^= (uint8_t)(queries[b - 1] ^ queries[b - 2]);
            memset(prepared + b * 4, q, 4);
        }
}

HM_AVX512 HM_INLINE __m512i hm_query4_avx512(const uint8_t *query) {
    int32_t four;
    memcpy(&four, query, 4);
    return _mm512_set1_epi32(four);
}

/* Counts of lines [0, n) of 64 lanes for T tokens; saturates at 255. n is a multiple of 3, or the last
 * lines are those of the token's last bytes.
 *
 * Of three lines a, b, c the XOR x is shared by all tokens: the sum bits are x ^ (qa ^ qb ^ qc), and the
 * carries follow from them with one ternary operation: where a ^ qa and b ^ qb agree they are the
 * carry, else it is the inverted sum. Eight operations for three lines instead of nine. */
HM_AVX512 HM_INLINE void hm_late_lines_avx512(const uint8_t *lanes, size_t n, const uint8_t *query,
                                              size_t token_bytes, const int T, ptrdiff_t ahead,
                                              __m512i *count) {
    __m512i ones[HM_TOKENS], twos[HM_TOKENS];
    size_t b, line;
    int i;
    for (i = 0; i < T; i++) ones[i] = twos[i] = _mm512_setzero_si512();
    for (b = 0; b + 3 <= n; b += 3) {
        const uint8_t *lines = lanes + b * HM_LANES;
        __m512i a = _mm512_loadu_si512(lines), c = _mm512_loadu_si512(lines + HM_LANES);
        __m512i x = _mm512_ternarylogic_epi64(a, c, _mm512_loadu_si512(lines + 2 * HM_LANES), 0x96);
        for (line = 0; line < 3; line++) HM_PREFETCH(lines + line * HM_LANES + ahead);
        for (i = 0; i < T; i++) {
            const uint8_t *q = query + (size_t)i * token_bytes + b * 4;
            __m512i sum = _mm512_xor_si512(x, hm_query4_avx512(q + 8));
            __m512i carry = _mm512_ternarylogic_epi64(_mm512_xor_si512(a, hm_query4_avx512(q)),
                                                      _mm512_xor_si512(c, hm_query4_avx512(q + 4)),
                                                      sum, 0xD4);
            ones[i] = _mm512_add_epi8(ones[i], _mm512_popcnt_epi8(sum));
            twos[i] = _mm512_add_epi8(twos[i], _mm512_popcnt_epi8(carry));
        }
    }
    for (; b < n; b++) {
        __m512i a = _mm512_loadu_si512(lanes + b * HM_LANES);
        HM_PREFETCH(lanes + b * HM_LANES + ahead);
        for (i = 0; i < T; i++) {
            __m512i q = hm_query4_avx512(query + (size_t)i * token_bytes + b * 4);
            ones[i] = _mm512_add_epi8(ones[i], _mm512_popcnt_epi8(_mm512_xor_si512(a, q)));
        }
    }
    for (i = 0; i < T; i++)
        count[i] = _mm512_adds_epu8(ones[i], _mm512_add_epi8(twos[i], twos[i]));
}

/* Smallest byte of each of eight vectors, as 32-bit numbers. */
HM_AVX512 HM_INLINE __m256i hm_min8_avx512(const __m512i *v) {
    __m512i half[4], quarter[2], w;
    int i;
    for (i = 0; i < 4; i++)
        half[i] = _mm512_min_epu8(_mm512_shuffle_i64x2(v[2 * i], v[2 * i + 1], 0x44),
                                  _mm512_shuffle_i64x2(v[2 * i], v[2 * i + 1], 0xEE));
    for (i = 0; i < 2; i++)
        quarter[i] = _mm512_min_epu8(_mm512_shuffle_i64x2(half[2 * i], half[2 * i + 1], 0x88),
                                     _mm512_shuffle_i64x2(half[2 * i], half[2 * i + 1], 0xDD));
    w = _mm512_min_epu8(_mm512_unpacklo_epi64(quarter[0], quarter[1]),
                        _mm512_unpackhi_epi64(quarter[0], quarter[1]));
    w = _mm512_min_epu8(w, _mm512_srli_epi64(w, 32));
    w = _mm512_min_epu8(w, _mm512_srli_epi64(w, 16));
    w = _mm512_min_epu8(w, _mm512_srli_epi64(w, 8));
    w = _mm512_and_si512(w, _mm512_set1_epi64(255)); /* 0 4 1 5 2 6 3 7 */
    return _mm512_cvtepi64_epi32(
        _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), w));
}

/* Up to 256 bits: counts stay in bytes. Returns 0 if a 255 might have been 256. */
HM_AVX512 HM_INLINE int hm_late_narrow_avx512(const uint8_t *group, size_t bytes,
                                              const uint8_t *query, const int T, size_t span,
                                              ptrdiff_t ahead, uint32_t *out) {
    const size_t runs = HM_LANES / span;
    __m512i count[HM_TOKENS];
    uint32_t largest = 0;
    size_t run, lane;
    int i;
    hm_late_lines_avx512(group, bytes, query, bytes * 4, T, ahead, count);
    if (span == 64) {
        const __mmask8 wanted = (__mmask8)((1u << T) - 1);
        __m256i least;
        for (i = T; i < HM_TOKENS; i++) count[i] = _mm512_setzero_si512();
        least = hm_min8_avx512(count);
        _mm256_mask_storeu_epi32(out, wanted, least);
        return _mm256_mask_cmpeq_epi32_mask(wanted, least, _mm256_set1_epi32(255)) == 0;
    }
    for (i = 0; i < T; i++, out += runs) {
        uint8_t counts[HM_LANES];
        _mm512_storeu_si512(counts, count[i]);
        for (run = 0; run < runs; run++) {
            uint32_t best = counts[run * span];
            for (lane = 1; lane < span; lane++) {
                uint32_t v = counts[run * span + lane];
                best = v < best ? v : best;
            }
            out[run] = best;
            largest = best > largest ? best : largest;
        }
    }
    return largest < 255;
}

/* Any number of bits below 65536: bytes are widened to words every 30 lines. */
HM_AVX512 HM_INLINE void hm_late_wide_avx512(const uint8_t *group, size_t bytes,
                                             const uint8_t *query, const int T, size_t span,
                                             ptrdiff_t ahead, uint32_t *out) {
    const __m512i low_bytes = _mm512_set1_epi16(0xFF);
    __m512i count[HM_TOKENS], even[HM_TOKENS], odd[HM_TOKENS];
    size_t b, lane;
    int i;
    for (i = 0; i < T; i++) even[i] = odd[i] = _mm512_setzero_si512();
    for (b = 0; b < bytes; b += 30) {
        hm_late_lines_avx512(group + b * HM_LANES, hm_min_size(30, bytes - b), query + b * 4,
                             bytes * 4, T, ahead, count);
        for (i = 0; i < T; i++) {
            even[i] = _mm512_add_epi16(even[i], _mm512_and_si512(count[i], low_bytes));
            odd[i] = _mm512_add_epi16(odd[i], _mm512_srli_epi16(count[i], 8));
        }
    }
    for (i = 0; i < T; i++, out += HM_LANES / span) {
        if (span == 64) {
            __m512i v = _mm512_min_epu16(even[i], odd[i]);
            __m256i w = _mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
            out[0] = hm_min_words_avx2(
                _mm_min_epu16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
        } else {
            uint16_t evens[32], odds[32];
            uint32_t counts[HM_LANES];
            _mm512_storeu_si512(evens, even[i]);
            _mm512_storeu_si512(odds, odd[i]);
            for (lane = 0; lane < 32; lane++) {
                counts[2 * lane] = evens[lane];
                counts[2 * lane + 1] = odds[lane];
            }
            hm_min_runs(counts, span, out);
        }
    }
}

HM_AVX512 static void hm_late_min_avx512(const uint8_t *group, size_t bytes,
                                         const uint8_t *prepared, size_t t, size_t span,
                                         ptrdiff_t ahead, uint32_t *out) {
    const size_t runs = HM_LANES / span, token_bytes = bytes * 4;
    size_t i, step;
    if (bytes <= 32) {
        int sure = 1;
        for (i = 0; i < t; i += step) {
            const uint8_t *query = prepared + i * token_bytes;
            uint32_t *to = out + i * runs;
            step = t - i >= 8 ? 8 : t - i >= 4 ? 4 : t - i >= 2 ? 2 : 1;
            if (step == 8) sure &= hm_late_narrow_avx512(group, bytes, query, 8, span, ahead, to);
            if (step == 4) sure &= hm_late_narrow_avx512(group, bytes, query, 4, span, ahead, to);
            if (step == 2) sure &= hm_late_narrow_avx512(group, bytes, query, 2, span, ahead, to);
            if (step == 1) sure &= hm_late_narrow_avx512(group, bytes, query, 1, span, ahead, to);
        }
        if (sure) return;
    }
    for (i = 0; i < t; i += step) {
        const uint8_t *query = prepared + i * token_bytes;
        uint32_t *to = out + i * runs;
        step = t - i >= 8 ? 8 : t - i >= 4 ? 4 : 1;
        if (step == 8) hm_late_wide_avx512(group, bytes, query, 8, span, ahead, to);
        if (step == 4) hm_late_wide_avx512(group, bytes, query, 4, span, ahead, to);
        if (step == 1) hm_late_wide_avx512(group, bytes, query, 1, span, ahead, to);
    }
}

static const hm_kernels hm_table_avx512 = {
    "avx512",
    hm_mean_avx2, /* widening to 512 bits takes two operations, to 256 bits one */
    hm_copy_finite_avx512,
    hm_fold_avx512,
    hm_flip_fwht_avx512,
    hm_pack_signs_avx512,
    hm_hamming_avx512,
    4,
    hm_late_prepare_avx512,
    hm_late_min_avx512,
    hm_late_weighted_avx2,
};

#endif
