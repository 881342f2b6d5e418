// The indexer of gated sparse attention.
//
//   I[t,s] = Σ_j w[t,j]·σ(q[t,j]·k[s]/√width + b_j)      w = σ(c + b_w)      s ≤ t
//
// `indexer_scores` writes I for some rows of tiles, `indexer_variances` and `indexer_mean` give the
// variance of every row and its mean, `indexer_select` the selection and the log-sum-exp of what is
// selected. `indexer_loss` and `indexer_loss_backward` walk the same tiles with the attention's
// probabilities beside them; with p their mean over heads and π = e^(I − lse_I),
//
//   KL_t = Σ_s p·(ln p − ln π)        dI = g·(π − p)
//   dw_j = Σ_s dI·σ_j                 dz_j = dI·w_j·σ_j·(1 − σ_j)/√width
//
// and dz is written for some rows at a time: its products with keys and queries are the gradients
// of queries and keys.
//
// queries [B, T, heads·width], keys [B, T, width], weights [B, T, heads] (c), biases [heads]. A
// block of 128 threads has a tile of 64 rows × 64 keys; a warp has 16 of the rows, and a thread
// with g = lane/4 and t = lane%4 the elements s[n][e] at row g + e/2·8 and key n·8 + 2t + e%2: the
// accumulators of the tensor cores, and the same layout in single precision.

#define TILE 64
#define THREADS 128

#include "common.cuh"
#include "matrix.cuh"
#include "selection.cuh"

// Columns of the operands that are in shared memory at once.
#define DEPTH 64
#if defined(REAL_F32)
#define STRIDE (DEPTH + 1)
#else
// Rows start 16 bytes further round the banks than those before.
#define STRIDE (DEPTH + 8)
#endif

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ---------------------------------------------------------------- tiles

// tile[64][DEPTH] = the columns from `column` on of the rows from `first` on; zeroes beyond `seq`
// rows and `width` columns.
__device__ __forceinline__ void read_tile(real* tile, const real* matrix, u32 stride, int first,
                                          int seq, int column, int width) {
#if !defined(REAL_F32)
    if ((stride | (u32)width) % 8 == 0 && (u64)matrix % 16 == 0) {
#pragma unroll
        for (int i = threadIdx.x; i < TILE * DEPTH / 8; i += THREADS) {
            int row = i / (DEPTH / 8), piece = i % (DEPTH / 8) * 8;
            uint4 value = {};
            if (first + row < seq && column + piece < width)
                value = *reinterpret_cast<const uint4*>(matrix + (u64)(first + row) * stride +
                                                        column + piece);
            *reinterpret_cast<uint4*>(tile + row * STRIDE + piece) = value;
        }
        return;
    }
#endif
    for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        int row = i / DEPTH, d = i % DEPTH;
        bool inside = first + row < seq && column + d < width;
        tile[row * STRIDE + d] = inside ? matrix[(u64)(first + row) * stride + column + d]
                                        : from_float<real>(0.0f);
    }
}

// s += left·rightᵀ.
__device__ __forceinline__ void add_product(float (&s)[8][4], const real* left,
                                            const real* right) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#if defined(REAL_F32)
    const float* a = left + (warp * 16 + lane / 4) * STRIDE;
    const float* b = right + 2 * (lane % 4) * STRIDE;
    for (int d = 0; d < DEPTH; d++) {
        float a0 = a[d], a1 = a[8 * STRIDE + d];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float b0 = b[n * 8 * STRIDE + d], b1 = b[(n * 8 + 1) * STRIDE + d];
            s[n][0] = fmaf(a0, b0, s[n][0]);
            s[n][1] = fmaf(a0, b1, s[n][1]);
            s[n][2] = fmaf(a1, b0, s[n][2]);
            s[n][3] = fmaf(a1, b1, s[n][3]);
        }
    }
#else
    u32 a_at = shared_address(left) +
               (u32)((warp * 16 + (lane & 15)) * STRIDE + (lane >> 4) * 8) * 2;
    u32 b_at = shared_address(right) +
               (u32)(((lane & 7) + (lane >> 4) * 8) * STRIDE + ((lane >> 3) & 1) * 8) * 2;
#pragma unroll
    for (int d = 0; d < DEPTH; d += 16) {
        u32 a[4];
        load_matrices(a, a_at + d * 2);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            u32 b[4];
            load_matrices(b, b_at + (u32)(n * 16 * STRIDE + d) * 2);
            multiply(s[2 * n], a, b[0], b[1]);
            multiply(s[2 * n + 1], a, b[2], b[3]);
        }
    }
#endif
}

