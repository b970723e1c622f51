/* AArch64: 16 bytes at a time. CNT counts the bits of bytes, so both scans are XOR, CNT, ADD; bytes are
 * widened once they could overflow. Four accumulators hide the latency of a chain.
 */
#ifndef HM_NEON_H
#define HM_NEON_H

#include <arm_neon.h>

#include "scalar.h"

#define HM_T
#define HM_FN(name) name##_neon
#define HM_SMALL(name) name##_scalar
#define HM_W 4
#define V float32x4_t
#define V_LOAD(p) vld1q_f32(p)
#define V_STORE(p, v) vst1q_f32((p), (v))
#define V_ADD(a, b) vaddq_f32((a), (b))
#define V_SUB(a, b) vsubq_f32((a), (b))
#define V_FLIP(v, b) hm_flip_vector_neon((v), (b))
#define V_INNER(v) hm_inner_neon(v)
#define V_GE0(v) hm_nonnegative_neon(v)
#define D float64x2_t
#define D_W 2
#define D_LOAD(p) vld1q_f64(p)
#define D_STORE(p, v) vst1q_f64((p), (v))
#define D_ADD(a, b) vaddq_f64((a), (b))
#define D_WIDEN(p) vcvt_f64_f32(vld1_f32(p))
#define D_MEAN(p, sum, n) vst1_f32((p), vcvt_f32_f64(vdivq_f64((sum), vdupq_n_f64(n))))

HM_INLINE float32x4_t hm_flip_vector_neon(float32x4_t v, uint32_t bits) {
    static const int32_t to_sign[4] = {31, 30, 29, 28};
    uint32x4_t spread = vshlq_u32(vdupq_n_u32(bits), vld1q_s32(to_sign));
    uint32x4_t signs = vandq_u32(spread, vdupq_n_u32(UINT32_C(0x80000000)));
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), signs));
}

/* The partner of each lane plus the lane itself, negated where it is the second of its pair. */
HM_INLINE float32x4_t hm_inner_neon(float32x4_t v) {
    v = vaddq_f32(vrev64q_f32(v), hm_flip_vector_neon(v, 10));
    return vaddq_f32(vextq_f32(v, v, 2), hm_flip_vector_neon(v, 12));
}

HM_INLINE uint32_t hm_nonnegative_neon(float32x4_t v) {
    static const uint32_t weights[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgezq_f32(v), vld1q_u32(weights)));
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

static int hm_copy_finite_neon(const float *src, float *dst, size_t n) {
    const uint32x4_t magnitude = vdupq_n_u32(UINT32_C(0x7FFFFFFF));
    uint32x4_t largest0 = vdupq_n_u32(0), largest1 = largest0;
    size_t i;
    for (i = 0; i + 8 <= n; i += 8) {
        float32x4_t a = vld1q_f32(src + i), b = vld1q_f32(src + i + 4);
        if (dst != NULL) {
            vst1q_f32(dst + i, a);
            vst1q_f32(dst + i + 4, b);
        }
        largest0 = vmaxq_u32(largest0, vandq_u32(vreinterpretq_u32_f32(a), magnitude));
        largest1 = vmaxq_u32(largest1, vandq_u32(vreinterpretq_u32_f32(b), magnitude));
    }
    if (vmaxvq_u32(vmaxq_u32(largest0, largest1)) >= UINT32_C(0x7F800000)) return 0;
    return hm_copy_finite_scalar(src + i, dst == NULL ? NULL : dst + i, n - i);
}

HM_INLINE uint8x16_t hm_count16_neon(const uint8_t *a, const uint8_t *b) {
    return vcntq_u8(veorq_u8(vld1q_u8(a), vld1q_u8(b)));
}

