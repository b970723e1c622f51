/* Loops over stored forms, included once per instruction set by codec.h: HM_CODEC_FN(name) gives the
 * functions their names, HM_CODEC_T their target. Plain C that compilers vectorise. Where an
 * instruction set brings inner loops of its own (HM_CODEC_STRIPS), these here serve what is narrower.
 * Each element has one formula, so all give the same bytes.
 */

HM_CODEC_T int HM_CODEC_FN(to_bfloat16)(const float *HM_RESTRICT x, size_t n,
                                        uint16_t *HM_RESTRICT out) {
    int32_t peak = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits = hm_float_to_bits(x[i]);
        int32_t a = (int32_t)(bits & HM_MAGNITUDE);
        peak = a > peak ? a : peak;
        out[i] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
    return peak < INT32_C(0x7F7F8000); /* from there on it rounds to infinity */
}

HM_CODEC_T int HM_CODEC_FN(to_float16)(const float *HM_RESTRICT x, size_t n,
                                       uint16_t *HM_RESTRICT out) {
    int32_t peak = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t bits = hm_float_to_bits(x[i]), a = bits & HM_MAGNITUDE;
        uint32_t normal = (a - HM_HALF_BIAS + 0xFFF + ((a >> 13) & 1)) >> 13;
        uint32_t tiny = hm_float_to_bits(hm_bits_to_float(a) + 0.5f) - UINT32_C(0x3F000000);
        peak = (int32_t)a > peak ? (int32_t)a : peak;
        out[i] = (uint16_t)(hm_choose(a, HM_HALF_NORMAL, tiny, normal) | ((bits >> 16) & 0x8000));
    }
    return peak < INT32_C(0x477FF000);
}

HM_CODEC_T void HM_CODEC_FN(from_bfloat16)(const uint16_t *HM_RESTRICT x, size_t n,
                                           float *HM_RESTRICT out) {
    size_t i;
    for (i = 0; i < n; i++) out[i] = hm_bits_to_float((uint32_t)x[i] << 16);
}

HM_CODEC_T void HM_CODEC_FN(from_float16)(const uint16_t *HM_RESTRICT x, size_t n,
                                          float *HM_RESTRICT out) {
    const float least = hm_bits_to_float(HM_HALF_NORMAL);
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t h = x[i], a = (h & 0x7FFF) << 13;
        uint32_t tiny = hm_float_to_bits(hm_bits_to_float(a + HM_HALF_NORMAL) - least);
        uint32_t normal = a + hm_choose(a, UINT32_C(0x0F800000), HM_HALF_BIAS, 2 * HM_HALF_BIAS);
        uint32_t wide = hm_choose(a, UINT32_C(0x00800000), tiny, normal);
        out[i] = hm_bits_to_float(wide | (h & 0x8000) << 16);
    }
}

/* Scales and zeros are stored as float16, which they are exact in, or as float32 where wide. At most
 * HM_RUN of them are written at a time; v has whole vectors. */
HM_CODEC_T void HM_CODEC_FN(keep)(const float *v, size_t n, int wide, void *stored, size_t at) {
    uint16_t halves[HM_RUN];
    if (wide) {
        memcpy((float *)stored + at, v, n * sizeof(float));
    } else {
        HM_CODEC_FN(to_float16)(v, (n + 15) / 16 * 16, halves);
        memcpy((uint16_t *)stored + at, halves, n * sizeof(uint16_t));
    }
}

HM_CODEC_T void HM_CODEC_FN(kept)(const void *stored, size_t at, size_t n, int wide, float *v) {
    if (wide)
        memcpy(v, (const float *)stored + at, n * sizeof(float));
    else
        HM_CODEC_FN(from_float16)((const uint16_t *)stored + at, n, v);
}

/* Smallest and largest value of each of w columns over n rows: on the bits as integers, which
 * compilers vectorise in any order and which keep a NaN. */
HM_CODEC_T void HM_CODEC_FN(column_ranges)(const float *x, size_t n, size_t stride, size_t w,
                                           float *low, float *high) {
    int32_t lo[HM_STRIP], hi[HM_STRIP];
    size_t row, c;
    for (c = 0; c < w; c++) lo[c] = hi[c] = hm_order(x[c]);
    for (row = 1; row < n; row++)
        for (c = 0; c < w; c++) {
            int32_t key = hm_order(x[row * stride + c]);
            lo[c] = key < lo[c] ? key : lo[c];
            hi[c] = key > hi[c] ? key : hi[c];
        }
    for (c = 0; c < w; c++) low[c] = hm_unorder(lo[c]);
    for (c = 0; c < w; c++) high[c] = hm_unorder(hi[c]);
}

