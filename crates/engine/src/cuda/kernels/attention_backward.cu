// The backward of softmax attention on the tensor cores, for heads of 32, 64 or 128 columns in bf16 or
// f16. Other widths and float graphs are in attention_any.cu; `attention_delta` here serves both.
//
// It is split so that scores stay in registers, as in the forward: one kernel owns keys (dK, dV), one
// owns queries (dQ). The scores are computed twice, but nothing is added across blocks, so the result
// is always the same.
//
//   dkv       Sᵀ = K·Qᵀ  dPᵀ = V·dOᵀ       dV = (P∘M)ᵀ·dO  dK = scale·dSᵀ·Q
//   dq        S = Q·Kᵀ   dP = dO·Vᵀ        dQ = scale·dS·K
//   with P = 2^(c·S − lse·log2 e), dS = P∘(dP∘M − δ), δ = Σ do∘o, M the dropout factors,
//   c = scale·log2 e.

#include "attention.cuh"

#if !defined(REAL_F32)

// ---------------------------------------------------------------- backward: keys and values

// A block has 16·TILES·WARPS keys of one key head and walks the queries that see them, of every
// head of its group, QUERIES at a time; a warp takes STEP of those at once. With `parts`
// [2][B, heads][T][D], where the blocks of key heads are too few for a card, it has one head of
// the group, whose share of dK and dV goes there.
template <bool SELECTED, int D, int TILES, int WARPS, int QUERIES, int STEP>
__device__ __forceinline__ void backward_keys(const real* d_o, const real* q, const real* k,
                                              const real* v, const float* lse, const float* delta,
                                              real* dk, real* dv, u32 q_stride, u32 kv_stride,
                                              int seq, int heads, int kv_heads, float scale,
                                              int causal, const u32* random, u32 stream,
                                              u32 threshold, const i32* lengths, int window,
                                              const i32* starts, const u32* selection,
                                              float* parts) {
    constexpr int ROWS = 16 * TILES * WARPS, THREADS = 32 * WARPS, N = STEP / 8;
    // A stage: queries, gradients of the output, then lse and delta of the queries.
    constexpr u32 TILE = QUERIES * D * 2, STATISTICS = 2 * TILE, STAGE = 2 * TILE + QUERIES * 8;
    static_assert(THREADS >= QUERIES, "a thread fetches the statistics of one query");
    extern __shared__ __align__(128) u8 shared[];
    u32 keys = shared_address(shared), values = keys + ROWS * D * 2;
    u32 stages = values + ROWS * D * 2;

    int blocks = (seq + ROWS - 1) / ROWS, group = heads / kv_heads, members = parts ? 1 : group;
    int own_head = blockIdx.x / blocks * members, first = (int)(blockIdx.x % blocks) * ROWS;
    int b = own_head / heads, h0 = own_head % heads, kv_head = own_head / group;
    int length = sequence_length(lengths, b, seq);
    u64 kv_start = (u64)b * seq * kv_stride + (u64)(kv_head % kv_heads) * D;
    u64 width = (u64)heads * D;
    q += (u64)b * seq * q_stride + (u64)h0 * D;
    d_o += (u64)b * seq * width + (u64)h0 * D;
    u64 statistics = ((u64)b * heads + h0) * seq;
    if (lengths) {
        clear_padding<D, ROWS, THREADS>(dk + kv_start, kv_stride, first, length, seq);
        clear_padding<D, ROWS, THREADS>(dv + kv_start, kv_stride, first, length, seq);
        if (first >= length) return;
    }

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int own = warp * 16 * TILES, row0 = first + own;
    Lanes<D> lanes;
    Left<D, TILES, false> key(keys + own * D * 2), value(values + own * D * 2);
    ScoreDropout dropout(random, stream, threshold, heads);
    float c = scale * LOG2_E;

    float grad_key[TILES][D / 8][4], grad_value[TILES][D / 8][4];
    clear(grad_key);
    clear(grad_value);

    bool bounded = window < seq || starts;
    // Queries before the first key see none of them.
    int begin = causal ? first / QUERIES * QUERIES : 0;
    if (starts) starts += (u64)b * seq;
    if (SELECTED) selection += (u64)b * seq * ((seq + 31) / 32);
    int end = causal ? queries_end(starts, window, min(first + ROWS, seq) - 1, length) : length;
    int per_head = (end - begin + QUERIES - 1) / QUERIES, total = per_head * members;
    auto fetch_queries = [&](int index) {
        int member = index / per_head, q0 = begin + index % per_head * QUERIES;
        u32 stage = stages + (index & 1) * STAGE;
        fetch<D, QUERIES, THREADS>(stage, q + (u64)member * D, q_stride, q0, length);
        fetch<D, QUERIES, THREADS>(stage + TILE, d_o + (u64)member * D, width, q0, length);
        if (threadIdx.x < QUERIES) {
            bool inside = q0 + (int)threadIdx.x < length;
            u64 at = statistics + (u64)member * seq + (inside ? q0 + threadIdx.x : 0);
            u32 to = stage + STATISTICS + threadIdx.x * 4;
            copy_4(to, lse + at, inside);
            copy_4(to + QUERIES * 4, delta + at, inside);
        }
    };
    fetch<D, ROWS, THREADS>(keys, k + kv_start, kv_stride, first, length);
    fetch<D, ROWS, THREADS>(values, v + kv_start, kv_stride, first, length);
    fetch_queries(0);

    for (int index = 0; index < total; index++) {
        copies_arrive();
        __syncthreads();
        if (index + 1 < total) fetch_queries(index + 1);
        int q0 = begin + index % per_head * QUERIES;
        u32 head = b * heads + h0 + index / per_head;
        u32 stage = stages + (index & 1) * STAGE;
        const float* numbers = reinterpret_cast<const float*>(
            shared + 2 * ROWS * D * 2 + (index & 1) * STAGE + STATISTICS);

#pragma unroll 1
        for (int part = 0; part < QUERIES; part += STEP) {
            int column0 = q0 + part;
            if (causal && column0 + STEP <= row0) continue;
            u32 rows = stage + part * D * 2;
            // Of each query, the bits of this warp's keys, which are in one word.
            static_assert(16 * TILES <= 32, "a warp's keys are in one word");
            u32 chosen[SELECTED ? N : 1][2];
            if constexpr (SELECTED) {
                u32 any = 0u, mask = 16 * TILES == 32 ? 0xffffffffu : (1u << 16 * TILES % 32) - 1u;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int query = column0 + n * 8 + 2 * t + e;
                        u32 word = selected_keys(selection, query, row0 / 32 * 32, seq);
                        chosen[n][e] = word >> (row0 % 32) & mask;
                        any |= chosen[n][e];
                    }
                if (!__any_sync(0xffffffffu, any)) continue;
            }
            lanes.forget();
            float p[TILES][N][4], ds[TILES][N][4];
            key.times(p, rows, lanes);
            value.times(ds, rows + TILE, lanes);

            if constexpr (SELECTED) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(chosen[n][e % 2] >> (i * 16 + e / 2 * 8 + g) & 1u))
                                p[i][n][e] = MINUS_INFINITY;
            }

            if (causal && column0 < row0 + 16 * TILES - 1) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        // The first query that sees the key, counted from this lane's column.
                        int seen = row0 + i * 16 + e / 2 * 8 + g - column0 - 2 * t - e % 2;
