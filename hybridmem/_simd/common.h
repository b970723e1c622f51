/* Shared by every instruction set: the kernel table, small helpers, portability macros.
 *
 * No header here includes Python.h, so the kernels can be compiled and tested as plain C.
 * All levels give the same bits: integer results are exact, float results come from additions in
 * one fixed order (see the project section of docs/format.md).
 */
#ifndef HM_COMMON_H
#define HM_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(_MSC_VER) && !defined(__clang__)
#define HM_TARGET(names)
#define HM_INLINE static __forceinline
#define HM_RESTRICT __restrict
#define HM_ALIGN64 __declspec(align(64))
#if defined(_M_X64)
#include <xmmintrin.h>
#define HM_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define HM_PREFETCH(p) ((void)0)
#endif
#define HM_UNUSED
#else
#define HM_TARGET(names) __attribute__((target(names)))
#define HM_INLINE static inline __attribute__((always_inline))
#define HM_RESTRICT __restrict__
#define HM_ALIGN64 __attribute__((aligned(64)))
#define HM_PREFETCH(p) __builtin_prefetch((p), 0, 3)
#define HM_UNUSED __attribute__((unused))
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define HM_X86 1
#elif defined(__aarch64__) || defined(_M_ARM64)
#define HM_ARM64 1
#endif

/* Lanes of a late-interaction group: tokens whose bytes lie side by side (one 64-byte line). */
#define HM_LANES 64

/* How far ahead scans fetch, in bytes. The processor's own prefetchers stop at pages and cannot hide the
 * counting; measured on long scans, these were best, and gave up to 2x. */
#define HM_AHEAD 2048
#define HM_LATE_AHEAD 8192

/* Floats from which on copies are written around the caches, to whole lines: they are not read soon,
 * and fetching the lines that they replace took as long again. */
#define HM_STREAM ((size_t)1 << 16)
HM_INLINE int hm_streams(const float *dst, size_t n) {
    return dst != NULL && n >= HM_STREAM && ((uintptr_t)dst & 63) == 0;
}

/* Query tokens that the late-interaction kernels take at a time. */
#define HM_TOKENS 8

/* Largest weight of a bit: HM_WEIGHTED_LINES lines of the weighted late interaction fit a byte. */
#define HM_MOST 15
#define HM_WEIGHTED_LINES 2

typedef void (*hm_late_fn)(const uint8_t *group, size_t bytes, const uint8_t *prepared, size_t t,
                           size_t span, ptrdiff_t ahead, uint32_t *out);

typedef struct {
    const char *name;

    /* out[c] = (float)(sum over rows of x[r][c] in double, rows ascending, / n); acc holds d doubles. */
    void (*mean)(const float *x, size_t n, size_t d, double *acc, float *out);

    /* 1 when every element is finite; dst may be NULL (only look). */
    int (*copy_finite)(const float *src, float *dst, size_t n);

    /* y[i] = sum over j ascending of (x[i + j*folded] with its sign flipped by flips), i < folded. */
    void (*fold)(const float *x, size_t padded, size_t folded, const uint64_t *flips, float *y);

    /* Flip signs (flips may be NULL: none), then Walsh-Hadamard of size n in place (strides 1, 2,
     * 4 ...); only y[0..keep) need be right afterwards; n and keep are powers of two. */
    void (*flip_fwht)(float *y, size_t n, size_t keep, const uint64_t *flips);

    /* Bit i of out = y[i] >= 0; n is a multiple of 64. */
    void (*pack_signs)(const float *y, size_t n, uint8_t *out);

    /* out[q*out_stride + r] = Hamming distance of row r and query q; bytes is a multiple of 8. */
    void (*hamming)(const uint8_t *rows, size_t n, const uint8_t *queries, size_t m, size_t bytes,
                    uint32_t *out, size_t out_stride);

    /* Late interaction works on groups: byte b of the group's 64 lanes at group[b*64 ..].
     * late_prepare expands t query tokens of `bytes` bytes into `late_expand` bytes per byte;
     * late_min gives, for each of at most HM_TOKENS prepared tokens, the smallest distance in each run
     * of `span` lanes (a power of two <= 64): out[token * (64 / span) + run]. Lines `ahead` bytes away
     * are fetched meanwhile. */
    size_t late_expand;
    void (*late_prepare)(const uint8_t *queries, size_t t, size_t bytes, uint8_t *prepared);
    hm_late_fn late_min;

    /* As late_min, of weighted distances: `prepared` holds 32 bytes per byte of a token, what each value
     * of a lane's low nibble adds to the distance, then what its high nibble adds; at most 4 *
     * HM_MOST each. Distances must fit 16 bits, but in plain C. */
    hm_late_fn late_weighted;
} hm_kernels;

HM_INLINE size_t hm_min_size(size_t a, size_t b) { return a < b ? a : b; }

HM_INLINE uint32_t hm_popcount64(uint64_t v) {
    v = v - ((v >> 1) & UINT64_C(0x5555555555555555));
    v = (v & UINT64_C(0x3333333333333333)) + ((v >> 2) & UINT64_C(0x3333333333333333));
    v = (v + (v >> 4)) & UINT64_C(0x0F0F0F0F0F0F0F0F);
    return (uint32_t)((v * UINT64_C(0x0101010101010101)) >> 56);
}

HM_INLINE uint64_t hm_load64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

HM_INLINE void hm_fetch_ahead(const uint8_t *row, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; i += 64) HM_PREFETCH(row + HM_AHEAD + i);
}

HM_INLINE float hm_bits_to_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

HM_INLINE uint32_t hm_float_to_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

/* 64-byte aligned scratch memory; the pointer to free is kept just before it. */
static void *hm_alloc(size_t bytes) {
    uint8_t *raw = (uint8_t *)malloc(bytes + 64 + sizeof(void *));
    uint8_t *aligned;
    if (raw == NULL) return NULL;
    aligned = (uint8_t *)(((uintptr_t)raw + sizeof(void *) + 63) & ~(uintptr_t)63);
    ((void **)aligned)[-1] = raw;
    return aligned;
}

static void hm_free(void *p) {
    if (p != NULL) free(((void **)p)[-1]);
}

#endif