HM_CODEC_T void HM_CODEC_FN(column_quantize)(const float *x, size_t n, size_t stride, size_t w,
                                             int wide, const float *by, const float *zero, int8_t *q,
                                             size_t q_stride) {
    size_t row, c;
    for (row = 0; row < n; row++) {
        const float *HM_RESTRICT from = x + row * stride;
        int8_t *HM_RESTRICT to = q + row * q_stride;
        if (wide)
            for (c = 0; c < w; c++) to[c] = hm_integer_wide(from[c], by[c], zero[c]);
        else
            for (c = 0; c < w; c++) to[c] = hm_integer((from[c] - zero[c]) * by[c]);
    }
}

/* The same of w columns of one row, which share a scale and a zero. */
HM_CODEC_T void HM_CODEC_FN(row_range)(const float *x, size_t w, float *low, float *high) {
    int32_t lo = hm_order(x[0]), hi = lo;
    size_t c;
    for (c = 0; c < w; c++) {
        int32_t key = hm_order(x[c]);
        lo = key < lo ? key : lo;
        hi = key > hi ? key : hi;
    }
    *low = hm_unorder(lo);
    *high = hm_unorder(hi);
}

HM_CODEC_T void HM_CODEC_FN(row_quantize)(const float *HM_RESTRICT x, size_t w, int wide, float by,
                                          float zero, int8_t *HM_RESTRICT q) {
    size_t c;
    if (wide)
        for (c = 0; c < w; c++) q[c] = hm_integer_wide(x[c], by, zero);
    else
        for (c = 0; c < w; c++) q[c] = hm_integer((x[c] - zero) * by);
}

#if !defined(HM_CODEC_STRIPS)
/* HM_STRIP columns; copied to `tile`, if there is one, where the second pass finds them close by. */
HM_CODEC_T void HM_CODEC_FN(strip_ranges)(const float *x, size_t n, size_t stride, float *low,
                                          float *high, float *tile) {
    size_t row;
    for (row = 0; tile != NULL && row < n; row++)
        memcpy(tile + row * HM_STRIP, x + row * stride, HM_STRIP * sizeof(float));
    HM_CODEC_FN(column_ranges)(x, n, stride, HM_STRIP, low, high);
}

HM_CODEC_T int HM_CODEC_FN(strip_quantize)(const float *x, size_t n, size_t stride, const float *by,
                                           const float *zero, int8_t *q, size_t q_stride) {
    HM_CODEC_FN(column_quantize)(x, n, stride, HM_STRIP, 0, by, zero, q, q_stride);
    return 0;
}

/* `count` groups of w columns of a row, w a multiple of HM_UNIT. */
HM_CODEC_T void HM_CODEC_FN(units_ranges)(const float *x, size_t w, size_t count, float *low,
                                          float *high) {
    size_t g;
    for (g = 0; g < count; g++) HM_CODEC_FN(row_range)(x + g * w, w, low + g, high + g);
}

HM_CODEC_T int HM_CODEC_FN(units_quantize)(const float *x, size_t w, size_t count, const float *by,
                                           const float *zero, int8_t *q) {
    size_t g;
    for (g = 0; g < count; g++)
        HM_CODEC_FN(row_quantize)(x + g * w, w, 0, by[g], zero[g], q + g * w);
    return 0;
}
#endif

/* From the ranges of n groups their zeros, and how far the ends are from them; returns the largest
 * magnitude. */
HM_CODEC_T float HM_CODEC_FN(fit_zeros)(const float *HM_RESTRICT low, const float *HM_RESTRICT high,
                                        size_t n, int wide, float *HM_RESTRICT zero,
                                        float *HM_RESTRICT reach) {
    int32_t peak = 0;
    size_t i;
    for (i = 0; i < n; i++) {
        int32_t end = (int32_t)hm_float_to_bits(hm_larger_magnitude(low[i], high[i]));
        peak = end > peak ? end : peak;
    }
    if (wide)
        for (i = 0; i < n; i++) zero[i] = hm_zero_wide(low[i], high[i]);
    else
        for (i = 0; i < n; i++) zero[i] = hm_zero_half(low[i], high[i]);
    for (i = 0; i < n; i++) reach[i] = hm_larger_magnitude(high[i] - zero[i], low[i] - zero[i]);
    return hm_bits_to_float((uint32_t)peak);
}