#pragma unroll
                        for (int n = 0; n < N; n++)
                            if (n * 8 < seen) p[i][n][e] = MINUS_INFINITY;
                    }
            }

            // Whether the last of these queries does not see all keys of the warp.
            if (bounded && first_key(starts, window, column0 + STEP - 1, seq) > row0) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int query = column0 + n * 8 + 2 * t + e;
                        int seen = first_key(starts, window, query, seq) - row0 - g;
#pragma unroll
                        for (int i = 0; i < TILES; i++)
#pragma unroll
                            for (int half = 0; half < 2; half++)
                                if (i * 16 + half * 8 < seen)
                                    p[i][n][2 * half + e] = MINUS_INFINITY;
                    }
            }

            // Queries after the end have zeroes for do, lse and delta, and so add nothing. What
            // comes out for keys after the end stays in their rows, which are not written.
#pragma unroll
            for (int n = 0; n < N; n++) {
                float2 offset = *reinterpret_cast<const float2*>(numbers + part + n * 8 + 2 * t);
                float2 mean =
                    *reinterpret_cast<const float2*>(numbers + QUERIES + part + n * 8 + 2 * t);
                float offsets[2] = {offset.x * LOG2_E, offset.y * LOG2_E};
                float means[2] = {mean.x, mean.y};
                if (dropout.threshold) {
                    u32 query = head * seq + column0 + n * 8 + 2 * t;
                    u32 base[2] = {dropout.row(query), dropout.row(query + 1)};
#pragma unroll
                    for (int i = 0; i < TILES; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            u32 column = row0 + i * 16 + e / 2 * 8 + g;
                            float factor = dropout.factor(base[e % 2], column);
                            float x = exp2_fast(fmaf(p[i][n][e], c, -offsets[e % 2]));
                            ds[i][n][e] = x * fmaf(ds[i][n][e], factor, -means[e % 2]);
                            p[i][n][e] = x * factor;
                        }
                } else {
#pragma unroll
                    for (int i = 0; i < TILES; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            float x = exp2_fast(fmaf(p[i][n][e], c, -offsets[e % 2]));
                            ds[i][n][e] = x * (ds[i][n][e] - means[e % 2]);
                            p[i][n][e] = x;
                        }
                }
            }
            accumulate<D>(grad_value, p, rows + TILE, lanes);
            accumulate<D>(grad_key, ds, rows, lanes);
        }
    }

    if (parts) {
        u64 at = (u64)own_head * seq, apart = (u64)gridDim.x / blocks * seq * D;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = row0 + i * 16 + half * 8 + g;
                if (row >= length) continue;
                float* to = parts + (at + row) * D + 2 * t;
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    float2 of_key = {grad_key[i][n][2 * half] * scale,
                                     grad_key[i][n][2 * half + 1] * scale};
                    float2 of_value = {grad_value[i][n][2 * half], grad_value[i][n][2 * half + 1]};
                    *reinterpret_cast<float2*>(to + n * 8) = of_key;
                    *reinterpret_cast<float2*>(to + apart + n * 8) = of_value;
                }
            }
        return;
    }
    float ones[TILES][2], scales[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            ones[i][half] = 1.0f;
            scales[i][half] = scale;
        }
    write_rows<D, TILES>(grad_key, scales, shared + own * D * 2, dk + kv_start, kv_stride, row0,
                         length);
    write_rows<D, TILES>(grad_value, ones, shared + (ROWS + own) * D * 2, dv + kv_start, kv_stride,
                         row0, length);
}

