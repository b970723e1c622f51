/* What the processor and the operating system offer, asked with CPUID and XGETBV. */
#ifndef HM_CPU_H
#define HM_CPU_H

#include "common.h"

#if defined(HM_X86)

#if defined(_MSC_VER) && !defined(__clang__)
#include <immintrin.h>
#include <intrin.h>
static void hm_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t *r) {
    int out[4];
    __cpuidex(out, (int)leaf, (int)subleaf);
    memcpy(r, out, sizeof out);
}
static uint64_t hm_xgetbv(void) { return _xgetbv(0); }
#else
#include <cpuid.h>
static void hm_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t *r) {
    __cpuid_count(leaf, subleaf, r[0], r[1], r[2], r[3]);
}
static uint64_t hm_xgetbv(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}
#endif

#define HM_CPU_POPCNT 1u
#define HM_CPU_AVX2 2u
#define HM_CPU_AVX512 4u

static unsigned hm_cpu_features(void) {
    uint32_t r[4]; /* eax, ebx, ecx, edx */
    uint32_t leaves, one_ecx, seven_ebx = 0, seven_ecx = 0;
    uint64_t states = 0;
    unsigned features = 0;
    hm_cpuid(0, 0, r);
    leaves = r[0];
    hm_cpuid(1, 0, r);
    one_ecx = r[2];
    if (leaves >= 7) {
        hm_cpuid(7, 0, r);
        seven_ebx = r[1];
        seven_ecx = r[2];
    }
    if (one_ecx >> 27 & 1) states = hm_xgetbv(); /* OSXSAVE */
    if (one_ecx >> 20 & one_ecx >> 23 & 1) features |= HM_CPU_POPCNT; /* with SSE4.2 */
    if ((features & HM_CPU_POPCNT) && (one_ecx >> 28 & 1) && (states & 0x06) == 0x06 &&
        (seven_ebx >> 5 & 1))
        features |= HM_CPU_AVX2;
    if ((features & HM_CPU_AVX2) && (states & 0xE6) == 0xE6 &&
        (seven_ebx >> 16 & seven_ebx >> 17 & seven_ebx >> 30 & seven_ebx >> 31 & 1) && /* F DQ BW VL */
        (seven_ecx >> 12 & seven_ecx >> 14 & 1)) /* BITALG, VPOPCNTDQ */
        features |= HM_CPU_AVX512;
    return features;
}

#endif
#endif
