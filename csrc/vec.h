// The vector type of the ISA that this file is being compiled for.
#pragma once
#if defined(HC_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(HC_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(HC_ISA_NEON)
#include "vec_neon.h"
#else
#include "vec_scalar.h"
#endif
