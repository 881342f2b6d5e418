// Both products that an adapter's second matrix W[n, 8] has in the backward, in one pass over dy:
//
//   dt[m, 8] (+)= scale·dy[m, n]·W        parts[p][n, 8] = scale·dy[m, n]ᵀ·t[m, 8] over the rows of part p
//
// n is the first number in a kernel's name and the second is the warps of a block. The grid is (parts,
// adapters): those beside each other have columns that follow each other, in dy and in t and dt, and up
// to three matrices of their own; their parts follow each other as well. Each warp has an equal share of
// the columns, brings them itself and some rows ahead, and sums its columns of parts in registers; what
// the warps have of a row of dt is added up in their order. Rows begin at multiples of 16 bytes. For
// 16-bit element types.
#include "common.cuh"
#include "matrix.cuh"

constexpr int RANK = 8;

__device__ __forceinline__ void bring(u32 to, const real* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}

template <int TILES, int ROWS> struct Stage {
    static constexpr int COLUMNS = 16 * TILES;
    // Eight rows of a matrix begin in different banks.
    alignas(16) real wide[ROWS][COLUMNS + 8];
    alignas(16) real narrow[ROWS][RANK];
};

// A warp has TILES of 16 columns, and ROWS rows, 16 or 32, in each of STAGES.
template <int WARPS, int TILES, int STAGES, int ROWS>
__device__ __forceinline__ void back(const real* dy, const real* t, const real* w, real* dt, float* parts,
                                     u32 rows, u32 dy_stride, u32 t_stride, u32 dt_stride, u32 rows_of_part,
                                     u32 is_added, float dt_scale, float scale) {
    constexpr int HALVES = ROWS / 16, N = WARPS * 16 * TILES;
    extern __shared__ char dynamic_shared[];
    typedef Stage<TILES, ROWS> Own;
    float(*sums)[WARPS][ROWS][RANK] = (float(*)[WARPS][ROWS][RANK])dynamic_shared;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    Own* stages = (Own*)(dynamic_shared + 2 * sizeof(sums[0])) + warp * STAGES;
    u32 begin = blockIdx.x * rows_of_part, end = min(begin + rows_of_part, rows), first = warp * Own::COLUMNS;
    dy += blockIdx.y * N;
    t += blockIdx.y * RANK;
    dt += blockIdx.y * RANK;
    auto bring_rows = [&](u32 from, Own& stage) {
#pragma unroll
        for (int i = 0; i < HALVES * TILES; i++) {
            u32 piece = i * 32 + lane, row = piece / (2 * TILES), at = piece % (2 * TILES) * 8;
            bool is_there = from + row < end;
            u64 place = is_there ? (u64)(from + row) * dy_stride + first + at : 0;
            bring(shared_address(&stage.wide[row][at]), dy + place, is_there);
        }
        if (lane < ROWS) {
            bool is_there = from + lane < end;
            u64 place = is_there ? (u64)(from + lane) * t_stride : 0;
            bring(shared_address(stage.narrow[lane]), t + place, is_there);
        }
    };
    auto committed = [] { asm volatile("cp.async.commit_group;" ::: "memory"); };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (begin + i * ROWS < end) bring_rows(begin + i * ROWS, stages[i]);
        committed();
    }
    u32 right[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const real* from = w + (u64)(first + i * 16 + half * 8 + 2 * q) * RANK + g;
            right[i][half] = (u32)from[0].bits | (u32)from[RANK].bits << 16;
        }
    float gradient[TILES][4] = {};
    u32 stage = 0, buffer = 0;
    for (u32 from = begin; from < end; from += ROWS, buffer ^= 1) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();
        u32 ahead = from + (STAGES - 1) * ROWS;
        if (ahead < end) bring_rows(ahead, stages[stage == 0 ? STAGES - 1 : stage - 1]);
        committed();
        Own& own = stages[stage];
        if (++stage == STAGES) stage = 0;
        u32 low[4];
        load_matrices_transposed(low, shared_address(own.narrow[lane % ROWS]));
        float sum[HALVES][4] = {};
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                u32 left[4], turned[4];
                load_matrices(left, shared_address(&own.wide[half * 16 + lane % 16][i * 16 + lane / 16 * 8]));
                multiply(sum[half], left, right[i][0], right[i][1]);
                u32 row = half * 16 + lane % 8 + lane / 16 * 8, at = i * 16 + lane / 8 % 2 * 8;
                load_matrices_transposed(turned, shared_address(&own.wide[row][at]));
                multiply(gradient[i], turned, low[2 * half], low[2 * half + 1]);
            }
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float2 two = {sum[half][2 * i], sum[half][2 * i + 1]};
                *(float2*)&sums[buffer][warp][half * 16 + i * 8 + g][2 * q] = two;
            }
        __syncthreads();
        // Two neighbours to a thread.
        u32 row = threadIdx.x / (RANK / 2), column = threadIdx.x % (RANK / 2) * 2;
        if (row < ROWS && from + row < end) {
            float2 total = {};
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                float2 other = *(const float2*)&sums[buffer][i][row][column];
                total.x += other.x;
                total.y += other.y;
            }
            real* to = dt + (u64)(from + row) * dt_stride + column;
            total.x *= dt_scale;
            total.y *= dt_scale;
            if (is_added) {
                total.x += to_float(to[0]);
                total.y += to_float(to[1]);
            }
            *(u32*)to = pack2(total.x, total.y);
        }
    }
    parts += (u64)(blockIdx.y * gridDim.x + blockIdx.x) * (N * RANK);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 column = first + i * 16 + half * 8 + g;
            float2 two = {gradient[i][2 * half] * scale, gradient[i][2 * half + 1] * scale};
            *(float2*)(parts + (u64)column * RANK + 2 * q) = two;
        }
}

#define BACK(columns, warps, stages, rows_at_once, blocks)                                                  \
    KERNEL __launch_bounds__(32 * warps, blocks)                                                            \
    adapter_back_##columns##_##warps(const real* dy, const real* t, const real* first, const real* second,  \
                                     const real* third, real* dt, float* parts, u32 rows, u32 dy_stride,    \
                                     u32 t_stride, u32 dt_stride, u32 rows_of_part, u32 is_added,           \
                                     float dt_scale, float scale) {                                         \
        await_earlier();                                                                                    \
        const real* w = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;                         \
        back<warps, columns / (16 * warps), stages, rows_at_once>(dy, t, w, dt, parts, rows, dy_stride,     \
                                                                  t_stride, dt_stride, rows_of_part,        \
                                                                  is_added, dt_scale, scale);               \
    }

BACK(128, 8, 4, 32, 2)
BACK(256, 8, 4, 32, 2)
BACK(384, 12, 4, 16, 2)
BACK(384, 4, 3, 16, 4)
BACK(512, 8, 3, 32, 1)
BACK(768, 8, 3, 32, 1)
BACK(1024, 8, 2, 32, 1)
BACK(1536, 8, 3, 16, 1)