/* From reaches the scales, and what distances from zero are multiplied (wide: divided) by. */
HM_CODEC_T void HM_CODEC_FN(fit_scales)(const float *HM_RESTRICT reach, size_t n, int wide,
                                        float *HM_RESTRICT scale, float *HM_RESTRICT by) {
    size_t i;
    if (wide) {
        for (i = 0; i < n; i++) by[i] = scale[i] = hm_scale_wide(reach[i]);
    } else {
        for (i = 0; i < n; i++) scale[i] = hm_scale_half(reach[i]);
        for (i = 0; i < n; i++) by[i] = 1.0f / scale[i];
    }
}

/* The largest magnitude, or NaN: where a code was out of range the values decide. */
HM_CODEC_T float HM_CODEC_FN(peak)(float peak, int odd, const float *x, size_t n) {
    int32_t most = 0;
    size_t i;
    for (i = 0; odd && i < n; i++) {
        int32_t a = (int32_t)(hm_float_to_bits(x[i]) & HM_MAGNITUDE);
        most = a > most ? a : most;
    }
    return most < INT32_C(0x7F800000) ? peak : hm_bits_to_float(UINT32_C(0x7FC00000));
}

/* A zero for each column, a scale for each two. A strip stays in the first-level cache between its two
 * passes; reading it across rows again would miss there, strides being what they are. */
HM_CODEC_T float HM_CODEC_FN(quantize_channels)(const float *x, size_t n, size_t d, int wide,
                                                int8_t *q, void *scale, void *zero) {
    HM_ALIGN64 float tile[HM_STRIP_ROWS * HM_STRIP];
    float low[HM_STRIP], high[HM_STRIP], reach[HM_STRIP], z[HM_STRIP] = {0}, by[HM_STRIP];
    float s[HM_STRIP / 2] = {0}, pair[HM_STRIP / 2], peak = 0, p;
    float *copy = n <= HM_STRIP_ROWS ? tile : NULL;
    size_t first, c;
    int odd = 0;
    for (first = 0; first < d; first += HM_STRIP) {
        size_t w = hm_min_size(HM_STRIP, d - first), pairs = (w + 1) / 2;
        int is_strip = w == HM_STRIP && !wide;
        if (is_strip)
            HM_CODEC_FN(strip_ranges)(x + first, n, d, low, high, copy);
        else
            HM_CODEC_FN(column_ranges)(x + first, n, d, w, low, high);
        p = HM_CODEC_FN(fit_zeros)(low, high, w, wide, z, reach);
        peak = hm_larger_magnitude(peak, p);
        if (w % 2) reach[w] = 0;
        for (c = 0; c < pairs; c++)
            reach[c] = hm_larger_magnitude(reach[2 * c], reach[2 * c + 1]);
        HM_CODEC_FN(fit_scales)(reach, pairs, wide, s, pair);
        for (c = 0; c < w; c++) by[c] = pair[c / 2];
        HM_CODEC_FN(keep)(z, w, wide, zero, first);
        HM_CODEC_FN(keep)(s, pairs, wide, scale, first / 2);
        if (is_strip)
            odd |= HM_CODEC_FN(strip_quantize)(copy ? copy : x + first, n, copy ? HM_STRIP : d, by, z,
                                               q + first, d);
        else
            HM_CODEC_FN(column_quantize)(x + first, n, d, w, wide, by, z, q + first, d);
    }
    return HM_CODEC_FN(peak)(peak, odd, x, n * d);
}

/* A zero and a scale for each group of `width` columns of each row; width is a multiple of HM_UNIT. */
HM_CODEC_T float HM_CODEC_FN(quantize_rows)(const float *x, size_t n, size_t d, size_t width,
                                            int wide, int8_t *q, void *scale, void *zero) {
    float low[HM_RUN], high[HM_RUN], reach[HM_RUN], z[HM_RUN], s[HM_RUN], by[HM_RUN], peak = 0, p;
    size_t groups = (d + width - 1) / width, row, first, g;
    int odd = 0;
    for (row = 0; row < n; row++)
        for (first = 0; first < groups; first += HM_RUN) {
            size_t run = hm_min_size(HM_RUN, groups - first), fitted = (run + 15) / 16 * 16;
            size_t whole = wide ? 0 : hm_min_size(run, d / width - first);
            const float *at = x + row * d + first * width;
            int8_t *to = q + row * d + first * width;
            HM_CODEC_FN(units_ranges)(at, width, whole, low, high);
            for (g = whole; g < run; g++)
                HM_CODEC_FN(row_range)(at + g * width, hm_min_size(width, d - (first + g) * width),
                                       &low[g], &high[g]);
            for (g = run; g < fitted; g++) low[g] = high[g] = 0; /* whole vectors fit faster */
            p = HM_CODEC_FN(fit_zeros)(low, high, fitted, wide, z, reach);
            peak = hm_larger_magnitude(peak, p);
            HM_CODEC_FN(fit_scales)(reach, fitted, wide, s, by);
            HM_CODEC_FN(keep)(z, run, wide, zero, row * groups + first);
            HM_CODEC_FN(keep)(s, run, wide, scale, row * groups + first);
            odd |= HM_CODEC_FN(units_quantize)(at, width, whole, by, z, to);
            for (g = whole; g < run; g++)
                HM_CODEC_FN(row_quantize)(at + g * width, hm_min_size(width, d - (first + g) * width),
                                          wide, by[g], z[g], to + g * width);
        }
    return HM_CODEC_FN(peak)(peak, odd, x, n * d);
}