__device__ __forceinline__ void clear(float (&s)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = 0.0f;
}

// The operands of a block.
struct Tiles {
    real left[TILE * STRIDE], right[TILE * STRIDE];
};

// s = the products of 64 rows of q with 64 rows of k, over `width` columns. `same` says that the
// rows of k are those of the call before; they are read again where they did not fit at once.
__device__ __forceinline__ void products(float (&s)[8][4], Tiles& tiles, const real* q,
                                         u32 q_stride, int t0, const real* k, u32 k_stride, int s0,
                                         int seq, int width, bool same) {
    clear(s);
    for (int column = 0; column < width; column += DEPTH) {
        // Nobody reads the tiles of before any more.
        __syncthreads();
        read_tile(tiles.left, q, q_stride, t0, seq, column, width);
        if (!same || width > DEPTH) read_tile(tiles.right, k, k_stride, s0, seq, column, width);
        __syncthreads();
        add_product(s, tiles.left, tiles.right);
    }
}

// ---------------------------------------------------------------- scores

#define INDEXER                                                                                    \
    const real *queries, const real *keys, const real *weights, const float *weight_bias,          \
        const float *score_bias
#define INDEXER_NAMES queries, keys, weights, weight_bias, score_bias

// The indexer of one sequence and one tile.
struct Indexer {
    const real *queries, *keys, *weights;
    const float *weight_bias, *score_bias;
    int seq, heads, width, t0, s0;
    float scale;

    __device__ __forceinline__ Indexer(INDEXER, int b, int seq, int heads, int width, int t0,
                                       int s0)
        : queries(queries + (u64)b * seq * heads * width), keys(keys + (u64)b * seq * width),
          weights(weights + (u64)b * seq * heads), weight_bias(weight_bias),
          score_bias(score_bias), seq(seq), heads(heads), width(width), t0(t0), s0(s0),
          scale(rsqrtf((float)width)) {}

    // The position of this thread's first (0) or second (1) row.
    __device__ __forceinline__ int row(int half) const {
        return t0 + (int)threadIdx.x / 32 * 16 + half * 8 + (int)threadIdx.x % 32 / 4;
    }

    __device__ __forceinline__ float weight(int row, int head) const {
        if (row >= seq) return 0.0f;
        return exact_sigmoid(to_float(weights[(u64)row * heads + head]) + weight_bias[head]);
    }

    // σ of one head.
    __device__ __forceinline__ void sigmoids(float (&s)[8][4], Tiles& tiles, int head,
                                             bool same) const {
        products(s, tiles, queries + (u64)head * width, heads * width, t0, keys, width, s0, seq,
                 width, same);
        float bias = score_bias[head];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = exact_sigmoid(fmaf(s[n][e], scale, bias));
    }

    __device__ __forceinline__ void scores(float (&sum)[8][4], Tiles& tiles) const {
        clear(sum);
        for (int head = 0; head < heads; head++) {
            float s[8][4];
            sigmoids(s, tiles, head, head > 0);
            float w[2] = {weight(row(0), head), weight(row(1), head)};
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) sum[n][e] = fmaf(w[e / 2], s[n][e], sum[n][e]);
        }
    }
};

// scores[rows of the tiles from `first_tile` on][⌈T/64⌉·64]; what a row does not see is undefined.
// Grid: (tiles of rows, tiles of keys).
KERNEL __launch_bounds__(THREADS, 4) indexer_scores(INDEXER, float* scores, int seq, int heads,
                                                 int width, int first_tile) {
    await_earlier();
    __shared__ __align__(16) Tiles tiles;
    int per_sequence = (seq + TILE - 1) / TILE, index = first_tile + blockIdx.x;
    int b = index / per_sequence, i = index % per_sequence;
    if ((int)blockIdx.y > i) return;
    int s0 = blockIdx.y * TILE;
    Indexer indexer(INDEXER_NAMES, b, seq, heads, width, i * TILE, s0);
    float sum[8][4];
    indexer.scores(sum, tiles);
    int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 row = (u64)blockIdx.x * TILE + (indexer.row(half) - i * TILE);
        float* to = scores + row * per_sequence * TILE + s0 + 2 * t;
#pragma unroll
        for (int n = 0; n < 8; n++)
            *reinterpret_cast<float2*>(to + n * 8) =
                float2{sum[n][2 * half], sum[n][2 * half + 1]};
    }
}

// ---------------------------------------------------------------- rows

// A block has one row of the scores.
struct Row {
    const float* scores;
    u64 row;
    int t;

