/* Which levels this machine can run, and the table in use.
 *
 *   hm_levels(): levels usable here, slowest first      hm_active: the table that kernels go through
 */
#ifndef HM_DISPATCH_H
#define HM_DISPATCH_H

#include "common.h"
#include "cpu.h"
#include "scalar.h"
#if defined(HM_X86)
#include "avx512.h"
#elif defined(HM_ARM64)
#include "neon.h"
#endif

#define HM_MAX_LEVELS 8

static const hm_kernels *hm_active = &hm_table_scalar;

static size_t hm_levels(const hm_kernels **out) {
    size_t n = 0;
    out[n++] = &hm_table_scalar;
#if defined(HM_X86)
    {
        const unsigned features = hm_cpu_features();
        if (features & HM_CPU_POPCNT) out[n++] = &hm_table_popcnt;
        if (features & HM_CPU_AVX2) out[n++] = &hm_table_avx2;
        if (features & HM_CPU_AVX512) out[n++] = &hm_table_avx512;
    }
#elif defined(HM_ARM64)
    out[n++] = &hm_table_neon; /* part of the base architecture */
#endif
    return n;
}

/* Use the level of this name (NULL: the best one). 0 when this machine has no such level. */
static int hm_select_level(const char *name) {
    const hm_kernels *levels[HM_MAX_LEVELS] = {NULL};
    size_t n = hm_levels(levels), i;
    if (name == NULL) {
        hm_active = levels[n - 1];
        return 1;
    }
    for (i = 0; i < n; i++)
        if (strcmp(levels[i]->name, name) == 0) {
            hm_active = levels[i];
            return 1;
        }
    return 0;
}

#endif