// ---------------------------------------------------------------- backward: queries

// Laid out as the forward; a warp takes STEP of the KEYS of a tile at once.
template <bool SELECTED, int D, int TILES, int WARPS, int KEYS, int STEP>
__device__ __forceinline__ void backward_queries(const real* d_o, const real* q, const real* k,
                                                 const real* v, const float* lse,
                                                 const float* delta, real* dq, u32 q_stride,
                                                 u32 kv_stride, int seq, int heads, int kv_heads,
                                                 float scale, int causal, const u32* random,
                                                 u32 stream, u32 threshold, const i32* lengths,
                                                 int window, const i32* starts,
                                                 const u32* selection) {
    constexpr int ROWS = 16 * TILES * WARPS, THREADS = 32 * WARPS, N = STEP / 8;
    constexpr u32 STAGE = KEYS * D * 2;
    extern __shared__ __align__(128) u8 shared[];
    u32 queries = shared_address(shared), gradients = queries + ROWS * D * 2;
    u32 keys = gradients + ROWS * D * 2, values = keys + 2 * STAGE;

    int blocks = (seq + ROWS - 1) / ROWS;
    int head = blockIdx.x / blocks, first = (blocks - 1 - (int)(blockIdx.x % blocks)) * ROWS;
    int b = head / heads, h = head % heads, length = sequence_length(lengths, b, seq);
    u64 kv_start = (u64)b * seq * kv_stride + (u64)(h / (heads / kv_heads)) * D;
    u64 q_start = (u64)b * seq * q_stride + (u64)h * D, width = (u64)heads * D;
    k += kv_start;
    v += kv_start;
    if (lengths) {
        clear_padding<D, ROWS, THREADS>(dq + q_start, q_stride, first, length, seq);
        if (first >= length) return;
    }

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int own = warp * 16 * TILES, row0 = first + own;
    Lanes<D> lanes;
    Left<D, TILES, D <= 64> query(queries + own * D * 2), gradient(gradients + own * D * 2);
    ScoreDropout dropout(random, stream, threshold, heads);
    float c = scale * LOG2_E;

    float out[TILES][D / 8][4], offset[TILES][2], mean[TILES][2];
    clear(out);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = row0 + i * 16 + half * 8 + g;
            u64 at = (u64)head * seq + row;
            offset[i][half] = row < length ? lse[at] * LOG2_E : 0.0f;
            mean[i][half] = row < length ? delta[at] : 0.0f;
        }

    int end = causal ? min(length, first + ROWS) : length;
    bool bounded = window < seq || starts;
    if (starts) starts += (u64)b * seq;
    if (SELECTED) selection += (u64)b * seq * ((seq + 31) / 32);
    int begin = bounded ? first_key(starts, window, first, seq) / KEYS * KEYS : 0;
    int all_see = bounded ? first_key(starts, window, row0 + 16 * TILES - 1, seq) : 0;
    d_o += (u64)b * seq * width + (u64)h * D;
    fetch<D, ROWS, THREADS>(queries, q + q_start, q_stride, first, length);
    fetch<D, ROWS, THREADS>(gradients, d_o, width, first, length);
    fetch<D, KEYS, THREADS>(keys, k, kv_stride, begin, length);
    fetch<D, KEYS, THREADS>(values, v, kv_stride, begin, length);

    u32 stage = 0;
    for (int k0 = begin; k0 < end; k0 += KEYS, stage ^= STAGE) {
        copies_arrive();
        __syncthreads();
        if (k0 + KEYS < end) {
            fetch<D, KEYS, THREADS>(keys + (stage ^ STAGE), k, kv_stride, k0 + KEYS, length);
            fetch<D, KEYS, THREADS>(values + (stage ^ STAGE), v, kv_stride, k0 + KEYS, length);
        }
        if (k0 == begin) {
            query.take(lanes);
            gradient.take(lanes);
        }

#pragma unroll 1
        for (int part = 0; part < KEYS; part += STEP) {
            int column0 = k0 + part;
            if (column0 >= length || (causal && column0 >= row0 + 16 * TILES)) break;
            u32 rows = keys + stage + part * D * 2;
            static_assert(STEP == 32, "the keys of a step are one word");
            u32 chosen[SELECTED ? TILES : 1][2];
            if constexpr (SELECTED) {
                u32 any = 0u;
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int row = row0 + i * 16 + half * 8 + g;
                        chosen[i][half] = selected_keys(selection, row, column0, seq);
                        any |= chosen[i][half];
                    }
                if (!__any_sync(0xffffffffu, any)) continue;
            }
            lanes.forget();
            float p[TILES][N][4], ds[TILES][N][4];
            query.times(p, rows, lanes);
            gradient.times(ds, rows + 2 * STAGE, lanes);

            if constexpr (SELECTED) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(chosen[i][e / 2] >> (n * 8 + 2 * t + e % 2) & 1u))
                                p[i][n][e] = MINUS_INFINITY;
            }

            if (column0 + STEP > length || (causal && column0 + STEP - 1 > row0)) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int row = row0 + i * 16 + e / 2 * 8 + g;
                        int visible =
                            (causal ? min(length, row + 1) : length) - column0 - 2 * t - e % 2;
