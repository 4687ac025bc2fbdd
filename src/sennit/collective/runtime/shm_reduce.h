/* Reductions of many operands, in their order, for all types.
 *
 * All operands are walked at once, a line of each at a time, and the result is stored once. Operands of other ranks lie
 * in the caches of other cores, where a line takes long to come from: one stream waits for one line after another,
 * eight streams wait for eight at a time. Against one operand after the other in strips of 4 KiB this took 14 instead
 * of 25 microseconds for 256 KiB of 8 ranks (16 cores, x86_64).
 *
 * A line is a vector of 64 bytes, which compilers lower to what there is, for each level of x86-64 by itself: one build
 * runs anywhere. reduce_numpy.py says the same in numpy, and tests compare the bits. */

#ifndef SENNIT_SHM_REDUCE_H
#define SENNIT_SHM_REDUCE_H

#include <stddef.h>
#include <string.h>

#include "shm_records.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define LOOP _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)
#define HALVES 512 /* elements of a half-precision operand at a time: they stay in the first-level cache as f32 */

/* to = from[0] op from[1] op ...; `to` may be one of them */
typedef void Kernel(char *to, const char *const *restrict from, int count, size_t bytes);

#define KERNEL(NAME, TYPE, RESULT)                                                                        \
    CLONES static void NAME(char *to, const char *const *restrict from, int count, size_t bytes)          \
    {                                                                                                     \
        typedef TYPE Vector __attribute__((vector_size(LINE)));                                           \
        typedef Vector Anywhere __attribute__((aligned(1), may_alias));                                   \
        size_t i = 0;                                                                                     \
        for (; i + 2 * LINE <= bytes; i += 2 * LINE) {                                                    \
            Vector one = *(const Anywhere *)(from[0] + i), two = *(const Anywhere *)(from[0] + i + LINE); \
            for (int k = 1; k < count; k++) {                                                             \
                Vector a = one, b = *(const Anywhere *)(from[k] + i);                                     \
                one = RESULT;                                                                             \
                a = two, b = *(const Anywhere *)(from[k] + i + LINE);                                     \
                two = RESULT;                                                                             \
            }                                                                                             \
            *(Anywhere *)(to + i) = one, *(Anywhere *)(to + i + LINE) = two;                              \
        }                                                                                                 \
        for (; i < bytes; i += LINE) {                                                                    \
            size_t rest = bytes - i < LINE ? bytes - i : LINE;                                            \
            Vector a = {0}, b = {0};                                                                      \
            memcpy(&a, from[0] + i, rest);                                                                \
            for (int k = 1; k < count; k++) {                                                             \
                memcpy(&b, from[k] + i, rest);                                                            \
                a = RESULT;                                                                               \
            }                                                                                             \
            memcpy(to + i, &a, rest);                                                                     \
        }                                                                                                 \
    }
