/* x86-64 with AVX2: 32 bytes at a time.
 *
 * There is no vector population count, so bytes are counted through two 16-entry tables in registers
 * (VPSHUFB), low and high nibble. W. Mula, N. Kurz, D. Lemire, "Faster population counts using AVX2
 * instructions", Comput. J. 61 (2018).
 *
 * Late interaction needs neither the XOR nor a fixed table: all lanes of a line are compared with the
 * same query byte, so the table of each query nibble already holds popcount(i ^ nibble), and a line is
 * split into nibbles once for all query tokens. Two shuffles and two additions per token and 32 bytes.
 */
#ifndef HM_AVX2_H
#define HM_AVX2_H

#include <immintrin.h>

#include "popcnt.h"

#define HM_T HM_TARGET("avx2,popcnt")
#define HM_FN(name) name##_avx2
#define HM_SMALL(name) name##_scalar
#define HM_W 8
#define V __m256
#define V_LOAD(p) _mm256_loadu_ps(p)
#define V_STORE(p, v) _mm256_storeu_ps((p), (v))
#define V_ADD(a, b) _mm256_add_ps((a), (b))
#define V_SUB(a, b) _mm256_sub_ps((a), (b))
#define V_FLIP(v, b) hm_flip_vector_avx2((v), (b))
#define V_INNER(v) hm_inner_avx2(v)
#define V_GE0(v) (unsigned)_mm256_movemask_ps(_mm256_cmp_ps((v), _mm256_setzero_ps(), _CMP_GE_OQ))
#define D __m256d
#define D_W 4
#define D_LOAD(p) _mm256_loadu_pd(p)
#define D_STORE(p, v) _mm256_storeu_pd((p), (v))
#define D_ADD(a, b) _mm256_add_pd((a), (b))
#define D_WIDEN(p) _mm256_cvtps_pd(_mm_loadu_ps(p))
#define D_MEAN(p, sum, n) \
    _mm_storeu_ps((p), _mm256_cvtpd_ps(_mm256_div_pd((sum), _mm256_set1_pd(n))))

HM_T HM_INLINE __m256 hm_flip_vector_avx2(__m256 v, uint32_t bits) {
    const __m256i to_sign = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    __m256i spread = _mm256_sllv_epi32(_mm256_set1_epi32((int)bits), to_sign);
    __m256i signs = _mm256_and_si256(spread, _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(v, _mm256_castsi256_ps(signs));
}

/* The partner of each lane plus the lane itself, negated where it is the second of its pair. */
HM_T HM_INLINE __m256 hm_inner_avx2(__m256 v) {
    const __m256 second1 = _mm256_setr_ps(0, -0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f);
    const __m256 second2 = _mm256_setr_ps(0, 0, -0.0f, -0.0f, 0, 0, -0.0f, -0.0f);
    const __m256 second4 = _mm256_setr_ps(0, 0, 0, 0, -0.0f, -0.0f, -0.0f, -0.0f);
    v = _mm256_add_ps(_mm256_permute_ps(v, 0xB1), _mm256_xor_ps(v, second1));
    v = _mm256_add_ps(_mm256_permute_ps(v, 0x4E), _mm256_xor_ps(v, second2));
    return _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, second4));
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
#undef D
#undef D_W
#undef D_LOAD
#undef D_STORE
#undef D_ADD
#undef D_WIDEN
#undef D_MEAN

#define HM_AVX2 HM_TARGET("avx2,popcnt")

HM_AVX2 HM_INLINE int hm_copy_avx2(const float *src, float *dst, size_t n, const int stream) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i largest0 = _mm256_setzero_si256(), largest1 = largest0;
    size_t i;
    for (i = 0; i + 16 <= n; i += 16) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(src + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(src + i + 8));
        if (stream) {
            _mm256_stream_si256((__m256i *)(dst + i), a);
            _mm256_stream_si256((__m256i *)(dst + i + 8), b);
        } else if (dst != NULL) {
            _mm256_storeu_si256((__m256i *)(dst + i), a);
            _mm256_storeu_si256((__m256i *)(dst + i + 8), b);
        }
        largest0 = _mm256_max_epi32(largest0, _mm256_and_si256(a, magnitude));
        largest1 = _mm256_max_epi32(largest1, _mm256_and_si256(b, magnitude));
    }
    if (stream) _mm_sfence();
    largest0 = _mm256_cmpgt_epi32(_mm256_max_epi32(largest0, largest1),
                                  _mm256_set1_epi32(0x7F7FFFFF));
    if (!_mm256_testz_si256(largest0, largest0)) return 0;
    return hm_copy_finite_scalar(src + i, dst == NULL ? NULL : dst + i, n - i);
}

