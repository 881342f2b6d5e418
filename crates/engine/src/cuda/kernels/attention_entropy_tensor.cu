// The entropy of attention, averaged over 8 heads of 8 columns, on the tensor cores in 16 bits: the
// equations and tensors of attention_entropy.cu.
//
// A block has 16 positions of one side (queries, or for dk keys), and its warps go through the
// other side, each with every so many tiles of 8. The scores of all heads of a pair of positions
// are in one lane, so that their mean needs nobody else. What the warps have is added in their
// order at the end.
#include "common.cuh"
#include "matrix.cuh"

constexpr float EPSILON = 1e-9f;
constexpr int HEADS = 8;
constexpr int WIDTH = 8;
constexpr int COLUMNS = HEADS * WIDTH;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
// Positions of a block, and of a tile of the other side.
constexpr int BLOCK = 16;
constexpr int TILE = 8;
// Elements from one row of a tile to the next: such that eight rows are in different banks.
constexpr int ROW = COLUMNS + 8;

#define PARAMETERS u32 stride, int seq, int heads, int width, float scale, int causal

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Of a causal order the blocks with the most work begin.
__device__ __forceinline__ int heaviest_first() { return gridDim.x - 1 - blockIdx.x; }

// Sixteen bytes of a row.
typedef Pack<u32, 4> Chunk;

// What a lane reads of a tile of q or k: two pieces of one of its rows; zeroes behind the end.
struct Piece {
    Chunk low, high;

    __device__ __forceinline__ void read(const real* matrix, u32 stride, int first, int seq) {
        int lane = threadIdx.x % 32, row = first + lane / 4;
        low = high = Chunk{};
        if (row >= seq) return;
        const real* from = matrix + (u64)row * stride + lane % 4 * 8;
        low = *reinterpret_cast<const Chunk*>(from);
        high = *reinterpret_cast<const Chunk*>(from + COLUMNS / 2);
    }
    __device__ __forceinline__ void put(real* tile) const {
        int lane = threadIdx.x % 32;
        real* to = tile + lane / 4 * ROW + lane % 4 * 8;
        *reinterpret_cast<Chunk*>(to) = low;
        *reinterpret_cast<Chunk*>(to + COLUMNS / 2) = high;
    }
};

// All heads of a tile as operands: (row g, columns 2t and 2t+1 of the head), or turned around (rows
// 2t and 2t+1, column g).
__device__ __forceinline__ void read_tile(const real* tile, u32 (&x)[HEADS]) {
    int lane = threadIdx.x % 32;
    u32 low[4], high[4];
    const real* from = tile + lane % 8 * ROW + lane / 8 * WIDTH;
    load_matrices(low, shared_address(from));
    load_matrices(high, shared_address(from + COLUMNS / 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = low[i];
        x[4 + i] = high[i];
    }
}
__device__ __forceinline__ void read_turned(const real* tile, u32 (&x)[HEADS]) {
    int lane = threadIdx.x % 32;
    u32 low[4], high[4];
    const real* from = tile + lane % 8 * ROW + lane / 8 * WIDTH;
    load_matrices_transposed(low, shared_address(from));
    load_matrices_transposed(high, shared_address(from + COLUMNS / 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = low[i];
        x[4 + i] = high[i];
    }
}

// The block's own positions as operands: of all heads rows g and g+8.
__device__ __forceinline__ void read_block(const real* matrix, u32 stride, int first, int seq,
                                           u32 (&x)[HEADS][2]) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + 8 * i + g;
        const u32* from = reinterpret_cast<const u32*>(matrix + (u64)row * stride);
#pragma unroll
        for (int h = 0; h < HEADS; h++) x[h][i] = row < seq ? from[h * 4 + t] : 0u;
    }
}

// a, its logarithm and w of a pair of positions, from the probabilities of its heads.
struct Mean {
    float a, logarithm, w;

