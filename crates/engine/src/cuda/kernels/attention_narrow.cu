// Softmax attention for heads of 2, 4 or 8 columns, in single precision, where a query sees all
// keys or those up to itself. The equations are those of attention_tensor.cu:
//
//   p_ts = exp(scale·⟨q_t, k_s⟩ − lse_t),   o_t = Σ_s m_ts·p_ts·v_s
//   δ_t = ⟨do_t, o_t⟩,   ds_ts = p_ts·(m_ts·⟨do_t, v_s⟩ − δ_t)
//   dq_t = scale·Σ_s ds_ts·k_s,   dk_s = scale·Σ_t ds_ts·q_t,   dv_s = Σ_t m_ts·p_ts·do_t
//
// A head is so narrow that a position fits into registers, and sums need nobody else: a thread has
// two positions of one side (queries, or for dk and dv keys) and goes through those of the other,
// which all lanes of a warp read from shared memory at the same address. Scores are in units of
// ln 2, the scale being in the queries, so that an exponential is one instruction.
//
// q [B, T, heads·W] with rows q_stride elements apart, k and v [B, T, kv_heads·W] with rows
// kv_stride apart, o and do [B, T, heads·W], lse [B, heads, T]; gradients as what they belong to.
// Grid: (tiles of positions × heads × B), where a tile is BLOCK positions.
#include "common.cuh"

constexpr int THREADS = 128;
// Positions of a thread, of a warp and of a block.
constexpr int EACH = 2;
constexpr int WARP = 32 * EACH;
constexpr int BLOCK = THREADS * EACH;
// Positions of the other side in shared memory, one read by each thread, and those that are worked
// on together.
constexpr int TILE = THREADS;
constexpr int STEP = 8;

#define PARAMETERS                                                                                 \
    u32 q_stride, u32 kv_stride, int seq, int heads, int kv_heads, float scale, int causal,        \
        const u32 *random, u32 stream, u32 threshold
#define ARGUMENTS                                                                                  \
    q_stride, kv_stride, seq, heads, kv_heads, scale, causal, random, stream, threshold

// Floats of a key with its value in shared memory, and of a query: q, do, lse, δ and the row's
// random number, in whole pieces of 16 bytes.
constexpr __device__ int key_size(int width) { return 2 * width; }
constexpr __device__ int query_size(int width) { return (2 * width + 3 + 3) / 4 * 4; }

template <int W> __device__ __forceinline__ float dot(const float (&a)[W], const float* b) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int d = 1; d < W; d++) sum = fmaf(a[d], b[d], sum);
    return sum;
}

template <int W>
__device__ __forceinline__ void add_scaled(float (&sum)[W], float factor, const float* x) {
#pragma unroll
    for (int d = 0; d < W; d++) sum[d] = fmaf(factor, x[d], sum[d]);
}

// N floats of shared memory, in pieces of 16 bytes where there are as many.
template <int N> __device__ __forceinline__ void read_shared(const float* from, float (&x)[N]) {
    Pack<float, N> pack = *reinterpret_cast<const Pack<float, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = pack.v[i];
}

// What a block works on: positions of one head of one sequence. Where the order is causal, the
// blocks with the most work begin: the last queries, the first keys.
struct Place {
    int b, head, first;

    __device__ __forceinline__ Place(int seq, int heads, bool last_first) {
        int tiles = (seq + BLOCK - 1) / BLOCK, others = gridDim.x / tiles;
        int tile = blockIdx.x / others, index = blockIdx.x % others;
        b = index / heads;
        head = index % heads;
        first = (last_first ? tiles - 1 - tile : tile) * BLOCK;
    }

    // The first position of this thread's warp; its own are `lane` and 32 more behind it.
    __device__ __forceinline__ int warp_first() const {
        return first + (int)(threadIdx.x / 32) * WARP;
    }
};

// A tile of keys and values, from `k0` on: rows of W and W floats. Zeroes behind the last.
template <int W>
__device__ __forceinline__ void read_keys(float* tile, const real* k, const real* v, u32 stride,
                                          int k0, int seq) {
    float key[W] = {}, value[W] = {};
    int s = k0 + threadIdx.x;
    if (s < seq) {
        load(k + (u64)s * stride, key);
        load(v + (u64)s * stride, value);
    }
    store(tile + threadIdx.x * 2 * W, key);
    store(tile + threadIdx.x * 2 * W + W, value);
}