HM_AVX2 static int hm_copy_finite_avx2(const float *src, float *dst, size_t n) {
    return hm_streams(dst, n) ? hm_copy_avx2(src, dst, n, 1) : hm_copy_avx2(src, dst, n, 0);
}

/* Number of set bits of each byte. */
HM_AVX2 HM_INLINE __m256i hm_count_bytes_avx2(__m256i v) {
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2,
                                           1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4);
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(v, nibble));
    __m256i high =
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble));
    return _mm256_add_epi8(low, high);
}

HM_AVX2 HM_INLINE __m256i hm_xor32_avx2(const uint8_t *a, const uint8_t *b) {
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)a),
                            _mm256_loadu_si256((const __m256i *)b));
}

/* Full adder: *high:*low = a + b + c, bit by bit. */
HM_AVX2 HM_INLINE void hm_add3_avx2(__m256i *high, __m256i *low, __m256i a, __m256i b, __m256i c) {
    __m256i u = _mm256_xor_si256(a, b);
    *high = _mm256_or_si256(_mm256_and_si256(a, b), _mm256_and_si256(u, c));
    *low = _mm256_xor_si256(u, c);
}

/* Counts of 512 bytes in byte lanes (at most 128): 15 vectors become four by full adders
 * (Harley-Seal), so that five are counted instead of sixteen. */
HM_AVX2 HM_INLINE __m256i hm_count512_avx2(const uint8_t *a, const uint8_t *b) {
    __m256i ones, twos, fours, eights, two[7], four[3], count;
#define HM_DIFFERENT(i) hm_xor32_avx2(a + 32 * (i), b + 32 * (i))
    hm_add3_avx2(&two[0], &ones, HM_DIFFERENT(0), HM_DIFFERENT(1), HM_DIFFERENT(2));
    hm_add3_avx2(&two[1], &ones, ones, HM_DIFFERENT(3), HM_DIFFERENT(4));
    hm_add3_avx2(&two[2], &ones, ones, HM_DIFFERENT(5), HM_DIFFERENT(6));
    hm_add3_avx2(&four[0], &twos, two[0], two[1], two[2]);
    hm_add3_avx2(&two[3], &ones, ones, HM_DIFFERENT(7), HM_DIFFERENT(8));
    hm_add3_avx2(&two[4], &ones, ones, HM_DIFFERENT(9), HM_DIFFERENT(10));
    hm_add3_avx2(&four[1], &twos, twos, two[3], two[4]);
    hm_add3_avx2(&two[5], &ones, ones, HM_DIFFERENT(11), HM_DIFFERENT(12));
    hm_add3_avx2(&two[6], &ones, ones, HM_DIFFERENT(13), HM_DIFFERENT(14));
    hm_add3_avx2(&four[2], &twos, twos, two[5], two[6]);
    hm_add3_avx2(&eights, &fours, four[0], four[1], four[2]);
    count = hm_count_bytes_avx2(eights);
    count = _mm256_add_epi8(_mm256_add_epi8(count, count), hm_count_bytes_avx2(fours));
    count = _mm256_add_epi8(_mm256_add_epi8(count, count), hm_count_bytes_avx2(twos));
    count = _mm256_add_epi8(_mm256_add_epi8(count, count), hm_count_bytes_avx2(ones));
    return _mm256_add_epi8(count, hm_count_bytes_avx2(HM_DIFFERENT(15)));
#undef HM_DIFFERENT
}

HM_AVX2 HM_INLINE uint32_t hm_distance_avx2(const uint8_t *a, const uint8_t *b, size_t bytes) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i total = zero, rest = zero;
    __m128i pair;
    uint64_t sum;
    size_t i;
    for (i = 0; i + 512 <= bytes; i += 512)
        total = _mm256_add_epi64(total, _mm256_sad_epu8(hm_count512_avx2(a + i, b + i), zero));
    for (; i + 32 <= bytes; i += 32)
        rest = _mm256_add_epi8(rest, hm_count_bytes_avx2(hm_xor32_avx2(a + i, b + i)));
    total = _mm256_add_epi64(total, _mm256_sad_epu8(rest, zero));
    pair = _mm_add_epi64(_mm256_castsi256_si128(total), _mm256_extracti128_si256(total, 1));
    sum = (uint64_t)_mm_cvtsi128_si64(pair) + (uint64_t)_mm_extract_epi64(pair, 1);
    for (; i < bytes; i += 8) sum += (uint64_t)_mm_popcnt_u64(hm_load64(a + i) ^ hm_load64(b + i));
    return (uint32_t)sum;
}

