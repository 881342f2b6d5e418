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

// A block to a row: z[gridDim.x, stride], of which `vocabulary` columns are logits. One pass
// finds the largest logit and the sum of exponentials together, a second one writes the
// gradient, unless `gradient` is 0. A target that is no token makes the row's loss NaN, which
// the host sees in the sum. `loss_scale` multiplies the gradient in half precision and is null otherwise.
KERNEL __launch_bounds__(1024)
cross_entropy_rows(real* z, const i32* targets, float* losses, const float* inverse_count,
                   const float* weight, const float* loss_scale, u32 vocabulary, u32 stride, float smoothing, u32 gradient) {
    __shared__ float scratch[32];
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
    float wanted = to_float(row[target]);

    // The sum is relative to the largest logit so far, and rescaled when that grows.
    float largest = LOWEST, sum = 0.0f, total = 0.0f;
#pragma unroll 2
    for (u32 column = threadIdx.x * VECTOR; column < vocabulary; column += blockDim.x * VECTOR) {
        float v[VECTOR];
        load(row + column, v);
        float top = largest;
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (column + i < vocabulary) top = fmaxf(top, v[i]);
        sum *= __expf(largest - top);
        largest = top;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            if (column + i < vocabulary) {
                sum += __expf(v[i] - top);
                total += v[i];
            }
        }
    }
    float top = block_max(largest, scratch);
    sum = block_sum(sum * __expf(largest - top), scratch);
    if (smoothing > 0.0f) total = block_sum(total, scratch);
    if (threadIdx.x == 0) {
        float log_sum = top + logf(sum), loss = log_sum - wanted;
        if (smoothing > 0.0f)
            loss = (1.0f - smoothing) * loss + smoothing * (log_sum - total / (float)vocabulary);
        losses[blockIdx.x] = loss;
    }
    if (!gradient) return;

    float share = *inverse_count * *weight * (loss_scale ? *loss_scale : 1.0f);
    float scale = share / sum;
    float uniform = smoothing / (float)vocabulary * share;
    float hit = (1.0f - smoothing) * share;
#pragma unroll 2
    for (u32 column = threadIdx.x * VECTOR; column < vocabulary; column += blockDim.x * VECTOR) {
        float v[VECTOR];
        load(row + column, v);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float d = fmaf(__expf(v[i] - top), scale, -uniform);
            if (column + i == (u32)target) d -= hit;
            v[i] = column + i < vocabulary ? d : 0.0f;
        }
        store(row + column, v);
    }
}

// loss (+)= Σ losses / count, without the term's weight, in a fixed order. One block.
KERNEL __launch_bounds__(1024)
cross_entropy_loss(const float* losses, const float* inverse_count, float* loss, u32 rows, u32 adds) {
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
