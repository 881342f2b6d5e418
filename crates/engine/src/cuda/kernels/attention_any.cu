// Softmax attention for any head width and element type, in single precision without tensor
// cores: float graphs, and heads that are not 32, 64 or 128 wide. The equations are those of
// attention_tensor.cu and attention_backward.cu, where δ is computed as well; `lengths`, `window`,
// `starts` and `selection` are what they are in attention.cuh.
//
// A block of 16×16 threads works on tiles of 32 queries × 32 keys in shared memory; a thread has
// the four scores (y, x), (y, x+16), (y+16, x), (y+16, x+16). Heads are read in chunks of `chunk`
// columns (op/attention.rs chooses it, so that any width fits), and a block writes one chunk of its
// result: with several chunks each block computes all scores again. Rows in shared memory are
// `chunk | 1` floats long, an odd number, so that a column's elements lie in different banks.

#include "common.cuh"

#define SIDE 32
#define SCORE_STRIDE (SIDE + 1)
// What every kernel here is called with, beyond its tensors.
struct Problem {
    u32 q_stride, kv_stride;
    int seq, heads, group, width, chunk, causal;
    float scale;
    // Positions of the block's sequence that count.
    int length;
    int window;
    // Of the block's sequence, or null.
    const i32* starts;
    const u32* selection;

    __device__ __forceinline__ int columns(int chunk_start) const {
        return min(chunk, width - chunk_start);
    }
    __device__ __forceinline__ int row_length() const { return chunk | 1; }
    __device__ __forceinline__ int tile() const { return SIDE * row_length(); }

    // The first key that the query at t sees.
    __device__ __forceinline__ int first_key(int t) const {
        int start = starts ? starts[min(t, seq - 1)] : 0;
        return causal ? min(max(max(start, t + 1 - window), 0), t) : 0;
    }

    // The end of the queries that see a key up to `last`.
    __device__ __forceinline__ int queries_end(int last) const {
        int end = (int)min((long long)last + window, (long long)length);
        if (!causal) return length;
        if (starts) {
            int low = min(last + 1, end);
            while (low < end) {
                int middle = (low + end) / 2;
                if (starts[middle] > last)
                    end = middle;
                else
                    low = middle + 1;
            }
        }
        return end;
    }

    // Whether the query at t, which counts, has selected the key at s.
    __device__ __forceinline__ bool selects(int t, int s) const {
        if (!selection || t >= seq) return true;
        return selection[(u64)t * ((seq + 31) / 32) + s / 32] >> (s % 32) & 1u;
    }

    // Whether the query at t sees the key at s.
    __device__ __forceinline__ bool sees(int t, int s) const {
        return t < length && s < length && (!causal || (s <= t && s >= first_key(t))) &&
               selects(t, s);
    }
};

// tile[32][columns] = the rows from `first` on, from `column` on; zeroes after the last one that
// counts.
__device__ __forceinline__ void read_tile(const Problem& x, float* tile, const real* matrix,
                                          u64 stride, int first, int column) {
    int columns = x.columns(column);
    for (int row = threadIdx.x / 16; row < SIDE; row += 16) {
        const real* from = matrix + (u64)(first + row) * stride + column;
        bool inside = first + row < x.length;
        for (int d = threadIdx.x % 16; d < columns; d += 16)
            tile[row * x.row_length() + d] = inside ? to_float(from[d]) : 0.0f;
    }
}

__device__ __forceinline__ void write_tile(const Problem& x, const float* tile, real* matrix,
                                           u64 stride, int first, int column) {
    int columns = x.columns(column);
    for (int row = threadIdx.x / 16; row < SIDE && first + row < x.seq; row += 16) {
        real* to = matrix + (u64)(first + row) * stride + column;
        for (int d = threadIdx.x % 16; d < columns; d += 16)
            to[d] = from_float<real>(tile[row * x.row_length() + d]);
    }
}

__device__ __forceinline__ void clear_tile(const Problem& x, float* tile) {
    for (int i = threadIdx.x; i < x.tile(); i += 256) tile[i] = 0.0f;
}

// s += a·bᵀ over `columns` of two tiles.
__device__ __forceinline__ void add_scores(const Problem& x, float (&s)[2][2], const float* a,
                                           const float* b, int columns) {
    int length = x.row_length(), row = threadIdx.x / 16, column = threadIdx.x % 16;
    a += row * length;
    b += column * length;
    for (int d = 0; d < columns; d++) {
        float a0 = a[d], a1 = a[16 * length + d], b0 = b[d], b1 = b[16 * length + d];
        s[0][0] = fmaf(a0, b0, s[0][0]);
        s[0][1] = fmaf(a0, b1, s[0][1]);
        s[1][0] = fmaf(a1, b0, s[1][0]);
        s[1][1] = fmaf(a1, b1, s[1][1]);
    }
}