/* With scales of float16's precision the product is exact in float32, so the sum is rounded as it is
 * from float64; wide ones need float64 for that. */
HM_CODEC_T void HM_CODEC_FN(dequantize_channels)(const int8_t *q, size_t n, size_t d, int wide,
                                                 const void *scale, const void *zero, float *out) {
    float s[HM_BAND], z[HM_BAND], pair[HM_BAND / 2];
    size_t first, row, c;
    for (first = 0; first < d; first += HM_BAND) {
        size_t w = hm_min_size(HM_BAND, d - first);
        HM_CODEC_FN(kept)(zero, first, w, wide, z);
        HM_CODEC_FN(kept)(scale, first / 2, (w + 1) / 2, wide, pair);
        for (c = 0; c < w; c++) s[c] = pair[c / 2];
        for (row = 0; row < n; row++) {
            const int8_t *HM_RESTRICT from = q + row * d + first;
            float *HM_RESTRICT to = out + row * d + first;
            if (wide)
                for (c = 0; c < w; c++) to[c] = hm_value_wide(from[c], s[c], z[c]);
            else
                for (c = 0; c < w; c++) to[c] = z[c] + s[c] * (float)from[c];
        }
    }
}

/* w columns of a row that share a scale and a zero. */
HM_CODEC_T void HM_CODEC_FN(row_dequantize)(const int8_t *HM_RESTRICT q, size_t w, int wide, float s,
                                            float z, float *HM_RESTRICT out) {
    size_t i;
    for (i = 0; wide && i < w; i++) out[i] = hm_value_wide(q[i], s, z);
    if (wide) return;
    for (; w >= HM_UNIT; w -= HM_UNIT, q += HM_UNIT, out += HM_UNIT)
        for (i = 0; i < HM_UNIT; i++) out[i] = z + s * (float)q[i];
    for (i = 0; i < w; i++) out[i] = z + s * (float)q[i];
}

HM_CODEC_T void HM_CODEC_FN(dequantize_rows)(const int8_t *q, size_t n, size_t d, size_t width,
                                             int wide, const void *scale, size_t scale_row,
                                             const void *zero, size_t zero_row, float *out) {
    float s[HM_SCALES], z[HM_SCALES];
    size_t groups = (d + width - 1) / width, some = hm_min_size(groups, HM_SCALES);
    size_t first, row, r, g, rows = HM_SCALES / some; /* whole rows, or a part of one */
    for (first = 0; first < groups; first += some)
        for (row = 0; row < n; row += rows) {
            size_t run = hm_min_size(some, groups - first), here = hm_min_size(rows, n - row);
            HM_CODEC_FN(kept)(scale, row * scale_row + first, (scale_row ? here : 1) * run, wide, s);
            HM_CODEC_FN(kept)(zero, row * zero_row + first, (zero_row ? here : 1) * run, wide, z);
            for (r = 0; r < here; r++)
                for (g = 0; g < run; g++) {
                    size_t column = (first + g) * width, at = (row + r) * d + column;
                    HM_CODEC_FN(row_dequantize)(q + at, hm_min_size(width, d - column), wide,
                                                s[(scale_row ? r * run : 0) + g],
                                                z[(zero_row ? r * run : 0) + g], out + at);
                }
        }
}

static const hm_codec HM_CODEC_FN(table) = {
    HM_CODEC_FN(quantize_channels), HM_CODEC_FN(quantize_rows), HM_CODEC_FN(dequantize_channels),
    HM_CODEC_FN(dequantize_rows),   HM_CODEC_FN(to_bfloat16),   HM_CODEC_FN(to_float16),
    HM_CODEC_FN(from_bfloat16),     HM_CODEC_FN(from_float16),
};
