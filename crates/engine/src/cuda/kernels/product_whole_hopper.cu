// Sums of matrix products on sm_90a whose results are whole rows, of 384 columns at the most:
//
//   C[m,n] = (C +) bias + A[m,k]·B[k,n] + drop(scale·low[m,r]·up[r,n])
//   norm:    S = X + drop(C) and Y = (S − mean)·rstd ⊙ γ + β instead, S being written where somebody
//            reads it, for all 384 columns
//
// A block has 128 rows and all columns: two warpgroups with 64 rows each. So A is read once, and the
// blocks of a cluster, which have neighbouring rows, bring a part of B each, for all. One thread feeds
// the copy engine. Blocks stay, and take tile after tile.
//
// The adapter's product is the first step of a tile: it is dropped and scaled in the accumulators, to
// which all that follows adds. What C has already comes last, as steps without products: it is on its
// way while others are multiplied. At the end of a tile each warp puts its 16 rows together in shared
// memory, 64 columns at a time, from where the copy engine writes them.
//
// B is [k, n] (`columns`) or [n, k] (`rows`); the number in a kernel's name is that of a cluster's
// blocks. r is 64 at the most.

#include "hopper.cuh"
#include "cluster.cuh"
#include "matrix.cuh"

constexpr int BM = 128, BN = 384, HALF = BN / 2, BK = 64, NUM_STAGES = 3, NUM_GROUPS = 2;
constexpr int NUM_THREADS = 128 * (NUM_GROUPS + 1);

constexpr int NONE = 0, NORM = 1;

struct Sum {
    int rows, columns;
    // Tiles of a cluster's rows, and of the inner dimension.
    int row_tiles, steps;
    // What the adapter's product has of sixteen; none without one.
    int low_parts;
    float scale;
    // What it is dropped by, or C before a norm.
    u32 stream, limit;
    // Whether C is added to or, before a norm, S is written.
    u32 adds, writes_sum;
    float epsilon;
};

// What a norm reads besides, and its statistics where somebody reads them.
struct Norm {
    const float *gamma, *beta;
    float *mean, *rstd;
};

struct Maps {
    const TensorMap *a, *b, *low, *up, *c, *before, *y;
};

// Shared memory: stages of A and B, for each warp two times 16 rows by 64 columns of what it writes,
// the bias, and barriers.
struct Tiles {
    static constexpr u32 A = BM * BK * 2, STAGE = A + BN * BK * 2, PANEL = 16 * 128, BEFORE = BM * HALF * 2;
    static constexpr u32 PANELS = NUM_STAGES * STAGE, BIAS = PANELS + NUM_GROUPS * 4 * 2 * PANEL,
                         BARRIERS = BIAS + BN * 4;
    u32 base;
    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * STAGE; }
    __device__ __forceinline__ u32 b(u32 stage) const { return base + stage * STAGE + A; }
    __device__ __forceinline__ u32 panel(u32 warp) const { return base + PANELS + warp * 2 * PANEL; }
    __device__ __forceinline__ u32 bias(u32 column) const { return base + BIAS + column * 4; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(NUM_STAGES + stage); }
};

// Where the pairs of four matrices are in accumulators, of sixteen columns: the rows above and below of
// eight, and of the next eight.
__device__ __forceinline__ constexpr int pair_at(int sixteen, int e) { return 8 * sixteen + 4 * (e / 2) + 2 * (e % 2); }

