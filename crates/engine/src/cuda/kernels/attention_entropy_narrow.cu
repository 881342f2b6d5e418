// The entropy of attention, averaged over heads, for up to 8 heads of 8 columns: the equations and
// tensors of attention_entropy.cu.
//
// A lane has one head of two positions of one side (queries, or for dk keys) in registers and goes
// through the other side in steps of eight, read from shared memory. The eight lanes of a position
// add their probabilities such that each ends up with the mean of one of the eight, takes its
// logarithm, and gives it back to the others.
#include "common.cuh"

constexpr float EPSILON = 1e-9f;
constexpr int WIDTH = 8;
// Lanes of a position, one for each head, and positions that are worked on together.
constexpr int HEADS = 8;
constexpr int STEP = 8;
constexpr int THREADS = 128;
// Positions of a lane, of a warp and of a block.
constexpr int EACH = 2;
constexpr int WARP = 32 / HEADS * EACH;
constexpr int BLOCK = THREADS / HEADS * EACH;
// Positions of the other side in shared memory, and floats of a row there: first the first halves
// of all heads, then the second, so that lanes side by side read side by side.
constexpr int TILE = 64;
constexpr int ROW = HEADS * WIDTH;
constexpr int HALF = WIDTH / 2;

#define PARAMETERS u32 stride, int seq, int heads, int width, float scale, int causal

// This lane's head, and the first of its positions; the second is a quarter of its warp behind.
struct Lane {
    int head, first;

    __device__ __forceinline__ explicit Lane(int block) {
        head = threadIdx.x % HEADS;
        first = block * BLOCK + threadIdx.x / 32 * WARP + threadIdx.x % 32 / HEADS;
    }
    __device__ __forceinline__ int position(int i) const { return first + i * (32 / HEADS); }
};

// Of a causal order the blocks with the most work begin.
__device__ __forceinline__ int heaviest_first() { return gridDim.x - 1 - blockIdx.x; }

// A head of a row of q or k, times `factor`; zeroes where there is none.
__device__ __forceinline__ void read_head(const real* matrix, u32 stride, int row, int seq,
                                          int head, int heads, float factor, float (&x)[WIDTH]) {
#pragma unroll
    for (int d = 0; d < WIDTH; d++) x[d] = 0.0f;
    if (row < seq && head < heads) load(matrix + (u64)row * stride + head * WIDTH, x);
#pragma unroll
    for (int d = 0; d < WIDTH; d++) x[d] *= factor;
}

// The rows from `first` on, times `factor`.
__device__ __forceinline__ void read_tile(float* tile, const real* matrix, u32 stride, int first,
                                          int seq, int heads, float factor) {
    for (int i = threadIdx.x; i < TILE * HEADS; i += THREADS) {
        int row = i / HEADS, head = i % HEADS;
        float x[WIDTH], half[HALF];
        read_head(matrix, stride, first + row, seq, head, heads, factor, x);
        float* to = tile + row * ROW + head * HALF;
#pragma unroll
        for (int d = 0; d < HALF; d++) half[d] = x[d];
        store(to, half);
#pragma unroll
        for (int d = 0; d < HALF; d++) half[d] = x[HALF + d];
        store(to + HEADS * HALF, half);
    }
}

__device__ __forceinline__ void read_row(const float* tile, int row, int head, float (&x)[WIDTH]) {
    float low[HALF], high[HALF];
    load(tile + row * ROW + head * HALF, low);
    load(tile + row * ROW + (HEADS + head) * HALF, high);
#pragma unroll
    for (int d = 0; d < HALF; d++) {
        x[d] = low[d];
        x[HALF + d] = high[d];
    }
}

__device__ __forceinline__ float dot(const float (&a)[WIDTH], const float (&b)[WIDTH]) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int d = 1; d < WIDTH; d++) sum = fmaf(a[d], b[d], sum);
    return sum;
}

// Sums p[j] over the eight lanes of a position: a lane gets that of j = its head.
__device__ __forceinline__ float sum_heads(const float (&p)[STEP]) {
    int head = threadIdx.x % HEADS;
    float four[4], two[2];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float given = head & 4 ? p[j] : p[j + 4];
        four[j] = (head & 4 ? p[j + 4] : p[j]) + __shfl_xor_sync(0xffffffffu, given, 4);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float given = head & 2 ? four[j] : four[j + 2];
        two[j] = (head & 2 ? four[j + 2] : four[j]) + __shfl_xor_sync(0xffffffffu, given, 2);
    }
    float given = head & 1 ? two[0] : two[1];
    return (head & 1 ? two[1] : two[0]) + __shfl_xor_sync(0xffffffffu, given, 1);
}