// ---------------------------------------------------------------- forward

template <int W, bool DROPS>
__device__ __forceinline__ void forward(float* tile, const real* q, const real* k, const real* v,
                                        real* o, float* lse, PARAMETERS) {
    ScoreDropout dropout(random, stream, threshold, heads, false);
    Place at(seq, heads, true);
    u32 head = at.b * heads + at.head;
    int group = heads / kv_heads, lane = threadIdx.x % 32, warp_first = at.warp_first();
    u64 kv_start = (u64)at.b * seq * kv_stride + (u64)(at.head / group) * W;
    q += (u64)at.b * seq * q_stride + (u64)at.head * W;
    k += kv_start;
    v += kv_start;

    // The last key that each query sees; those behind the sequence's end compute something that
    // nobody reads.
    int t[EACH], last[EACH];
    float query[EACH][W] = {}, out[EACH][W] = {}, top[EACH], sum[EACH] = {};
    u32 base[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        t[i] = warp_first + i * 32 + lane;
        last[i] = causal ? min(t[i], seq - 1) : seq - 1;
        top[i] = MINUS_INFINITY;
        base[i] = DROPS ? dropout.row(head * seq + t[i]) : 0u;
        if (t[i] < seq) load(q + (u64)t[i] * q_stride, query[i]);
#pragma unroll
        for (int d = 0; d < W; d++) query[i][d] *= scale * LOG2_E;
    }
    // The first key that some query of the warp does not see, and the last that one sees.
    int common = causal ? min(warp_first, seq - 1) + 1 : seq;
    int warp_last = warp_first >= seq ? -1 : causal ? min(warp_first + WARP, seq) - 1 : seq - 1;
    int end = causal ? min(at.first + BLOCK, seq) : seq;
    for (int k0 = 0; k0 < end; k0 += TILE) {
        __syncthreads();
        read_keys<W>(tile, k, v, kv_stride, k0, seq);
        __syncthreads();
        for (int s0 = k0; s0 < k0 + TILE && s0 <= warp_last; s0 += STEP) {
            const float* keys = tile + (s0 - k0) * 2 * W;
            float score[EACH][STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float key[W];
                read_shared(keys + j * 2 * W, key);
#pragma unroll
                for (int i = 0; i < EACH; i++) score[i][j] = dot(query[i], key);
            }
            if (s0 + STEP > common) {
#pragma unroll
                for (int j = 0; j < STEP; j++) {
#pragma unroll
                    for (int i = 0; i < EACH; i++)
                        if (s0 + j > last[i]) score[i][j] = MINUS_INFINITY;
                }
            }
            // Every query sees the first key, so there is a largest score after the first step.
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float before = top[i];
#pragma unroll
                for (int j = 0; j < STEP; j++) top[i] = fmaxf(top[i], score[i][j]);
                float shrink = exp2_fast(before - top[i]);
                sum[i] *= shrink;
#pragma unroll
                for (int d = 0; d < W; d++) out[i][d] *= shrink;
            }
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float value[W];
                read_shared(keys + j * 2 * W + W, value);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    float p = exp2_fast(score[i][j] - top[i]);
                    sum[i] += p;
                    if (DROPS && !dropout.keeps(base[i], s0 + j)) p = 0.0f;
                    add_scaled(out[i], p, value);
                }
            }
        }
    }
    u64 o_stride = (u64)heads * W;
    o += (u64)at.b * seq * o_stride + (u64)at.head * W;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (t[i] >= seq) continue;
        float share = (DROPS ? dropout.scale : 1.0f) / sum[i];
#pragma unroll
        for (int d = 0; d < W; d++) out[i][d] *= share;
        store(o + (u64)t[i] * o_stride, out[i]);
        lse[(u64)head * seq + t[i]] = fmaf(top[i], LN_2, logf(sum[i]));
    }
}

// ---------------------------------------------------------------- backward