#pragma unroll
                        for (int n = 0; n < N; n++)
                            if (n * 8 >= visible) p[i][n][e] = MINUS_INFINITY;
                    }
            }
            if (column0 < all_see) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int row = row0 + i * 16 + half * 8 + g;
                        int hidden = first_key(starts, window, row, seq) - column0 - 2 * t;
#pragma unroll
                        for (int n = 0; n < N; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (n * 8 + e < hidden) p[i][n][2 * half + e] = MINUS_INFINITY;
                    }
            }

            if (dropout.threshold) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 base = dropout.row((u32)head * seq + row0 + i * 16 + half * 8 + g);
#pragma unroll
                        for (int n = 0; n < N; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                ds[i][n][2 * half + e] *=
                                    dropout.factor(base, column0 + n * 8 + 2 * t + e);
                    }
            }
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        ds[i][n][e] = exp2_fast(fmaf(p[i][n][e], c, -offset[i][e / 2])) *
                                      (ds[i][n][e] - mean[i][e / 2]);
            accumulate<D>(out, ds, rows, lanes);
        }
    }

    float scales[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++) scales[i][0] = scales[i][1] = scale;
    write_rows<D, TILES>(out, scales, shared + own * D * 2, dq + q_start, q_stride, row0, length);
}

// ---------------------------------------------------------------- instances

