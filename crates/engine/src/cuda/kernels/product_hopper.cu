// Sums of matrix products on sm_90a: C[m,n] = bias + Σ scale·A[m,k]·B[k,n], all terms in one pass.
//
// An adapter's product is a term of the sum, so that what it adds to is never written and read back.
// Two blocks (a cluster) have neighbouring rows of C and the same columns: each brings half of B's
// tile, for both. In a block one thread feeds the copy engine and two warpgroups multiply, each 64
// rows. Blocks stay, and take tile after tile.
//
// B is [k, n] (`columns`) or [n, k] (`rows`); the number in a kernel's name is the columns of its
// tile.

#include "hopper.cuh"

constexpr int BM = 128, BK = 64, NUM_STAGES = 4, NUM_THREADS = 384, MAX_TERMS = 4;

struct Term {
    // Columns of C that it adds to: B's column 0 belongs to the first.
    int first, width;
    // Tiles of the inner dimension.
    int steps;
    float scale;
};

struct Sum {
    int rows, columns, stride;
    // Tiles of C: pairs of neighbouring rows, of which so many are gone through together.
    int row_pairs, column_tiles, together;
    int num_terms;
    Term terms[MAX_TERMS];
};

struct Maps {
    const TensorMap *a[MAX_TERMS], *b[MAX_TERMS];
};

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the barrier in the same place of one of the cluster's blocks.
__device__ __forceinline__ void arrive_in(u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}
__device__ __forceinline__ void copy_matrix(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}
__device__ __forceinline__ void copy_matrix_to_both(u32 to, const TensorMap* map, u32 barrier, int column,
                                                    int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)3)
                 : "memory");
}

#define OPERANDS10(ten) "%" ten "0, %" ten "1, %" ten "2, %" ten "3, %" ten "4, %" ten "5, %" ten "6, %" ten "7, %" ten "8, %" ten "9, "
#define RESULTS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RESULTS16(i) RESULTS4(i), RESULTS4(i + 4), RESULTS4(i + 8), RESULTS4(i + 12)
#define RESULTS32(i) RESULTS16(i), RESULTS16(i + 16)

template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[88], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %90, 0; "
                 "wgmma.mma_async.sync.aligned.m64n176k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7")
                 "%80, %81, %82, %83, %84, %85, %86, %87}, %88, %89, adds, 1, 1, %91, %92; }"
                 : RESULTS32(0), RESULTS32(32), RESULTS16(64), RESULTS4(80), RESULTS4(84)
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[96], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %98, 0; "
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7") OPERANDS10("8")
                 "%90, %91, %92, %93, %94, %95}, %96, %97, adds, 1, 1, %99, %100; }"
                 : RESULTS32(0), RESULTS32(32), RESULTS32(64)
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %130, 0; "
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7") OPERANDS10("8") OPERANDS10("9")
                 OPERANDS10("10") OPERANDS10("11")
                 "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, adds, 1, 1, %131, %132; }"
                 : RESULTS32(0), RESULTS32(32), RESULTS32(64), RESULTS32(96)
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}

template <int BN> struct Tiles {
    // Panels of 64 columns, where B lies by columns; the last may be used in part.
    static constexpr int PANELS = (BN + 63) / 64;
    static constexpr u32 A = BM * BK * 2, STAGE = A + PANELS * 64 * BK * 2;
    u32 base;
    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * STAGE; }
    __device__ __forceinline__ u32 b(u32 stage) const { return base + stage * STAGE + A; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + NUM_STAGES * STAGE + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return base + NUM_STAGES * STAGE + (NUM_STAGES + stage) * 8; }
};

// Where a tile of C begins.
struct Place {
    int row, column;
    __device__ __forceinline__ bool take(const Sum& x, int index, int rank, int bn) {
        if (index >= x.row_pairs * x.column_tiles) return false;
        int whole = x.together * x.column_tiles, set = index / whole, rest = index % whole;
        int members = min(x.together, x.row_pairs - set * x.together);
        row = ((set * x.together + rest % members) * 2 + rank) * BM;
        column = rest / members * bn;
        return true;
    }
};

__device__ __forceinline__ bool meets(const Term& term, int column, int bn) {
    return column < term.first + term.width && column + bn > term.first;
}

// The scale of the term after `i` of a tile, or 1 after the last.
__device__ __forceinline__ float next_scale(const Sum& x, int i, int column, int bn) {
    for (i++; i < x.num_terms; i++)
        if (meets(x.terms[i], column, bn)) return x.terms[i].scale;
    return 1.0f;
}