// The sum over the four threads of a row.
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <int BLOCKS, int B_BY_COLUMN, int KIND>
__device__ __forceinline__ void product_sum(const Sum& x, const Maps& maps, const float* bias, const u32* random,
                                            const Norm& norm) {
    extern __shared__ char dynamic_shared[];
    Tiles tiles{(shared_address(dynamic_shared) + 1023) & ~1023u};
    u32 rank = cluster_rank();
    // The same for all threads of a warp, as the compiler sees by this.
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    int cluster = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(tiles.full(i), 1);
            barrier_init(tiles.empty(i), NUM_GROUPS * BLOCKS);
        }
        barriers_are_there();
    }
    await_earlier();
    for (int i = threadIdx.x; i < BN; i += NUM_THREADS) {
        float value = bias && i < x.columns ? bias[i] : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(tiles.bias(i)), "f"(value) : "memory");
    }
    cluster_meet();
    Ring<NUM_STAGES> ring;
    if (group == NUM_GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x % 128 == 0) {
            for (int tile = cluster; tile < x.row_tiles; tile += clusters) {
                int row = (tile * BLOCKS + rank) * BM;
                auto bring = [&](const TensorMap* a, const TensorMap* b, int k) {
                    wait(tiles.empty(ring.stage), ring.parity ^ 1);
                    u32 full = tiles.full(ring.stage), to = tiles.b(ring.stage);
                    arrive_with_bytes(full, Tiles::STAGE);
                    copy_matrix(tiles.a(ring.stage), a, full, k, row);
                    if (B_BY_COLUMN) {
                        constexpr int ROWS = BK / BLOCKS;
#pragma unroll
                        for (int panel = 0; panel < BN / 64; panel++)
                            copy_matrix_to_all<BLOCKS>(to + (panel * BK + rank * ROWS) * 128, b, full, panel * 64,
                                                       k + rank * ROWS);
                    } else {
                        constexpr int ROWS = BN / BLOCKS;
                        copy_matrix_to_all<BLOCKS>(to + rank * ROWS * 128, b, full, k, rank * ROWS);
                    }
                    ring.advance();
                };
                if (x.low_parts > 0) bring(maps.low, maps.up, 0);
#pragma unroll 1
                for (int k = 0; k < x.steps; k++) bring(maps.a, maps.b, k * BK);
                if (KIND == NONE && !x.adds) continue;
#pragma unroll 1
                for (int column = 0; column < BN; column += HALF) {
                    wait(tiles.empty(ring.stage), ring.parity ^ 1);
                    u32 full = tiles.full(ring.stage);
                    arrive_with_bytes(full, Tiles::BEFORE);
#pragma unroll
                    for (int panel = 0; panel < HALF / 64; panel++)
                        copy_matrix(tiles.a(ring.stage) + panel * BM * 128, maps.before, full, column + panel * 64, row);
                    ring.advance();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
        // The lane's row of the four matrices that are moved at once, two beside each other: in a panel,
        // whose 16-byte pieces are permuted within eight rows.
        u32 place = lane % 16 * 128 + ((lane / 16 ^ lane & 7) << 4), bias_at = tiles.bias(2 * t);
        Dropout dropout(random, x.stream, x.limit);
        auto release = [&](u32 stage) {
            if (threadIdx.x % 128 < BLOCKS) arrive_in(tiles.empty(stage), threadIdx.x % 128);
        };
        for (int tile = cluster; tile < x.row_tiles; tile += clusters) {
            int warp_row = (tile * BLOCKS + rank) * BM + warp * 16;
            float d[2][HALF / 2];
            auto operands = [&](u64& left, u64& right) {
                u32 b = tiles.b(ring.stage);
                left = by_row(tiles.a(ring.stage) + group * 64 * 128);
                right = B_BY_COLUMN ? by_column(b, BK * 128) : by_row(b);
            };
            // Further on in an operand, in units of 16 bytes: by sixteen of k, and by half the columns.
            constexpr u32 NEXT = B_BY_COLUMN ? 128 : 2, BESIDE = HALF * 128 / 16;
            if (x.low_parts > 0) {
                u64 left, right;
                wait(tiles.full(ring.stage), ring.parity);
                operands(left, right);
                products_begin();
#pragma unroll
                for (int half = 0; half < 2; half++) multiply_first<B_BY_COLUMN>(d[half], left, right + half * BESIDE);
#pragma unroll 1
                for (int part = 1; part < x.low_parts; part++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        multiply_more<B_BY_COLUMN>(d[half], left + part * 2, right + part * NEXT + half * BESIDE);
                products_end();
                products_wait<0>();
                settle(d[0]);
                settle(d[1]);
                release(ring.stage);
                ring.advance();
                float scale = x.scale;
                if (KIND == NONE && dropout.threshold) {
                    scale *= dropout.scale;
#pragma unroll
                    for (int low = 0; low < 2; low++) {
                        u32 base = dropout.row(warp_row + lane / 4 + low * 8) + Dropout::pair_offset(2 * t);
#pragma unroll
                        for (int j = 0; j < BN / 8; j++) {
                            float(&of)[HALF / 2] = d[j / (HALF / 8)];
                            int at = 4 * (j % (HALF / 8)) + 2 * low;
                            dropout.drop(Dropout::word(base + Dropout::pair_offset(8 * j)), of[at], of[at + 1]);
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    float2 more = shared_pair(bias_at + j * 32);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& sum = d[j / (HALF / 8)][4 * (j % (HALF / 8)) + i];
                        sum = fmaf(sum, scale, i % 2 ? more.y : more.x);
                    }
                }
            } else {
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    float2 more = shared_pair(bias_at + j * 32);
#pragma unroll
                    for (int i = 0; i < 4; i++) d[j / (HALF / 8)][4 * (j % (HALF / 8)) + i] = i % 2 ? more.y : more.x;
                }
            }
            u32 last = 0;
            auto multiply_step = [&] {
                u64 left, right;
                wait(tiles.full(ring.stage), ring.parity);
                operands(left, right);
                products_begin();
#pragma unroll
                for (int part = 0; part < BK / 16; part++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        multiply_more<B_BY_COLUMN>(d[half], left + part * 2, right + part * NEXT + half * BESIDE);
                products_end();
                last = ring.stage;
                ring.advance();
            };
            // The first by itself: in a loop that begins without a wait the compiler lets each product
            // wait for the one before.
            multiply_step();
#pragma unroll 1
            for (int k = 1; k < x.steps; k++) {
                u32 done = last;
                multiply_step();
                products_wait<1>();
                release(done);
            }
            products_wait<0>();
            settle(d[0]);
            settle(d[1]);
            release(last);
            // Pairs of neighbours as they are written.
            u32 w[2][HALF / 4];
            u32 bases[2];
            float center[2] = {}, inverse[2] = {};
            if (KIND == NORM)
#pragma unroll
                for (int low = 0; low < 2; low++)
                    bases[low] = dropout.row(warp_row + lane / 4 + low * 8) + Dropout::pair_offset(2 * t);
            auto write = [&](const TensorMap* map, int half) {
#pragma unroll
                for (int part = 0; part < HALF / 64; part++) {
                    int column = half * HALF + part * 64;
                    if (column >= x.columns) break;
                    u32 panel = tiles.panel(warp) + column / 64 % 2 * Tiles::PANEL;
                    if (lane == 0) one_write_is_left();
                    __syncwarp();
#pragma unroll
                    for (int i = 4 * part; i < 4 * part + 4; i++) {
                        u32 four[4] = {w[half][4 * i], w[half][4 * i + 1], w[half][4 * i + 2], w[half][4 * i + 3]};
                        store_matrices(panel + (place ^ i % 4 * 32), four);
                    }
                    publish_shared();
                    __syncwarp();
                    if (lane == 0) write_matrix(map, panel, column, warp_row);
                }
            };
            auto pack_half = [&](int half) {
#pragma unroll
                for (int i = 0; i < HALF / 4; i++) {
                    int at = pair_at(i / 4, i % 4);
                    w[half][i] = pack2(d[half][at], d[half][at + 1]);
                }
            };
            // C before a norm as it would be read back, in half as many registers.
            if (KIND == NORM) pack_half(0), pack_half(1);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (KIND == NORM || x.adds) {
                    wait(tiles.full(ring.stage), ring.parity);
#pragma unroll
                    for (int i = 0; i < HALF / 16; i++) {
                        u32 had[4];
                        load_matrices(had, tiles.a(ring.stage) + (i / 4 * BM + warp * 16) * 128 + (place ^ i % 4 * 32));
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            if (KIND == NONE) {
                                float* to = &d[half][pair_at(i, e)];
                                to[0] += low_half(had[e]), to[1] += high_half(had[e]);
                                continue;
                            }
                            u32 number = bases[e % 2] + Dropout::pair_offset(half * HALF + 16 * i + e / 2 * 8);
                            u32& sum = w[half][4 * i + e];
                            sum &= dropout.kept_of(Dropout::word(number));
                            sum = pack2(fmaf(low_half(sum), dropout.scale, low_half(had[e])),
                                        fmaf(high_half(sum), dropout.scale, high_half(had[e])));
                            center[e % 2] += low_half(sum) + high_half(sum);
                        }
                    }
                    // Its warps have read it one by one.
                    meet(1 + group, 128);
                    release(ring.stage);
                    ring.advance();
                }
                if (KIND == NONE) pack_half(half);
                if (KIND == NONE || x.writes_sum) write(maps.c, half);
            }
            if (KIND == NORM) {
#pragma unroll
                for (int low = 0; low < 2; low++) {
                    center[low] = row_sum(center[low]) * (1.0f / BN);
#pragma unroll
                    for (int i = low; i < BN / 4; i += 2) {
                        u32 pair = w[i / (HALF / 4)][i % (HALF / 4)];
                        float left = low_half(pair) - center[low], right = high_half(pair) - center[low];
                        inverse[low] = fmaf(left, left, inverse[low]), inverse[low] = fmaf(right, right, inverse[low]);
                    }
                    inverse[low] = 1.0f / sqrtf(row_sum(inverse[low]) * (1.0f / BN) + x.epsilon);
                    int row = warp_row + lane / 4 + low * 8;
                    bool is_there = t == 0 && row < x.rows;
                    if (is_there && norm.mean) norm.mean[row] = center[low];
                    if (is_there && norm.rstd) norm.rstd[row] = inverse[low];
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int j = 0; j < HALF / 8; j++) {
                        int column = half * HALF + 8 * j + 2 * t;
                        float2 scale = *(const float2*)(norm.gamma + column);
                        float2 shift = *(const float2*)(norm.beta + column);
#pragma unroll
                        for (int low = 0; low < 2; low++) {
                            u32& pair = w[half][2 * j + low];
                            pair = pack2(fmaf((low_half(pair) - center[low]) * inverse[low], scale.x, shift.x),
                                         fmaf((high_half(pair) - center[low]) * inverse[low], scale.y, shift.y));
                        }
                    }
                    write(maps.y, half);
                }
            }
        }
        if (lane == 0) writes_are_done();
    }
    __syncwarp();
    // A block must be there as long as the others copy to it or arrive at its barriers.
    cluster_meet();
}

