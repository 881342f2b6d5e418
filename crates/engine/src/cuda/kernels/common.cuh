// What every kernel starts with: element types, vector access, reductions, dropout.
//
// Compiled by NVRTC with REAL_F32, REAL_BF16 or REAL_F16 defined: `real` is the element type of
// activations. Sums, statistics, gradients of parameters and optimizer states are float. No CUDA
// header is needed, so a machine with only a driver and NVRTC can build it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;

#define KERNEL extern "C" __global__ void

// What every kernel does before it reads or writes memory. It may be on the card before the kernel
// that precedes it has ended, and lets the next one come as early: what is left of a launch's delay
// runs beside the work.
__device__ __forceinline__ void await_earlier() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
#define MINUS_INFINITY __int_as_float(0xff800000)

// 2ˣ to about 22 bits; results that are not normal numbers are 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// ---------------------------------------------------------------- element types

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

#if defined(REAL_BF16)
typedef bf16 real;
#elif defined(REAL_F16)
typedef f16 real;
#else
typedef float real;
#endif

// Two floats as one 32-bit word of two 16-bit elements, the first in the low half: the operand
// format of the tensor cores.
__device__ __forceinline__ u32 pack2(float low, float high) {
    u32 y;
#if defined(REAL_F16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
    return y;
}

// ---------------------------------------------------------------- vector access

// N elements that are loaded and stored as one, or as 16-byte pieces.
template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T v[N]; };

template <typename T, int N> __device__ __forceinline__ void load(const T* p, float (&x)[N]) {
    Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(p);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = to_float(pack.v[i]);
}

template <typename T, int N> __device__ __forceinline__ void store(T* p, const float (&x)[N]) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; i++) pack.v[i] = from_float<T>(x[i]);
    *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

// How many of first, first + step, … come before `end`. A loop that counts up to it, unrolled, has its
// loads under way together. Of one that compares a growing index with its end the compiler does not
// know how often it runs, since the index could wrap around: it tests, and waits, between each two.
__device__ __forceinline__ u32 num_turns(u32 first, u32 end, u32 step) {
    return first < end ? (end - first - 1) / step + 1 : 0;
}

// ---------------------------------------------------------------- reductions

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// The sum over a block of up to 1024 threads, in every thread, in a fixed order. `scratch` has
// 32 floats in shared memory and may be reused after the call.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = lane < warps ? scratch[lane] : 0.0f;
    x = warp_sum(x);
    __syncthreads();
    return x;
}

__device__ __forceinline__ float block_max(float x, float* scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    x = warp_max(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = lane < warps ? scratch[lane] : -3.402823466e38f;
    x = warp_max(x);
    __syncthreads();
    return x;
}

// ---------------------------------------------------------------- functions

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(__expf(-fabsf(x)));
}

// ---------------------------------------------------------------- dropout

// The same function of key, stream, row and column as on the CPU (cpu/dropout.rs): masks are
// equal bit for bit.
__device__ __forceinline__ u32 mix_upper(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    return x * 0x846ca68bu;
}
__device__ __forceinline__ u32 mix(u32 x) {
    x = mix_upper(x);
    return x ^ (x >> 16);
}

// Columns 2c and 2c + 1 have one random number, 14 bits of it each. The row's own is mixed already.
struct Dropout {
    static constexpr u32 MASK = 0x3fff3fffu;
    // From what a pair's numbers are made of to what those of the next are.
    static constexpr u32 STEP = 0x9e3779b9u;
    u32 key, row_offset, threshold;
    // Two of them, side by side. As numbers of 16 bits they and what is compared with them are
    // finite and positive.
    u32 thresholds;
    float scale;

    // `random` is the graph's random state: two words of key, one of row offset; null for none.
    // `rows` is how many rows the op has for each row of the batch (attention: its heads).
    __device__ __forceinline__ Dropout(const u32* random, u32 stream, u32 limit, u32 rows = 1) {
        threshold = random ? limit : 0u;
        key = random ? mix(random[0] ^ mix(stream ^ random[1])) : 0u;
        row_offset = random ? random[2] * rows : 0u;
        u32 bits = min((threshold >> 17) + 1 >> 1, 0x3fffu);
        thresholds = bits * 0x10001u;
        scale = (float)(1.0 / (1.0 - (double)bits / 16384.0));
    }

