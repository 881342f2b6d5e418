// Softmax attention on the tensor cores, for heads of 32, 64 or 128 columns in bf16 or f16. Other
// widths and float graphs are in attention_any.cu, the backward in attention_backward.cu.
//
//   S = Q·Kᵀ   P = 2^(c·S − m)   O = P·V / l            c = scale·log2 e

#include "attention.cuh"

// ---------------------------------------------------------------- forward

// A block has 16·TILES·WARPS queries of one head and walks its keys, KEYS at a time. Blocks of
// one head follow one another, so that its keys and values are in the cache, the one with the
// most keys to see first.
template <bool SELECTED, int D, int TILES, int WARPS, int KEYS>
__device__ __forceinline__ void forward(const real* q, const real* k, const real* v, real* o,
                                        float* lse, u32 q_stride, u32 kv_stride, int seq, int heads,
                                        int kv_heads, float scale, int causal, const u32* random,
                                        u32 stream, u32 threshold, const i32* lengths, int window,
                                        const i32* starts, const u32* selection) {
    constexpr int ROWS = 16 * TILES * WARPS, THREADS = 32 * WARPS, N = KEYS / 8;
    constexpr u32 STAGE = KEYS * D * 2;
    extern __shared__ __align__(128) u8 shared[];
    u32 queries = shared_address(shared), keys = queries + ROWS * D * 2, values = keys + 2 * STAGE;

    int blocks = (seq + ROWS - 1) / ROWS;
    int head = blockIdx.x / blocks, first = (blocks - 1 - (int)(blockIdx.x % blocks)) * ROWS;
    int b = head / heads, h = head % heads, length = sequence_length(lengths, b, seq);
    u64 kv_start = (u64)b * seq * kv_stride + (u64)(h / (heads / kv_heads)) * D;
    u64 width = (u64)heads * D;
    q += (u64)b * seq * q_stride + (u64)h * D;
    k += kv_start;
    v += kv_start;
    o += (u64)b * seq * width + (u64)h * D;
    lse += (u64)head * seq;
    if (lengths) {
        clear_padding<D, ROWS, THREADS>(o, width, first, length, seq);
        for (int t = max(first, length) + threadIdx.x; t < min(first + ROWS, seq); t += THREADS)
            lse[t] = 0.0f;
        if (first >= length) return;
    }

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int own = warp * 16 * TILES, row0 = first + own;
    Lanes<D> lanes;
    Left<D, TILES, D <= 64> query(queries + own * D * 2);
    ScoreDropout dropout(random, stream, threshold, heads);
    float c = scale * LOG2_E;

    float out[TILES][D / 8][4], largest[TILES][2], sum[TILES][2];
    clear(out);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[i][half] = MINUS_INFINITY;
            sum[i][half] = 0.0f;
        }

    int end = causal ? min(length, first + ROWS) : length;
    bool bounded = window < seq || starts;
    if (starts) starts += (u64)b * seq;
    if (SELECTED) selection += (u64)b * seq * ((seq + 31) / 32);
    int begin = bounded ? first_key(starts, window, first, seq) / KEYS * KEYS : 0;
    // From here on every row of the warp sees the keys before its own.
    int all_see = bounded ? first_key(starts, window, row0 + 16 * TILES - 1, seq) : 0;
    fetch<D, ROWS, THREADS>(queries, q, q_stride, first, length);
    fetch<D, KEYS, THREADS>(keys, k, kv_stride, begin, length);
    fetch<D, KEYS, THREADS>(values, v, kv_stride, begin, length);

    u32 stage = 0;
    for (int k0 = begin; k0 < end; k0 += KEYS, stage ^= STAGE) {
        copies_arrive();
        // After this barrier the tile is complete, and nobody reads the other stage any more.
        __syncthreads();
        if (k0 + KEYS < end) {
            fetch<D, KEYS, THREADS>(keys + (stage ^ STAGE), k, kv_stride, k0 + KEYS, length);
            fetch<D, KEYS, THREADS>(values + (stage ^ STAGE), v, kv_stride, k0 + KEYS, length);
        }
        if (k0 == begin) query.take(lanes);
        if (causal && k0 >= row0 + 16 * TILES) continue;
        u32 chosen[SELECTED ? TILES : 1][2][KEYS / 32];
        if constexpr (SELECTED) {
            u32 any = 0u;
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int word = 0; word < KEYS / 32; word++) {
                        int row = row0 + i * 16 + half * 8 + g;
                        chosen[i][half][word] =
                            selected_keys(selection, row, k0 + word * 32, seq);
                        any |= chosen[i][half][word];
                    }
            if (!__any_sync(0xffffffffu, any)) continue;
        }

        lanes.forget();
        float s[TILES][N][4];
        query.times(s, keys + stage, lanes);

        if constexpr (SELECTED) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        u32 word = chosen[i][e / 2][n / 4];
                        if (!(word >> (n % 4 * 8 + 2 * t + e % 2) & 1u))
                            s[i][n][e] = MINUS_INFINITY;
                    }
        }

        if (k0 + KEYS > length || (causal && k0 + KEYS - 1 > row0)) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int row = row0 + i * 16 + e / 2 * 8 + g;
                    int visible = (causal ? min(length, row + 1) : length) - k0 - 2 * t - e % 2;
