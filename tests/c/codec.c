/* Prints, for each level named, a hash (FNV-1a) of all that the codec makes of the same numbers. */
#include <stdio.h>

#include "../../hybridmem/_simd/codec.h"

#define ROWS 70
#define COLUMNS 300

static uint64_t hash, state;
static float x[ROWS * COLUMNS], out[ROWS * COLUMNS], scale[ROWS * COLUMNS], zero[ROWS * COLUMNS];
static int8_t q[ROWS * COLUMNS];
static uint16_t half[ROWS * COLUMNS], stored[2][ROWS * COLUMNS];

static void add(uint32_t value) { /* value by value: the same in any byte order */
    int i;
    for (i = 0; i < 32; i += 8) {
        hash ^= (value >> i) & 255;
        hash *= UINT64_C(1099511628211);
    }
}

static void add_floats(const float *p, size_t n) {
    while (n--) add(hm_float_to_bits(*p++));
}

static void add_quantized(const hm_codec *codec, size_t n, size_t d, int wide, size_t scales,
                          size_t zeros) {
    size_t i;
    if (!wide) {
        codec->from_float16(stored[0], scales, scale);
        codec->from_float16(stored[1], zeros, zero);
    }
    for (i = 0; i < n * d; i++) add((uint32_t)q[i]);
    add_floats(scale, scales);
    add_floats(zero, zeros);
    add_floats(out, n * d);
}

static void add_halves(size_t n) {
    size_t i;
    for (i = 0; i < n; i++) add(half[i]);
    add_floats(out, n);
}

static void all_of(const hm_codec *codec, size_t n, size_t d, int wide) {
    size_t groups = (d + 95) / 96, i;
    void *s = wide ? (void *)scale : (void *)stored[0], *z = wide ? (void *)zero : (void *)stored[1];
    for (i = 0; i < n * d; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        x[i] = (float)(int32_t)(state >> 32) / 2147483648.0f * (wide ? 1e38f : 1.0f);
    }
    codec->quantize_channels(x, n, d, wide, q, s, z);
    codec->dequantize_channels(q, n, d, wide, s, z, out);
    add_quantized(codec, n, d, wide, (d + 1) / 2, d);
    codec->quantize_rows(x, n, d, 96, wide, q, s, z);
    codec->dequantize_rows(q, n, d, 96, wide, s, groups, z, groups, out);
    add_quantized(codec, n, d, wide, n * groups, n * groups);
    codec->to_bfloat16(x, n * d, half);
    codec->from_bfloat16(half, n * d, out);
    add_halves(n * d);
    if (wide) return;
    codec->to_float16(x, n * d, half);
    codec->from_float16(half, n * d, out);
    add_halves(n * d);
}

int main(int argc, char **argv) {
    int level, wide;
    size_t n, d;
    for (level = 1; level < argc; level++) {
        hash = UINT64_C(14695981039346656037);
        state = 1;
        for (d = 1; d < COLUMNS; d += 7)
            for (n = 1; n < ROWS; n += 11)
                for (wide = 0; wide < 2; wide++) all_of(hm_codec_of(argv[level]), n, d, wide);
        printf("%016llx\n", (unsigned long long)hash);
    }
    return 0;
}
