// The entropy of attention, averaged over heads.
//
//   p_hs = exp(scale·⟨q_h, k_hs⟩ − lse_h),   a_s = Σ_h p_hs / H
//   entropy = −Σ_s a_s·ln(a_s + ε),          w_s = ln(a_s + ε) + a_s / (a_s + ε)
//   D_h  = Σ_s p_hs·w_s,                     ds_hs = −g/H·p_hs·(w_s − D_h)
//
// q and k [B, T, heads·width] with rows `stride` elements apart; lse and D [B, heads, T]. A lane
// has a key and computes its probabilities of all heads, so that their mean needs nobody else.
#include "common.cuh"

constexpr float EPSILON = 1e-9f;
constexpr int WARPS = 8;
// Queries of a warp, of a block, and keys of a tile.
constexpr int EACH = 2;
constexpr int ROWS = WARPS * EACH;
constexpr int KEYS = 32;

#define PARAMETERS u32 stride, int seq, int heads, int width, float scale, int causal

// A block's tiles in shared memory: queries [ROWS][columns], keys [KEYS][columns + 1].
struct Tiles {
    float *queries, *keys, *rest;
    int columns;

    __device__ __forceinline__ Tiles(float* shared, int heads, int width) {
        columns = heads * width;
        queries = shared;
        keys = queries + ROWS * columns;
        rest = keys + KEYS * (columns + 1);
    }

    __device__ __forceinline__ void read_queries(const real* q, u32 stride, int first, int seq) {
        for (int i = threadIdx.x; i < ROWS * columns; i += 32 * WARPS) {
            int row = i / columns, column = i % columns;
            bool inside = first + row < seq;
            queries[i] = inside ? to_float(q[(u64)(first + row) * stride + column]) : 0.0f;
        }
    }

    __device__ __forceinline__ void read_keys(const real* k, u32 stride, int first, int seq) {
        for (int i = threadIdx.x; i < KEYS * columns; i += 32 * WARPS) {
            int row = i / columns, column = i % columns;
            bool inside = first + row < seq;
            keys[row * (columns + 1) + column] =
                inside ? to_float(k[(u64)(first + row) * stride + column]) : 0.0f;
        }
    }
};

// p and w of this lane's key for the queries of its warp, the first of which is at `t0`. `lse` is
// that of the sequence. Where a query does not see the key, p is 0.
template <int H>
__device__ __forceinline__ void probabilities(const Tiles& tiles, const float* lse, int t0, int s,
                                              int seq, int heads, int width, float scale,
                                              int causal, float (&p)[EACH][H], float (&a)[EACH],
                                              float (&w)[EACH]) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* key = tiles.keys + lane * (tiles.columns + 1);
    const float* query = tiles.queries + warp * EACH * tiles.columns;
    float share = 1.0f / (float)heads;
#pragma unroll
    for (int i = 0; i < EACH; i++) a[i] = 0.0f;
#pragma unroll
    for (int h = 0; h < H; h++) {
        if (h < heads) {
            float score[EACH] = {};
            for (int d = 0; d < width; d++) {
                float x = key[h * width + d];
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    score[i] = fmaf(query[i * tiles.columns + h * width + d], x, score[i]);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                int t = t0 + i;
                bool sees = t < seq && s < seq && (!causal || s <= t);
                p[i][h] = sees ? __expf(score[i] * scale - lse[(u64)h * seq + t]) : 0.0f;
                a[i] = fmaf(p[i][h], share, a[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i++) p[i][h] = 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) w[i] = logf(a[i] + EPSILON) + a[i] / (a[i] + EPSILON);
}

// Grid (tiles of queries, B). Shared memory: the tiles.
template <int H>
__device__ __forceinline__ void forward(const real* q, const real* k, const float* lse,
                                        float* entropy, float* means, PARAMETERS) {
    extern __shared__ float shared[];
    Tiles tiles(shared, heads, width);
    int first = blockIdx.x * ROWS, b = blockIdx.y, lane = threadIdx.x % 32;
    int t0 = first + threadIdx.x / 32 * EACH;
    q += (u64)b * seq * stride;
    k += (u64)b * seq * stride;
    lse += (u64)b * heads * seq;
    tiles.read_queries(q, stride, first, seq);
    float sum[EACH] = {}, mean[EACH][H] = {};
    int end = causal ? min(seq, first + ROWS) : seq;
    for (int k0 = 0; k0 < end; k0 += KEYS) {
        __syncthreads();
        tiles.read_keys(k, stride, k0, seq);
        __syncthreads();
        float p[EACH][H], a[EACH], w[EACH];
        probabilities<H>(tiles, lse, t0, k0 + lane, seq, heads, width, scale, causal, p, a, w);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            sum[i] = fmaf(-a[i], logf(a[i] + EPSILON), sum[i]);
#pragma unroll
            for (int h = 0; h < H; h++) mean[i][h] = fmaf(p[i][h], w[i], mean[i][h]);
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        float total = warp_sum(sum[i]);
        if (lane == 0 && t0 + i < seq) entropy[(u64)b * seq + t0 + i] = total;
        if (!means) continue;
#pragma unroll
        for (int h = 0; h < H; h++) {
            float total = warp_sum(mean[i][h]);
            if (lane == 0 && h < heads && t0 + i < seq)
                means[((u64)b * heads + h) * seq + t0 + i] = total;
        }
    }
}

// The gradients of the scores of a tile, times the scale, as rest[ROWS][heads][KEYS + 1].
template <int H>
__device__ __forceinline__ void score_gradients(const Tiles& tiles, const float* gradient,
                                                const float* lse, const float* means, int t0,
                                                int k0, int seq, int heads, int width, float scale,
                                                int causal) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float p[EACH][H], a[EACH], w[EACH];
    probabilities<H>(tiles, lse, t0, k0 + lane, seq, heads, width, scale, causal, p, a, w);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        bool inside = t0 + i < seq;
        float g = inside ? -gradient[t0 + i] * scale / (float)heads : 0.0f;
#pragma unroll
        for (int h = 0; h < H; h++) {
            if (h >= heads) continue;
            float mean = inside ? means[(u64)h * seq + t0 + i] : 0.0f;
            tiles.rest[((warp * EACH + i) * heads + h) * (KEYS + 1) + lane] =
                p[i][h] * (w[i] - mean) * g;
        }
    }
}

