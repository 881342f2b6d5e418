// Gradients of weights on sm_90a: C[m,n] (+)= scale·Aᵀ·B with A [k, m] and B [k, n], several such
// products in one launch.
//
// Narrow weights leave most of the card idle one by one. A block has one tile of one of the products:
// two warpgroups multiply, each 64 rows of C, and a thread of one more warp feeds the copy engine.
// Two blocks share a multiprocessor, so that one begins and ends while the other multiplies. Where
// tiles are few, the blocks of a cluster have one, and each of them a part of k: the number in a
// kernel's name is that of parts.

#include "hopper.cuh"
#include "cluster.cuh"

constexpr int SIDE = 128, BK = 64, NUM_STAGES = 3, NUM_THREADS = 256 + 32, MAX_PRODUCTS = 6;
constexpr u32 PANEL = BK * 128, STAGE = 4 * PANEL;

struct OneProduct {
    int rows, columns, stride;
    // Of the launch: its first tile, and how many tiles lie beside each other in it.
    int first_tile, column_tiles;
    // Tiles of the inner dimension.
    int steps;
    float scale;
    // Whether it adds to what is there, and whether C is in fp32.
    int adds, is_full;
};

struct Group {
    int num_products;
    OneProduct products[MAX_PRODUCTS];
};

// Two neighbouring numbers of C.
__device__ __forceinline__ void store_full(float* c, float first, float second, bool adds) {
    if (adds) {
        float2 before = *(const float2*)c;
        first += before.x, second += before.y;
    }
    *(float2*)c = make_float2(first, second);
}
__device__ __forceinline__ void store_real(real* c, float first, float second, bool adds) {
    if (adds) first += to_float(c[0]), second += to_float(c[1]);
    *(u32*)c = pack2(first, second);
}

// A pair of C, at an offset in numbers.
__device__ __forceinline__ void store_pair(const OneProduct& x, void* c, u64 at, float first, float second) {
    if (x.is_full)
        store_full((float*)c + at, first * x.scale, second * x.scale, x.adds);
    else
        store_real((real*)c + at, first * x.scale, second * x.scale, x.adds);
}

template <int PARTS>
__device__ __forceinline__ void gradient_tile(const OneProduct& x, const TensorMap* a, const TensorMap* b,
                                              void* c, int tile) {
    extern __shared__ char dynamic_shared[];
    u32 base = (shared_address(dynamic_shared) + 1023) & ~1023u;
    u32 full = base + NUM_STAGES * STAGE, empty = full + NUM_STAGES * 8;
    int row = tile / x.column_tiles * SIDE, column = tile % x.column_tiles * SIDE;
    int rank = PARTS > 1 ? cluster_rank() : 0;
    int first = (int)((long long)x.steps * rank / PARTS), end = (int)((long long)x.steps * (rank + 1) / PARTS);
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 2);
        }
        barriers_are_there();
    }
    __syncthreads();
    Ring<NUM_STAGES> ring;
    int half = threadIdx.x / 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (half == 2) {
        if (lane == 0) {
            for (int k = first; k < end; k++) {
                wait(empty + 8 * ring.stage, ring.parity ^ 1);
                u32 barrier = full + 8 * ring.stage, to = base + ring.stage * STAGE;
                arrive_with_bytes(barrier, STAGE);
#pragma unroll
                for (int panel = 0; panel < 2; panel++) {
                    copy_matrix(to + panel * PANEL, a, barrier, row + panel * 64, k * BK);
                    copy_matrix(to + (2 + panel) * PANEL, b, barrier, column + panel * 64, k * BK);
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
            u32 left = base + ring.stage * STAGE + half * PANEL, right = base + ring.stage * STAGE + 2 * PANEL;
            products_begin();
#pragma unroll
            for (int part = 0; part < BK / 16; part++)
                multiply<1, 1>(d, by_column(left + part * 16 * 128, PANEL), by_column(right + part * 16 * 128, PANEL), 1);
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
        if (PARTS > 1) {
            // Both warpgroups are done with the tiles, whose place the sums take.
            meet(1, 256);
            leave_part(base, half * 64, d);
        } else {
            row += half * 64 + warp * 16 + lane / 4;
            column += 2 * (lane % 4);
#pragma unroll
            for (int low = 0; low < 2; low++) {
                int at_row = row + low * 8;
                if (at_row >= x.rows) continue;
                u64 at = (u64)at_row * x.stride;
#pragma unroll
                for (int j = 0; j < 16; j++) {
                    int at_column = column + 8 * j;
                    if (at_column >= x.columns) continue;
                    store_pair(x, c, at + at_column, d[4 * j + 2 * low], d[4 * j + 2 * low + 1]);
                }
            }
        }
    }
    if (PARTS == 1) return;
    cluster_meet();
    constexpr int ROWS = SIDE / PARTS;
    for (int i = threadIdx.x; i < ROWS * 16 && half < 2; i += 256) {
        int own = rank * ROWS + i / 16, at_column = i % 16 * 8;
        float sum[8];
        add_parts<PARTS>(base, own, at_column, sum);
        if (row + own >= x.rows) continue;
        u64 at = (u64)(row + own) * x.stride + column + at_column;
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            if (column + at_column + j < x.columns) store_pair(x, c, at + j, sum[j], sum[j + 1]);
    }
    // A block must be there as long as others read from it.
    __syncwarp();
    cluster_meet();
}

#define MATRICES(i) const __grid_constant__ TensorMap a##i, const __grid_constant__ TensorMap b##i, void *c##i

#define OPERANDS                                                                                   \
    const __grid_constant__ Group x, MATRICES(0), MATRICES(1), MATRICES(2), MATRICES(3),           \
        MATRICES(4), MATRICES(5)
#define COMPUTE(parts)                                                                             \
    const TensorMap* const a[MAX_PRODUCTS] = {&a0, &a1, &a2, &a3, &a4, &a5};                       \
    const TensorMap* const b[MAX_PRODUCTS] = {&b0, &b1, &b2, &b3, &b4, &b5};                       \
    void* const c[MAX_PRODUCTS] = {c0, c1, c2, c3, c4, c5};                                        \
    int tile = blockIdx.x / parts, which = 0;                                                      \
    while (which + 1 < x.num_products && tile >= x.products[which + 1].first_tile) which++;        \
    const OneProduct& product = x.products[which];                                                 \
    gradient_tile<parts>(product, a[which], b[which], c[which], tile - product.first_tile);
#define GRADIENTS(parts)                                                                           \
    KERNEL __cluster_dims__(parts, 1, 1) __launch_bounds__(NUM_THREADS, 2)                         \
    gradients_##parts(OPERANDS) {                                                                  \
        await_earlier();                                                                           \
        COMPUTE(parts)                                                                             \
    }

KERNEL __launch_bounds__(NUM_THREADS, 2) gradients(OPERANDS) {
    await_earlier();
    COMPUTE(1)
}
GRADIENTS(2)
GRADIENTS(4)
GRADIENTS(8)
