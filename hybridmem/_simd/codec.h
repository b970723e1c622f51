/* Stored forms of keys and values: INT8 with scales and zeros, float16, bfloat16.
 *
 * INT8 is x = zero + scale * q, rounded once. docs/format.md says which columns share a scale and a zero.
 * Both are rounded to what will be stored before the values are quantised against them.
 */
#ifndef HM_CODEC_H
#define HM_CODEC_H

#include <float.h>

#include "common.h"

#define HM_STRIP 64       /* columns that are quantised by channel at a time */
#define HM_STRIP_ROWS 128 /* rows up to which a strip is copied: 32 KiB */
#define HM_UNIT 32        /* groups of a row are a multiple of this wide */
#define HM_BAND 512       /* columns that are dequantised by channel at a time */
#define HM_RUN 64         /* groups of a row that are fitted at a time */
#define HM_SCALES 1024    /* scales of rows that are widened at a time */

#define HM_MAGNITUDE UINT32_C(0x7FFFFFFF)
#define HM_HALF_NORMAL UINT32_C(0x38800000) /* 2^-14, the least normal float16 */
#define HM_HALF_BIAS UINT32_C(0x38000000)   /* what float32 adds to a float16's exponent */

typedef struct {
    /* Return the largest magnitude, NaN or infinity where there is one; q is useless then. Scales and
     * zeros are float16, or float32 where `wide`: for magnitudes that float16 does not hold. */
    float (*quantize_channels)(const float *x, size_t n, size_t d, int wide, int8_t *q, void *scale,
                               void *zero);
    float (*quantize_rows)(const float *x, size_t n, size_t d, size_t width, int wide, int8_t *q,
                           void *scale, void *zero);
    void (*dequantize_channels)(const int8_t *q, size_t n, size_t d, int wide, const void *scale,
                                const void *zero, float *out);
    /* scale_row and zero_row: values from one row to the next, 0 where one row serves all. */
    void (*dequantize_rows)(const int8_t *q, size_t n, size_t d, size_t width, int wide,
                            const void *scale, size_t scale_row, const void *zero, size_t zero_row,
                            float *out);
    /* 0 where some value is not finite, before or after. */
    int (*to_bfloat16)(const float *x, size_t n, uint16_t *out);
    int (*to_float16)(const float *x, size_t n, uint16_t *out);
    void (*from_bfloat16)(const uint16_t *x, size_t n, float *out);
    void (*from_float16)(const uint16_t *x, size_t n, float *out);
} hm_codec;

/* a < limit ? below : above for magnitudes, by a mask: compilers do not vectorise a choice between
 * float results where they have to respect traps. */
HM_INLINE uint32_t hm_choose(uint32_t a, uint32_t limit, uint32_t below, uint32_t above) {
    uint32_t mask = (uint32_t)-(int32_t)((int32_t)a < (int32_t)limit);
    return (below & mask) | (above & ~mask);
}

HM_INLINE float hm_larger_magnitude(float v, float w) {
    uint32_t a = hm_float_to_bits(v) & HM_MAGNITUDE, b = hm_float_to_bits(w) & HM_MAGNITUDE;
    return hm_bits_to_float(hm_choose(a, b, b, a));
}

/* The bits of a float as an integer that orders as the float does, NaN beyond the infinities. */
HM_INLINE int32_t hm_order(float v) {
    int32_t bits = (int32_t)hm_float_to_bits(v);
    return bits ^ ((bits >> 31) & (int32_t)HM_MAGNITUDE);
}

HM_INLINE float hm_unorder(int32_t key) {
    return hm_bits_to_float((uint32_t)(key ^ ((key >> 31) & (int32_t)HM_MAGNITUDE)));
}

/* rint(v), half to even, of |v| < 128: adding 1.5 * 2^23 rounds and leaves the integer in the low
 * bits. rint itself is a function call where SSE4.1 is not assumed. */
HM_INLINE int8_t hm_integer(float v) {
    return (int8_t)(uint8_t)hm_float_to_bits(v + 12582912.0f);
}

/* v rounded to float16, half to even; |v| <= 65504. 0.5 has the last place of float16's subnormals,
 * so a sum with it is rounded as they are. */
HM_INLINE float hm_round_half(float v) {
    uint32_t bits = hm_float_to_bits(v), a = bits & HM_MAGNITUDE;
    uint32_t tiny = hm_float_to_bits((hm_bits_to_float(a) + 0.5f) - 0.5f);
    uint32_t normal = (a + 0xFFF + ((a >> 13) & 1)) & UINT32_C(0xFFFFE000);
    return hm_bits_to_float(hm_choose(a, HM_HALF_NORMAL, tiny, normal) | (bits & ~HM_MAGNITUDE));
}

/* The middle of a range as it is stored, without the sign of 0. */
HM_INLINE float hm_zero_half(float low, float high) {
    return hm_round_half(0.5f * low + 0.5f * high) + 0.0f;
}

HM_INLINE float hm_zero_wide(float low, float high) {
    return (float)(0.5 * (double)low + 0.5 * (double)high) + 0.0f;
}

/* The scale as it is stored. One that was rounded down clips the outermost values by less than they
 * are rounded by anyway, unless it is subnormal: a quotient above 127.4 raises it by one unit.
 * A group without extent gets 1. */
HM_INLINE float hm_scale(float scale, float unit, float reach) {
    uint32_t quotient = hm_float_to_bits(reach / scale);
    uint32_t bits = hm_choose(hm_float_to_bits(127.4f), quotient, hm_float_to_bits(scale + unit),
                              hm_float_to_bits(scale));
    return hm_bits_to_float(hm_choose(0, hm_float_to_bits(reach), bits, UINT32_C(0x3F800000)));
}

HM_INLINE float hm_scale_half(float reach) {
    return hm_scale(hm_round_half(reach / 127.0f), 0x1p-24f, reach);
}

/* Smaller by 2^-22 of itself, so that the ends of a range up to the largest float32 stay steps. */
HM_INLINE float hm_scale_wide(float reach) {
    return hm_scale(reach / 127.0f * (1.0f - 0x1p-22f), 0x1p-149f, reach);
}

HM_INLINE float hm_value_wide(int8_t q, float scale, float zero) {
    return (float)((double)zero + (double)scale * (double)q);
}

/* Where the nearest step lies beyond the largest float32, the one before it. */
HM_INLINE int8_t hm_integer_wide(float x, float scale, float zero) {
    int q = hm_integer((x - zero) / scale);
    double value = (double)zero + (double)scale * (double)q;
    return (int8_t)(q - (value > (double)FLT_MAX) + (value < -(double)FLT_MAX));
}

#define HM_CODEC_FN(name) hm_##name##_codec_scalar
#define HM_CODEC_T static
#include "codec_loops.h"
#undef HM_CODEC_FN
#undef HM_CODEC_T

#if defined(HM_X86)
#include <immintrin.h>
#define HM_CODEC_STRIPS
#include "codec_avx2.h"
#include "codec_avx512.h"
#endif

/* The table that belongs to a level of dispatch.h. What has none of its own uses the scalar one, which
 * compilers vectorise for the base architecture (NEON, SSE2). */
static const hm_codec *hm_codec_of(const char *level) {
#if defined(HM_X86)
    if (strcmp(level, "avx512") == 0) return &hm_table_codec_avx512;
    if (strcmp(level, "avx2") == 0) return &hm_table_codec_avx2;
#endif
    (void)level;
    return &hm_table_codec_scalar;
}

#endif
