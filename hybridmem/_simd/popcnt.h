/* x86-64 with the POPCNT instruction: one 64-bit word per cycle, four chains to hide its latency. */
#ifndef HM_POPCNT_H
#define HM_POPCNT_H

#include <nmmintrin.h>

#include "scalar.h"

HM_TARGET("popcnt")
static void hm_hamming_popcnt(const uint8_t *rows, size_t n, const uint8_t *queries, size_t m,
                              size_t bytes, uint32_t *out, size_t out_stride) {
    size_t r, q, i;
    for (r = 0; r < n; r++) {
        if (n > 1) hm_fetch_ahead(rows + r * bytes, bytes);
        for (q = 0; q < m; q++) {
            const uint8_t *a = rows + r * bytes, *b = queries + q * bytes;
            uint64_t c0 = 0, c1 = 0, c2 = 0, c3 = 0;
            for (i = 0; i + 32 <= bytes; i += 32) {
                c0 += (uint64_t)_mm_popcnt_u64(hm_load64(a + i) ^ hm_load64(b + i));
                c1 += (uint64_t)_mm_popcnt_u64(hm_load64(a + i + 8) ^ hm_load64(b + i + 8));
                c2 += (uint64_t)_mm_popcnt_u64(hm_load64(a + i + 16) ^ hm_load64(b + i + 16));
                c3 += (uint64_t)_mm_popcnt_u64(hm_load64(a + i + 24) ^ hm_load64(b + i + 24));
            }
            for (; i < bytes; i += 8)
                c0 += (uint64_t)_mm_popcnt_u64(hm_load64(a + i) ^ hm_load64(b + i));
            out[q * out_stride + r] = (uint32_t)(c0 + c1 + c2 + c3);
        }
    }
}

static const hm_kernels hm_table_popcnt = {
    "popcnt",
    hm_mean_scalar,
    hm_copy_finite_scalar,
    hm_fold_scalar,
    hm_flip_fwht_scalar,
    hm_pack_signs_scalar,
    hm_hamming_popcnt,
    1,
    hm_late_prepare_scalar,
    hm_late_min_scalar,
    hm_late_weighted_scalar,
};

#endif
