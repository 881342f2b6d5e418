// Layer and RMS norm with the residual addition before them, and their gradient.
//
//   s = x + dropout(branch)      x̂ = (s − mean)·rstd      y = x̂ ⊙ γ + β
//
// RMS norm has neither mean nor β: null pointers say so. What is normed is s as it is stored,
// rounded to `real`, so that norm_apply gives y again with the same bits.
//
// Rows that are a whole number of 16-byte vectors, at most 1024 of them, take the kernels
// without a suffix: a group of threads has a row, each thread one vector of it, in registers.
// A block holds several groups (threadIdx.y) and walks over the rows, γ and β staying in
// registers. Where registers are left, a row's numbers are on their way while the row before it
// waits for its sums. Rows of 128, 256, 384 or 512 elements take those named _warp, a warp to a row,
// backwards where no parameter is trained or where that is measured to be faster. Other widths take
// the kernels named _any: a block to a row, one element at a time.
#include "common.cuh"

constexpr int VECTOR = 16 / sizeof(real);

// Waits for the threads of one group only, so that groups of a block do not stall each other.
// Barrier 0 is __syncthreads'.
__device__ __forceinline__ void group_sync() {
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "r"(blockDim.x) : "memory");
}

struct Pair { float a, b; };

// Sums over a group, in a fixed order, in every thread. One barrier is enough as long as two
// successive calls are given different scratch memory (32 pairs to a group).
__device__ __forceinline__ Pair group_sum(Pair x, Pair* scratch) {
    x.a = warp_sum(x.a);
    x.b = warp_sum(x.b);
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (warps == 1) return x;
    if (lane == 0) scratch[threadIdx.x / 32] = x;
    group_sync();
    x = lane < warps ? scratch[lane] : Pair{0.0f, 0.0f};
    x.a = warp_sum(x.a);
    x.b = warp_sum(x.b);
    return x;
}

// One function for norm_forward and norm_apply: the same bits. Without a shift `beta` is zero,
// and adding it changes nothing.
__device__ __forceinline__ float normalized(float x, float mean, float rstd, float gamma,
                                            float beta) {
    return fmaf((x - mean) * rstd, gamma, beta);
}

// A thread's vector of a row as it was read, in as few registers as it has words.
struct alignas(16) Words { u32 word[4]; };

__device__ __forceinline__ Words fetch(const real* p) { return *reinterpret_cast<const Words*>(p); }

__device__ __forceinline__ void unpack(const Words& words, float (&x)[VECTOR]) {
    Pack<real, VECTOR> pack;
    memcpy(&pack, &words, sizeof pack);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) x[i] = to_float(pack.v[i]);
}

// A thread's numbers of γ or β, which are there in whole vectors; zeroes where there are none.
template <int N>
__device__ __forceinline__ void parameters(const float* from, u32 column, bool is_there, float (&to)[N]) {
    if (is_there) {
        load(from + column, to);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = 0.0f;
    }
}

// As it will be read back.
__device__ __forceinline__ float rounded(float x) { return to_float(from_float<real>(x)); }

// ---------------------------------------------------------------- forward

