// The gradient of a small linear layer on the tensor cores, in 16 bits: dW[m, n] = dyᵀ·x and
// db[m] = Σ dy over very many rows, of which both are few columns wide.
//
// Nothing but the rows is long, so blocks have parts of them: a block has a tile of 64 × 64 of dW
// and its part of the rows, in the same order every time. The sums of the parts are floats in the
// workspace, [parts, m·n + m], which a second launch adds up in their order.
#include "common.cuh"
#include "matrix.cuh"

constexpr int THREADS = 128;
constexpr int SIDE = 64;
// Rows of a step, and elements from one of them to the next in shared memory: such that eight rows
// are in different banks.
constexpr int STEP = 32;
constexpr int ROW = SIDE + 8;
// Elements of 16 bytes; those that a thread reads of a step of one matrix.
constexpr int VECTOR = 8;
constexpr int CHUNKS = STEP * SIDE / VECTOR / THREADS;
#if defined(REAL_F16)
constexpr u32 ONES = 0x3c003c00u;
#else
constexpr u32 ONES = 0x3f803f80u;
#endif

typedef Pack<u32, 4> Chunk;

// A thread's part of a step of a matrix: `CHUNKS` pieces; zeroes beside and behind it.
struct Piece {
    Chunk chunks[CHUNKS];

    __device__ __forceinline__ void read(const real* matrix, u32 stride, u32 first, u32 end,
                                         u32 column, u32 width) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 place = threadIdx.x + i * THREADS;
            u32 row = first + place / (SIDE / VECTOR);
            u32 at = column + place % (SIDE / VECTOR) * VECTOR;
            chunks[i] = Chunk{};
            if (row < end && at < width)
                chunks[i] = *reinterpret_cast<const Chunk*>(matrix + (u64)row * stride + at);
        }
    }
    __device__ __forceinline__ void put(real* tile) const {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) {
            u32 place = threadIdx.x + i * THREADS;
            u32 row = place / (SIDE / VECTOR), at = place % (SIDE / VECTOR) * VECTOR;
            *reinterpret_cast<Chunk*>(tile + row * ROW + at) = chunks[i];
        }
    }
};

// Grid (tiles of n, tiles of m, parts). The four warps have 32 × 32 each.
KERNEL __launch_bounds__(THREADS)
gradient_parts(const real* dy, const real* x, float* parts, u32 dy_stride, u32 x_stride, u32 rows,
               u32 rows_of_part, u32 m, u32 n) {
    await_earlier();
    __shared__ alignas(16) real dy_tile[STEP * ROW];
    __shared__ alignas(16) real x_tile[STEP * ROW];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 m0 = blockIdx.y * SIDE, n0 = blockIdx.x * SIDE;
    u32 first = blockIdx.z * rows_of_part, end = min(first + rows_of_part, rows);
    int row_side = warp / 2 * 32, column_side = warp % 2 * 32;
    bool sums_rows = blockIdx.x == 0 && column_side == 0;
    float sums[2][4][4] = {}, of_rows[2][4] = {};
    Piece next_dy, next_x;
    next_dy.read(dy, dy_stride, first, end, m0, m);
    next_x.read(x, x_stride, first, end, n0, n);
    for (u32 row = first; row < end; row += STEP) {
        __syncthreads();
        next_dy.put(dy_tile);
        next_x.put(x_tile);
        __syncthreads();
        next_dy.read(dy, dy_stride, row + STEP, end, m0, m);
        next_x.read(x, x_stride, row + STEP, end, n0, n);
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            // Both lie by rows of the sum and are turned around.
            u32 a[2][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int of_a = k + lane / 16 * 8 + lane % 8, column_a = row_side + 16 * i;
                load_matrices_transposed(
                    a[i], shared_address(dy_tile + of_a * ROW + column_a + lane / 8 % 2 * 8));
                int of_b = k + lane / 8 % 2 * 8 + lane % 8, column_b = column_side + 16 * i;
                load_matrices_transposed(
                    b[i], shared_address(x_tile + of_b * ROW + column_b + lane / 16 * 8));
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                if (sums_rows) multiply(of_rows[i], a[i], ONES, ONES);
            }
        }
    }
    parts += (u64)blockIdx.z * (m * n + m);
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = m0 + row_side + 16 * i + 8 * half + g;
            if (row >= m) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 column = n0 + column_side + 8 * j + 2 * t;
                float2 pair = make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
                if (column < n) *reinterpret_cast<float2*>(parts + row * n + column) = pair;
            }
            if (sums_rows && t == 0) parts[m * n + row] = of_rows[i][2 * half];
        }
    }
}

// dw[weights] (+)= scale·Σ parts, db (+)= Σ of those that follow, where there is one. Blocks of
// 32 × 32: an output to a thread, every 32nd part.
KERNEL __launch_bounds__(1024)
gradient_sum(const float* parts, float* dw, float* db, u32 num_parts, u32 weights, u32 outputs,
             float scale, u32 dw_adds, u32 db_adds) {
    await_earlier();
    __shared__ float sums[32][33];
    u32 i = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (i < outputs) {
        u32 count = num_turns(threadIdx.y, num_parts, 32);
#pragma unroll 4
        for (u32 turn = 0; turn < count; turn++)
            sum += parts[(u64)(threadIdx.y + turn * 32) * outputs + i];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Each warp adds up the 32 sums of one output.
    float total = warp_sum(sums[threadIdx.x][threadIdx.y]);
    i = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x != 0 || i >= outputs) return;
    if (i < weights) {
        total *= scale;
        dw[i] = dw_adds ? dw[i] + total : total;
    } else if (db) {
        db[i - weights] = db_adds ? db[i - weights] + total : total;
    }
}