// out[i][d] += Σ_j w(i, j)·b[j][d] over a tile b, where w(i, j) is at w[i·row_step + j·step].
__device__ __forceinline__ void add_product(const Problem& x, float* out, const float* w,
                                            int row_step, int step, const float* b, int columns) {
    int length = x.row_length(), row = threadIdx.x / 16;
    const float* w0 = w + row * row_step;
    const float* w1 = w0 + 16 * row_step;
    for (int d = threadIdx.x % 16; d < columns; d += 16) {
        float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll 8
        for (int j = 0; j < SIDE; j++) {
            float y = b[j * length + d];
            sum0 = fmaf(w0[j * step], y, sum0);
            sum1 = fmaf(w1[j * step], y, sum1);
        }
        out[row * length + d] += sum0;
        out[(row + 16) * length + d] += sum1;
    }
}

// The widest heads that have kernels of their own where nothing is hidden (attention_narrow.cu).
#define NARROW 8
#define PARAMETERS                                                                                 \
    u32 q_stride, u32 kv_stride, int seq, int heads, int kv_heads, int width, int chunk,           \
        float scale, int causal, const u32 *random, u32 stream, u32 threshold,                     \
        const i32 *lengths, int window, const i32 *starts, const u32 *selection
#define PROBLEM                                                                                    \
    Problem x = {q_stride, kv_stride, seq,    heads, heads / kv_heads, width,                      \
                 chunk,    causal,    scale,  seq,   window,           starts,                     \
                 selection};                                                                       \
    ScoreDropout dropout(random, stream, threshold, heads, width > NARROW)

// The kernels' grids are (tiles of the sequence × heads × batch, chunks of the result).
struct Place {
    int b, head, first, column;

    __device__ __forceinline__ Place(Problem& x, int heads) {
        int tiles = (x.seq + SIDE - 1) / SIDE, index = blockIdx.x / tiles;
        b = index / heads;
        head = index % heads;
        first = (int)(blockIdx.x % tiles) * SIDE;
        column = blockIdx.y * x.chunk;
        if (x.starts) x.starts += (u64)b * x.seq;
        if (x.selection) x.selection += (u64)b * x.seq * ((x.seq + 31) / 32);
    }

    // Beyond its sequence's length a block has nothing to compute, only zeroes to write.
    __device__ __forceinline__ bool is_padding(Problem& x, const i32* lengths) const {
        if (lengths) x.length = min(max(lengths[b], 0), x.seq);
        return first >= x.length;
    }
};

// ---------------------------------------------------------------- forward