// `stream` is null where there is no branch, or nobody reads it. It may be x or, without dropout, the
// branch: each thread reads its elements before it writes them.
KERNEL __launch_bounds__(1024)
norm_forward(const real* x, const real* branch, const float* gamma, const float* beta,
             real* stream, real* y, float* mean, float* rstd, const u32* random, u32 number,
             u32 threshold, u32 rows, u32 width, float epsilon) {
    await_earlier();
    __shared__ Pair scratch[2][16][32];
    Dropout dropout(random, number, threshold);
    u32 column = threadIdx.x * VECTOR;
    bool active = column < width;
    float scale = 1.0f / (float)width;
    int turn = 0;
    u32 step = gridDim.x * blockDim.y;
    Words next_x = {}, next_branch = {};
    auto bring = [&](u32 row) {
        if (!active || row >= rows) return;
        u64 at = (u64)row * width + column;
        next_x = fetch(x + at);
        if (branch) next_branch = fetch(branch + at);
    };
    u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    bring(row);
    float g[VECTOR], b[VECTOR];
    parameters(gamma, column, active, g);
    parameters(beta, column, active && beta, b);
    for (; row < rows; row += step) {
        u64 at = (u64)row * width + column;
        float s[VECTOR], added[VECTOR];
        unpack(next_x, s);
        unpack(next_branch, added);
        bring(row + step);
        if (active) {
            if (branch) {
                float factors[VECTOR];
                dropout.factors(factors, dropout.row(row), column);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) s[i] = rounded(fmaf(added[i], factors[i], s[i]));
                if (stream) store(stream + at, s);
            }
        }
        float center = 0.0f;
        if (mean) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum += s[i];
            center = group_sum(Pair{sum, 0.0f}, scratch[turn][threadIdx.y]).a * scale;
            turn ^= 1;
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float distance = active ? s[i] - center : 0.0f;
            squares = fmaf(distance, distance, squares);
        }
        float variance = group_sum(Pair{squares, 0.0f}, scratch[turn][threadIdx.y]).a * scale;
        turn ^= 1;
        float inverse = 1.0f / sqrtf(variance + epsilon);
        if (active) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                s[i] = normalized(s[i], center, inverse, g[i], b[i]);
            store(y + at, s);
        }
        if (threadIdx.x == 0) {
            if (mean) mean[row] = center;
            rstd[row] = inverse;
        }
    }
}

// A lane has four neighbours of every 128 elements.
struct alignas(4 * sizeof(real)) Quad {
    // As they were read: elements would take a register each.
    u32 words[sizeof(real)];
    __device__ __forceinline__ void unpack(float* to) const {
        Pack<real, 4> pack;
        memcpy(&pack, words, sizeof pack);
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = to_float(pack.v[i]);
    }
};

template <int QUADS> struct WarpRow {
    static constexpr int EACH = 4 * QUADS;
    Quad quads[QUADS];

    __device__ __forceinline__ void bring(const real* row) {
#pragma unroll
        for (int i = 0; i < QUADS; i++)
            quads[i] = *reinterpret_cast<const Quad*>(row + column(i));
    }
    __device__ __forceinline__ void unpack(float (&to)[EACH]) const {
#pragma unroll
        for (int i = 0; i < QUADS; i++) quads[i].unpack(to + 4 * i);
    }
    static __device__ __forceinline__ u32 column(int quad) { return (quad * 32 + threadIdx.x) * 4; }
    static __device__ __forceinline__ void write(real* row, const float (&from)[EACH]) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; j++) four[j] = from[4 * i + j];
            store(row + column(i), four);
        }
    }
    static __device__ __forceinline__ void parameters(const float* from, float (&to)[EACH]) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float four[4];
            ::parameters(from, column(i), from != nullptr, four);
#pragma unroll
            for (int j = 0; j < 4; j++) to[4 * i + j] = four[j];
        }
    }
    // γ and β from shared memory, where there are no registers for them.
    static __device__ __forceinline__ void share(const float* from, float* shared) {
        for (u32 i = threadIdx.y * 32 + threadIdx.x; i < 32 * EACH; i += blockDim.y * 32)
            shared[i] = from ? from[i] : 0.0f;
    }
    static __device__ __forceinline__ void factors(const Dropout& dropout, u32 row, float (&to)[EACH]) {
        u32 base = dropout.row(row);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float four[4];
            dropout.factors(four, base, column(i));
#pragma unroll
            for (int j = 0; j < 4; j++) to[4 * i + j] = four[j];
        }
    }
};

