// Pointwise functions and their derivatives. After common.cuh.

// Inverse and exponential by the special function units: exact to a few units in the last place,
// and 0 where the exponential overflows.
__device__ __forceinline__ float fast_sigmoid(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_fast(-LOG2_E * x)));
    return y;
}

constexpr float SQRT_2_OVER_PI = 0.7978845608028654f;
constexpr float CUBE = 0.044715f;

// x/2·(1 + tanh u) = x·σ(2u), with u = √(2/π)·(x + 0.044715 x³).
struct GeluTanh {
    static __device__ __forceinline__ float twice_inside(float x) {
        return 2.0f * SQRT_2_OVER_PI * x * fmaf(CUBE * x, x, 1.0f);
    }
    static __device__ __forceinline__ float value(float x) {
        return x * fast_sigmoid(twice_inside(x));
    }
    // σ + x·σ·(1 − σ)·2u′
    static __device__ __forceinline__ float slope(float x) {
        float s = fast_sigmoid(twice_inside(x));
        float inside_slope = 2.0f * SQRT_2_OVER_PI * fmaf(3.0f * CUBE * x, x, 1.0f);
        return fmaf(x * s * (1.0f - s), inside_slope, s);
    }
};

// x·Φ(x), Φ the normal distribution function.
struct Gelu {
#if defined(REAL_F16) || defined(REAL_BF16)
    // Φ(−|x|) = t·p(t)·exp(−x²/2) with t = 1/(1 + 0.2316419 |x|), p of the fourth degree: Abramowitz and
    // Stegun 26.2.17, to 7.5e-8, far below what elements of 16 bits can hold. The exponential comes
    // back as well: it is the density but for a constant.
    static __device__ __forceinline__ float tail(float x, float& exponential) {
        float t;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.2316419f, fabsf(x), 1.0f)));
        exponential = exp2_fast(x * (-0.5f * LOG2_E) * x);
        float p = fmaf(0.530702714f, t, -0.726576013f);
        p = fmaf(p, t, 0.710706870f);
        p = fmaf(p, t, -0.142248368f);
        p = fmaf(p, t, 0.127414796f);
        return p * t * exponential;
    }
    // max(x, 0) − |x|·Φ(−|x|)
    static __device__ __forceinline__ float value(float x) {
        float exponential;
        return fmaf(-fabsf(x), tail(x, exponential), fmaxf(x, 0.0f));
    }
    // Φ + x·φ, φ the normal density.
    static __device__ __forceinline__ float slope(float x) {
        float exponential, below = tail(x, exponential);
        float distribution = x < 0.0f ? below : 1.0f - below;
        return fmaf(x * (0.5f * SQRT_2_OVER_PI), exponential, distribution);
    }
#else
    static __device__ __forceinline__ float distribution(float x) {
        return fmaf(0.5f, erff(x * 0.70710678118654752f), 0.5f);
    }
    static __device__ __forceinline__ float value(float x) { return x * distribution(x); }
    // Φ + x·φ, φ the normal density.
    static __device__ __forceinline__ float slope(float x) {
        float density = 0.5f * SQRT_2_OVER_PI * __expf(-0.5f * x * x);
        return fmaf(x, density, distribution(x));
    }
#endif
};

struct Silu {
    static __device__ __forceinline__ float value(float x) { return x * fast_sigmoid(x); }
    // σ·(1 + x·(1 − σ))
    static __device__ __forceinline__ float slope(float x) {
        float s = fast_sigmoid(x);
        return s * fmaf(x, 1.0f - s, 1.0f);
    }
};

struct Relu {
    static __device__ __forceinline__ float value(float x) { return fmaxf(x, 0.0f); }
    static __device__ __forceinline__ float slope(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};
