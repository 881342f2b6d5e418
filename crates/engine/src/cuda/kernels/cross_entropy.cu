// The loss of each row from its logits, and the logits turned into their own gradient in place.
//
//   loss = (1 − ε)·(lse − z_t) + ε·(lse − mean z),   lse = ln Σ_j e^{z_j}
//   dz   = (softmax(z) − (1 − ε)·onehot(t) − ε/V) · weight / count · scale
//
// Rows of logits are padded to whole 16-byte vectors. The padding is readable, counts for
// nothing, and becomes zero.
#include "common.cuh"

constexpr int VECTOR = 16 / sizeof(real);
constexpr float LOWEST = -3.402823466e38f;

// The target that takes a row out of the loss.
constexpr i32 IGNORED = -100;

typedef Pack<real, VECTOR> Piece;

// A piece as logits: what the product has made, and the bias, which may be null; below every
// other after the last.
__device__ __forceinline__ void logits(const Piece& piece, const float* bias, u32 column,
                                       u32 vocabulary, float (&v)[VECTOR]) {
#pragma unroll
    for (int i = 0; i < VECTOR; i++) v[i] = to_float(piece.v[i]);
    if (bias) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (column + i < vocabulary) v[i] += bias[column + i];
    }
    // Only the last piece of a row has padding.
    if (column + VECTOR > vocabulary) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (column + i >= vocabulary) v[i] = LOWEST;
    }
}

// The logits of a thread so far: the sum is relative to the largest, and rescaled when that grows.
struct Seen {
    float largest = LOWEST, sum = 0.0f, total = 0.0f;

    __device__ __forceinline__ void take(const Piece& piece, const float* bias, u32 column,
                                         u32 vocabulary, float smoothing) {
        float v[VECTOR];
        logits(piece, bias, column, vocabulary, v);
        float top = largest;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) top = fmaxf(top, v[i]);
        sum *= exp2_fast((largest - top) * LOG2_E);
        largest = top;
        float offset = top * LOG2_E;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum += exp2_fast(fmaf(v[i], LOG2_E, -offset));
        if (smoothing > 0.0f) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (column + i < vocabulary) total += v[i];
        }
    }
};

// Groups of pieces that are all on their way before the first is looked at, and pieces of a thread in
// each: enough for all that are kept.
constexpr int GROUPS = 3, GROUP = 3;

template <int LATER> __device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// A block to a row: z[gridDim.x, stride], of which `vocabulary` columns are logits. One pass
// finds the largest logit and the sum of exponentials together, a second one writes the
// gradient, unless `gradient` is 0. The first `kept` pieces of 16 bytes stay in shared memory for
// the second pass; each thread reads back what it has written itself. With AHEAD they come there by
// themselves, all at once: there are no more than GROUPS · GROUP for a thread. A target that is no
// token makes the row's loss NaN, which the host sees in the sum. `loss_scale` multiplies the gradient
// in half precision and is null otherwise.
template <bool AHEAD>
__device__ __forceinline__ void entropy_of_row(real* z, const i32* targets, float* losses,
                                               const float* inverse_count, const float* weight,
                                               const float* bias, const float* loss_scale,
                                               u32 vocabulary, u32 stride, float smoothing,
                                               u32 gradient, u32 kept) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ float scratch[32];
    Piece* pieces = reinterpret_cast<Piece*>(memory);
    real* row = z + (u64)blockIdx.x * stride;
    i32 target = targets[blockIdx.x];
    if ((u32)target >= vocabulary) {
        if (threadIdx.x == 0)
            losses[blockIdx.x] = target == IGNORED ? 0.0f : __int_as_float(0x7fc00000);
        if (gradient) {
            float zero[VECTOR] = {};
            for (u32 column = threadIdx.x * VECTOR; column < vocabulary;
                 column += blockDim.x * VECTOR)
                store(row + column, zero);
        }
        return;
    }
    // Read before anyone writes the gradient.
    float wanted = to_float(row[target]) + (bias ? bias[target] : 0.0f);

    Seen seen;
    u32 first = threadIdx.x * VECTOR, step = blockDim.x * VECTOR;
    if (AHEAD) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                u32 column = first + (group * GROUP + i) * step;
                if (column >= vocabulary || column / VECTOR >= kept) continue;
                u32 to = (u32)__cvta_generic_to_shared(pieces + column / VECTOR);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(row + column)
                             : "memory");
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        auto look = [&](int group) {
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                u32 column = first + (group * GROUP + i) * step;
                if (column < vocabulary && column / VECTOR < kept)
                    seen.take(pieces[column / VECTOR], bias, column, vocabulary, smoothing);
            }
        };
        arrived<2>();
        look(0);
        arrived<1>();
        look(1);
        arrived<0>();
        look(2);
        // On to those that are not kept.
        while (first < vocabulary && first / VECTOR < kept) first += step;
    }
