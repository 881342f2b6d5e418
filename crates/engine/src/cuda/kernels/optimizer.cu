// The end of a step: the norm of all gradients with the factor that clips them, and AdamW.
// Everything that changes from step to step is read from device memory, so that the launches can
// be replayed.
#include "common.cuh"

// The sum over a block, in a fixed order, in thread 0. `scratch` has 32 doubles.
__device__ __forceinline__ double block_total(double x, double* scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    if (warp != 0) return 0.0;
    x = lane < warps ? scratch[lane] : 0.0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
    return x;
}

// partials[b] = Σ x² over elements b·share to (b+1)·share, share being a multiple of 4: each
// thread adds up its few elements as floats, the rest is in double.
KERNEL __launch_bounds__(512)
gradient_squares(const float* x, double* partials, u64 elements, u32 share) {
    __shared__ double scratch[32];
    u64 start = (u64)blockIdx.x * share;
    u64 end = start + share < elements ? start + share : elements;
    float sum = 0.0f;
    u64 whole = end - (end - start) % 4;
#pragma unroll 8
    for (u64 i = start + threadIdx.x * 4; i < whole; i += blockDim.x * 4) {
        float v[4];
        load(x + i, v);
#pragma unroll
        for (int j = 0; j < 4; j++) sum = fmaf(v[j], v[j], sum);
    }
    if (whole + threadIdx.x < end) sum = fmaf(x[whole + threadIdx.x], x[whole + threadIdx.x], sum);
    double total = block_total((double)sum, scratch);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// Ends of the loss scale and the good steps after which it doubles: see the graph's LossScale.
constexpr float SMALLEST_SCALE = 1.0f, LARGEST_SCALE = 2147483648.0f, SCALE_INTERVAL = 2000.0f;

// out = [norm, factor]. The small constant is PyTorch's, and keeps a zero norm from dividing;
// without clipping max_norm is infinite. `scaling`, or null: [scale, good steps, skipped steps,
// whether this one is skipped]. The gradients are then `scale` times too large, which the factor
// takes out, and a norm that is not finite gives the factor 0.
KERNEL __launch_bounds__(1024)
gradient_norm(const double* partials, float* out, float* scaling, u32 count, float max_norm) {
    __shared__ double scratch[32];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    double total = block_total(sum, scratch);
    if (threadIdx.x != 0) return;
    double norm = sqrt(total), scale = scaling ? (double)scaling[0] : 1.0;
    norm /= scale;
    out[0] = (float)norm;
    out[1] = (float)(fmin((double)max_norm / (norm + 1e-6), 1.0) / scale);
    if (!scaling) return;
    bool finite = norm < 1.0e300;
    if (!finite) {
        out[1] = 0.0f;
        scaling[0] = fmaxf(scaling[0] * 0.5f, SMALLEST_SCALE);
        scaling[1] = 0.0f;
        scaling[2] += 1.0f;
        scaling[3] = 1.0f;
        return;
    }
    float good = scaling[1] + 1.0f;
    bool grows = good >= SCALE_INTERVAL;
    if (grows) scaling[0] = fminf(scaling[0] * 2.0f, LARGEST_SCALE);
    scaling[1] = grows ? 0.0f : good;
    scaling[3] = 0.0f;
}

struct Update {
    float factor, keep, weight1, beta2, weight2, step, root2, epsilon;

    //   g = factor·gradient                          p ← p·(1 − lr·decay)
    //   m ← m + (1 − β₁)(g − m)                      v ← β₂ v + (1 − β₂) g²
    //   p ← p − lr/c₁ · m / (√v/√c₂ + ε)             c₁, c₂ the bias corrections
    __device__ __forceinline__ void apply(float& p, float gradient, float& m, float& v) const {
        float g = gradient * factor;
        m = fmaf(weight1, g - m, m);
        v = fmaf(beta2, v, weight2 * g * g);
        float root = fmaf(sqrtf(v), root2, epsilon);
        p = p * keep - step * m / root;
    }
};

// A parameter in the table of a launch. Tensors are named by their offset from the arena's start
// in units of 256 bytes; the copy in the compute type may be absent.
struct Entry {
    u32 parameter, gradient, m, v, copy;
    u32 elements, first_block;
    float decay;
};

constexpr int ENTRIES = 120;
constexpr u32 UNIT = 256, NO_COPY = 0xffffffffu;
struct Table { Entry entries[ENTRIES]; };

// Elements of a block, four to a thread at a time.
constexpr u32 SHARE = 8192, UPDATE_THREADS = 256;

template <typename T> __device__ __forceinline__ T* at(u8* arena, u32 units) {
    return reinterpret_cast<T*>(arena + (u64)units * UNIT);
}

// AdamW for `count` parameters at once; entries are in the order of their blocks. `clipping` is
// [norm, factor], `scalars` [learning rate, c₁, c₂]. A factor of 0 marks a step that is skipped:
// a finite norm never gives it.
KERNEL __launch_bounds__(256)
adamw(const __grid_constant__ Table table, u32 count, u8* arena, const float* clipping,
      const float* scalars, float weight1, float beta2, float weight2, float epsilon) {
    Update update;
    update.factor = clipping[1];
    if (update.factor == 0.0f) return;
    // The last entry that begins at this block or before.
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (table.entries[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    const Entry& entry = table.entries[low];
    float* parameter = at<float>(arena, entry.parameter);
    const float* gradient = at<float>(arena, entry.gradient);
    float* m = at<float>(arena, entry.m);
    float* v = at<float>(arena, entry.v);
    real* copy = entry.copy == NO_COPY ? nullptr : at<real>(arena, entry.copy);
    update.keep = fmaf(-scalars[0], entry.decay, 1.0f);
    update.weight1 = weight1;
    update.beta2 = beta2;
    update.weight2 = weight2;
    update.step = scalars[0] / scalars[1];
    update.root2 = 1.0f / sqrtf(scalars[2]);
    update.epsilon = epsilon;

    u32 start = (blockIdx.x - entry.first_block) * SHARE;
    u32 end = entry.elements - start < SHARE ? entry.elements : start + SHARE;
    u32 whole = end - end % 4;
#pragma unroll 2
    for (u32 i = start + threadIdx.x * 4; i < whole; i += UPDATE_THREADS * 4) {
        float p[4], g[4], first[4], second[4];
        load(parameter + i, p);
        load(gradient + i, g);
        load(m + i, first);
        load(v + i, second);
#pragma unroll
        for (int j = 0; j < 4; j++) update.apply(p[j], g[j], first[j], second[j]);
        store(parameter + i, p);
        store(m + i, first);
        store(v + i, second);
        if (copy) store(copy + i, p);
    }
    u32 last = whole + threadIdx.x;
    if (last < end) {
        float p = parameter[last], first = m[last], second = v[last];
        update.apply(p, gradient[last], first, second);
        parameter[last] = p;
        m[last] = first;
        v[last] = second;
        if (copy) copy[last] = from_float<real>(p);
    }
}

// Floats in the compute type: weights after loading, and the bias that a product adds.
KERNEL copy_to_real(const float* from, real* to, u64 elements) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 vectors = elements / 4;
    for (u64 i = thread; i < vectors; i += threads) {
        float v[4];
        load(from + i * 4, v);
        store(to + i * 4, v);
    }
    u64 last = vectors * 4 + thread;
    if (last < elements) to[last] = from_float<real>(from[last]);
}