template <int QUADS>
__device__ __forceinline__ void warp_forward(const real* x, const real* branch, const float* gamma,
                                             const float* beta, real* stream, real* y, float* mean,
                                             float* rstd, const Dropout& dropout, u32 rows,
                                             float epsilon) {
    typedef WarpRow<QUADS> Row;
    constexpr int EACH = Row::EACH;
    constexpr u32 WIDTH = 128 * QUADS;
    u32 step = gridDim.x * blockDim.y, row = blockIdx.x * blockDim.y + threadIdx.y;
    Row next_x, next_branch;
    auto bring = [&](u32 row) {
        if (row >= rows) return;
        next_x.bring(x + (u64)row * WIDTH);
        if (branch) next_branch.bring(branch + (u64)row * WIDTH);
    };
    bring(row);
    __shared__ alignas(16) float g[WIDTH], b[WIDTH];
    Row::share(gamma, g);
    Row::share(beta, b);
    __syncthreads();
    for (; row < rows; row += step) {
        float s[EACH];
        next_x.unpack(s);
        if (branch) {
            u32 base = dropout.row(row);
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                float added[4], factors[4];
                next_branch.quads[i].unpack(added);
                dropout.factors(factors, base, Row::column(i));
#pragma unroll
                for (int j = 0; j < 4; j++) s[4 * i + j] = rounded(fmaf(added[j], factors[j], s[4 * i + j]));
            }
            bring(row + step);
            if (stream) Row::write(stream + (u64)row * WIDTH, s);
        } else {
            bring(row + step);
        }
        float center = 0.0f, squares = 0.0f;
        if (mean) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; i++) sum += s[i];
            center = warp_sum(sum) * (1.0f / WIDTH);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) squares = fmaf(s[i] - center, s[i] - center, squares);
        float inverse = 1.0f / sqrtf(warp_sum(squares) * (1.0f / WIDTH) + epsilon);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float scale[4], shift[4];
            load(g + Row::column(i), scale);
            load(b + Row::column(i), shift);
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[4 * i + j] = normalized(s[4 * i + j], center, inverse, scale[j], shift[j]);
        }
        Row::write(y + (u64)row * WIDTH, s);
        if (threadIdx.x == 0) {
            if (mean) mean[row] = center;
            rstd[row] = inverse;
        }
    }
}

#define FORWARD_WARP(quads, blocks)                                                                 \
    KERNEL __launch_bounds__(256, blocks)                                                           \
    norm_forward_warp_##quads(const real* x, const real* branch, const float* gamma,                \
                              const float* beta, real* stream, real* y, float* mean, float* rstd,   \
                              const u32* random, u32 number, u32 threshold, u32 rows, u32 width,    \
                              float epsilon) {                                                      \
        await_earlier();                                                                            \
        warp_forward<quads>(x, branch, gamma, beta, stream, y, mean, rstd,                          \
                            Dropout(random, number, threshold), rows, epsilon);                     \
    }

FORWARD_WARP(1, 4)
FORWARD_WARP(2, 4)
FORWARD_WARP(3, 3)
FORWARD_WARP(4, 3)

KERNEL __launch_bounds__(1024)
norm_forward_any(const real* x, const real* branch, const float* gamma, const float* beta,
                 real* stream, real* y, float* mean, float* rstd, const u32* random, u32 number,
                 u32 threshold, u32 rows, u32 width, float epsilon) {
    await_earlier();
    __shared__ float scratch[32];
    Dropout dropout(random, number, threshold);
    float scale = 1.0f / (float)width;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        u64 start = (u64)row * width;
        u32 base = dropout.row(row);
        float sum = 0.0f;
        for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
            float s = to_float(x[start + column]);
            if (branch) {
                s = rounded(fmaf(to_float(branch[start + column]), dropout.factor(base, column), s));
                stream[start + column] = from_float<real>(s);
            }
            sum += s;
        }
        // What a thread wrote it reads again itself.
        const real* normed = branch ? stream : x;
        float center = mean ? block_sum(sum, scratch) * scale : 0.0f;
        float squares = 0.0f;
        for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
            float distance = to_float(normed[start + column]) - center;
            squares = fmaf(distance, distance, squares);
        }
        float variance = block_sum(squares, scratch) * scale;
        float inverse = 1.0f / sqrtf(variance + epsilon);
        for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
            float s = to_float(normed[start + column]);
            float shift = beta ? beta[column] : 0.0f;
            y[start + column] =
                from_float<real>(normalized(s, center, inverse, gamma[column], shift));
        }
        if (threadIdx.x == 0) {
            if (mean) mean[row] = center;
            rstd[row] = inverse;
        }
    }
}