HM_AVX2 static void hm_hamming_avx2(const uint8_t *rows, size_t n, const uint8_t *queries, size_t m,
                                    size_t bytes, uint32_t *out, size_t out_stride) {
    size_t r, q;
    for (r = 0; r < n; r++) {
        if (n > 1) hm_fetch_ahead(rows + r * bytes, bytes);
        for (q = 0; q < m; q++)
            out[q * out_stride + r] = hm_distance_avx2(rows + r * bytes, queries + q * bytes, bytes);
    }
}

/* Per query byte: the 16-entry table of its low nibble, then that of its high nibble. */
HM_AVX2 static void hm_late_prepare_avx2(const uint8_t *queries, size_t t, size_t bytes,
                                         uint8_t *prepared) {
    size_t i, v;
    for (i = 0; i < t * bytes; i++)
        for (v = 0; v < 16; v++) {
            prepared[i * 32 + v] = (uint8_t)hm_popcount64(v ^ (queries[i] & 15u));
            prepared[i * 32 + 16 + v] = (uint8_t)hm_popcount64(v ^ (queries[i] >> 4));
        }
}

/* Add the counts of lines [0, n) of 32 lanes for T tokens; saturates at 255. */
HM_AVX2 HM_INLINE void hm_late_lines_avx2(const uint8_t *lanes, size_t n, const uint8_t *tables,
                                          size_t token_bytes, const int T, ptrdiff_t ahead,
                                          __m256i *count) {
    const __m256i nibble = _mm256_set1_epi8(15);
    size_t b;
    int i;
    for (i = 0; i < T; i++) count[i] = _mm256_setzero_si256();
    for (b = 0; b < n; b++) {
        __m256i line = _mm256_loadu_si256((const __m256i *)(lanes + b * HM_LANES));
        HM_PREFETCH(lanes + b * HM_LANES + ahead);
        __m256i low = _mm256_and_si256(line, nibble);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(line, 4), nibble);
        for (i = 0; i < T; i++) {
            const __m128i *table = (const __m128i *)(tables + (size_t)i * token_bytes + b * 32);
            __m256i of_low = _mm256_broadcastsi128_si256(_mm_loadu_si128(table));
            __m256i of_high = _mm256_broadcastsi128_si256(_mm_loadu_si128(table + 1));
            count[i] = _mm256_adds_epu8(count[i], _mm256_shuffle_epi8(of_low, low));
            count[i] = _mm256_adds_epu8(count[i], _mm256_shuffle_epi8(of_high, high));
        }
    }
}

/* Smallest of 16 bytes; of 8 words. */
HM_AVX2 HM_INLINE uint32_t hm_min_bytes_avx2(__m128i v) {
    v = _mm_min_epu8(v, _mm_srli_epi16(v, 8));
    return (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(v)) & 0xFFFF;
}

HM_AVX2 HM_INLINE uint32_t hm_min_words_avx2(__m128i v) {
    return (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(v)) & 0xFFFF;
}

