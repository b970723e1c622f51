/* Plain C: the reference of every other level, and the fallback where none of them fits. */
#ifndef HM_SCALAR_H
#define HM_SCALAR_H

#include "common.h"

static void hm_mean_scalar(const float *x, size_t n, size_t d, double *acc, float *out) {
    size_t r, c;
    for (c = 0; c < d; c++) acc[c] = (double)x[c];
    for (r = 1; r < n; r++) {
        const float *row = x + r * d;
        for (c = 0; c < d; c++) acc[c] += (double)row[c];
    }
    for (c = 0; c < d; c++) out[c] = (float)(acc[c] / (double)n);
}

static int hm_copy_finite_scalar(const float *src, float *dst, size_t n) {
    const uint32_t exponent = UINT32_C(0x7F800000);
    uint32_t bad = 0;
    size_t i;
    if (dst != NULL) memcpy(dst, src, n * sizeof(float));
    for (i = 0; i < n; i++) bad |= (hm_float_to_bits(src[i]) & exponent) == exponent;
    return bad == 0;
}

/* Negate y[i] where bit i of flips is set, through the sign bit: exact for zeros too. */
HM_INLINE float hm_flip1(float v, const uint64_t *flips, size_t i) {
    uint32_t sign = (uint32_t)((flips[i >> 6] >> (i & 63)) & 1) << 31;
    return hm_bits_to_float(hm_float_to_bits(v) ^ sign);
}

static void hm_fold_scalar(const float *x, size_t padded, size_t folded, const uint64_t *flips,
                           float *y) {
    size_t i, j;
    for (i = 0; i < folded; i++) y[i] = hm_flip1(x[i], flips, i);
    for (j = folded; j < padded; j += folded)
        for (i = 0; i < folded; i++) y[i] += hm_flip1(x[j + i], flips, j + i);
}

/* Stages from stride `first` on; the last ones, above `keep`, only make the sums that are kept. */
HM_INLINE void hm_fwht_stages(float *y, size_t n, size_t keep, size_t first) {
    size_t stride, start, i;
    for (stride = first; stride < keep; stride *= 2)
        for (start = 0; start < n; start += 2 * stride)
            for (i = start; i < start + stride; i++) {
                float a = y[i], b = y[i + stride];
                y[i] = a + b;
                y[i + stride] = a - b;
            }
    for (; stride < n; stride *= 2)
        for (start = 0; start < n; start += 2 * stride)
            for (i = start; i < start + keep; i++) y[i] += y[i + stride];
}

static void hm_flip_fwht_scalar(float *y, size_t n, size_t keep, const uint64_t *flips) {
    size_t i;
    if (flips != NULL)
        for (i = 0; i < n; i++) y[i] = hm_flip1(y[i], flips, i);
    hm_fwht_stages(y, n, keep, 1);
}

static void hm_pack_signs_scalar(const float *y, size_t n, uint8_t *out) {
    size_t i, b;
    for (i = 0; i < n / 8; i++) {
        unsigned v = 0;
        for (b = 0; b < 8; b++) v |= (unsigned)(y[8 * i + b] >= 0.0f) << b;
        out[i] = (uint8_t)v;
    }
}

static void hm_hamming_scalar(const uint8_t *rows, size_t n, const uint8_t *queries, size_t m,
                              size_t bytes, uint32_t *out, size_t out_stride) {
    size_t r, q, i;
    for (r = 0; r < n; r++)
        for (q = 0; q < m; q++) {
            const uint8_t *a = rows + r * bytes, *b = queries + q * bytes;
            uint32_t distance = 0;
            for (i = 0; i < bytes; i += 8) distance += hm_popcount64(hm_load64(a + i) ^ hm_load64(b + i));
            out[q * out_stride + r] = distance;
        }
}

/* Smallest value in each run of `span` lanes. */
HM_INLINE void hm_min_runs(const uint32_t *lanes, size_t span, uint32_t *out) {
    size_t run, i;
    for (run = 0; run < HM_LANES / span; run++) {
        uint32_t best = lanes[run * span];
        for (i = 1; i < span; i++) {
            uint32_t v = lanes[run * span + i];
            best = v < best ? v : best;
        }
        out[run] = best;
    }
}

static void hm_late_prepare_scalar(const uint8_t *queries, size_t t, size_t bytes,
                                   uint8_t *prepared) {
    memcpy(prepared, queries, t * bytes);
}

/* Bytes are counted in the 8-bit lanes themselves, widened before they could overflow (31 x 8 = 248). */
static void hm_late_min_scalar(const uint8_t *group, size_t bytes, const uint8_t *prepared,
                               size_t t, size_t span, ptrdiff_t ahead, uint32_t *out) {
    uint32_t wide[HM_LANES];
    uint8_t narrow[HM_LANES];
    size_t token, b, end, lane;
    (void)ahead;
    for (token = 0; token < t; token++) {
        const uint8_t *query = prepared + token * bytes;
        memset(wide, 0, sizeof wide);
        for (b = 0; b < bytes; b = end) {
            memset(narrow, 0, sizeof narrow);
            for (end = b; end < bytes && end < b + 31; end++) {
                const uint8_t *line = group + end * HM_LANES;
                uint8_t q = query[end];
                for (lane = 0; lane < HM_LANES; lane++) {
                    uint8_t v = (uint8_t)(line[lane] ^ q);
                    v = (uint8_t)(v - ((v >> 1) & 0x55));
                    v = (uint8_t)((v & 0x33) + ((v >> 2) & 0x33));
                    narrow[lane] = (uint8_t)(narrow[lane] + ((v + (v >> 4)) & 0x0F));
                }
            }
            for (lane = 0; lane < HM_LANES; lane++) wide[lane] += narrow[lane];
        }
        hm_min_runs(wide, span, out + token * (HM_LANES / span));
    }
}

static void hm_late_weighted_scalar(const uint8_t *group, size_t bytes, const uint8_t *prepared,
                                    size_t t, size_t span, ptrdiff_t ahead, uint32_t *out) {
    uint32_t sums[HM_LANES];
    size_t token, b, lane;
    (void)ahead;
    for (token = 0; token < t; token++, prepared += bytes * 32) {
        memset(sums, 0, sizeof sums);
        for (b = 0; b < bytes; b++) {
            const uint8_t *line = group + b * HM_LANES, *low = prepared + b * 32, *high = low + 16;
            for (lane = 0; lane < HM_LANES; lane++)
                sums[lane] += (uint32_t)(low[line[lane] & 15] + high[line[lane] >> 4]);
        }
        hm_min_runs(sums, span, out + token * (HM_LANES / span));
    }
}

static const hm_kernels hm_table_scalar = {
    "scalar",
    hm_mean_scalar,
    hm_copy_finite_scalar,
    hm_fold_scalar,
    hm_flip_fwht_scalar,
    hm_pack_signs_scalar,
    hm_hamming_scalar,
    1,
    hm_late_prepare_scalar,
    hm_late_min_scalar,
    hm_late_weighted_scalar,
};

#endif