// Queries: grid (tiles of queries, B), C the columns of a lane. Also clears the values' gradients.
template <int H, int C>
__device__ __forceinline__ void backward_queries(const float* gradient, const real* q,
                                                 const real* k, const float* lse,
                                                 const float* means, real* dq, real* dv,
                                                 PARAMETERS) {
    extern __shared__ float shared[];
    Tiles tiles(shared, heads, width);
    int first = blockIdx.x * ROWS, b = blockIdx.y, lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32, t0 = first + warp * EACH, columns = tiles.columns;
    u64 start = (u64)b * seq * stride;
    lse += (u64)b * heads * seq;
    means += (u64)b * heads * seq;
    gradient += (u64)b * seq;
    tiles.read_queries(q + start, stride, first, seq);
    float sum[EACH][C] = {};
    int end = causal ? min(seq, first + ROWS) : seq;
    for (int k0 = 0; k0 < end; k0 += KEYS) {
        __syncthreads();
        tiles.read_keys(k + start, stride, k0, seq);
        __syncthreads();
        score_gradients<H>(tiles, gradient, lse, means, t0, k0, seq, heads, width, scale, causal);
        // A warp reads what its own lanes have written.
        __syncwarp();
#pragma unroll
        for (int c = 0; c < C; c++) {
            int column = lane + 32 * c;
            if (column >= columns) continue;
            const float* ds = tiles.rest + (warp * EACH * heads + column / width) * (KEYS + 1);
#pragma unroll 8
            for (int j = 0; j < KEYS; j++) {
                float x = tiles.keys[j * (columns + 1) + column];
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    sum[i][c] = fmaf(ds[i * heads * (KEYS + 1) + j], x, sum[i][c]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (t0 + i >= seq) continue;
#pragma unroll
        for (int c = 0; c < C; c++) {
            int column = lane + 32 * c;
            if (column >= columns) continue;
            u64 at = start + (u64)(t0 + i) * stride + column;
            dq[at] = from_float<real>(sum[i][c]);
            dv[at] = from_float<real>(0.0f);
        }
    }
}

// Keys: grid (tiles of keys, B). A thread has 4·C of the tile's sums: column by column of a key.
template <int H, int C>
__device__ __forceinline__ void backward_keys(const float* gradient, const real* q, const real* k,
                                              const float* lse, const float* means, real* dk,
                                              PARAMETERS) {
    extern __shared__ float shared[];
    Tiles tiles(shared, heads, width);
    int k0 = blockIdx.x * KEYS, b = blockIdx.y, warp = threadIdx.x / 32;
    int columns = tiles.columns;
    u64 start = (u64)b * seq * stride;
    lse += (u64)b * heads * seq;
    means += (u64)b * heads * seq;
    gradient += (u64)b * seq;
    tiles.read_keys(k + start, stride, k0, seq);
    float sum[4 * C] = {};
    int begin = causal ? k0 / ROWS * ROWS : 0;
    for (int first = begin; first < seq; first += ROWS) {
        __syncthreads();
        tiles.read_queries(q + start, stride, first, seq);
        __syncthreads();
        score_gradients<H>(tiles, gradient, lse, means, first + warp * EACH, k0, seq, heads, width,
                           scale, causal);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 4 * C; n++) {
            int index = threadIdx.x + 32 * WARPS * n;
            if (index >= KEYS * columns) continue;
            int key = index / columns, column = index % columns;
            const float* ds = tiles.rest + column / width * (KEYS + 1) + key;
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                sum[n] = fmaf(ds[row * heads * (KEYS + 1)], tiles.queries[row * columns + column],
                              sum[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < 4 * C; n++) {
        int index = threadIdx.x + 32 * WARPS * n;
        int key = index / columns, column = index % columns;
        if (key < KEYS && k0 + key < seq)
            dk[start + (u64)(k0 + key) * stride + column] = from_float<real>(sum[n]);
    }
}

// Up to H heads and 32·C columns.
#define INSTANCES(H, C)                                                                            \
    KERNEL __launch_bounds__(256) attention_entropy_##H(                                           \
        const real* q, const real* k, const float* lse, float* entropy, float* means,              \
        PARAMETERS) {                                                                              \
        await_earlier();                                                                           \
        forward<H>(q, k, lse, entropy, means, stride, seq, heads, width, scale, causal);           \
    }                                                                                              \
    KERNEL __launch_bounds__(256) attention_entropy_queries_##H(                                   \
        const float* gradient, const real* q, const real* k, const float* lse,                     \
        const float* means, real* dq, real* dv, PARAMETERS) {                                      \
        await_earlier();                                                                           \
        backward_queries<H, C>(gradient, q, k, lse, means, dq, dv, stride, seq, heads, width,      \
                               scale, causal);                                                     \
    }                                                                                              \
    KERNEL __launch_bounds__(256) attention_entropy_keys_##H(                                      \
        const float* gradient, const real* q, const real* k, const float* lse,                     \
        const float* means, real* dk, PARAMETERS) {                                                \
        await_earlier();                                                                           \
        backward_keys<H, C>(gradient, q, k, lse, means, dk, stride, seq, heads, width, scale,      \
                            causal);                                                               \
    }

INSTANCES(8, 2)
INSTANCES(16, 8)

// Tokens that follow others: q [B, T, heads·width], keys [B, heads, slots, width], positions
// [B, T], whose first of each row counts. A block has a query; grid (T, B). First a warp makes the
// log-sum-exp of each head, then a thread has every 256th key.
KERNEL __launch_bounds__(256) cached_attention_entropy(
    const real* q, const real* keys, const i32* positions, float* entropy, u32 stride, int seq,
    int heads, int width, float scale, int slots) {
    await_earlier();
    __shared__ float lse[16], query[256], scratch[32];
    int t = blockIdx.x, b = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int count = min(max(positions[(u64)b * seq], 0) + t + 1, slots);
    keys += (u64)b * heads * slots * width;
    if ((int)threadIdx.x < heads * width)
        query[threadIdx.x] = to_float(q[((u64)b * seq + t) * stride + threadIdx.x]) * scale;
    __syncthreads();
    for (int h = warp; h < heads; h += WARPS) {
        float largest = MINUS_INFINITY, sum = 0.0f;
        for (int s = lane; s < count; s += 32) {
            const real* key = keys + ((u64)h * slots + s) * width;
            float score = 0.0f;
            for (int d = 0; d < width; d++)
                score = fmaf(query[h * width + d], to_float(key[d]), score);
            float top = fmaxf(largest, score);
            sum = sum * __expf(largest - top) + __expf(score - top);
            largest = top;
        }
        float top = warp_max(largest);
        sum = warp_sum(largest == MINUS_INFINITY ? 0.0f : sum * __expf(largest - top));
        if (lane == 0) lse[h] = top + logf(sum);
    }
    __syncthreads();
    float total = 0.0f;
    for (int s = threadIdx.x; s < count; s += 32 * WARPS) {
        float a = 0.0f;
        for (int h = 0; h < heads; h++) {
            const real* key = keys + ((u64)h * slots + s) * width;
            float score = 0.0f;
            for (int d = 0; d < width; d++)
                score = fmaf(query[h * width + d], to_float(key[d]), score);
            a += __expf(score - lse[h]);
        }
        a /= (float)heads;
        total = fmaf(-a, logf(a + EPSILON), total);
    }
    total = block_sum(total, scratch);
    if (threadIdx.x == 0) entropy[(u64)b * seq + t] = total;
}