/* Up to 256 bits: counts stay in bytes. Returns 0 if a 255 might have been 256. */
HM_AVX2 HM_INLINE int hm_late_narrow_avx2(const uint8_t *group, size_t bytes, const uint8_t *tables,
                                          const int T, size_t span, ptrdiff_t ahead, uint32_t *out) {
    __m256i a[HM_TOKENS], b[HM_TOKENS];
    const size_t runs = HM_LANES / span;
    uint32_t largest = 0;
    size_t run, lane;
    int i;
    hm_late_lines_avx2(group, bytes, tables, bytes * 32, T, ahead, a);
    hm_late_lines_avx2(group + 32, bytes, tables, bytes * 32, T, ahead, b);
    for (i = 0; i < T; i++, out += runs) {
        if (span == 64) {
            __m256i v = _mm256_min_epu8(a[i], b[i]);
            out[0] = hm_min_bytes_avx2(
                _mm_min_epu8(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
        } else {
            uint8_t counts[HM_LANES];
            _mm256_storeu_si256((__m256i *)counts, a[i]);
            _mm256_storeu_si256((__m256i *)(counts + 32), b[i]);
            for (run = 0; run < runs; run++) {
                uint32_t best = counts[run * span];
                for (lane = 1; lane < span; lane++) {
                    uint32_t v = counts[run * span + lane];
                    best = v < best ? v : best;
                }
                out[run] = best;
            }
        }
        for (run = 0; run < runs; run++) largest = out[run] > largest ? out[run] : largest;
    }
    return largest < 255;
}

/* Distances below 65536: bytes are widened to words every `most` lines. */
HM_AVX2 HM_INLINE void hm_late_wide_avx2(const uint8_t *group, size_t bytes, const uint8_t *tables,
                                         const int T, const size_t most, size_t span, ptrdiff_t ahead,
                                         uint32_t *out) {
    const __m256i low_bytes = _mm256_set1_epi16(0xFF);
    __m256i count[4], even[2][4], odd[2][4];
    size_t b, lane, half;
    int i;
    for (half = 0; half < 2; half++) {
        for (i = 0; i < T; i++) even[half][i] = odd[half][i] = _mm256_setzero_si256();
        for (b = 0; b < bytes; b += most) {
            /* Few lines divide all: a constant, for the compiler. */
            const size_t lines = most == HM_WEIGHTED_LINES ? most : hm_min_size(most, bytes - b);
            hm_late_lines_avx2(group + b * HM_LANES + half * 32, lines,
                               tables + b * 32, bytes * 32, T, ahead, count);
            for (i = 0; i < T; i++) {
                even[half][i] =
                    _mm256_add_epi16(even[half][i], _mm256_and_si256(count[i], low_bytes));
                odd[half][i] = _mm256_add_epi16(odd[half][i], _mm256_srli_epi16(count[i], 8));
            }
        }
    }
    for (i = 0; i < T; i++, out += HM_LANES / span) {
        if (span == 64) {
            __m256i v = _mm256_min_epu16(_mm256_min_epu16(even[0][i], odd[0][i]),
                                         _mm256_min_epu16(even[1][i], odd[1][i]));
            out[0] = hm_min_words_avx2(
                _mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
        } else {
            uint16_t evens[2][16], odds[2][16];
            uint32_t counts[HM_LANES];
            for (half = 0; half < 2; half++) {
                _mm256_storeu_si256((__m256i *)evens[half], even[half][i]);
                _mm256_storeu_si256((__m256i *)odds[half], odd[half][i]);
                for (lane = 0; lane < 16; lane++) {
                    counts[half * 32 + 2 * lane] = evens[half][lane];
                    counts[half * 32 + 2 * lane + 1] = odds[half][lane];
                }
            }
            hm_min_runs(counts, span, out);
        }
    }
}

HM_AVX2 static void hm_late_min_avx2(const uint8_t *group, size_t bytes, const uint8_t *prepared,
                                     size_t t, size_t span, ptrdiff_t ahead, uint32_t *out) {
    const size_t runs = HM_LANES / span, token_bytes = bytes * 32;
    if (bytes <= 32) {
        int sure = 1;
        size_t i = 0, step;
        for (; i < t; i += step) {
            const uint8_t *tables = prepared + i * token_bytes;
            uint32_t *to = out + i * runs;
            step = t - i >= 8 ? 8 : t - i >= 4 ? 4 : t - i >= 2 ? 2 : 1;
            if (step == 8) sure &= hm_late_narrow_avx2(group, bytes, tables, 8, span, ahead, to);
            if (step == 4) sure &= hm_late_narrow_avx2(group, bytes, tables, 4, span, ahead, to);
            if (step == 2) sure &= hm_late_narrow_avx2(group, bytes, tables, 2, span, ahead, to);
            if (step == 1) sure &= hm_late_narrow_avx2(group, bytes, tables, 1, span, ahead, to);
        }
        if (sure) return;
    }
    for (; t >= 4; t -= 4, prepared += 4 * token_bytes, out += 4 * runs)
        hm_late_wide_avx2(group, bytes, prepared, 4, 31, span, ahead, out);
    for (; t > 0; t--, prepared += token_bytes, out += runs)
        hm_late_wide_avx2(group, bytes, prepared, 1, 31, span, ahead, out);
}

/* The same loop: it does not matter to it what the tables hold. */
HM_AVX2 static void hm_late_weighted_avx2(const uint8_t *group, size_t bytes, const uint8_t *prepared,
                                          size_t t, size_t span, ptrdiff_t ahead, uint32_t *out) {
    const size_t runs = HM_LANES / span, token_bytes = bytes * 32;
    for (; t >= 4; t -= 4, prepared += 4 * token_bytes, out += 4 * runs)
        hm_late_wide_avx2(group, bytes, prepared, 4, HM_WEIGHTED_LINES, span, ahead, out);
    for (; t > 0; t--, prepared += token_bytes, out += runs)
        hm_late_wide_avx2(group, bytes, prepared, 1, HM_WEIGHTED_LINES, span, ahead, out);
}

static const hm_kernels hm_table_avx2 = {
    "avx2",
    hm_mean_avx2,
    hm_copy_finite_avx2,
    hm_fold_avx2,
    hm_flip_fwht_avx2,
    hm_pack_signs_avx2,
    hm_hamming_avx2,
    32,
    hm_late_prepare_avx2,
    hm_late_min_avx2,
    hm_late_weighted_avx2,
};

#endif
