// A host that stands in for a GPU, so that the walk of gpu_kernel.cu is tested where there is none: a thread block is
// one thread of the host.

#pragma once

#define DEVICE static inline
#define APART static inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct Index {
    int x;
};
static const Index threadIdx = {0};
static thread_local Index blockIdx = {0};
static thread_local struct {
    u64 x;
} gridDim = {0};

static inline void meet() {}
static inline Vector load(const Vector *from) { return *from; }
static inline void store(Vector *to, const Vector &v) { *to = v; }
static inline u64 acquire(const u64 *flag) {
    pause_thread();  // others need the core
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
static inline void release(u64 *flag, u64 value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
static inline u64 take_ticket(u64 *counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }
static inline bool first_to_fail(u64 *status) {
    u64 none = 0;
    return __atomic_compare_exchange_n(status, &none, 1ull, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static inline float as_float(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
static inline u32 as_bits(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
static inline float bf16_to_f32(unsigned short bits) { return as_float((u32)bits << 16); }
static inline unsigned short f32_to_bf16(float value) {
    if (value != value) return 0x7fff;
    u32 bits = as_bits(value);
    return (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline float f16_to_f32(unsigned short half) {
    int sign = half >> 15, exponent = (half >> 10) & 31, digits = half & 1023;
    float value;
    if (exponent == 31) value = digits ? __builtin_nanf("") : __builtin_inff();
    else if (exponent == 0) value = digits * 0x1p-24f;
    else value = (1024 + digits) * __builtin_ldexpf(1.0f, exponent - 25);
    return sign ? -value : value;
}
static inline unsigned short f32_to_f16(float value) {
    unsigned short sign = as_bits(value) >> 31 << 15;
    if (value != value) return 0x7fff;
    float size = value < 0 ? -value : value;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent;
    __builtin_frexpf(size, &exponent);
    if (exponent < -13) exponent = -13;  // below the least normal number all have the same spacing
    float scaled = __builtin_ldexpf(size, 11 - exponent);  // the last digit kept is 1
    float rounded = __builtin_rintf(scaled);
    if (rounded < 1024) return sign | (unsigned short)rounded;
    return sign | (unsigned short)((exponent + 13) * 1024 + (int)rounded);
}