#pragma unroll 2
    for (u32 column = first; column < vocabulary; column += step) {
        Piece piece = *reinterpret_cast<const Piece*>(row + column);
        if (!AHEAD && column / VECTOR < kept) pieces[column / VECTOR] = piece;
        seen.take(piece, bias, column, vocabulary, smoothing);
    }
    float largest = seen.largest, sum = seen.sum, total = seen.total;
    float top = block_max(largest, scratch);
    sum = block_sum(sum * exp2_fast((largest - top) * LOG2_E), scratch);
    if (smoothing > 0.0f) total = block_sum(total, scratch);
    if (threadIdx.x == 0) {
        float log_sum = top + logf(sum), loss = log_sum - wanted;
        if (smoothing > 0.0f)
            loss = (1.0f - smoothing) * loss + smoothing * (log_sum - total / (float)vocabulary);
        losses[blockIdx.x] = loss;
    }
    if (!gradient) return;

    float share = *inverse_count * *weight * (loss_scale ? *loss_scale : 1.0f);
    float scale = share / sum, offset = top * LOG2_E;
    float uniform = smoothing / (float)vocabulary * share;
    float hit = (1.0f - smoothing) * share;
#pragma unroll 1
    for (u32 column = threadIdx.x * VECTOR; column < vocabulary; column += blockDim.x * VECTOR) {
        Piece piece = column / VECTOR < kept ? pieces[column / VECTOR]
                                             : *reinterpret_cast<const Piece*>(row + column);
        float v[VECTOR];
        logits(piece, bias, column, vocabulary, v);
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            v[i] = fmaf(exp2_fast(fmaf(v[i], LOG2_E, -offset)), scale, -uniform);
        if ((u32)target - column < VECTOR) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (column + i == (u32)target) v[i] -= hit;
        }
        if (column + VECTOR > vocabulary) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                if (column + i >= vocabulary) v[i] = 0.0f;
        }
        store(row + column, v);
    }
}

KERNEL __launch_bounds__(768, 2)
cross_entropy_rows(real* z, const i32* targets, float* losses, const float* inverse_count,
                   const float* weight, const float* bias, const float* loss_scale,
                   u32 vocabulary, u32 stride, float smoothing, u32 gradient, u32 kept) {
    await_earlier();
    entropy_of_row<false>(z, targets, losses, inverse_count, weight, bias, loss_scale, vocabulary,
                         stride, smoothing, gradient, kept);
}

KERNEL __launch_bounds__(768, 2)
cross_entropy_rows_ahead(real* z, const i32* targets, float* losses, const float* inverse_count,
                         const float* weight, const float* bias, const float* loss_scale,
                         u32 vocabulary, u32 stride, float smoothing, u32 gradient, u32 kept) {
    await_earlier();
    entropy_of_row<true>(z, targets, losses, inverse_count, weight, bias, loss_scale, vocabulary,
                         stride, smoothing, gradient, kept);
}

// loss (+)= Σ losses / count, without the term's weight, in a fixed order. One block.
KERNEL __launch_bounds__(1024)
cross_entropy_loss(const float* losses, const float* inverse_count, float* loss, u32 rows, u32 adds) {
    await_earlier();
    __shared__ double sums[1024];
    double sum = 0.0;
    for (u32 row = threadIdx.x; row < rows; row += blockDim.x) sum += (double)losses[row];
    sums[threadIdx.x] = sum;
    for (u32 half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) {
        float value = (float)(sums[0] * (double)*inverse_count);
        *loss = adds ? *loss + value : value;
    }
}

// db[vocabulary] (+)= Σ_rows dz[rows, stride]. Blocks of 8×128 threads: a thread has a vector of
// columns of every 128th row, so that few columns keep much of the card busy.
KERNEL __launch_bounds__(1024)
cross_entropy_bias(const real* dz, float* db, u32 rows, u32 vocabulary, u32 stride, u32 adds) {
    await_earlier();
    __shared__ float sums[128][8 * VECTOR];
    u32 column = (blockIdx.x * 8 + threadIdx.x) * VECTOR;
    float sum[VECTOR] = {};
    if (column < stride) {
        u32 count = num_turns(threadIdx.y, rows, 128);
#pragma unroll 4
        for (u32 turn = 0; turn < count; turn++) {
            float v[VECTOR];
            load(dz + (u64)(threadIdx.y + turn * 128) * stride + column, v);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum[i] += v[i];
        }
    }
    float* own = sums[threadIdx.y] + threadIdx.x * VECTOR;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) own[i] = sum[i];
    for (u32 half = 64; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y >= half) continue;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) own[i] += own[half * 8 * VECTOR + i];
    }
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        if (column + i < vocabulary) db[column + i] = adds ? db[column + i] + own[i] : own[i];
}

// logits[gridDim.y, vocabulary] += bias.
KERNEL __launch_bounds__(256) logits_bias(float* logits, const float* bias, u32 vocabulary) {
    await_earlier();
    u32 column = blockIdx.x * 256 + threadIdx.x;
    if (column < vocabulary) logits[(u64)blockIdx.y * vocabulary + column] += bias[column];
}