// ---------------------------------------------------------------- y again

KERNEL __launch_bounds__(1024)
norm_apply(const real* s, const float* mean, const float* rstd, const float* gamma,
           const float* beta, real* y, u32 rows, u32 width) {
    await_earlier();
    u32 column = threadIdx.x * VECTOR;
    if (column >= width) return;
    float g[VECTOR], b[VECTOR];
    parameters(gamma, column, true, g);
    parameters(beta, column, beta != nullptr, b);
    for (u32 row = blockIdx.x * blockDim.y + threadIdx.y; row < rows;
         row += gridDim.x * blockDim.y) {
        u64 at = (u64)row * width + column;
        float center = mean ? mean[row] : 0.0f, inverse = rstd[row];
        float v[VECTOR];
        load(s + at, v);
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            v[i] = normalized(v[i], center, inverse, g[i], b[i]);
        store(y + at, v);
    }
}

KERNEL __launch_bounds__(1024)
norm_apply_any(const real* s, const float* mean, const float* rstd, const float* gamma,
               const float* beta, real* y, u32 rows, u32 width) {
    await_earlier();
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        float center = mean ? mean[row] : 0.0f, inverse = rstd[row];
        for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
            float v = to_float(s[(u64)row * width + column]);
            float shift = beta ? beta[column] : 0.0f;
            y[(u64)row * width + column] =
                from_float<real>(normalized(v, center, inverse, gamma[column], shift));
        }
    }
}

// ---------------------------------------------------------------- backward
//
// With g = dy ⊙ γ and means over the row:
//
//   layer:  dx = ds + rstd·(g − mean(g) − x̂·mean(g ⊙ x̂))
//   RMS:    dx = ds + rstd·(g − x̂·mean(g ⊙ x̂))
//   dγ = Σ_rows dy ⊙ x̂      dβ = Σ_rows dy      dbranch = mask ⊙ dx
//
// ds is what came down the residual path, or null. dx may be dy or ds. Unless y is null it is
// written again, with the bits of norm_apply; it may be dy, and dx then ds.

