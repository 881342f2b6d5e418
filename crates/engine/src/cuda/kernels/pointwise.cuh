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
    // Polynomials fitted for elements of 16 bits, one exponential each.
    //
    // max(x, 0) − a·Φ(−a) with a = |x| and Φ(−a) = 2^p(a): to 8.5e-5 of the result, a sixth of what
    // rounding to fp16 costs, and beyond a = 4 to 2.5e-7 in all.
    static __device__ __forceinline__ float value(float x) {
        float a = fabsf(x);
        float p = fmaf(-3.2020999e-4f, a, 5.8243003e-3f);
        p = fmaf(p, a, -4.8226973e-2f);
        p = fmaf(p, a, -0.46413527f);
        p = fmaf(p, a, -1.1491687f);
        p = fmaf(p, a, -1.0001215f);
        return fmaf(-a, exp2_fast(p), fmaxf(x, 0.0f));
    }
    // Φ + x·φ, φ the normal density; of −a it is p(a)·exp(−a²/2), to 6.3e-5, of a what is left of 1.
    static __device__ __forceinline__ float slope(float x) {
        float below = slope_below(x);
        return x < 0.0f ? below : 1.0f - below;
    }
    // The slope at −|x|.
    static __device__ __forceinline__ float slope_below(float x) {
        float a = fabsf(x), exponential = exp2_fast(x * (-0.5f * LOG2_E) * x);
        float p = fmaf(-2.7395853e-3f, a, 2.5280068e-2f);
        p = fmaf(p, a, -9.966135e-2f);
        p = fmaf(p, a, 0.23543266f);
        p = fmaf(p, a, -0.79550962f);
        p = fmaf(p, a, 0.49993727f);
        return p * exponential;
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