    __device__ __forceinline__ Mean(const float (&p)[HEADS][4], int e) {
        float sum = p[0][e];
#pragma unroll
        for (int h = 1; h < HEADS; h++) sum += p[h][e];
        a = sum * (1.0f / HEADS);
        logarithm = log2_fast(a + EPSILON) * LN_2;
        w = logarithm + __fdividef(a, a + EPSILON);
    }
};

// The block's queries with what is known of their rows: in units of ln 2 the log-sum-exp.
struct Queries {
    u32 query[HEADS][2];
    float offset[HEADS][2];
    int last[2], end;

    __device__ __forceinline__ void read(const real* q, const float* lse, u32 stride, int first,
                                         int seq, int causal) {
        int g = threadIdx.x % 32 / 4;
        read_block(q, stride, first, seq, query);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = first + 8 * i + g;
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                offset[h][i] = row < seq ? lse[(u64)h * seq + row] * LOG2_E : 0.0f;
            last[i] = causal ? min(row, seq - 1) : seq - 1;
        }
        end = causal ? min(first + BLOCK, seq) : seq;
    }

    // Probabilities of the keys from `s0` on.
    __device__ __forceinline__ void meet(const real* tile, int s0, int common, float factor,
                                         float (&p)[HEADS][4]) const {
        int t = threadIdx.x % 4;
        u32 key[HEADS];
        read_tile(tile, key);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
            for (int e = 0; e < 4; e++) p[h][e] = 0.0f;
            multiply_short(p[h], query[h], key[h]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[h][e] = exp2_fast(fmaf(p[h][e], factor, -offset[h][e / 2]));
        }
        if (s0 + TILE <= common) return;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (s0 + 2 * t + e % 2 <= last[e / 2]) continue;
#pragma unroll
            for (int h = 0; h < HEADS; h++) p[h][e] = 0.0f;
        }
    }
};

// Grid (blocks of queries, B).
KERNEL __launch_bounds__(THREADS, 4)
attention_entropy_tensor(const real* q, const real* k, const float* lse, float* entropy,
                         float* means, PARAMETERS) {
    await_earlier();
    __shared__ alignas(16) real tiles[WARPS][TILE * ROW];
    __shared__ float parts[WARPS][BLOCK][HEADS + 1];
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    int first = heaviest_first() * BLOCK, b = blockIdx.y;
    float factor = scale * LOG2_E;
    q += (u64)b * seq * stride;
    k += (u64)b * seq * stride;
    Queries queries;
    queries.read(q, lse + (u64)b * HEADS * seq, stride, first, seq, causal);
    // The first key that some query of the block does not see.
    int common = causal ? min(first + 1, seq) : seq;
    float sum[2] = {}, mean[HEADS][2] = {};
    Piece next;
    next.read(k, stride, warp * TILE, seq);
    for (int s0 = warp * TILE; s0 < queries.end; s0 += WARPS * TILE) {
        __syncwarp();
        next.put(tiles[warp]);
        __syncwarp();
        next.read(k, stride, s0 + WARPS * TILE, seq);
        float p[HEADS][4];
        queries.meet(tiles[warp], s0, common, factor, p);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            Mean of(p, e);
            sum[e / 2] = fmaf(-of.a, of.logarithm, sum[e / 2]);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
                mean[h][e / 2] = fmaf(p[h][e], of.w, mean[h][e / 2]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int h = 0; h <= HEADS; h++) {
            float total = h < HEADS ? mean[h % HEADS][i] : sum[i];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            if (t == 0) parts[warp][8 * i + g][h] = total;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK * (HEADS + 1); i += THREADS) {
        int row = i % BLOCK, h = i / BLOCK, at = first + row;
        if (at >= seq) continue;
        float total = parts[0][row][h];
#pragma unroll
        for (int w = 1; w < WARPS; w++) total += parts[w][row][h];
        if (h == HEADS) entropy[(u64)b * seq + at] = total;
        else if (means) means[((u64)b * HEADS + h) * seq + at] = total;
    }
}

// The sums of a block, of its warps in order, times `factor` of their rows. A warp has some heads.
struct Sums {
    float parts[WARPS][HEADS * 4][32];

    __device__ __forceinline__ void add(const float (&sum)[HEADS][4], float (&total)[2][4]) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
            for (int e = 0; e < 4; e++) parts[warp][h * 4 + e][lane] = sum[h][e];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int place = (2 * warp + i) * 4 + e;
                total[i][e] = parts[0][place][lane];
#pragma unroll
                for (int w = 1; w < WARPS; w++) total[i][e] += parts[w][place][lane];
            }
        }
    }
};