// w[j] of the eight, from this lane's own.
__device__ __forceinline__ void share(float own, float (&w)[STEP]) {
#pragma unroll
    for (int j = 0; j < STEP; j++)
        w[j] = __shfl_sync(0xffffffffu, own, (threadIdx.x % 32) / HEADS * HEADS + j);
}

__device__ __forceinline__ float weight(float a) {
    return logf(a + EPSILON) + a / (a + EPSILON);
}

// The last key that a query sees.
__device__ __forceinline__ int last_key(int t, int seq, int causal) {
    return causal ? min(t, seq - 1) : seq - 1;
}

// Grid (tiles of queries, B).
KERNEL __launch_bounds__(THREADS) attention_entropy_narrow(const real* q, const real* k,
                                                           const float* lse, float* entropy,
                                                           float* means, PARAMETERS) {
    await_earlier();
    __shared__ alignas(16) float tile[TILE * ROW];
    int block = heaviest_first(), b = blockIdx.y;
    Lane lane(block);
    q += (u64)b * seq * stride;
    k += (u64)b * seq * stride;
    lse += (u64)b * heads * seq;
    float query[EACH][WIDTH], offset[EACH], sum[EACH] = {}, mean[EACH] = {};
    int last[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int t = lane.position(i);
        bool inside = t < seq && lane.head < heads;
        read_head(q, stride, t, seq, lane.head, heads, scale * LOG2_E, query[i]);
        offset[i] = inside ? lse[(u64)lane.head * seq + t] * LOG2_E : 0.0f;
        last[i] = inside ? last_key(t, seq, causal) : -1;
    }
    int end = last_key(min(block * BLOCK + BLOCK, seq) - 1, seq, causal) + 1;
    float part = 1.0f / (float)heads;
    for (int k0 = 0; k0 < end; k0 += TILE) {
        __syncthreads();
        read_tile(tile, k, stride, k0, seq, heads, 1.0f);
        __syncthreads();
        for (int s0 = k0; s0 < min(k0 + TILE, end); s0 += STEP) {
            float p[EACH][STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float key[WIDTH];
                read_row(tile, s0 - k0 + j, lane.head, key);
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    p[i][j] = s0 + j <= last[i] ? exp2_fast(dot(query[i], key) - offset[i]) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float a = sum_heads(p[i]) * part, w[STEP];
                float logarithm = logf(a + EPSILON);
                sum[i] = fmaf(-a, logarithm, sum[i]);
                share(logarithm + a / (a + EPSILON), w);
#pragma unroll
                for (int j = 0; j < STEP; j++) mean[i] = fmaf(p[i][j], w[j], mean[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int t = lane.position(i);
        float total = sum[i];
#pragma unroll
        for (int offset = HEADS / 2; offset > 0; offset /= 2)
            total += __shfl_xor_sync(0xffffffffu, total, offset);
        if (t >= seq || lane.head >= heads) continue;
        if (lane.head == 0) entropy[(u64)b * seq + t] = total;
        if (means) means[((u64)b * heads + lane.head) * seq + t] = mean[i];
    }
}

// Queries: grid (tiles of queries, B). Also clears the values' gradients.
KERNEL __launch_bounds__(THREADS)
attention_entropy_queries_narrow(const float* gradient, const real* q, const real* k,
                                 const float* lse, const float* means, real* dq, real* dv,
                                 PARAMETERS) {
    await_earlier();
    __shared__ alignas(16) float tile[TILE * ROW];
    int block = heaviest_first(), b = blockIdx.y;
    Lane lane(block);
    u64 start = (u64)b * seq * stride;
    float part = 1.0f / (float)heads;
    float query[EACH][WIDTH], sum[EACH][WIDTH] = {};
    float offset[EACH] = {}, mean[EACH] = {}, factor[EACH] = {};
    int last[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int t = lane.position(i);
        bool inside = t < seq && lane.head < heads;
        read_head(q + start, stride, t, seq, lane.head, heads, scale * LOG2_E, query[i]);
        last[i] = inside ? last_key(t, seq, causal) : -1;
        if (!inside) continue;
        u64 at = ((u64)b * heads + lane.head) * seq + t;
        offset[i] = lse[at] * LOG2_E;
        mean[i] = means[at];
        factor[i] = -gradient[(u64)b * seq + t] * part;
    }
    int end = last_key(min(block * BLOCK + BLOCK, seq) - 1, seq, causal) + 1;
    for (int k0 = 0; k0 < end; k0 += TILE) {
        __syncthreads();
        read_tile(tile, k + start, stride, k0, seq, heads, 1.0f);
        __syncthreads();
        for (int s0 = k0; s0 < min(k0 + TILE, end); s0 += STEP) {
            float ds[EACH][STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float key[WIDTH];
                read_row(tile, s0 - k0 + j, lane.head, key);
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    ds[i][j] = s0 + j <= last[i] ? exp2_fast(dot(query[i], key) - offset[i]) : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float w[STEP];
                share(weight(sum_heads(ds[i]) * part), w);
#pragma unroll
                for (int j = 0; j < STEP; j++) ds[i][j] *= (w[j] - mean[i]) * factor[i];
            }
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float key[WIDTH];
                read_row(tile, s0 - k0 + j, lane.head, key);
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int d = 0; d < WIDTH; d++)
                        sum[i][d] = fmaf(ds[i][j], key[d], sum[i][d]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int t = lane.position(i);
        if (t >= seq || lane.head >= heads) continue;
        float zero[WIDTH] = {};
#pragma unroll
        for (int d = 0; d < WIDTH; d++) sum[i][d] *= scale;
        u64 at = start + (u64)t * stride + lane.head * WIDTH;
        store(dq + at, sum[i]);
        store(dv + at, zero);
    }
}

// Keys: grid (tiles of keys, B).
KERNEL __launch_bounds__(THREADS)
attention_entropy_keys_narrow(const float* gradient, const real* q, const real* k,
                              const float* lse, const float* means, real* dk, PARAMETERS) {
    await_earlier();
    // Queries, and of each and each head the log-sum-exp and D; then what ds is multiplied by.
    __shared__ alignas(16) float tile[TILE * ROW];
    __shared__ alignas(16) float numbers[TILE * HEADS * 2];
    __shared__ float factors[TILE];
    int b = blockIdx.y;
    Lane lane(blockIdx.x);
    u64 start = (u64)b * seq * stride;
    float part = 1.0f / (float)heads;
    float key[EACH][WIDTH], sum[EACH][WIDTH] = {};
    // The first query that sees each key.
    int from[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int s = lane.position(i);
        read_head(k + start, stride, s, seq, lane.head, heads, 1.0f, key[i]);
        from[i] = s >= seq || lane.head >= heads ? seq : causal ? s : 0;
    }
    int begin = causal ? (int)blockIdx.x * BLOCK : 0;
    for (int t0 = begin; t0 < seq; t0 += TILE) {
        __syncthreads();
        read_tile(tile, q + start, stride, t0, seq, heads, scale * LOG2_E);
        for (int i = threadIdx.x; i < TILE * HEADS; i += THREADS) {
            int row = i % TILE, head = i / TILE, t = t0 + row;
            u64 at = ((u64)b * heads + head) * seq + t;
            bool inside = t < seq && head < heads;
            numbers[(row * HEADS + head) * 2] = inside ? lse[at] * LOG2_E : 0.0f;
            numbers[(row * HEADS + head) * 2 + 1] = inside ? means[at] : 0.0f;
        }
        if (threadIdx.x < TILE) {
            int t = t0 + threadIdx.x;
            factors[threadIdx.x] = t < seq ? -gradient[(u64)b * seq + t] * part : 0.0f;
        }
        __syncthreads();
        for (int r0 = t0; r0 < min(t0 + TILE, seq); r0 += STEP) {
            float ds[EACH][STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float query[WIDTH];
                read_row(tile, r0 - t0 + j, lane.head, query);
                float offset = numbers[((r0 - t0 + j) * HEADS + lane.head) * 2];
                bool inside = r0 + j < seq;
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    bool seen = inside && r0 + j >= from[i];
                    ds[i][j] = seen ? exp2_fast(dot(query, key[i]) - offset) : 0.0f;
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float w[STEP];
                share(weight(sum_heads(ds[i]) * part), w);
#pragma unroll
                for (int j = 0; j < STEP; j++) {
                    float mean = numbers[((r0 - t0 + j) * HEADS + lane.head) * 2 + 1];
                    ds[i][j] *= (w[j] - mean) * factors[r0 - t0 + j];
                }
            }
#pragma unroll
            for (int j = 0; j < STEP; j++) {
                float query[WIDTH];
                read_row(tile, r0 - t0 + j, lane.head, query);
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int d = 0; d < WIDTH; d++)
                        sum[i][d] = fmaf(ds[i][j], query[d], sum[i][d]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int s = lane.position(i);
        if (s >= seq || lane.head >= heads) continue;
        // The queries had the scale in units of ln 2.
#pragma unroll
        for (int d = 0; d < WIDTH; d++) sum[i][d] *= LN_2;
        store(dk + start + (u64)s * stride + lane.head * WIDTH, sum[i]);
    }
}