HM_INLINE uint32_t hm_distance_neon(const uint8_t *a, const uint8_t *b, size_t bytes) {
    uint32x4_t total = vdupq_n_u32(0);
    uint32_t sum;
    size_t i = 0;
    while (i + 64 <= bytes) { /* 31 x 8 = 248 in a byte at most */
        uint8x16_t c0 = vdupq_n_u8(0), c1 = c0, c2 = c0, c3 = c0;
        size_t end = hm_min_size(bytes, i + 31 * 64);
        for (; i + 64 <= end; i += 64) {
            c0 = vaddq_u8(c0, hm_count16_neon(a + i, b + i));
            c1 = vaddq_u8(c1, hm_count16_neon(a + i + 16, b + i + 16));
            c2 = vaddq_u8(c2, hm_count16_neon(a + i + 32, b + i + 32));
            c3 = vaddq_u8(c3, hm_count16_neon(a + i + 48, b + i + 48));
        }
        total = vpadalq_u16(total, vpadalq_u8(vpaddlq_u8(c0), c1));
        total = vpadalq_u16(total, vpadalq_u8(vpaddlq_u8(c2), c3));
    }
    sum = vaddvq_u32(total);
    for (; i < bytes; i += 8) sum += vaddv_u8(vcnt_u8(veor_u8(vld1_u8(a + i), vld1_u8(b + i))));
    return sum;
}

static void hm_hamming_neon(const uint8_t *rows, size_t n, const uint8_t *queries, size_t m,
                            size_t bytes, uint32_t *out, size_t out_stride) {
    size_t r, q;
    for (r = 0; r < n; r++) {
        if (n > 1) hm_fetch_ahead(rows + r * bytes, bytes);
        for (q = 0; q < m; q++)
            out[q * out_stride + r] = hm_distance_neon(rows + r * bytes, queries + q * bytes, bytes);
    }
}

/* Counts of 16 lanes for T tokens, widened to 16 bits every 31 lines; even[i] and odd[i] hold those
 * of the even and odd lanes. */
HM_INLINE void hm_late_lanes_neon(const uint8_t *lanes, size_t bytes, const uint8_t *query,
                                  const int T, ptrdiff_t ahead,
                                  uint16x8_t *even, uint16x8_t *odd) {
    uint8x16_t count[HM_TOKENS];
    size_t b, end;
    int i;
    for (i = 0; i < T; i++) even[i] = odd[i] = vdupq_n_u16(0);
    for (b = 0; b < bytes; b = end) {
        end = hm_min_size(bytes, b + 31);
        for (i = 0; i < T; i++) count[i] = vdupq_n_u8(0);
        for (; b < end; b++) {
            uint8x16_t line = vld1q_u8(lanes + b * HM_LANES);
            HM_PREFETCH(lanes + b * HM_LANES + ahead);
            for (i = 0; i < T; i++) {
                uint8x16_t q = vld1q_dup_u8(query + (size_t)i * bytes + b);
                count[i] = vaddq_u8(count[i], vcntq_u8(veorq_u8(line, q)));
            }
        }
        for (i = 0; i < T; i++) {
            uint16x8_t pairs = vreinterpretq_u16_u8(count[i]);
            even[i] = vaddq_u16(even[i], vandq_u16(pairs, vdupq_n_u16(0xFF)));
            odd[i] = vaddq_u16(odd[i], vshrq_n_u16(pairs, 8));
        }
    }
}

/* The same of what the tables add for the nibbles, widened every HM_WEIGHTED_LINES lines. */
HM_INLINE void hm_weighted_lanes_neon(const uint8_t *lanes, size_t bytes, const uint8_t *tables,
                                      const int T, ptrdiff_t ahead, uint16x8_t *even,
                                      uint16x8_t *odd) {
    size_t b, line;
    int i;
    for (i = 0; i < T; i++) even[i] = odd[i] = vdupq_n_u16(0);
    for (b = 0; b < bytes; b += HM_WEIGHTED_LINES) {
        uint8x16_t low[HM_WEIGHTED_LINES], high[HM_WEIGHTED_LINES];
        for (line = 0; line < HM_WEIGHTED_LINES; line++) {
            const uint8_t *from = lanes + (b + line) * HM_LANES;
            HM_PREFETCH(from + ahead);
            low[line] = vandq_u8(vld1q_u8(from), vdupq_n_u8(15));
            high[line] = vshrq_n_u8(vld1q_u8(from), 4);
        }
        for (i = 0; i < T; i++) {
            const uint8_t *table = tables + ((size_t)i * bytes + b) * 32;
            uint8x16_t sum = vdupq_n_u8(0);
            uint16x8_t pairs;
            for (line = 0; line < HM_WEIGHTED_LINES; line++, table += 32) {
                sum = vaddq_u8(sum, vqtbl1q_u8(vld1q_u8(table), low[line]));
                sum = vaddq_u8(sum, vqtbl1q_u8(vld1q_u8(table + 16), high[line]));
            }
            pairs = vreinterpretq_u16_u8(sum);
            even[i] = vaddq_u16(even[i], vandq_u16(pairs, vdupq_n_u16(0xFF)));
            odd[i] = vaddq_u16(odd[i], vshrq_n_u16(pairs, 8));
        }
    }
}