// Queries: grid (blocks of queries, B). Also clears the values' gradients.
KERNEL __launch_bounds__(THREADS, 3)
attention_entropy_queries_tensor(const float* gradient, const real* q, const real* k,
                                 const float* lse, const float* means, real* dq, real* dv,
                                 PARAMETERS) {
    await_earlier();
    __shared__ alignas(16) real tiles[WARPS][TILE * ROW];
    __shared__ Sums sums;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    int first = heaviest_first() * BLOCK, b = blockIdx.y;
    u64 start = (u64)b * seq * stride, rows = (u64)b * HEADS * seq;
    float factor = scale * LOG2_E;
    Queries queries;
    queries.read(q + start, lse + rows, stride, first, seq, causal);
    int common = causal ? min(first + 1, seq) : seq;
    float mean[HEADS][2], sum[HEADS][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + 8 * i + g;
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            mean[h][i] = row < seq ? means[rows + (u64)h * seq + row] : 0.0f;
    }
    Piece next;
    next.read(k + start, stride, warp * TILE, seq);
    for (int s0 = warp * TILE; s0 < queries.end; s0 += WARPS * TILE) {
        __syncwarp();
        next.put(tiles[warp]);
        __syncwarp();
        next.read(k + start, stride, s0 + WARPS * TILE, seq);
        float p[HEADS][4], w[4];
        queries.meet(tiles[warp], s0, common, factor, p);
#pragma unroll
        for (int e = 0; e < 4; e++) w[e] = Mean(p, e).w;
        u32 key[HEADS];
        read_turned(tiles[warp], key);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            // Without the row's gradient, which may be of any size: so 16 bits hold it.
#pragma unroll
            for (int e = 0; e < 4; e++) p[h][e] *= w[e] - mean[h][e / 2];
            u32 ds[2] = {pack2(p[h][0], p[h][1]), pack2(p[h][2], p[h][3])};
            multiply_short(sum[h], ds, key[h]);
        }
    }
    float total[2][4];
    sums.add(sum, total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + 8 * i + g;
        if (row >= seq) continue;
        float whole = -gradient[(u64)b * seq + row] * scale * (1.0f / HEADS);
#pragma unroll
        for (int head = 0; head < 2; head++) {
            u64 at = start + (u64)row * stride + (2 * warp + head) * WIDTH + 2 * t;
            *reinterpret_cast<u32*>(dq + at) =
                pack2(total[head][2 * i] * whole, total[head][2 * i + 1] * whole);
            *reinterpret_cast<u32*>(dv + at) = 0u;
        }
    }
}

// What a warp knows of the queries of its tile, by head: the log-sum-exp in units of ln 2 and D;
// then what ds is multiplied by.
struct Numbers {
    alignas(16) float offset[HEADS][TILE];
    alignas(16) float mean[HEADS][TILE];
    alignas(16) float factor[TILE];
};

// What a lane reads of them.
struct Share {
    float offset[2], mean[2], factor;

    __device__ __forceinline__ void read(const float* gradient, const float* lse,
                                         const float* means, int first, int seq) {
        int lane = threadIdx.x % 32, row = first + lane % TILE;
        bool inside = row < seq;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u64 at = (u64)(lane / TILE + 4 * i) * seq + row;
            // Behind the end nothing is seen, by an offset that leaves no probability.
            offset[i] = inside ? lse[at] * LOG2_E : 1e30f;
            mean[i] = inside ? means[at] : 0.0f;
        }
        factor = inside ? -gradient[row] * (1.0f / HEADS) : 0.0f;
    }
    __device__ __forceinline__ void put(Numbers& numbers) const {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            numbers.offset[lane / TILE + 4 * i][lane % TILE] = offset[i];
            numbers.mean[lane / TILE + 4 * i][lane % TILE] = mean[i];
        }
        if (lane < TILE) numbers.factor[lane] = factor;
    }
};