// Without SUMS neither dγ nor dβ is made, and their registers hold the next row. With SUMS,
// `partials` gets dγ of each block's rows [gridDim.x, width], then for layer norm dβ likewise;
// sum_partials adds them up. There are 2·width floats of dynamic shared memory then.
template <bool SUMS>
__device__ __forceinline__ void norm_gradient(const real* dy, const real* ds, const real* s,
                                              const float* mean, const float* rstd,
                                              const float* gamma, const float* beta, real* dx,
                                              real* dbranch, real* y, float* partials,
                                              const u32* random, u32 number, u32 threshold,
                                              u32 rows, u32 width) {
    extern __shared__ float columns[];
    __shared__ Pair scratch[2][16][32];
    Dropout dropout(random, number, threshold);
    u32 column = threadIdx.x * VECTOR;
    bool inside = column < width;
    float scale = 1.0f / (float)width;
    float g[VECTOR], dgamma[VECTOR] = {}, dbeta[VECTOR] = {};
    int turn = 0;
    u32 step = gridDim.x * blockDim.y;
    Words next_dy = {}, next_s = {}, next_ds = {};
    auto bring = [&](u32 row) {
        if (!inside || row >= rows) return;
        u64 at = (u64)row * width + column;
        next_dy = fetch(dy + at);
        next_s = fetch(s + at);
        if (ds) next_ds = fetch(ds + at);
    };
    if (!SUMS) bring(blockIdx.x * blockDim.y + threadIdx.y);
    parameters(gamma, column, inside, g);
    // Groups that have no row left go round with the others: all meet at the same barriers.
    for (u32 first = blockIdx.x * blockDim.y; first < rows; first += step) {
        u32 row = first + threadIdx.y;
        bool active = inside && row < rows;
        u64 at = (u64)row * width + column;
        float center = mean && active ? mean[row] : 0.0f, inverse = active ? rstd[row] : 0.0f;
        float d[VECTOR] = {}, x_hat[VECTOR] = {};
        if (SUMS) bring(row);
        Words residual = next_ds;
        Pair sums = {0.0f, 0.0f};
        if (active) {
            unpack(next_dy, d);
            unpack(next_s, x_hat);
        }
        if (!SUMS) bring(row + step);
        if (active) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                x_hat[i] = (x_hat[i] - center) * inverse;
                if (SUMS) {
                    dgamma[i] = fmaf(d[i], x_hat[i], dgamma[i]);
                    dbeta[i] += d[i];
                }
                d[i] *= g[i];
                sums.a += d[i];
                sums.b = fmaf(d[i], x_hat[i], sums.b);
            }
            if (y) {
                float value[VECTOR];
#pragma unroll
                for (int i = 0; i < VECTOR; i++)
                    value[i] = fmaf(x_hat[i], g[i], beta ? beta[column + i] : 0.0f);
                store(y + at, value);
            }
        }
        sums = group_sum(sums, scratch[turn][threadIdx.y]);
        turn ^= 1;
        if (active) {
            float mean_g = mean ? sums.a * scale : 0.0f, mean_gx = sums.b * scale;
            float along[VECTOR];
            unpack(residual, along);
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                d[i] = fmaf(inverse, d[i] - mean_g - x_hat[i] * mean_gx, along[i]);
            store(dx + at, d);
            if (dbranch) {
                float factors[VECTOR];
                dropout.factors(factors, dropout.row(row), column);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) d[i] *= factors[i];
                store(dbranch + at, d);
            }
        }
    }
    if (!SUMS) return;
    // The groups add their sums one after another. What is first of all vectors comes first, so that
    // neighbouring threads meet different banks.
    u32 vectors = width / VECTOR;
    for (u32 group = 0; group < blockDim.y; group++) {
        if (threadIdx.y == group && inside) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                float* sums = columns + i * vectors + threadIdx.x;
                sums[0] = (group ? sums[0] : 0.0f) + dgamma[i];
                sums[width] = (group ? sums[width] : 0.0f) + dbeta[i];
            }
        }
        __syncthreads();
    }
    u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (u32 i = thread; i < width; i += blockDim.x * blockDim.y) {
        u64 at = (u64)blockIdx.x * width + i;
        const float* sums = columns + i % VECTOR * vectors + i / VECTOR;
        partials[at] = sums[0];
        if (mean) partials[(u64)gridDim.x * width + at] = sums[width];
    }
}