HM_INLINE void hm_late_tokens_neon(const uint8_t *group, size_t bytes, const uint8_t *query,
                                   const int T, const int weighted, size_t span, ptrdiff_t ahead,
                                   uint32_t *out) {
    uint16x8_t even[4][HM_TOKENS], odd[4][HM_TOKENS];
    size_t quarter, lane;
    int i;
    for (quarter = 0; quarter < 4; quarter++) {
        const uint8_t *lanes = group + quarter * 16;
        if (weighted)
            hm_weighted_lanes_neon(lanes, bytes, query, T, ahead, even[quarter], odd[quarter]);
        else
            hm_late_lanes_neon(lanes, bytes, query, T, ahead, even[quarter], odd[quarter]);
    }
    for (i = 0; i < T; i++, out += HM_LANES / span) {
        uint16x8_t least[4];
        for (quarter = 0; quarter < 4; quarter++)
            least[quarter] = vminq_u16(even[quarter][i], odd[quarter][i]);
        if (span == 64) {
            out[0] = vminvq_u16(
                vminq_u16(vminq_u16(least[0], least[1]), vminq_u16(least[2], least[3])));
        } else if (span == 32) {
            out[0] = vminvq_u16(vminq_u16(least[0], least[1]));
            out[1] = vminvq_u16(vminq_u16(least[2], least[3]));
        } else if (span == 16) {
            for (quarter = 0; quarter < 4; quarter++) out[quarter] = vminvq_u16(least[quarter]);
        } else {
            uint16_t counts16[16];
            uint32_t counts[HM_LANES];
            for (quarter = 0; quarter < 4; quarter++) {
                vst1q_u16(counts16, vzip1q_u16(even[quarter][i], odd[quarter][i]));
                vst1q_u16(counts16 + 8, vzip2q_u16(even[quarter][i], odd[quarter][i]));
                for (lane = 0; lane < 16; lane++) counts[quarter * 16 + lane] = counts16[lane];
            }
            hm_min_runs(counts, span, out);
        }
    }
}

static void hm_late_min_neon(const uint8_t *group, size_t bytes, const uint8_t *prepared, size_t t,
                             size_t span, ptrdiff_t ahead, uint32_t *out) {
    const size_t runs = HM_LANES / span;
    size_t i, step;
    for (i = 0; i < t; i += step) {
        const uint8_t *query = prepared + i * bytes;
        uint32_t *to = out + i * runs;
        step = t - i >= 8 ? 8 : t - i >= 4 ? 4 : t - i >= 2 ? 2 : 1;
        if (step == 8) hm_late_tokens_neon(group, bytes, query, 8, 0, span, ahead, to);
        if (step == 4) hm_late_tokens_neon(group, bytes, query, 4, 0, span, ahead, to);
        if (step == 2) hm_late_tokens_neon(group, bytes, query, 2, 0, span, ahead, to);
        if (step == 1) hm_late_tokens_neon(group, bytes, query, 1, 0, span, ahead, to);
    }
}

static void hm_late_weighted_neon(const uint8_t *group, size_t bytes, const uint8_t *prepared,
                                  size_t t, size_t span, ptrdiff_t ahead, uint32_t *out) {
    const size_t runs = HM_LANES / span, token_bytes = bytes * 32;
    for (; t >= 4; t -= 4, prepared += 4 * token_bytes, out += 4 * runs)
        hm_late_tokens_neon(group, bytes, prepared, 4, 1, span, ahead, out);
    for (; t > 0; t--, prepared += token_bytes, out += runs)
        hm_late_tokens_neon(group, bytes, prepared, 1, 1, span, ahead, out);
}

static const hm_kernels hm_table_neon = {
    "neon",
    hm_mean_neon,
    hm_copy_finite_neon,
    hm_fold_neon,
    hm_flip_fwht_neon,
    hm_pack_signs_neon,
    hm_hamming_neon,
    1,
    hm_late_prepare_scalar,
    hm_late_min_neon,
    hm_late_weighted_neon,
};

#endif