// Two 16-bit elements as floats.
__device__ __forceinline__ float2 unpack2(u32 x) {
    real low, high;
    low.bits = (u16)(x & 0xffffu);
    high.bits = (u16)(x >> 16);
    return make_float2(to_float(low), to_float(high));
}

// Keys: grid (blocks of keys, B). The first blocks have the most work.
KERNEL __launch_bounds__(THREADS, 3)
attention_entropy_keys_tensor(const float* gradient, const real* q, const real* k,
                              const float* lse, const float* means, real* dk, PARAMETERS) {
    await_earlier();
    __shared__ alignas(16) real tiles[WARPS][TILE * ROW];
    __shared__ Numbers numbers[WARPS];
    __shared__ Sums sums;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    int first = (int)blockIdx.x * BLOCK, b = blockIdx.y;
    u64 start = (u64)b * seq * stride, rows = (u64)b * HEADS * seq;
    float factor = scale * LOG2_E;
    gradient += (u64)b * seq;
    lse += rows;
    means += rows;
    q += start;
    u32 key[HEADS][2];
    read_block(k + start, stride, first, seq, key);
    float sum[HEADS][4] = {};
    const Numbers& now = numbers[warp];
    int begin = (causal ? first : 0) + warp * TILE;
    Piece next;
    Share share;
    next.read(q, stride, begin, seq);
    share.read(gradient, lse, means, begin, seq);
    for (int t0 = begin; t0 < seq; t0 += WARPS * TILE) {
        __syncwarp();
        next.put(tiles[warp]);
        share.put(numbers[warp]);
        __syncwarp();
        next.read(q, stride, t0 + WARPS * TILE, seq);
        share.read(gradient, lse, means, t0 + WARPS * TILE, seq);
        u32 query[HEADS];
        read_tile(tiles[warp], query);
        float p[HEADS][4], w[4];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float2 offset = *reinterpret_cast<const float2*>(now.offset[h] + 2 * t);
#pragma unroll
            for (int e = 0; e < 4; e++) p[h][e] = 0.0f;
            multiply_short(p[h], key[h], query[h]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[h][e] = exp2_fast(fmaf(p[h][e], factor, e % 2 ? -offset.y : -offset.x));
        }
        // Keys behind the end are rows of their own, which nobody writes.
        if (causal && first + BLOCK > t0 + 1) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (first + e / 2 * 8 + g <= t0 + 2 * t + e % 2) continue;
#pragma unroll
                for (int h = 0; h < HEADS; h++) p[h][e] = 0.0f;
            }
        }
        float2 part = *reinterpret_cast<const float2*>(now.factor + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; e++) w[e] = Mean(p, e).w;
        read_turned(tiles[warp], query);
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float2 mean = *reinterpret_cast<const float2*>(now.mean[h] + 2 * t);
#pragma unroll
            for (int e = 0; e < 4; e++)
                p[h][e] *= (w[e] - (e % 2 ? mean.y : mean.x)) * (e % 2 ? part.y : part.x);
            float2 pair = unpack2(query[h]);
            multiply_floats(sum[h], p[h], pair.x, pair.y);
        }
    }
    float total[2][4];
    sums.add(sum, total);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + 8 * i + g;
        if (row >= seq) continue;
        float whole = scale * CUT;
#pragma unroll
        for (int head = 0; head < 2; head++) {
            u64 at = start + (u64)row * stride + (2 * warp + head) * WIDTH + 2 * t;
            *reinterpret_cast<u32*>(dk + at) =
                pack2(total[head][2 * i] * whole, total[head][2 * i + 1] * whole);
        }
    }
}
