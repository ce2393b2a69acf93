/* Adds an error of one unit in the last place to the BLAS products of NumPy, as another processor would.
 *
 *     cc -shared -fPIC -O2 -o disturbed.so .ci/disturbed_products.c
 *     LD_PRELOAD=./disturbed.so pytest
 *
 * BLAS has different kernels for other processors, which add in a different order. A test that depends on
 * one order also fails with this library: equal rows give different bits, and equal products differ. Each
 * element of a product becomes the next float up or down, or stays. Integers stay: their sums are exact in
 * any order. The names are those of the OpenBLAS in NumPy's wheels. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t integer;
enum { ROW_MAJOR = 101, NOT_TRANSPOSED = 111 };

static int is_blas(struct dl_phdr_info* info, size_t size, void* name) {
    (void)size;
    if (strstr(info->dlpi_name, "libscipy_openblas64_") == NULL) return 0;
    *(const char**)name = info->dlpi_name;
    return 1;
}

/* Returns the function of NumPy's BLAS with this name; ends the process if it does not exist. */
static void* function(const char* symbol) {
    const char* library = NULL;
    dl_iterate_phdr(is_blas, &library);
    void* opened = library ? dlopen(library, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    void* found = opened ? dlsym(opened, symbol) : NULL;
    if (found == NULL) {
        fprintf(stderr, "NumPy's OpenBLAS has no %s\n", symbol);
        abort();
    }
    return found;
}

/* Sets the start of the directions of one product. Equal calls give equal bits on every processor. */
static uint64_t start(integer m, integer n, integer k) {
    return 88172645463325252u + (uint64_t)(m * 1000003 + n * 1009 + k);
}

/* -1, 0 or 1 (xorshift, Marsaglia 2003). */
static int direction(uint64_t* state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (int)(*state % 3) - 1;
}

#define DEFINE(letter, type, next)                                                                           \
    static void disturb_##letter(type* value, uint64_t* state) {                                             \
        int towards = direction(state);                                                                      \
        if (*value != rint(*value)) *value = towards == 0 ? *value : next(*value, towards * (type)INFINITY); \
    }                                                                                                        \
    static void disturb_##letter##_matrix(int order, integer m, integer n, integer k, type* c,               \
                                          integer ldc) {                                                     \
        uint64_t state = start(m, n, k);                                                                     \
        integer outer = order == ROW_MAJOR ? m : n, inner = order == ROW_MAJOR ? n : m;                      \
        for (integer i = 0; i < outer; i++)                                                                  \
            for (integer j = 0; j < inner; j++) disturb_##letter(c + i * ldc + j, &state);                   \
    }                                                                                                        \
    void scipy_cblas_##letter##gemm64_(int order, int trans_a, int trans_b, integer m, integer n, integer k, \
                                       type alpha, const type* a, integer lda, const type* b, integer ldb,   \
                                       type beta, type* c, integer ldc) {                                    \
        static void (*real)(int, int, int, integer, integer, integer, type, const type*, integer,            \
                            const type*, integer, type, type*, integer);                                     \
        if (real == NULL) real = function("scipy_cblas_" #letter "gemm64_");                                 \
        real(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                         \
        disturb_##letter##_matrix(order, m, n, k, c, ldc);                                                   \
    }                                                                                                        \
    void scipy_cblas_##letter##syrk64_(int order, int uplo, int trans, integer n, integer k, type alpha,     \
                                       const type* a, integer lda, type beta, type* c, integer ldc) {        \
        static void (*real)(int, int, int, integer, integer, type, const type*, integer, type, type*,        \
                            integer);                                                                        \
        if (real == NULL) real = function("scipy_cblas_" #letter "syrk64_");                                 \
        real(order, uplo, trans, n, k, alpha, a, lda, beta, c, ldc);                                         \
        disturb_##letter##_matrix(order, n, n, k, c, ldc);                                                   \
    }                                                                                                        \
    void scipy_cblas_##letter##gemv64_(int order, int trans, integer m, integer n, type alpha,               \
                                       const type* a, integer lda, const type* x, integer incx, type beta,   \
                                       type* y, integer incy) {                                              \
        static void (*real)(int, int, integer, integer, type, const type*, integer, const type*, integer,    \
                            type, type*, integer);                                                           \
        if (real == NULL) real = function("scipy_cblas_" #letter "gemv64_");                                 \
        real(order, trans, m, n, alpha, a, lda, x, incx, beta, y, incy);                                     \
        integer count = trans == NOT_TRANSPOSED ? m : n;                                                     \
        uint64_t state = start(m, n, 0);                                                                     \
        for (integer i = 0; i < count; i++) disturb_##letter(y + i * incy, &state);                          \
    }                                                                                                        \
    type scipy_cblas_##letter##dot64_(integer n, const type* x, integer incx, const type* y, integer incy) { \
        static type (*real)(integer, const type*, integer, const type*, integer);                            \
        if (real == NULL) real = function("scipy_cblas_" #letter "dot64_");                                  \
        type value = real(n, x, incx, y, incy);                                                              \
        uint64_t state = start(1, 1, n);                                                                     \
        disturb_##letter(&value, &state);                                                                    \
        return value;                                                                                        \
    }

DEFINE(s, float, nextafterf)
DEFINE(d, double, nextafter)