/* where: bits of ones where a is taken; a number that is none wins over all others, on either side */
#define TAKE(WHERE) ((Vector)(((__typeof__(WHERE))a & (WHERE)) | ((__typeof__(WHERE))b & ~(WHERE))))
#define ARITHMETIC(NAME, TYPE)                         \
    KERNEL(NAME##_sum, TYPE, a + b)                    \
    KERNEL(NAME##_prod, TYPE, a *b)                    \
    KERNEL(NAME##_min, TYPE, TAKE((a < b) | (a != a))) \
    KERNEL(NAME##_max, TYPE, TAKE((a > b) | (a != a)))
#define BITWISE(NAME, TYPE)         \
    KERNEL(NAME##_band, TYPE, a &b) \
    KERNEL(NAME##_bor, TYPE, a | b) \
    KERNEL(NAME##_bxor, TYPE, a ^ b)

ARITHMETIC(f64, double)
ARITHMETIC(f32, float)
ARITHMETIC(i64, int64_t)
ARITHMETIC(i32, int32_t)
ARITHMETIC(i16, int16_t)
ARITHMETIC(i8, int8_t)
ARITHMETIC(u8, uint8_t)
BITWISE(i64, int64_t)
BITWISE(i32, int32_t)
BITWISE(i16, int16_t)
BITWISE(i8, int8_t)
#define u8_band i8_band
#define u8_bor i8_bor
#define u8_bxor i8_bxor

/* in the order of DTYPES and REDUCTIONS of shm_abi.py; halves are computed in f32, a bool's sum is "or" */
enum { F64, F32, BF16, F16, I64, I32, I16, I8, U8, BOOL };
#define FLOATING(NAME) {NAME##_sum, NAME##_prod, NAME##_min, NAME##_max, 0, 0, 0}
#define INTEGER(NAME) {NAME##_sum, NAME##_prod, NAME##_min, NAME##_max, NAME##_band, NAME##_bor, NAME##_bxor}
static Kernel *const kernels[][7] = {
    FLOATING(f64), FLOATING(f32),
    FLOATING(f32), FLOATING(f32),
    INTEGER(i64),  INTEGER(i32),
    INTEGER(i16),  INTEGER(i8),
    INTEGER(u8),   {u8_bor, u8_band, u8_band, u8_bor, u8_band, u8_bor, u8_bxor},
};

CLONES static void widen_bf16(float *to, const uint16_t *from, size_t n)
{
    LOOP
    {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, 4);
    }
}

CLONES static void narrow_bf16(uint16_t *to, const float *from, size_t n)
{
    LOOP
    {
        uint32_t bits;
        memcpy(&bits, from + i, 4);
        uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : even);
    }
}

/* f16 has an exponent that is 112 less; a product with 2^112 moves it, and brings numbers without a leading one in
 * order too */
CLONES static void widen_f16(float *to, const uint16_t *from, size_t n)
{
    LOOP
    {
        uint32_t half = from[i], bits = (half & 0x7fff) << 13, infinite = bits >= 0x0f800000;
        float number, scale = 0x1p112f;
        memcpy(&number, &bits, 4);
        number *= scale;
        memcpy(&bits, &number, 4);
        bits = (infinite ? bits | 0x7f800000 : bits) | (half & 0x8000) << 16;
        memcpy(to + i, &bits, 4);
    }
}

CLONES static void narrow_f16(uint16_t *to, const float *from, size_t n)
{
    LOOP
    {
        uint32_t bits, sign, even, tiny;
        memcpy(&bits, from + i, 4);
        sign = bits >> 16 & 0x8000;
        bits &= 0x7fffffff;
        /* round to nearest even, carry into the exponent */
        even = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
        float small;
        memcpy(&small, &bits, 4);
        small += 0.5f; /* below 2^-14: the adder rounds at 2^-24 */
        memcpy(&tiny, &small, 4);
        tiny -= 0x3f000000;
        even = bits < 0x38800000 ? tiny : even;
        even = bits >= 0x477ff000 ? 0x7c00 : even;
        even = bits > 0x7f800000 ? 0x7e00 | (bits >> 13 & 0x3ff) : even;
        to[i] = (uint16_t)(sign | even);
    }
}

static void widen(int dtype, float *to, const void *from, size_t n)
{
    dtype == F16 ? widen_f16(to, from, n) : widen_bf16(to, from, n);
}

static void narrow(int dtype, void *to, const float *from, size_t n)
{
    dtype == F16 ? narrow_f16(to, from, n) : narrow_bf16(to, from, n);
}

/* target = the reduction of all sources, in their order. The target may be a source. */
static void reduce_all(const Call *call, char *target, const char **sources, int count, size_t elements)
{
    Kernel *kernel = kernels[call->dtype][call->reduction];
    if (count == 1) {
        if (sources[0] != target)
            memcpy(target, sources[0], elements * call->itemsize);
        return;
    }
    if (call->dtype != BF16 && call->dtype != F16) {
        kernel(target, sources, count, elements * call->itemsize);
        return;
    }
    _Alignas(LINE) float total[HALVES], term[HALVES];
    const char *const pair[2] = {(char *)total, (char *)term};
    for (size_t done = 0; done < elements; done += HALVES) {
        size_t n = elements - done < HALVES ? elements - done : HALVES;
        widen(call->dtype, total, sources[0] + 2 * done, n);
        for (int k = 1; k < count; k++) {
            widen(call->dtype, term, sources[k] + 2 * done, n);
            kernel((char *)total, pair, 2, n * sizeof(float));
        }
        narrow(call->dtype, target + 2 * done, total, n);
    }
}

/* sennit_reduce: the same for tests, and for callers that hold all operands */
void sennit_reduce(const Call *call, char *target, const char **sources, int32_t count, int64_t elements)
{
    reduce_all(call, target, sources, count, (size_t)elements);
}

#define DIVIDE(DTYPE, TYPE)                  \
    case DTYPE: {                            \
        TYPE *t = (TYPE *)data;              \
        LOOP t[i] = (TYPE)(t[i] / (TYPE)by); \
        break;                               \
    }
static void divide(int dtype, char *data, int by, size_t n)
{
    float strip[HALVES];
    switch (dtype) {
        DIVIDE(F64, double)
        DIVIDE(F32, float)
        DIVIDE(I64, int64_t)
        DIVIDE(I32, int32_t)
        DIVIDE(I16, int16_t)
        DIVIDE(I8, int8_t)
        DIVIDE(U8, uint8_t)
    case BF16:
    case F16:
        for (size_t done = 0; done < n; done += HALVES) {
            size_t some = n - done < HALVES ? n - done : HALVES;
            widen(dtype, strip, data + 2 * done, some);
            for (size_t i = 0; i < some; i++)
                strip[i] /= (float)by;
            narrow(dtype, data + 2 * done, strip, some);
        }
    }
}

#endif