// Shared memory: four tiles (queries, keys, values, output), scores, then three rows of numbers.
KERNEL __launch_bounds__(256, 2) attention_forward_any(const real* q, const real* k, const real* v,
                                                    real* o, float* lse, PARAMETERS) {
    await_earlier();
    PROBLEM;
    extern __shared__ float tiles[];
    float *queries = tiles, *keys = queries + x.tile(), *values = keys + x.tile();
    float *output = values + x.tile(), *scores = output + x.tile();
    float *largest = scores + SIDE * SCORE_STRIDE, *sums = largest + SIDE, *shrinks = sums + SIDE;

    Place at(x, heads);
    int head = at.b * heads + at.head, first = at.first;
    u64 kv_start = (u64)at.b * seq * kv_stride + (u64)(at.head / x.group) * width;
    q += (u64)at.b * seq * q_stride + (u64)at.head * width;
    k += kv_start;
    v += kv_start;
    int row = threadIdx.x / 16, column = threadIdx.x % 16, warp = threadIdx.x / 32;
    int lane = threadIdx.x % 32;

    clear_tile(x, output);
    if (threadIdx.x < SIDE) {
        largest[threadIdx.x] = MINUS_INFINITY;
        sums[threadIdx.x] = 0.0f;
    }
    int end = at.is_padding(x, lengths) ? 0 : causal ? min(x.length, first + SIDE) : x.length;
    int begin = x.first_key(first) / SIDE * SIDE;
    for (int k0 = begin; k0 < end; k0 += SIDE) {
        float s[2][2] = {};
        for (int d = 0; d < width; d += chunk) {
            __syncthreads();
            if (k0 == begin || chunk < width) read_tile(x, queries, q, q_stride, first, d);
            read_tile(x, keys, k, kv_stride, k0, d);
            __syncthreads();
            add_scores(x, s, queries, keys, x.columns(d));
        }
        read_tile(x, values, v, kv_stride, k0, at.column);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = row + i / 2 * 16, c = column + i % 2 * 16;
            int t = first + r, key = k0 + c;
            bool seen = key < x.length && (!causal || (key <= t && key >= x.first_key(t))) &&
                        x.selects(t, key);
            scores[r * SCORE_STRIDE + c] = seen ? s[i / 2][i % 2] * scale : MINUS_INFINITY;
        }
        __syncthreads();
        // A warp has four queries, a lane one key. Where a query has seen no key yet, there is no
        // largest score, and nothing is added.
        for (int r = warp * 4; r < warp * 4 + 4; r++) {
            float score = scores[r * SCORE_STRIDE + lane], before = largest[r];
            float top = fmaxf(before, warp_max(score));
            float offset = top == MINUS_INFINITY ? 0.0f : top;
            float p = expf(score - offset), added = warp_sum(p);
            u32 base = dropout.row((u32)head * seq + first + r);
            scores[r * SCORE_STRIDE + lane] = p * dropout.factor(base, k0 + lane);
            __syncwarp();
            if (lane == 0) {
                float shrink = expf(before - offset);
                shrinks[r] = shrink;
                sums[r] = sums[r] * shrink + added;
                largest[r] = top;
            }
        }
        __syncthreads();
        int columns = x.columns(at.column), length = x.row_length();
        for (int d = column; d < columns; d += 16) {
            output[row * length + d] *= shrinks[row];
            output[(row + 16) * length + d] *= shrinks[row + 16];
        }
        add_product(x, output, scores, SCORE_STRIDE, 1, values, columns);
    }
    __syncthreads();
    int columns = x.columns(at.column), length = x.row_length();
    for (int d = column; d < columns; d += 16) {
        for (int r = row; r < SIDE; r += 16) {
            float& out = output[r * length + d];
            out = first + r < x.length ? out / sums[r] : 0.0f;
        }
    }
    __syncthreads();
    u64 o_stride = (u64)heads * width;
    write_tile(x, output, o + (u64)at.b * seq * o_stride + (u64)at.head * width, o_stride, first,
               at.column);
    int t = first + threadIdx.x;
    if (blockIdx.y == 0 && threadIdx.x < SIDE && t < seq)
        lse[(u64)head * seq + t] =
            t < x.length ? largest[threadIdx.x] + logf(sums[threadIdx.x]) : 0.0f;
}

// ---------------------------------------------------------------- backward

// A tile of P∘M and of dS·scale, rows are queries, from the products S and dP of this thread.
// `p` is null where only dS is wanted.
__device__ __forceinline__ void score_gradients(const Problem& x, const ScoreDropout& dropout,
                                                const float (&s)[2][2], const float (&dp)[2][2],
                                                const float* lse, const float* delta, u32 head,
                                                int t0, int k0, float* p, float* ds) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = threadIdx.x / 16 + i / 2 * 16, c = threadIdx.x % 16 + i % 2 * 16;
        float probability = 0.0f, gradient = 0.0f;
        if (x.sees(t0 + r, k0 + c)) {
            u64 at = (u64)head * x.seq + t0 + r;
            float factor = dropout.factor(dropout.row(head * x.seq + t0 + r), k0 + c);
            float exponential = expf(s[i / 2][i % 2] * x.scale - lse[at]);
            gradient = exponential * (dp[i / 2][i % 2] * factor - delta[at]) * x.scale;
            probability = exponential * factor;
        }
        if (p) p[r * SCORE_STRIDE + c] = probability;
        ds[r * SCORE_STRIDE + c] = gradient;
    }
}