// TILES, WARPS, the tile of the other side, and how much of that a warp takes at once, for each
// head width; op/attention.rs repeats what a launch needs of them. The second launch bound is how
// many blocks a multiprocessor holds, by registers and by shared memory.
#define INSTANCES(D, KEYS, KEYS_THREADS, KEYS_BLOCKS, QUERIES)                                     \
    KERNEL __launch_bounds__(KEYS_THREADS, KEYS_BLOCKS) attention_backward_keys_##D(               \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dk, real* dv, SCALARS) {                                         \
        await_earlier();                                                                           \
        backward_keys<false, D, KEYS>(d_o, q, k, v, lse, delta, dk, dv, SCALAR_NAMES, nullptr,     \
                                       nullptr);                                                   \
    }                                                                                              \
    KERNEL __launch_bounds__(128, 2) attention_backward_queries_##D(                               \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dq, SCALARS) {                                                   \
        await_earlier();                                                                           \
        backward_queries<false, D, QUERIES>(d_o, q, k, v, lse, delta, dq, SCALAR_NAMES, nullptr);  \
    }                                                                                              \
    KERNEL __launch_bounds__(KEYS_THREADS, KEYS_BLOCKS) attention_selected_backward_keys_##D(      \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dk, real* dv, float* parts, SCALARS, const u32* selection) {     \
        await_earlier();                                                                           \
        backward_keys<true, D, KEYS>(d_o, q, k, v, lse, delta, dk, dv, SCALAR_NAMES, selection,    \
                                     parts);                                                       \
    }                                                                                              \
    KERNEL __launch_bounds__(128, 2) attention_selected_backward_queries_##D(                      \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dq, SCALARS, const u32* selection) {                             \
        await_earlier();                                                                           \
        backward_queries<true, D, QUERIES>(d_o, q, k, v, lse, delta, dq, SCALAR_NAMES, selection); \
    }

INSTANCES(32, SHAPE(2, 4, 64, 32), 128, 2, SHAPE(2, 4, 64, 32))
INSTANCES(64, SHAPE(2, 4, 64, 32), 128, 2, SHAPE(2, 4, 64, 32))
INSTANCES(128, SHAPE(1, 8, 32, 32), 256, 1, SHAPE(2, 4, 32, 32))

#endif  // !REAL_F32

// ---------------------------------------------------------------- parts

// dk and dv from the parts of the heads of each group, added in their order. A thread has four
// columns; `quads` is B·T·kv_heads·width/4.
KERNEL __launch_bounds__(256) attention_sum_heads(const float* parts, real* dk, real* dv,
                                                  u32 kv_stride, int seq, int heads, int kv_heads,
                                                  int width, u64 quads) {
    await_earlier();
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= 2 * quads) return;
    real* to = index < quads ? dk : dv;
    const float* from = parts + (index < quads ? 0 : quads * 4 * (heads / kv_heads));
    index = index < quads ? index : index - quads;
    int group = heads / kv_heads, columns = width / 4, column = (int)(index % columns) * 4;
    int kv_head = (int)(index / columns % kv_heads);
    u64 row = index / columns / kv_heads, b = row / seq, t = row % seq;
    from += ((b * heads + kv_head * group) * seq + t) * width + column;
    float sum[4] = {};
    for (int member = 0; member < group; member++) {
        float4 part = *reinterpret_cast<const float4*>(from + (u64)member * seq * width);
        sum[0] += part.x;
        sum[1] += part.y;
        sum[2] += part.z;
        sum[3] += part.w;
    }
    store(to + row * kv_stride + (u64)kv_head * width + column, sum);
}

// ---------------------------------------------------------------- δ

// delta[b, h, t] = Σ_d do[b, t, h, d]·o[b, t, h, d]: eight lanes per row and head. `vector` says
// that the head's width is a multiple of eight, so that eight elements can be read at once.
KERNEL __launch_bounds__(256) attention_delta(const real* d_o, const real* o, float* delta, u64 rows,
                                              int seq, int heads, int width, int vector) {
    await_earlier();
    u64 index = ((u64)blockIdx.x * 256 + threadIdx.x) / 8;
    int part = threadIdx.x % 8;
    float sum = 0.0f;
    if (index < rows * heads) {
        const real* x = d_o + index * width;
        const real* y = o + index * width;
        if (vector) {
            for (int d = part * 8; d < width; d += 64) {
                float a[8], b[8];
                load(x + d, a);
                load(y + d, b);
#pragma unroll
                for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
            }
        } else {
            for (int d = part; d < width; d += 8) sum = fmaf(to_float(x[d]), to_float(y[d]), sum);
        }
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (index < rows * heads && part == 0) {
        u64 row = index / heads, h = index % heads;
        delta[(row / seq * heads + h) * seq + row % seq] = sum;
    }
}
