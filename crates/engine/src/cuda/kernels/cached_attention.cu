// Attention of tokens that follow others, whose keys and values are in a cache.
//
//   o_t = Σ_s softmax_s(scale·⟨q_t, k_s⟩) v_s     s from max(0, p_t − window + 1) to p_t
//
// q [B, T, heads·width], k and v [B, T, kv_heads·width] with rows `q_stride` and `kv_stride`
// elements apart; keys and values [B, kv_heads, slots, width], where position p has slot
// p mod slots; positions [B, T], whose first of each row is p_0, p_t = p_0 + t. With a `selection`
// [B, T, ⌈slots/32⌉] a query sees only the slots whose bits are set. Launches do not
// depend on how many tokens the cache holds: the blocks that share a query's keys divide those
// that there are.

#include "common.cuh"

constexpr int WARPS = 4;
// Keys that a warp has in flight.
constexpr int KEYS = 4;

// Puts the heads of the new tokens into their slots. A thread has an element of k and of v.
KERNEL __launch_bounds__(256) cached_attention_append(
    const real* k, const real* v, const i32* positions, real* keys, real* values, u32 kv_stride,
    u32 batch, u32 seq, u32 kv_heads, u32 width, u32 slots) {
    await_earlier();
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    u32 columns = kv_heads * width;
    if (index >= (u64)batch * seq * columns) return;
    u32 column = index % columns;
    u64 row = index / columns;
    u32 b = row / seq, t = row % seq;
    u32 slot = ((u32)max(positions[(u64)b * seq], 0) + t) % slots;
    u64 to = (((u64)b * kv_heads + column / width) * slots + slot) * width + column % width;
    keys[to] = k[row * kv_stride + column];
    values[to] = v[row * kv_stride + column];
}

// What a warp knows of a query: the sum of values, weighted by e^{s − largest}, a lane having
// every 32nd column, and the sum of the weights.
template <int E> struct Sum {
    float values[E], largest, weights;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int e = 0; e < E; e++) values[e] = 0.0f;
        largest = MINUS_INFINITY;
        weights = 0.0f;
    }

    // By what sums shrink that were made with `from` as the largest score.
    __device__ __forceinline__ static float shrink(float from, float to) {
        return from == MINUS_INFINITY ? 0.0f : __expf(from - to);
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int e = 0; e < E; e++) values[e] *= factor;
        weights *= factor;
    }
};

// Grid (heads·T, splits, B): a block has one query of one head, its warps every (4·splits)th group
// of KEYS keys. With one split it writes o, otherwise its share into `partial`
// [B, T, heads, splits, width + 2]: values, largest score, weights.
template <int E>
__device__ __forceinline__ void attend(
    const real* q, const i32* positions, const real* keys, const real* values, real* o,
    float* partial, u32 q_stride, u32 seq, u32 heads, u32 kv_heads, u32 width, u32 slots,
    u32 window, float scale, const u32* selection) {
    __shared__ Sum<E> sums[WARPS][32];
    u32 split = blockIdx.y, splits = gridDim.y, head = blockIdx.x % heads;
    u32 t = blockIdx.x / heads, b = blockIdx.z;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 row = (u64)b * seq + t;
    u32 position = (u32)max(positions[(u64)b * seq], 0) + t;
    u32 first = position + 1 > window ? position + 1 - window : 0;
    u64 cache = ((u64)b * kv_heads + head / (heads / kv_heads)) * slots * width;

    if (selection) selection += row * ((slots + 31) / 32);

    float query[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        u32 d = lane + 32 * e;
        query[e] = d < width ? to_float(q[row * q_stride + (u64)head * width + d]) * scale : 0.0f;
    }
    Sum<E> sum;
    sum.clear();
    u32 step = WARPS * splits * KEYS;
    for (u32 s = first + (split * WARPS + warp) * KEYS; s <= position; s += step) {
        // Those of the keys that the query sees, a bit for each; where it sees none, there is
        // nothing to read.
        u32 seen = 0u;
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            u32 key = s + i;
            bool sees = key <= position;
            if (sees && selection) sees = selection[key / 32] >> (key % 32) & 1u;
            seen |= (u32)sees << i;
        }
        if (seen == 0u) continue;
        float score[KEYS];
        u64 place[KEYS];
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            place[i] = cache + (u64)(min(s + i, position) % slots) * width;
            float product = 0.0f;
#pragma unroll
            for (int e = 0; e < E; e++) {
                u32 d = lane + 32 * e;
                if (d < width) product = fmaf(query[e], to_float(keys[place[i] + d]), product);
            }
            score[i] = product;
        }
        float largest = sum.largest;
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            score[i] = seen >> i & 1u ? warp_sum(score[i]) : MINUS_INFINITY;
            largest = fmaxf(largest, score[i]);
        }
        sum.scale(Sum<E>::shrink(sum.largest, largest));
        sum.largest = largest;
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            float weight = Sum<E>::shrink(score[i], largest);
            sum.weights += weight;