// Without ds: its registers hold more rows.
template <int QUADS>
__device__ __forceinline__ void warp_gradient(const real* dy, const real* s, const float* mean,
                                              const float* rstd, const float* gamma,
                                              const float* beta, real* dx, real* dbranch, real* y,
                                              const Dropout& dropout, u32 rows) {
    typedef WarpRow<QUADS> Row;
    constexpr int EACH = Row::EACH;
    constexpr u32 WIDTH = 128 * QUADS;
    u32 step = gridDim.x * blockDim.y, row = blockIdx.x * blockDim.y + threadIdx.y;
    Row next_dy, next_s;
    float next_center = 0.0f, next_inverse = 0.0f;
    auto bring = [&](u32 row) {
        if (row >= rows) return;
        next_dy.bring(dy + (u64)row * WIDTH);
        next_s.bring(s + (u64)row * WIDTH);
        if (mean) next_center = mean[row];
        next_inverse = rstd[row];
    };
    bring(row);
    float g[EACH];
    Row::parameters(gamma, g);
    for (; row < rows; row += step) {
        float d[EACH], x_hat[EACH];
        float center = next_center, inverse = next_inverse;
        next_dy.unpack(d);
        next_s.unpack(x_hat);
        bring(row + step);
        float sum = 0.0f, along_x = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            x_hat[i] = (x_hat[i] - center) * inverse;
            d[i] *= g[i];
            sum += d[i];
            along_x = fmaf(d[i], x_hat[i], along_x);
        }
        if (y) {
            float value[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++)
                value[i] = fmaf(x_hat[i], g[i], beta ? beta[Row::column(i / 4) + i % 4] : 0.0f);
            Row::write(y + (u64)row * WIDTH, value);
        }
        float mean_g = mean ? warp_sum(sum) * (1.0f / WIDTH) : 0.0f;
        float mean_gx = warp_sum(along_x) * (1.0f / WIDTH);
#pragma unroll
        for (int i = 0; i < EACH; i++) d[i] = inverse * (d[i] - mean_g - x_hat[i] * mean_gx);
        Row::write(dx + (u64)row * WIDTH, d);
        if (dbranch) {
            float factors[EACH];
            Row::factors(dropout, row, factors);
#pragma unroll
            for (int i = 0; i < EACH; i++) d[i] *= factors[i];
            Row::write(dbranch + (u64)row * WIDTH, d);
        }
    }
}

// With ds and the sums of dγ and dβ, `partials` as above; γ and, in the end, the sums of the block's
// warps are in shared memory.
template <int QUADS>
__device__ __forceinline__ void warp_gradient_sums(const real* dy, const real* ds, const real* s,
                                                   const float* mean, const float* rstd,
                                                   const float* gamma, const float* beta, real* dx,
                                                   real* dbranch, real* y, float* partials,
                                                   const Dropout& dropout, u32 rows) {
    typedef WarpRow<QUADS> Row;
    constexpr int EACH = Row::EACH;
    constexpr u32 WIDTH = 128 * QUADS;
    __shared__ alignas(16) float g[WIDTH], sums[2 * WIDTH];
    u32 step = gridDim.x * blockDim.y, row = blockIdx.x * blockDim.y + threadIdx.y;
    Row next_dy, next_s, next_ds = {};
    float next_center = 0.0f, next_inverse = 0.0f;
    auto bring = [&](u32 row) {
        if (row >= rows) return;
        next_dy.bring(dy + (u64)row * WIDTH);
        next_s.bring(s + (u64)row * WIDTH);
        if (ds) next_ds.bring(ds + (u64)row * WIDTH);
        if (mean) next_center = mean[row];
        next_inverse = rstd[row];
    };
    bring(row);
    Row::share(gamma, g);
    __syncthreads();
    float dgamma[EACH] = {}, dbeta[EACH] = {};
    for (; row < rows; row += step) {
        // x̂ is made twice: registers for all of it would be too many.
        float d[EACH];
        float center = next_center, inverse = next_inverse;
        Row residual = next_ds, own = next_s;
        next_dy.unpack(d);
        bring(row + step);
        float sum = 0.0f, along_x = 0.0f;
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float scale[4], value[4], x_hat[4];
            load(g + Row::column(i), scale);
            own.quads[i].unpack(x_hat);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = 4 * i + j;
                x_hat[j] = (x_hat[j] - center) * inverse;
                dgamma[at] = fmaf(d[at], x_hat[j], dgamma[at]);
                dbeta[at] += d[at];
                d[at] *= scale[j];
                sum += d[at];
                along_x = fmaf(d[at], x_hat[j], along_x);
                if (y) value[j] = fmaf(x_hat[j], scale[j], beta ? beta[Row::column(i) + j] : 0.0f);
            }
            if (y) store(y + (u64)row * WIDTH + Row::column(i), value);
        }
        float mean_g = mean ? warp_sum(sum) * (1.0f / WIDTH) : 0.0f;
        float mean_gx = warp_sum(along_x) * (1.0f / WIDTH);
        u32 base = dropout.row(row);
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            float along[4], x_hat[4], four[4];
            residual.quads[i].unpack(along);
            own.quads[i].unpack(x_hat);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                x_hat[j] = (x_hat[j] - center) * inverse;
                four[j] = fmaf(inverse, d[4 * i + j] - mean_g - x_hat[j] * mean_gx, along[j]);
            }
            store(dx + (u64)row * WIDTH + Row::column(i), four);
            if (dbranch) {
                float factors[4];
                dropout.factors(factors, base, Row::column(i));
#pragma unroll
                for (int j = 0; j < 4; j++) four[j] *= factors[j];
                store(dbranch + (u64)row * WIDTH + Row::column(i), four);
            }
        }
    }
    // The warps add their sums one after another.
    auto add = [](float* to, const float* own, bool starts) {
        float four[4] = {};
        if (!starts) load(to, four);
#pragma unroll
        for (int j = 0; j < 4; j++) four[j] += own[j];
        store(to, four);
    };
    for (u32 warp = 0; warp < blockDim.y; warp++) {
        if (threadIdx.y == warp) {
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                add(sums + Row::column(i), dgamma + 4 * i, warp == 0);
                add(sums + WIDTH + Row::column(i), dbeta + 4 * i, warp == 0);
            }
        }
        __syncthreads();
    }
    for (u32 i = threadIdx.y * 32 + threadIdx.x; i < WIDTH; i += blockDim.y * 32) {
        u64 at = (u64)blockIdx.x * WIDTH + i;
        partials[at] = sums[i];
        if (mean) partials[(u64)gridDim.x * WIDTH + at] = sums[WIDTH + i];
    }
}