// `c` and `before` are the same matrix, as a warp writes it and as all read it, or S and X.
#define PRODUCTS(name, blocks, by_columns, kind)                                                     \
    KERNEL __cluster_dims__(blocks, 1, 1) __launch_bounds__(NUM_THREADS, 1)                          \
    name(const __grid_constant__ Sum x, const __grid_constant__ TensorMap a,                         \
         const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap low,                 \
         const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap c,                  \
         const __grid_constant__ TensorMap before, const __grid_constant__ TensorMap y,              \
         const float* bias, const u32* random, const float* gamma, const float* beta, float* mean,   \
         float* rstd) {                                                                              \
        Maps maps{&a, &b, &low, &up, &c, &before, &y};                                               \
        product_sum<blocks, by_columns, kind>(x, maps, bias, random, Norm{gamma, beta, mean, rstd}); \
    }

PRODUCTS(whole_rows_2, 2, 0, NONE)
PRODUCTS(whole_rows_4, 4, 0, NONE)
PRODUCTS(whole_rows_norm_2, 2, 0, NORM)
PRODUCTS(whole_rows_norm_4, 4, 0, NORM)
PRODUCTS(whole_columns_2, 2, 1, NONE)
PRODUCTS(whole_columns_4, 4, 1, NONE)