// Keys and values. Shared memory: six tiles (keys, values, queries, do, dk, dv), P∘M and dS.
KERNEL __launch_bounds__(256, 2) attention_backward_keys_any(const real* d_o, const real* q,
                                                          const real* k, const real* v,
                                                          const float* lse, const float* delta,
                                                          real* dk, real* dv, PARAMETERS) {
    await_earlier();
    PROBLEM;
    extern __shared__ float tiles[];
    float *keys = tiles, *values = keys + x.tile(), *queries = values + x.tile();
    float *gradients = queries + x.tile(), *grad_keys = gradients + x.tile();
    float *grad_values = grad_keys + x.tile(), *p = grad_values + x.tile();
    float* ds = p + SIDE * SCORE_STRIDE;

    Place at(x, kv_heads);
    u64 kv_start = (u64)at.b * seq * kv_stride + (u64)at.head * width;
    u64 o_stride = (u64)heads * width;
    bool single = chunk >= width;
    clear_tile(x, grad_keys);
    clear_tile(x, grad_values);
    int end = at.is_padding(x, lengths) ? 0 : x.queries_end(min(at.first + SIDE, seq) - 1);
    int begin = causal ? at.first : 0, columns = x.columns(at.column);
    for (int h = at.head * x.group; h < (at.head + 1) * x.group; h++) {
        const real* query = q + (u64)at.b * seq * q_stride + (u64)h * width;
        const real* gradient = d_o + (u64)at.b * seq * o_stride + (u64)h * width;
        for (int t0 = begin; t0 < end; t0 += SIDE) {
            float s[2][2] = {}, dp[2][2] = {};
            for (int d = 0; d < width; d += chunk) {
                __syncthreads();
                read_tile(x, queries, query, q_stride, t0, d);
                read_tile(x, gradients, gradient, o_stride, t0, d);
                read_tile(x, keys, k + kv_start, kv_stride, at.first, d);
                read_tile(x, values, v + kv_start, kv_stride, at.first, d);
                __syncthreads();
                add_scores(x, s, queries, keys, x.columns(d));
                add_scores(x, dp, gradients, values, x.columns(d));
            }
            score_gradients(x, dropout, s, dp, lse, delta, at.b * heads + h, t0, at.first, p, ds);
            __syncthreads();
            if (!single) {
                read_tile(x, queries, query, q_stride, t0, at.column);
                read_tile(x, gradients, gradient, o_stride, t0, at.column);
                __syncthreads();
            }
            // Transposed: the sums run over queries.
            add_product(x, grad_values, p, 1, SCORE_STRIDE, gradients, columns);
            add_product(x, grad_keys, ds, 1, SCORE_STRIDE, queries, columns);
        }
    }
    __syncthreads();
    write_tile(x, grad_keys, dk + kv_start, kv_stride, at.first, at.column);
    write_tile(x, grad_values, dv + kv_start, kv_stride, at.first, at.column);
}

// Queries. Shared memory: five tiles (queries, do, keys, values, dq) and dS.
KERNEL __launch_bounds__(256, 2) attention_backward_queries_any(const real* d_o, const real* q,
                                                             const real* k, const real* v,
                                                             const float* lse, const float* delta,
                                                             real* dq, PARAMETERS) {
    await_earlier();
    PROBLEM;
    extern __shared__ float tiles[];
    float *queries = tiles, *gradients = queries + x.tile(), *keys = gradients + x.tile();
    float *values = keys + x.tile(), *output = values + x.tile(), *ds = output + x.tile();

    Place at(x, heads);
    int head = at.b * heads + at.head;
    u64 kv_start = (u64)at.b * seq * kv_stride + (u64)(at.head / x.group) * width;
    u64 q_start = (u64)at.b * seq * q_stride + (u64)at.head * width, o_stride = (u64)heads * width;
    const real* gradient = d_o + (u64)at.b * seq * o_stride + (u64)at.head * width;
    bool single = chunk >= width;
    clear_tile(x, output);
    int end = at.is_padding(x, lengths) ? 0 : causal ? min(x.length, at.first + SIDE) : x.length;
    int begin = x.first_key(at.first) / SIDE * SIDE;
    for (int k0 = begin; k0 < end; k0 += SIDE) {
        float s[2][2] = {}, dp[2][2] = {};
        for (int d = 0; d < width; d += chunk) {
            __syncthreads();
            if (k0 == begin || !single) {
                read_tile(x, queries, q + q_start, q_stride, at.first, d);
                read_tile(x, gradients, gradient, o_stride, at.first, d);
            }
            read_tile(x, keys, k + kv_start, kv_stride, k0, d);
            read_tile(x, values, v + kv_start, kv_stride, k0, d);
            __syncthreads();
            add_scores(x, s, queries, keys, x.columns(d));
            add_scores(x, dp, gradients, values, x.columns(d));
        }
        score_gradients(x, dropout, s, dp, lse, delta, head, at.first, k0, nullptr, ds);
        __syncthreads();
        if (!single) {
            read_tile(x, keys, k + kv_start, kv_stride, k0, at.column);
            __syncthreads();
        }
        add_product(x, output, ds, SCORE_STRIDE, 1, keys, x.columns(at.column));
    }
    __syncthreads();
    write_tile(x, output, dq + q_start, q_stride, at.first, at.column);
}