    __device__ __forceinline__ Row(const float* table, int seq, int first_tile) {
        int per_sequence = (seq + TILE - 1) / TILE, index = first_tile + blockIdx.x / TILE;
        t = index % per_sequence * TILE + blockIdx.x % TILE;
        row = (u64)(index / per_sequence) * seq + t;
        scores = table + (u64)blockIdx.x * per_sequence * TILE;
    }
};

// variances[row]: unbiased, over T columns of which those that the row does not see are 0.
KERNEL __launch_bounds__(THREADS) indexer_variances(const float* scores, float* variances, int seq,
                                                    int first_tile) {
    await_earlier();
    __shared__ float scratch[32];
    Row at(scores, seq, first_tile);
    if (at.t >= seq) return;
    float sum = 0.0f;
    for (int s = threadIdx.x; s <= at.t; s += THREADS) sum += at.scores[s];
    float mean = block_sum(sum, scratch) / (float)seq;
    float squares = 0.0f;
    for (int s = threadIdx.x; s <= at.t; s += THREADS) {
        float x = at.scores[s] - mean;
        squares = fmaf(x, x, squares);
    }
    squares = block_sum(squares, scratch) + (float)(seq - 1 - at.t) * mean * mean;
    if (threadIdx.x == 0) variances[at.row] = seq < 2 ? 0.0f : squares / (float)(seq - 1);
}

// variances[rows] = the mean of those before it. One block.
KERNEL __launch_bounds__(1024) indexer_mean(float* variances, u64 rows) {
    await_earlier();
    __shared__ float scratch[32];
    float sum = 0.0f;
    for (u64 i = threadIdx.x; i < rows; i += 1024) sum += variances[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) variances[rows] = sum / (float)rows;
}

// lse[row] of the selected scores and, where `bits` is there, bits[row][⌈T/32⌉]. `mode` 0: all that
// is seen; 1: `base` keys; 2: as many as the row's variance asks for. Of equal scores, those at lower
// positions are selected.
KERNEL __launch_bounds__(THREADS) indexer_select(const float* scores, const float* variances,
                                                 float* lse, u32* bits, u64 rows, int seq,
                                                 int first_tile, int mode, int base, int least,
                                                 int most, float temperature) {
    await_earlier();
    __shared__ float scratch[32];
    Row at(scores, seq, first_tile);
    if (at.t >= seq) return;
    int visible = at.t + 1, count = visible;
    if (mode == 1) count = min(base, visible);
    if (mode == 2) {
        float ratio = variances[at.row] / (variances[rows] + 1e-8f);
        float share = 0.5f + 1.0f / (1.0f + ratio * temperature);
        float wanted = fminf(fmaxf((float)base * share, (float)least), (float)most);
        count = max((int)fminf(wanted, (float)visible), 1);
    }
    Range of = range(at.scores, visible);
    float largest = from_ordered(of.high);
    Last last = {0u, 0};
    if (count < visible) last = last_of(at.scores, visible, of, count);

    // A warp has a word at a time.
    int lane = threadIdx.x % 32, words = (seq + 31) / 32;
    float sum = 0.0f;
    for (int word = threadIdx.x / 32; word < words; word += THREADS / 32) {
        int s = word * 32 + lane;
        float x = s < visible ? at.scores[s] : 0.0f;
        bool chosen = s < visible && (count == visible || last.includes(ordered(x), s));
        u32 ones = __ballot_sync(0xffffffffu, chosen);
        if (bits && lane == 0) bits[at.row * words + word] = ones;
        if (chosen) sum += expf(x - largest);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) lse[at.row] = largest + logf(sum);
}

// ---------------------------------------------------------------- loss

#define ATTENTION                                                                                  \
    const real *q, const real *k, const float *lse, const u32 *selection, u32 q_stride,            \
        u32 kv_stride, int attention_heads, int kv_heads, int head_dim, float scale
#define ATTENTION_NAMES                                                                            \
    q, k, lse, selection, q_stride, kv_stride, attention_heads, kv_heads, head_dim, scale

// p: the mean over heads of the probabilities of a tile, whether a key is seen or not.
__device__ __forceinline__ void probabilities(float (&p)[8][4], Tiles& tiles, ATTENTION, int b,
                                              int seq, int t0, int s0, const int (&rows)[2]) {
    clear(p);
    int group = attention_heads / kv_heads;
    q += (u64)b * seq * q_stride;
    k += (u64)b * seq * kv_stride;
    for (int head = 0; head < attention_heads; head++) {
        float s[8][4];
        products(s, tiles, q + (u64)head * head_dim, q_stride, t0,
                 k + (u64)(head / group) * head_dim, kv_stride, s0, seq, head_dim,
                 head % group != 0);
        const float* sums = lse + ((u64)b * attention_heads + head) * seq;
        float offset[2] = {rows[0] < seq ? sums[rows[0]] : 0.0f,
                           rows[1] < seq ? sums[rows[1]] : 0.0f};
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) p[n][e] += expf(fmaf(s[n][e], scale, -offset[e / 2]));
    }
    float share = 1.0f / (float)attention_heads;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) p[n][e] *= share;
}