#define BACKWARD_SUMS_WARP(quads, blocks)                                                           \
    KERNEL __launch_bounds__(256, blocks)                                                           \
    norm_backward_sums_warp_##quads(const real* dy, const real* ds, const real* s,                  \
                                    const float* mean, const float* rstd, const float* gamma,       \
                                    const float* beta, real* dx, real* dbranch, real* y,            \
                                    float* partials, const u32* random, u32 number, u32 threshold,  \
                                    u32 rows, u32 width) {                                          \
        await_earlier();                                                                            \
        warp_gradient_sums<quads>(dy, ds, s, mean, rstd, gamma, beta, dx, dbranch, y, partials,     \
                                  Dropout(random, number, threshold), rows);                        \
    }

BACKWARD_SUMS_WARP(1, 2)
BACKWARD_SUMS_WARP(2, 2)
BACKWARD_SUMS_WARP(3, 2)
BACKWARD_SUMS_WARP(4, 2)

#define BACKWARD_WARP(quads, blocks)                                                                \
    KERNEL __launch_bounds__(256, blocks)                                                           \
    norm_backward_warp_##quads(const real* dy, const real* s, const float* mean, const float* rstd, \
                               const float* gamma, const float* beta, real* dx, real* dbranch,      \
                               real* y, const u32* random, u32 number, u32 threshold, u32 rows,     \
                               u32 width) {                                                         \
        await_earlier();                                                                            \
        warp_gradient<quads>(dy, s, mean, rstd, gamma, beta, dx, dbranch, y,                        \
                             Dropout(random, number, threshold), rows);                             \
    }

BACKWARD_WARP(1, 4)
BACKWARD_WARP(2, 4)
BACKWARD_WARP(3, 3)
BACKWARD_WARP(4, 2)