    // 1/scale.
    __device__ __forceinline__ float kept_share() const {
        return 1.0f - (float)(thresholds & 0xffffu) / 16384.0f;
    }

    __device__ __forceinline__ u32 row(u32 row) const { return mix((row + row_offset) ^ key); }

    // A pair's numbers, one in each half.
    __device__ __forceinline__ static u32 word(u32 x) { return word_of_product(x * FACTOR); }
    // The same where what it is made of is multiplied already.
    static constexpr u32 FACTOR = 0x7feb352du;
    __device__ __forceinline__ static u32 word_of_product(u32 x) {
        x ^= x >> 15;
        x *= 0x846ca68bu;
        return (x ^ (x >> 16)) & MASK;
    }
    // How far a pair's number is from that of its row, before it is mixed: of the sum of columns, which
    // are even and may be negative, the sum.
    __device__ __forceinline__ static u32 pair_offset(i32 column) { return (u32)(column >> 1) * STEP; }
    __device__ __forceinline__ static u32 pair(u32 base, u32 column) { return word(base + pair_offset((i32)column)); }

    __device__ __forceinline__ bool keeps(u32 base, u32 column) const {
        u32 both = pair(base, column);
        return (column & 1 ? both >> 16 : both & 0xffffu) >= (thresholds & 0xffffu);
    }
    // Of an even column and the next one: a half of ones where the element is kept.
    __device__ __forceinline__ u32 kept(u32 base, u32 column) const { return kept_of(pair(base, column)); }
    __device__ __forceinline__ u32 kept_of(u32 word) const {
        u32 ones;
        asm("set.ge.u32.f16x2 %0, %1, %2;" : "=r"(ones) : "r"(word), "r"(thresholds));
        return ones;
    }

    // 0 for a dropped element, 1/(1 − rate) for a kept one.
    __device__ __forceinline__ float factor(u32 base, u32 column) const {
        if (threshold == 0u) return 1.0f;
        return keeps(base, column) ? scale : 0.0f;
    }
    // Of neighbours, the first in an even column; of a single one, wherever it is.
    template <int N> __device__ __forceinline__ void factors(float (&to)[N], u32 base, u32 column) const {
        if (N == 1) {
            to[0] = factor(base, column);
            return;
        }
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = scale;
        if (threshold == 0u) return;
#pragma unroll
        for (int i = 0; i + 1 < N; i += 2) drop(pair(base, column + i), to[i], to[i + 1]);
    }
    // Zeroes what is dropped of such a pair.
    __device__ __forceinline__ void drop(u32 word, float& first, float& second) const {
        asm("{ .reg .pred p, q; setp.ge.f16x2 p|q, %2, %3; "
            "selp.f32 %0, %0, 0f00000000, p; selp.f32 %1, %1, 0f00000000, q; }"
            : "+f"(first), "+f"(second)
            : "r"(word), "r"(thresholds));
    }
};

// Dropout of attention's probabilities: keys s and s + 8 of sixteen have one random number.
struct ScoreDropout : Dropout {
    // Narrow heads have kernels of their own, which draw a number for each probability.
    bool paired;

    __device__ __forceinline__ ScoreDropout(const u32* random, u32 stream, u32 limit, u32 rows,
                                            bool pairs = true)
        : Dropout(random, stream, limit, rows), paired(pairs) {
        if (!paired) scale = (float)(1.0 / (1.0 - (double)threshold / 4294967296.0));
    }

    // How far the word of a key is from that of its row.
    __device__ __forceinline__ static u32 offset(u32 key) {
        return (key >> 4 << 3 | (key & 7)) * 0x9e3779b9u;
    }

    // The threshold's lower half is zero, so the upper half of a number of its own decides.
    __device__ __forceinline__ bool keeps_single(u32 base, u32 key) const {
        return mix_upper(base + key * 0x9e3779b9u) >= threshold;
    }
    __device__ __forceinline__ bool keeps(u32 base, u32 key) const {
        if (!paired) return keeps_single(base, key);
        u32 both = word(base + offset(key));
        return (key & 8 ? both >> 16 : both & 0xffffu) >= (thresholds & 0xffffu);
    }
    __device__ __forceinline__ float factor(u32 base, u32 key) const {
        if (threshold == 0u) return 1.0f;
        return keeps(base, key) ? scale : 0.0f;
    }
};