#pragma unroll
            for (int e = 0; e < E; e++) {
                u32 d = lane + 32 * e;
                if (d < width)
                    sum.values[e] = fmaf(weight, to_float(values[place[i] + d]), sum.values[e]);
            }
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int other = 1; other < WARPS; other++) {
        Sum<E> more = sums[other][lane];
        float largest = fmaxf(sum.largest, more.largest);
        sum.scale(Sum<E>::shrink(sum.largest, largest));
        more.scale(Sum<E>::shrink(more.largest, largest));
#pragma unroll
        for (int e = 0; e < E; e++) sum.values[e] += more.values[e];
        sum.weights += more.weights;
        sum.largest = largest;
    }
    if (splits == 1) {
        float inverse = 1.0f / sum.weights;
        real* out = o + (row * heads + head) * width;
#pragma unroll
        for (int e = 0; e < E; e++) {
            u32 d = lane + 32 * e;
            if (d < width) out[d] = from_float<real>(sum.values[e] * inverse);
        }
        return;
    }
    float* out = partial + ((row * heads + head) * splits + split) * (width + 2);
#pragma unroll
    for (int e = 0; e < E; e++) {
        u32 d = lane + 32 * e;
        if (d < width) out[d] = sum.values[e];
    }
    if (lane == 0) {
        out[width] = sum.largest;
        out[width + 1] = sum.weights;
    }
}

#define CACHED_ATTENTION_KERNEL(E)                                                               \
    KERNEL __launch_bounds__(128) cached_attention_##E(                                          \
        const real* q, const i32* positions, const real* keys, const real* values, real* o,      \
        float* partial, u32 q_stride, u32 seq, u32 heads, u32 kv_heads, u32 width, u32 slots,    \
        u32 window, float scale, const u32* selection) {                                         \
        await_earlier();                                                                         \
        attend<E>(                                                                               \
            q, positions, keys, values, o, partial, q_stride, seq, heads, kv_heads, width,       \
            slots, window, scale, selection);                                                    \
    }

CACHED_ATTENTION_KERNEL(1)
CACHED_ATTENTION_KERNEL(2)
CACHED_ATTENTION_KERNEL(4)
CACHED_ATTENTION_KERNEL(8)
CACHED_ATTENTION_KERNEL(16)

// o [B, T, heads, width] from the shares of each query's blocks, added in their order. A block has
// a query of a head.
KERNEL __launch_bounds__(128) cached_attention_combine(
    const float* partial, real* o, u32 splits, u32 width) {
    await_earlier();
    u64 query = blockIdx.x;
    partial += query * splits * (width + 2);
    float largest = MINUS_INFINITY, weights = 0.0f;
    for (u32 split = 0; split < splits; split++)
        largest = fmaxf(largest, partial[split * (width + 2) + width]);
    for (u32 split = 0; split < splits; split++) {
        const float* share = partial + split * (width + 2);
        weights += share[width + 1] * Sum<1>::shrink(share[width], largest);
    }
    float inverse = 1.0f / weights;
    for (u32 d = threadIdx.x; d < width; d += blockDim.x) {
        float sum = 0.0f;
        for (u32 split = 0; split < splits; split++) {
            const float* share = partial + split * (width + 2);
            sum = fmaf(share[d], Sum<1>::shrink(share[width], largest), sum);
        }
        o[query * width + d] = from_float<real>(sum * inverse);
    }
}