// The keys of the tile that a row sees, a bit for each.
__device__ __forceinline__ u64 seen_keys(const u32* selection, int b, int row, int s0, int seq) {
    if (row >= seq || s0 > row) return 0ull;
    u64 seen = row - s0 >= 63 ? ~0ull : (1ull << (row - s0 + 1)) - 1ull;
    if (selection) {
        int words = (seq + 31) / 32, word = s0 / 32;
        const u32* at = selection + ((u64)b * seq + row) * words;
        u64 low = at[word], high = word + 1 < words ? at[word + 1] : 0u;
        seen &= low | high << 32;
    }
    return seen;
}

// The sum over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// partials[tile of keys][row] of KL. Grid: (tiles of rows of all sequences, tiles of keys).
KERNEL __launch_bounds__(THREADS, 3) indexer_loss(INDEXER, const float* indexer_lse, ATTENTION,
                                               float* partials, u64 total_rows, int seq, int heads,
                                               int width) {
    await_earlier();
    __shared__ __align__(16) Tiles tiles;
    int per_sequence = (seq + TILE - 1) / TILE;
    int b = blockIdx.x / per_sequence, i = blockIdx.x % per_sequence;
    if ((int)blockIdx.y > i) return;
    int t0 = i * TILE, s0 = blockIdx.y * TILE, t = threadIdx.x % 4;
    Indexer indexer(INDEXER_NAMES, b, seq, heads, width, t0, s0);
    int rows[2] = {indexer.row(0), indexer.row(1)};
    float p[8][4], score[8][4];
    probabilities(p, tiles, ATTENTION_NAMES, b, seq, t0, s0, rows);
    indexer.scores(score, tiles);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = rows[half];
        u64 seen = seen_keys(selection, b, row, s0, seq) >> (2 * t);
        float offset = row < seq ? indexer_lse[(u64)b * seq + row] : 0.0f, sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = p[n][2 * half + e];
                if (seen >> (n * 8 + e) & 1ull && x > 1e-37f)
                    sum += x * (logf(x) - score[n][2 * half + e] + offset);
            }
        sum = row_sum(sum);
        if (t == 0 && row < seq)
            partials[(u64)blockIdx.y * total_rows + (u64)b * seq + row] = sum;
    }
}

// kl[row] from the partial sums of the tiles that the row sees.
KERNEL __launch_bounds__(256) indexer_loss_rows(const float* partials, float* kl, u64 total_rows,
                                                int seq) {
    await_earlier();
    u64 row = (u64)blockIdx.x * 256 + threadIdx.x;
    if (row >= total_rows) return;
    int tiles = (int)(row % seq) / TILE + 1;
    float sum = 0.0f;
    for (int i = 0; i < tiles; i++) sum += partials[(u64)i * total_rows + row];
    kl[row] = sum;
}

__device__ __forceinline__ void store_pair(real* to, float low, float high) {
#if defined(REAL_F32)
    *reinterpret_cast<float2*>(to) = float2{low, high};
#else
    *reinterpret_cast<u32*>(to) = pack2(low, high);
#endif
}

