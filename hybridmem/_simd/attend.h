/* Softmax attention over rows of keys and values as they lie in memory, a block at a time.
 *
 * The running maximum, sum and weighted values of each query head (online softmax: M. Milakov,
 * N. Gimelshein, "Online normalizer calculation for softmax", 2018) go on from call to call, so rows that
 * lie apart need not be brought together. Rows are read once, in order: for one query token the
 * time is that of reading them. A dot product is summed in 32 lanes and then in pairs, so that all
 * instruction sets add in the same order.
 */
#ifndef HM_ATTEND_H
#define HM_ATTEND_H

#include <math.h>

#include "common.h"

#define HM_DOT_LANES 32
#define HM_ATTEND_ROWS 32 /* rows scored before their values are added */

typedef struct {
    size_t queries, heads, kv_heads, head_dim;
    float scale;
    const float *q;       /* [queries][heads][head_dim] */
    float *acc;           /* the same shape: weighted sum of values */
    float *top, *sum;     /* [queries][heads]: running maximum (-inf at the start) and sum */
    float *scores;        /* scratch: [queries][heads][HM_ATTEND_ROWS] */
} hm_attention;

typedef struct {
    const float *k, *v; /* [n][kv_heads][head_dim] */
    size_t n;
    const float *next; /* keys of the rows that come after these, to be fetched meanwhile */
    size_t next_n;
} hm_rows;

typedef void (*hm_attend_fn)(const hm_attention *a, const hm_rows *some);

#define HM_ATTEND_FN(name) hm_##name##_scalar
#define HM_ATTEND_T static
#include "attend_loops.h"
#undef HM_ATTEND_FN
#undef HM_ATTEND_T

#if defined(HM_X86)
#define HM_ATTEND_FN(name) hm_##name##_avx2
#define HM_ATTEND_T HM_TARGET("avx2") static
#include "attend_loops.h"
#undef HM_ATTEND_FN
#undef HM_ATTEND_T

#define HM_ATTEND_FN(name) hm_##name##_avx512
#define HM_ATTEND_T HM_TARGET("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512") static
#include "attend_loops.h"
#undef HM_ATTEND_FN
#undef HM_ATTEND_T
#endif

static hm_attend_fn hm_attend_of(const char *level) {
#if defined(HM_X86)
    if (strcmp(level, "avx512") == 0) return hm_attend_avx512;
    if (strcmp(level, "avx2") == 0) return hm_attend_avx2;
#endif
    (void)level;
    return hm_attend_scalar;
}

#endif
