// The vector type of the ISA that this file is compiled for.
#pragma once

// Names that one file of an instruction set defines and another uses: HC_OWN(dots) is dots_avx2 in AVX2's
// files. HC_SHARED(dots) is the same also in files of a set that shares AVX2's kernels (HC_ISA_SHARES).
#define HC_CONCAT_(a, b) a##b
#define HC_CONCAT(a, b) HC_CONCAT_(a, b)
#define HC_OWN(name) HC_CONCAT(name##_, HC_ISA)
#ifdef HC_ISA_SHARES
#define HC_SHARED(name) HC_CONCAT(name##_, HC_ISA_SHARES)
#else
#define HC_SHARED(name) HC_OWN(name)
#endif

// Steps are inlined: a call would spill a kernel's registers, and GCC drops calls of a function that only
// prefetches. The scalar kernels have no such registers and do not prefetch.
#if defined(_MSC_VER)
#define HC_INLINE __forceinline
#define HC_NOINLINE __declspec(noinline)
#define HC_INLINE_LAMBDA
#elif defined(HC_ISA_SCALAR)
#define HC_INLINE inline
#define HC_NOINLINE
#define HC_INLINE_LAMBDA
#else
#define HC_INLINE inline __attribute__((always_inline))
#define HC_NOINLINE __attribute__((noinline))
#define HC_INLINE_LAMBDA __attribute__((always_inline))
#endif
// GCC computes many products before it adds them, and spills them to memory; this makes it add each one at
// once.
#if defined(HC_IN_ORDER)  // emulated
#elif defined(__GNUC__) && defined(__x86_64__) && !defined(HC_ISA_SCALAR)
#define HC_IN_ORDER(vector) asm volatile("" : "+v"(vector))
#else
#define HC_IN_ORDER(vector)
#endif
#if defined(HC_ISA_AVX512)
#include "simd/vec_avx512.h"
#elif defined(HC_ISA_AVX2) || defined(HC_ISA_AVXVNNI) || defined(HC_ISA_AVXVNNI_EVEX)
#include "simd/vec_avx2.h"
#elif defined(HC_ISA_NEON) || defined(HC_ISA_DOTPROD) || defined(HC_ISA_I8MM)
#include "simd/vec_neon.h"
#else
#include "simd/vec_scalar.h"
#endif
