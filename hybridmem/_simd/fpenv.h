/* Some libraries leave flush-to-zero or another rounding mode on in the calling thread; signature bits
 * and means must not depend on that. */
#ifndef HM_FPENV_H
#define HM_FPENV_H

#include "common.h"

#if defined(HM_X86)
#include <immintrin.h>
typedef unsigned int hm_fpenv;
HM_INLINE hm_fpenv hm_fpenv_enter(void) {
    hm_fpenv saved = _mm_getcsr();
    _mm_setcsr(0x1F80);
    return saved;
}
HM_INLINE void hm_fpenv_leave(hm_fpenv saved) { _mm_setcsr(saved); }
#elif defined(HM_ARM64) && !defined(_MSC_VER)
typedef uint64_t hm_fpenv;
HM_INLINE hm_fpenv hm_fpenv_enter(void) {
    hm_fpenv saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0) : "memory");
    return saved;
}
HM_INLINE void hm_fpenv_leave(hm_fpenv saved) {
    __asm__ volatile("msr fpcr, %0" ::"r"(saved) : "memory");
}
#else
typedef int hm_fpenv;
HM_INLINE hm_fpenv hm_fpenv_enter(void) { return 0; }
HM_INLINE void hm_fpenv_leave(hm_fpenv saved) { (void)saved; }
#endif

#endif