#pragma unroll
                    for (int n = 0; n < N; n++)
                        if (n * 8 >= visible) s[i][n][e] = MINUS_INFINITY;
                }
        }
        if (k0 < all_see) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = row0 + i * 16 + half * 8 + g;
                    int hidden = first_key(starts, window, row, seq) - k0 - 2 * t;
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (n * 8 + e < hidden) s[i][n][2 * half + e] = MINUS_INFINITY;
                }
        }

#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = largest[i][half];
#pragma unroll
                for (int n = 0; n < N; n++)
                    top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
                // The four lanes of a row.
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                // A row that has seen no key yet has no largest score, and nothing to shrink.
                float offset = top == MINUS_INFINITY ? 0.0f : top * c;
                float shrink = exp2_fast(fmaf(largest[i][half], c, -offset));
                float added = 0.0f;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        s[i][n][e] = exp2_fast(fmaf(s[i][n][e], c, -offset));
                        added += s[i][n][e];
                    }
                // Only this lane's columns: the lanes are added up at the end.
                sum[i][half] = fmaf(sum[i][half], shrink, added);
                largest[i][half] = top;
#pragma unroll
                for (int d = 0; d < D / 8; d++) {
                    out[i][d][2 * half] *= shrink;
                    out[i][d][2 * half + 1] *= shrink;
                }
            }

        // The factor of what is kept is applied to the output as a whole.
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
                            if (dropout.factor(base, k0 + n * 8 + 2 * t + e) == 0.0f)
                                s[i][n][2 * half + e] = 0.0f;
                }
        }
        accumulate<D>(out, s, values + stage, lanes);
    }

    float inverse[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[i][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            inverse[i][half] = dropout.scale / total;
            int row = row0 + i * 16 + half * 8 + g;
            if (t == 0 && row < length) lse[row] = largest[i][half] * scale + logf(total);
        }
    write_rows<D, TILES>(out, inverse, shared + own * D * 2, o, width, row0, length);
}

// ---------------------------------------------------------------- instances

// TILES, WARPS and the tile of keys for each head width; op/attention.rs repeats what a launch needs
// of them. The second launch bound is how many blocks a multiprocessor holds, by registers and by
// shared memory.
#define INSTANCES(D, FORWARD, FORWARD_BLOCKS)                                                      \
    KERNEL __launch_bounds__(128, FORWARD_BLOCKS) attention_forward_##D(                           \
        const real* q, const real* k, const real* v, real* o, float* lse, SCALARS) {               \
        await_earlier();                                                                           \
        forward<false, D, FORWARD>(q, k, v, o, lse, SCALAR_NAMES, nullptr);                        \
    }                                                                                              \
    KERNEL __launch_bounds__(128, FORWARD_BLOCKS) attention_selected_forward_##D(                  \
        const real* q, const real* k, const real* v, real* o, float* lse, SCALARS,                 \
        const u32* selection) {                                                                    \
        await_earlier();                                                                           \
        forward<true, D, FORWARD>(q, k, v, o, lse, SCALAR_NAMES, selection);                       \
    }

INSTANCES(32, SHAPE(2, 4, 64), 3)
INSTANCES(64, SHAPE(2, 4, 64), 2)
INSTANCES(128, SHAPE(2, 4, 64), 2)
