// Mathematics, bit casts, integer instructions and atomics of CUDA C++, for the host.
//
// The host's functions are not the card's bit for bit (expf, rsqrtf and the like differ in the last places): tests
// compare with tolerances, and bits only with what the same library computed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
static inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
static inline unsigned long long __double_as_longlong(double value) {
    unsigned long long bits;
    std::memcpy(&bits, &value, 8);
    return bits;
}

namespace emu {
// Round to nearest even; every NaN becomes 0x7fff, as cvt.rn.bf16.f32 does.
static inline unsigned round_to_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
}  // namespace emu

static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
static inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// glibc declares functions of these names.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

template <class T>
static inline T __ldg(const T* address) {
    return *address;
}
template <class T>
static inline T __ldcs(const T* address) {
    return *address;
}
template <class T>
static inline void __stcs(T* address, T value) {
    *address = value;
}

#define EMU_ATOMICS(T)                                                                                    \
    static inline T atomicAdd(T* p, T value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }   \
    static inline T atomicExch(T* p, T value) { return __atomic_exchange_n(p, value, __ATOMIC_RELAXED); } \
    static inline T atomicOr(T* p, T value) { return __atomic_fetch_or(p, value, __ATOMIC_RELAXED); }     \
    static inline T atomicAnd(T* p, T value) { return __atomic_fetch_and(p, value, __ATOMIC_RELAXED); }   \
    static inline T atomicCAS(T* p, T compare, T value) {                                                 \
        __atomic_compare_exchange_n(p, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);       \
        return compare;                                                                                   \
    }                                                                                                     \
    static inline T atomicMax(T* p, T value) {                                                            \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                     \
        while (old < value &&                                                                             \
               !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        }                                                                                                 \
        return old;                                                                                       \
    }                                                                                                     \
    static inline T atomicMin(T* p, T value) {                                                            \
        T old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                     \
        while (value < old &&                                                                             \
               !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) { \
        }                                                                                                 \
        return old;                                                                                       \
    }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned)
EMU_ATOMICS(unsigned long long)
#undef EMU_ATOMICS

static inline float atomicAdd(float* p, float value) {
    unsigned* bits = reinterpret_cast<unsigned*>(p);
    unsigned old = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &old, __float_as_uint(__uint_as_float(old) + value), false,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return __uint_as_float(old);
}