template <int W, bool DROPS>
__device__ __forceinline__ void backward_queries(float* tile, const real* d_o, const real* q,
                                                 const real* k, const real* v, const real* o,
                                                 const float* lse, real* dq, PARAMETERS) {
    ScoreDropout dropout(random, stream, threshold, heads, false);
    Place at(seq, heads, true);
    u32 head = at.b * heads + at.head;
    int group = heads / kv_heads, lane = threadIdx.x % 32, warp_first = at.warp_first();
    u64 kv_start = (u64)at.b * seq * kv_stride + (u64)(at.head / group) * W;
    u64 q_start = (u64)at.b * seq * q_stride + (u64)at.head * W, o_stride = (u64)heads * W;
    u64 o_start = (u64)at.b * seq * o_stride + (u64)at.head * W;

    int t[EACH], last[EACH];
    float query[EACH][W] = {}, gradient[EACH][W] = {}, sum[EACH][W] = {};
    float delta[EACH], offset[EACH];
    u32 base[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        t[i] = warp_first + i * 32 + lane;
        last[i] = causal ? min(t[i], seq - 1) : seq - 1;
        base[i] = DROPS ? dropout.row(head * seq + t[i]) : 0u;
        float output[W] = {};
        offset[i] = 0.0f;
        if (t[i] < seq) {
            load(q + q_start + (u64)t[i] * q_stride, query[i]);
            load(d_o + o_start + (u64)t[i] * o_stride, gradient[i]);
            load(o + o_start + (u64)t[i] * o_stride, output);
            offset[i] = lse[(u64)head * seq + t[i]] * LOG2_E;
        }
        delta[i] = dot(gradient[i], output);
#pragma unroll
        for (int d = 0; d < W; d++) {
            query[i][d] *= scale * LOG2_E;
            // What the mask multiplies by, where it keeps.
            if (DROPS) gradient[i][d] *= dropout.scale;
        }
    }
    int common = causal ? min(warp_first, seq - 1) + 1 : seq;
    int warp_last = warp_first >= seq ? -1 : causal ? min(warp_first + WARP, seq) - 1 : seq - 1;
    int end = causal ? min(at.first + BLOCK, seq) : seq;
    for (int k0 = 0; k0 < end; k0 += TILE) {
        __syncthreads();
        read_keys<W>(tile, k + kv_start, v + kv_start, kv_stride, k0, seq);
        __syncthreads();
        for (int s0 = k0; s0 < k0 + TILE && s0 <= warp_last; s0 += STEP) {
            bool all = s0 + STEP <= common;
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float pair[2 * W];
                read_shared(tile + (s0 - k0 + j) * 2 * W, pair);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    float p = exp2_fast(dot(query[i], pair) - offset[i]);
                    float dp = dot(gradient[i], pair + W);
                    if (DROPS && !dropout.keeps(base[i], s0 + j)) dp = 0.0f;
                    float ds = p * (dp - delta[i]);
                    if (!all && s0 + j > last[i]) ds = 0.0f;
                    add_scaled(sum[i], ds, pair);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (t[i] >= seq) continue;
#pragma unroll
        for (int d = 0; d < W; d++) sum[i][d] *= scale;
        store(dq + q_start + (u64)t[i] * q_stride, sum[i]);
    }
}

template <int W, bool DROPS>
__device__ __forceinline__ void backward_keys(float* tile, const real* d_o, const real* q,
                                              const real* k, const real* v, const real* o,
                                              const float* lse, real* dk, real* dv, PARAMETERS) {
    constexpr int SIZE = query_size(W);
    ScoreDropout dropout(random, stream, threshold, heads, false);
    Place at(seq, kv_heads, false);
    int group = heads / kv_heads, lane = threadIdx.x % 32, warp_first = at.warp_first();
    u64 kv_start = (u64)at.b * seq * kv_stride + (u64)at.head * W, o_stride = (u64)heads * W;

    int s[EACH];
    float key[EACH][W] = {}, value[EACH][W] = {}, d_key[EACH][W] = {}, d_value[EACH][W] = {};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        s[i] = warp_first + i * 32 + lane;
        if (s[i] >= seq) continue;
        load(k + kv_start + (u64)s[i] * kv_stride, key[i]);
        load(v + kv_start + (u64)s[i] * kv_stride, value[i]);
    }
    // The first query that all keys of the warp are seen by.
    int common = causal ? warp_first + WARP - 1 : 0;
    for (int h = at.head * group; h < (at.head + 1) * group; h++) {
        u32 head = at.b * heads + h;
        u64 q_start = (u64)at.b * seq * q_stride + (u64)h * W;
        u64 o_start = (u64)at.b * seq * o_stride + (u64)h * W;
        for (int t0 = causal ? at.first : 0; t0 < seq; t0 += TILE) {
            __syncthreads();
            {
                int t = t0 + threadIdx.x;
                float query[W] = {}, gradient[W] = {}, output[W] = {};
                // Behind the end nothing is seen, by an offset that leaves no probability.
                float offset = 1e30f;
                if (t < seq) {
                    load(q + q_start + (u64)t * q_stride, query);
                    load(d_o + o_start + (u64)t * o_stride, gradient);
                    load(o + o_start + (u64)t * o_stride, output);
                    offset = lse[(u64)head * seq + t] * LOG2_E;
                }
                float* row = tile + threadIdx.x * SIZE;
                row[2 * W] = offset;
                row[2 * W + 1] = dot(gradient, output);
                row[2 * W + 2] = __uint_as_float(DROPS ? dropout.row(head * seq + t) : 0u);
#pragma unroll
                for (int d = 0; d < W; d++) {
                    query[d] *= scale * LOG2_E;
                    if (DROPS) gradient[d] *= dropout.scale;
                }
                store(row, query);
                store(row + W, gradient);
            }
            __syncthreads();
            // Nothing before the warp's first key sees any of its keys.
            int begin = causal ? max(t0, warp_first) : t0;
            for (int r0 = begin; r0 < t0 + TILE && r0 < seq; r0 += STEP) {
                bool all = r0 >= common;
#pragma unroll
                for (int j = 0; j < STEP; j++) {
                    float row[SIZE];
                    read_shared(tile + (r0 - t0 + j) * SIZE, row);
#pragma unroll
                    for (int i = 0; i < EACH; i++) {
                        float p = exp2_fast(dot(key[i], row) - row[2 * W]);
                        float dp = dot(value[i], row + W);
                        if (!all && r0 + j < s[i]) p = 0.0f;
                        float kept = p;
                        if (DROPS && !dropout.keeps(__float_as_uint(row[2 * W + 2]), s[i])) {
                            dp = 0.0f;
                            kept = 0.0f;
                        }
                        add_scaled(d_key[i], p * (dp - row[2 * W + 1]), row);
                        add_scaled(d_value[i], kept, row + W);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (s[i] >= seq) continue;
        // The queries had the scale in units of ln 2.
#pragma unroll
        for (int d = 0; d < W; d++) d_key[i][d] *= LN_2;
        store(dk + kv_start + (u64)s[i] * kv_stride, d_key[i]);
        store(dv + kv_start + (u64)s[i] * kv_stride, d_value[i]);
    }
}

#define INSTANCES(D)                                                                               \
    KERNEL __launch_bounds__(THREADS, 4) attention_forward_narrow_##D(                             \
        const real* q, const real* k, const real* v, real* o, float* lse, PARAMETERS) {            \
        await_earlier();                                                                           \
        __shared__ alignas(16) float tile[TILE * key_size(D)];                                     \
        if (random && threshold)                                                                   \
            forward<D, true>(tile, q, k, v, o, lse, ARGUMENTS);                                    \
        else                                                                                       \
            forward<D, false>(tile, q, k, v, o, lse, ARGUMENTS);                                   \
    }                                                                                              \
    KERNEL __launch_bounds__(THREADS, 4) attention_backward_keys_narrow_##D(                       \
        const real* d_o, const real* q, const real* k, const real* v, const real* o,               \
        const float* lse, real* dk, real* dv, PARAMETERS) {                                        \
        await_earlier();                                                                           \
        __shared__ alignas(16) float tile[TILE * query_size(D)];                                   \
        if (random && threshold)                                                                   \
            backward_keys<D, true>(tile, d_o, q, k, v, o, lse, dk, dv, ARGUMENTS);                 \
        else                                                                                       \
            backward_keys<D, false>(tile, d_o, q, k, v, o, lse, dk, dv, ARGUMENTS);                \
    }                                                                                              \
    KERNEL __launch_bounds__(THREADS, 4) attention_backward_queries_narrow_##D(                    \
        const real* d_o, const real* q, const real* k, const real* v, const real* o,               \
        const float* lse, real* dq, PARAMETERS) {                                                  \
        await_earlier();                                                                           \
        __shared__ alignas(16) float tile[TILE * key_size(D)];                                     \
        if (random && threshold)                                                                   \
            backward_queries<D, true>(tile, d_o, q, k, v, o, lse, dq, ARGUMENTS);                  \
        else                                                                                       \
            backward_queries<D, false>(tile, d_o, q, k, v, o, lse, dq, ARGUMENTS);                 \
    }

INSTANCES(2)
INSTANCES(4)
INSTANCES(8)
