/* Signatures of rows: scaling, blocks of flips and transforms, sign bits. Independent of the level. */
#ifndef HM_PROJECT_H
#define HM_PROJECT_H

#include "common.h"

/* Powers of two as floats; e in [-126, 127]. */
HM_INLINE float hm_pow2(int e) { return hm_bits_to_float((uint32_t)(e + 127) << 23); }

/* Scale by the power of two that brings the largest magnitude into [2^63, 2^64): nothing can overflow
 * in 2^64 additions, and nothing that matters gets lost in subnormals. Zero rows stay as they are. */
static void hm_scale_row(const float *x, size_t d, size_t padded, float *out) {
    uint32_t largest = 0;
    int exponent, shift;
    size_t i;
    for (i = 0; i < d; i++) {
        uint32_t magnitude = hm_float_to_bits(x[i]) & UINT32_C(0x7FFFFFFF);
        largest = magnitude > largest ? magnitude : largest;
    }
    memset(out + d, 0, (padded - d) * sizeof(float));
    if (largest == 0) {
        memcpy(out, x, d * sizeof(float));
        return;
    }
    if (largest >= UINT32_C(0x00800000)) {
        exponent = (int)(largest >> 23) - 127;
    } else { /* subnormal: the position of its highest bit */
        exponent = -150;
        while (largest != 0) {
            largest >>= 1;
            exponent++;
        }
    }
    shift = 63 - exponent;
    if (shift <= 127) {
        float scale = hm_pow2(shift);
        for (i = 0; i < d; i++) out[i] = x[i] * scale;
    } else { /* 2^shift is no float; the first step upwards is exact */
        float rest = hm_pow2(shift - 100), scale = hm_pow2(100);
        for (i = 0; i < d; i++) out[i] = (x[i] * scale) * rest;
    }
}

/* Words of flips that one round of length n takes. */
HM_INLINE size_t hm_flip_words(size_t n) { return n < 64 ? 1 : n / 64; }

/* scaled: padded floats of scratch; y: folded floats of scratch; out: bits / 8 bytes, or NULL, then values
 * get the `bits` floats whose signs out would hold, times a power of two. */
static void hm_project_row(const hm_kernels *k, const float *x, size_t d, const uint64_t *flips,
                           size_t padded, size_t folded, size_t bits, float *scaled, float *y,
                           uint8_t *out, float *values) {
    size_t done, i;
    hm_scale_row(x, d, padded, scaled);
    if (folded < 64 && out != NULL) memset(out, 0, bits / 8);
    for (done = 0; done < bits; done += folded) {
        size_t take = hm_min_size(folded, bits - done), keep = 1;
        while (keep < take) keep *= 2;
        k->fold(scaled, padded, folded, flips, y);
        flips += hm_flip_words(padded);
        k->flip_fwht(y, folded, folded, NULL);
        k->flip_fwht(y, folded, folded, flips);
        flips += hm_flip_words(folded);
        k->flip_fwht(y, folded, keep, flips);
        flips += hm_flip_words(folded);
        if (out == NULL) {
            memcpy(values + done, y, take * sizeof(float));
        } else if (folded >= 64) {
            k->pack_signs(y, take, out + done / 8);
        } else {
            for (i = 0; i < take; i++)
                if (y[i] >= 0.0f) out[(done + i) / 8] |= (uint8_t)(1u << ((done + i) % 8));
        }
    }
}

/* Round a row to integers of at most `most` <= 127, relative to its largest magnitude; zeros stay zeros. */
static void hm_round_row(const float *x, size_t n, int most, int8_t *out) {
    const float whole = 12582912.0f; /* 1.5 * 2^23: no fraction is left beside it, ties went to even */
    float peak = 0.0f, scale;
    size_t i;
    for (i = 0; i < n; i++) {
        float magnitude = x[i] < 0.0f ? -x[i] : x[i];
        peak = magnitude > peak ? magnitude : peak;
    }
    scale = peak > 0.0f ? (float)most / peak : 0.0f;
    for (i = 0; i < n; i++) {
        float shifted = x[i] * scale + whole;
        out[i] = (int8_t)(shifted - whole);
    }
}

#endif