KERNEL __launch_bounds__(1024)
norm_backward(const real* dy, const real* ds, const real* s, const float* mean,
              const float* rstd, const float* gamma, const float* beta, real* dx, real* dbranch,
              real* y, const u32* random, u32 number, u32 threshold, u32 rows, u32 width) {
    await_earlier();
    norm_gradient<false>(dy, ds, s, mean, rstd, gamma, beta, dx, dbranch, y, nullptr, random,
                         number, threshold, rows, width);
}

KERNEL __launch_bounds__(1024)
norm_backward_sums(const real* dy, const real* ds, const real* s, const float* mean,
                   const float* rstd, const float* gamma, const float* beta, real* dx,
                   real* dbranch, real* y, float* partials, const u32* random, u32 number,
                   u32 threshold, u32 rows, u32 width) {
    await_earlier();
    norm_gradient<true>(dy, ds, s, mean, rstd, gamma, beta, dx, dbranch, y, partials, random,
                        number, threshold, rows, width);
}

KERNEL __launch_bounds__(1024)
norm_backward_any(const real* dy, const real* ds, const real* s, const float* mean,
                  const float* rstd, const float* gamma, const float* beta, real* dx,
                  real* dbranch, real* y, const u32* random, u32 number, u32 threshold,
                  u32 rows, u32 width) {
    await_earlier();
    __shared__ float scratch[32];
    Dropout dropout(random, number, threshold);
    float scale = 1.0f / (float)width;
    for (u32 row = blockIdx.x; row < rows; row += gridDim.x) {
        u64 start = (u64)row * width;
        u32 base = dropout.row(row);
        float center = mean ? mean[row] : 0.0f, inverse = rstd[row];
        float sum_g = 0.0f, sum_gx = 0.0f;
        for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
            float g = to_float(dy[start + column]) * gamma[column];
            sum_g += g;
            sum_gx = fmaf(g, (to_float(s[start + column]) - center) * inverse, sum_gx);
        }
        float mean_g = mean ? block_sum(sum_g, scratch) * scale : 0.0f;
        float mean_gx = block_sum(sum_gx, scratch) * scale;
        for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
            float g = to_float(dy[start + column]) * gamma[column];
            float x_hat = (to_float(s[start + column]) - center) * inverse;
            float residual = ds ? to_float(ds[start + column]) : 0.0f;
            float d = fmaf(inverse, g - mean_g - x_hat * mean_gx, residual);
            dx[start + column] = from_float<real>(d);
            if (y) {
                float shift = beta ? beta[column] : 0.0f;
                y[start + column] = from_float<real>(fmaf(x_hat, gamma[column], shift));
            }
            if (dbranch)
                dbranch[start + column] = from_float<real>(d * dropout.factor(base, column));
        }
    }
}

// The partial sums of dγ and dβ, for widths that norm_backward does not take; before
// norm_backward_any, which may overwrite dy. Block 32×8: a column to a thread, every eighth of
// the rows of its block; blockIdx.y is the block of rows.
KERNEL __launch_bounds__(256)
norm_partials_any(const real* dy, const real* s, const float* mean, const float* rstd,
                  float* partials, u32 rows, u32 width) {
    await_earlier();
    __shared__ Pair sums[8][32];
    u32 column = blockIdx.x * 32 + threadIdx.x;
    Pair sum = {0.0f, 0.0f};
    if (column < width) {
        for (u64 row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            float d = to_float(dy[row * width + column]);
            float center = mean ? mean[row] : 0.0f;
            sum.a = fmaf(d, (to_float(s[row * width + column]) - center) * rstd[row], sum.a);
            sum.b += d;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
    for (int i = 1; i < 8; i++) {
        sum.a += sums[i][threadIdx.x].a;
        sum.b += sums[i][threadIdx.x].b;
    }
    u64 at = (u64)blockIdx.y * width + column;
    partials[at] = sum.a;
    if (mean) partials[(u64)gridDim.y * width + at] = sum.b;
}