// For `num_rows` rows from `first_row` (a multiple of 64) on of the sequences from
// `first_sequence` on: dz[sequence][row][head][⌈T/64⌉·64], zero where a row does not see a key, up
// to the last tile of keys that any of the rows sees; partials[tile of keys][row of all][head][2]:
// dw, and the sum of dz·√width. `inverse_count` and `weight` are the term's, and `loss_scale`
// multiplies the gradient in half precision and is null otherwise. Grid: (tiles of rows × sequences, tiles of keys).
KERNEL __launch_bounds__(THREADS, 3) indexer_loss_backward(const float* inverse_count,
                                                        const float* term_weight,
                                                        const float* loss_scale, INDEXER,
                                                        const float* indexer_lse, ATTENTION,
                                                        real* dz, float* partials, u64 total_rows,
                                                        int seq, int heads, int width,
                                                        int first_sequence, int first_row,
                                                        int num_rows) {
    await_earlier();
    __shared__ __align__(16) Tiles tiles;
    int row_tiles = (num_rows + TILE - 1) / TILE;
    int sequence = blockIdx.x / row_tiles, b = first_sequence + sequence;
    int t0 = first_row + (int)(blockIdx.x % row_tiles) * TILE, s0 = blockIdx.y * TILE;
    int t = threadIdx.x % 4;
    u64 row_length = (u64)((seq + TILE - 1) / TILE) * TILE;
    Indexer indexer(INDEXER_NAMES, b, seq, heads, width, t0, s0);
    int rows[2] = {indexer.row(0), indexer.row(1)};
    // This thread's first element in either row, and whether the row is there.
    real* to[2];
    bool inside[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        inside[half] = rows[half] < min(first_row + num_rows, seq);
        u64 row = (u64)sequence * num_rows + (rows[half] - first_row);
        to[half] = dz + row * heads * row_length + s0 + 2 * t;
    }
    if (s0 > t0) {
        for (int head = 0; head < heads; head++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int n = 0; n < 8; n++)
                    if (inside[half]) store_pair(to[half] + head * row_length + n * 8, 0.0f, 0.0f);
        return;
    }

    float factor = *inverse_count * *term_weight * (loss_scale ? *loss_scale : 1.0f);
    float d[8][4], score[8][4];
    probabilities(d, tiles, ATTENTION_NAMES, b, seq, t0, s0, rows);
    indexer.scores(score, tiles);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = rows[half];
        u64 seen = seen_keys(selection, b, row, s0, seq) >> (2 * t);
        float offset = row < seq ? indexer_lse[(u64)b * seq + row] : 0.0f;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                bool sees = seen >> (n * 8 + e % 2) & 1ull;
                d[n][e] = sees ? factor * (expf(score[n][e] - offset) - d[n][e]) : 0.0f;
            }
    }
    for (int head = 0; head < heads; head++) {
        float s[8][4];
        // The keys of the scores just computed are still there.
        indexer.sigmoids(s, tiles, head, true);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = rows[half];
            float w = indexer.weight(row, head), of_weight = 0.0f, of_score = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float pair[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float sigma = s[n][2 * half + e], difference = d[n][2 * half + e];
                    float x = difference * w * sigma * (1.0f - sigma);
                    of_weight = fmaf(difference, sigma, of_weight);
                    of_score += x;
                    pair[e] = x * indexer.scale;
                }
                if (inside[half])
                    store_pair(to[half] + head * row_length + n * 8, pair[0], pair[1]);
            }
            of_weight = row_sum(of_weight);
            of_score = row_sum(of_score);
            if (t == 0 && inside[half]) {
                u64 at = (u64)blockIdx.y * total_rows + (u64)b * seq + row;
                *reinterpret_cast<float2*>(partials + (at * heads + head) * 2) =
                    float2{of_weight, of_score};
            }
        }
    }
}

// Rows of a block of `indexer_gradient_rows`, as in the op's declaration.
#define ROWS 64

// The gradients of the weights before their sigmoid, and for each block of rows the sums of these
// and of the gradients of the scores: biases[2][blocks][heads]. Dynamic shared memory:
// [2][ROWS][heads] floats.
KERNEL __launch_bounds__(256) indexer_gradient_rows(const float* partials, const real* weights,
                                                    const float* weight_bias, real* grad_weights,
                                                    float* biases, u64 total_rows, int seq,
                                                    int heads) {
    await_earlier();
    extern __shared__ float sums[];
    for (int i = threadIdx.x; i < ROWS * heads; i += 256) {
        u64 row = (u64)blockIdx.x * ROWS + i / heads;
        int head = i % heads;
        float of_weight = 0.0f, of_score = 0.0f;
        if (row < total_rows) {
            int tiles = (int)(row % seq) / TILE + 1;
            for (int tile = 0; tile < tiles; tile++) {
                u64 at = ((u64)tile * total_rows + row) * heads + head;
                float2 part = *reinterpret_cast<const float2*>(partials + at * 2);
                of_weight += part.x;
                of_score += part.y;
            }
            float w = exact_sigmoid(to_float(weights[row * heads + head]) + weight_bias[head]);
            of_weight *= w * (1.0f - w);
            grad_weights[row * heads + head] = from_float<real>(of_weight);
        }
        sums[i] = of_weight;
        sums[ROWS * heads + i] = of_score;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * heads; i += 256) {
        int which = i / heads, head = i % heads;
        float sum = 0.0f;
        for (int row = 0; row < ROWS; row++) sum += sums[(which * ROWS + row) * heads + head];
        biases[((u64)which * gridDim.x + blockIdx.x) * heads + head] = sum;
    }
}