template <int BN, int B_BY_COLUMN>
__device__ __forceinline__ void product_sum(const Sum& x, const Maps& maps, real* c, const float* bias) {
    extern __shared__ char dynamic_shared[];
    Tiles<BN> tiles{(shared_address(dynamic_shared) + 1023) & ~1023u};
    u32 rank = cluster_rank();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(tiles.full(i), 1);
            barrier_init(tiles.empty(i), 4);
        }
        barriers_are_there();
    }
    cluster_meet();
    int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    Ring<NUM_STAGES> ring;
    constexpr u32 bytes = Tiles<BN>::A + (B_BY_COLUMN ? Tiles<BN>::PANELS * 64 : BN) * BK * 2;
    Place place;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int index = cluster; place.take(x, index, rank, BN); index += clusters) {
                for (int i = 0; i < x.num_terms; i++) {
                    const Term& term = x.terms[i];
                    if (!meets(term, place.column, BN)) continue;
                    int column = place.column - term.first;
                    for (int k = 0; k < term.steps; k++) {
                        wait(tiles.empty(ring.stage), ring.parity ^ 1);
                        u32 full = tiles.full(ring.stage);
                        arrive_with_bytes(full, bytes);
                        copy_matrix(tiles.a(ring.stage), maps.a[i], full, k * BK, place.row);
                        u32 b = tiles.b(ring.stage);
                        if (B_BY_COLUMN) {
#pragma unroll
                            for (int panel = 0; panel < Tiles<BN>::PANELS; panel++)
                                copy_matrix_to_both(b + panel * BK * 128 + rank * BK / 2 * 128, maps.b[i], full,
                                                    column + panel * 64, k * BK + rank * BK / 2);
                        } else {
                            copy_matrix_to_both(b + rank * BN / 2 * 128, maps.b[i], full, k * BK,
                                                column + rank * BN / 2);
                        }
                        ring.advance();
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int half = group - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        for (int index = cluster; place.take(x, index, rank, BN); index += clusters) {
            float d[BN / 2];
#pragma unroll
            for (int j = 0; j < BN / 2; j++) d[j] = 0.0f;
            for (int i = 0; i < x.num_terms; i++) {
                const Term& term = x.terms[i];
                if (!meets(term, place.column, BN)) continue;
                u32 before = 0;
                for (int k = 0; k < term.steps; k++) {
                    wait(tiles.full(ring.stage), ring.parity);
                    u32 a = tiles.a(ring.stage) + half * 64 * 128, b = tiles.b(ring.stage);
                    products_begin();
#pragma unroll
                    for (int part = 0; part < BK / 16; part++) {
                        u64 left = by_row(a + part * 32);
                        if (B_BY_COLUMN)
                            multiply<0, 1>(d, left, by_column(b + part * 16 * 128, BK * 128), 1);
                        else
                            multiply<0, 0>(d, left, by_row(b + part * 32), 1);
                    }
                    products_end();
                    if (k > 0) {
                        products_wait<1>();
                        if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(before), threadIdx.x % 128);
                    }
                    before = ring.stage;
                    ring.advance();
                }
                products_wait<0>();
                settle(d);
                if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(before), threadIdx.x % 128);
                // The sum so far as a multiple of the next term's scale, in the end of 1.
                float change = term.scale / next_scale(x, i, place.column, BN);
                if (change != 1.0f) {
#pragma unroll
                    for (int j = 0; j < BN / 2; j++) d[j] *= change;
                }
            }
            int t = lane % 4;
            if (bias) {
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    int column = place.column + 8 * j + 2 * t;
                    if (column < x.columns) {
                        float first = bias[column], second = bias[column + 1];
                        d[4 * j] += first, d[4 * j + 1] += second, d[4 * j + 2] += first, d[4 * j + 3] += second;
                    }
                }
            }
            // The four threads of a row turn four blocks of eight columns, so that each stores one.
#pragma unroll
            for (int low = 0; low < 2; low++) {
                int row = place.row + half * 64 + warp * 16 + lane / 4 + low * 8;
#pragma unroll
                for (int j = 0; j < BN / 8; j += 4) {
                    u32 w[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int at = 4 * (j + i) + 2 * low;
                        w[i] = j + i < BN / 8 ? pack2(d[at], d[at + 1]) : 0;
                    }
#pragma unroll
                    for (int i = 0; i < 4; i += 2) {
                        u32 got = __shfl_xor_sync(~0u, t & 1 ? w[i] : w[i + 1], 1);
                        if (t & 1) w[i] = got;
                        else w[i + 1] = got;
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        u32 got = __shfl_xor_sync(~0u, t & 2 ? w[i] : w[i + 2], 2);
                        if (t & 2) w[i] = got;
                        else w[i + 2] = got;
                    }
                    int column = place.column + 8 * (j + t);
                    if (row < x.rows && column < x.columns && j + t < BN / 8)
                        *(uint4*)(c + (u64)row * x.stride + column) = make_uint4(w[0], w[1], w[2], w[3]);
                }
            }
        }
    }
    __syncwarp();
    // A block must be there as long as the other one copies to it or arrives at its barriers.
    cluster_meet();
}

#define PRODUCTS(name, bn, by_columns)                                                              \
    KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(NUM_THREADS, 1)                              \
    name(const __grid_constant__ Sum x, const __grid_constant__ TensorMap a0,                       \
         const __grid_constant__ TensorMap a1, const __grid_constant__ TensorMap a2,                \
         const __grid_constant__ TensorMap a3, const __grid_constant__ TensorMap b0,                \
         const __grid_constant__ TensorMap b1, const __grid_constant__ TensorMap b2,                \
         const __grid_constant__ TensorMap b3, real* c, const float* bias) {                         \
        Maps maps{{&a0, &a1, &a2, &a3}, {&b0, &b1, &b2, &b3}};                                      \
        product_sum<bn, by_columns>(x, maps, c, bias);                                              \
    }

PRODUCTS(products_rows_176, 176, 0)
PRODUCTS(products_rows_192, 192, 0)
PRODUCTS(products_rows_256, 256, 0)
PRODUCTS(products_columns_176, 176, 1)
PRODUCTS(products_columns_192, 192, 1)
PRODUCTS(products_columns_256, 256, 1)
