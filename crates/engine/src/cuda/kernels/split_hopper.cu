// Narrow matrix products on sm_90a: C[m,n] (+)= scale·A[m,k]·B[k,n], where C has fewer tiles than the
// card has multiprocessors and k is long.
//
// The blocks of a cluster have one tile of C, and each of them a part of k. What they have summed
// meets in shared memory: each block adds up some rows of all parts, always in the same order.
// In a block two warpgroups multiply, each 64 rows, and a thread of one more warp feeds the copy
// engine. B is [k, n] (`columns`) or [n, k] (`rows`); the number in a kernel's name is that of parts.

#include "hopper.cuh"
#include "cluster.cuh"

constexpr int SIDE = 128, BK = 64, NUM_STAGES = 3, NUM_THREADS = 256 + 32;
constexpr u32 PANEL = BK * 128, STAGE = 4 * PANEL;

struct Narrow {
    int rows, columns, stride, column_tiles;
    // Tiles of the inner dimension.
    int steps;
    float scale;
    int adds;
};

template <int PARTS, int B_BY_COLUMN>
__device__ __forceinline__ void narrow_product(const Narrow& x, const TensorMap* a, const TensorMap* b, real* c) {
    extern __shared__ char dynamic_shared[];
    u32 base = (shared_address(dynamic_shared) + 1023) & ~1023u;
    u32 full = base + NUM_STAGES * STAGE, empty = full + NUM_STAGES * 8;
    u32 rank = cluster_rank();
    int tile = blockIdx.x / PARTS, row = tile / x.column_tiles * SIDE, column = tile % x.column_tiles * SIDE;
    int first = (int)((long long)x.steps * rank / PARTS), end = (int)((long long)x.steps * (rank + 1) / PARTS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2);
        }
        barriers_are_there();
    }
    __syncthreads();
    await_earlier();
    Ring<NUM_STAGES> ring;
    int half = threadIdx.x / 128, lane = threadIdx.x % 32;
    if (half == 2) {
        if (lane == 0) {
            for (int k = first; k < end; k++) {
                wait(empty + 8 * ring.stage, ring.parity ^ 1);
                u32 barrier = full + 8 * ring.stage, to = base + ring.stage * STAGE;
                arrive_with_bytes(barrier, STAGE);
                copy_matrix(to, a, barrier, k * BK, row);
                if (B_BY_COLUMN) {
                    copy_matrix(to + 2 * PANEL, b, barrier, column, k * BK);
                    copy_matrix(to + 3 * PANEL, b, barrier, column + 64, k * BK);
                } else {
                    copy_matrix(to + 2 * PANEL, b, barrier, k * BK, column);
                }
                ring.advance();
            }
        }
        __syncwarp();
    } else {
        float d[64];
#pragma unroll
        for (int j = 0; j < 64; j++) d[j] = 0.0f;
        u32 before = 0;
        for (int k = first; k < end; k++) {
            wait(full + 8 * ring.stage, ring.parity);
            u32 left = base + ring.stage * STAGE + half * 64 * 128, right = base + ring.stage * STAGE + 2 * PANEL;
            products_begin();
#pragma unroll
            for (int part = 0; part < BK / 16; part++) {
                if (B_BY_COLUMN)
                    multiply<0, 1>(d, by_row(left + part * 32), by_column(right + part * 16 * 128, PANEL), 1);
                else
                    multiply<0, 0>(d, by_row(left + part * 32), by_row(right + part * 32), 1);
            }
            products_end();
            if (k > first) {
                products_wait<1>();
                if (threadIdx.x % 128 == 0) arrive(empty + 8 * before);
            }
            before = ring.stage;
            ring.advance();
        }
        products_wait<0>();
        settle(d);
        // Both warpgroups are done with the tiles, whose place the sums take.
        meet(1, 256);
        leave_part(base, half * 64, d);
    }
    cluster_meet();
    constexpr int ROWS = SIDE / PARTS;
    for (int i = threadIdx.x; i < ROWS * 16 && half < 2; i += 256) {
        int own = rank * ROWS + i / 16, at_column = i % 16 * 8;
        float sum[8];
        add_parts<PARTS>(base, own, at_column, sum);
        if (row + own >= x.rows || column + at_column >= x.columns) continue;
        real* to = c + (u64)(row + own) * x.stride + column + at_column;
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] = sum[j] * x.scale + (x.adds ? to_float(to[j]) : 0.0f);
        *(uint4*)to =
            make_uint4(pack2(sum[0], sum[1]), pack2(sum[2], sum[3]), pack2(sum[4], sum[5]), pack2(sum[6], sum[7]));
    }
    // A block must be there as long as others read from it.
    __syncwarp();
    cluster_meet();
}

#define PRODUCT(name, parts, by_columns)                                                            \
    KERNEL __cluster_dims__(parts, 1, 1) __launch_bounds__(NUM_THREADS, 2)                          \
    name(const __grid_constant__ Narrow x, const __grid_constant__ TensorMap a,                     \
         const __grid_constant__ TensorMap b, real* c) {                                            \
        narrow_product<parts, by_columns>(x, &a, &b, c);                                            \
    }

PRODUCT(narrow_rows_4, 4, 0)
PRODUCT(narrow_rows_8, 8, 0)
PRODUCT(narrow_columns_4, 4, 1)
PRODUCT(narrow_columns_8, 8, 1)
