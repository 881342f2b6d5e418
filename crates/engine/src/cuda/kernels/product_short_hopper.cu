// Sums of matrix products with a short inner dimension on sm_90a, and what comes right after them:
//
//   C[m,n]  = bias + A[m,k]·B[k,n] + drop(scale·low[m,r]·up[r,n])
//   forward:  Y = gelu(C), C being written as well where somebody reads it
//   backward: Y = C·gelu′(X)
//
// With few steps of k a tile is finished as soon as it is begun, so that its end is what takes time.
// A block keeps its columns of B in shared memory for good, and only rows of A pass by. Two blocks (a
// cluster) have neighbouring columns and the same rows: each brings half of them, for both. In a block
// one thread feeds the copy engine, and two warpgroups take turns: while one multiplies, the other
// ends its tile and begins the next one with the adapter's product, of which nothing waits for the
// main one's.
//
// B is [k, n] (`columns`) or [n, k] (`rows`).

#include "hopper.cuh"
#include "cluster.cuh"
#include "pointwise.cuh"

constexpr int BM = 64, BN = 192, BK = 64, MAX_STEPS = 6, NUM_STAGES = 5, NUM_THREADS = 384, MAX_ADAPTERS = 3;
constexpr int NONE = 0, FORWARD = 1, BACKWARD = 2;

struct Adapter {
    // Columns of C that it adds to: B's column 0 belongs to the first.
    int first, width;
    // Sixteens of the inner dimension, four at the most.
    int parts;
    float scale;
};

struct Sum {
    int rows, columns, stride;
    // Of C: rows by 64, and pairs of tiles of columns.
    int row_tiles, column_pairs;
    // Of the inner dimension.
    int steps;
    int num_adapters;
    Adapter adapters[MAX_ADAPTERS];
    // Of what the adapters add.
    u32 stream, limit;
};

struct Maps {
    const TensorMap *a, *b, *low, *up;
};

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

// Shared memory: what a block keeps of B and of an adapter's, the stages of A, a tile of what an
// adapter reads for each warpgroup, and barriers.
struct Tiles {
    static constexpr u32 A = BM * BK * 2, B = BN * BK * 2;
    static constexpr u32 STAGES = (MAX_STEPS + 1) * B, LOW = STAGES + NUM_STAGES * A, BARRIERS = LOW + 2 * A;
    u32 base;
    // The last of them is the adapter's.
    __device__ __forceinline__ u32 b(u32 step) const { return base + step * B; }
    __device__ __forceinline__ u32 a(u32 stage) const { return base + STAGES + stage * A; }
    __device__ __forceinline__ u32 low(u32 group) const { return base + LOW + group * A; }
    __device__ __forceinline__ u32 barrier(u32 index) const { return base + BARRIERS + index * 8; }
    __device__ __forceinline__ u32 full(u32 stage) const { return barrier(stage); }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barrier(NUM_STAGES + stage); }
    __device__ __forceinline__ u32 low_full(u32 group) const { return barrier(2 * NUM_STAGES + group); }
    __device__ __forceinline__ u32 low_empty(u32 group) const { return barrier(2 * NUM_STAGES + 2 + group); }
    __device__ __forceinline__ u32 turn(u32 group) const { return barrier(2 * NUM_STAGES + 4 + group); }
    __device__ __forceinline__ u32 ready(u32 step) const { return barrier(2 * NUM_STAGES + 6 + step); }
};

// The columns that a block's cluster has, in pairs of tiles.
__device__ __forceinline__ int pair_of(const Sum& x) { return blockIdx.x / 2 % x.column_pairs; }

// The adapter that adds to columns of the pair, of which there is one at the most, or −1.
__device__ __forceinline__ int adapter_of(const Sum& x) {
    int begin = 2 * BN * pair_of(x), found = -1;
    for (int i = 0; i < x.num_adapters; i++)
        if (begin < x.adapters[i].first + x.adapters[i].width && begin + 2 * BN > x.adapters[i].first) found = i;
    return found;
}

template <int B_BY_COLUMN, int KIND>
__device__ __forceinline__ void product_sum(const Sum& x, int adapter, const Maps& maps, real* c, real* y, const real* before,
                                            const float* bias, const u32* random) {
    extern __shared__ char dynamic_shared[];
    Tiles tiles{(shared_address(dynamic_shared) + 1023) & ~1023u};
    u32 rank = cluster_rank();
    int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(tiles.full(i), 1);
            barrier_init(tiles.empty(i), 2);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(tiles.low_full(i), 1);
            barrier_init(tiles.low_empty(i), 2);
            barrier_init(tiles.turn(i), 1);
        }
        for (int i = 0; i <= MAX_STEPS; i++) barrier_init(tiles.ready(i), 1);
        barriers_are_there();
    }
    cluster_meet();
    // A cluster stays with its columns; those that have the same share the rows.
    int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    int pair = pair_of(x), first = cluster / x.column_pairs;
    int next = (clusters - pair + x.column_pairs - 1) / x.column_pairs;
    int column = (2 * pair + rank) * BN;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            auto keep = [&](u32 step, const TensorMap* map, int at_column, int k) {
                arrive_with_bytes(tiles.ready(step), Tiles::B);
                if (B_BY_COLUMN) {
#pragma unroll
                    for (int panel = 0; panel < BN / 64; panel++)
                        copy_matrix(tiles.b(step) + panel * BK * 128, map, tiles.ready(step), at_column + panel * 64, k);
                } else {
                    copy_matrix(tiles.b(step), map, tiles.ready(step), k, at_column);
                }
            };
            auto bring_low = [&](int number) {
                int tile = first + number * next, to = number % 2;
                if (adapter < 0 || tile >= x.row_tiles) return;
                wait(tiles.low_empty(to), (number / 2 & 1) ^ 1);
                arrive_with_bytes(tiles.low_full(to), Tiles::A);
                copy_matrix_to_both(tiles.low(to) + rank * BM / 2 * 128, maps.low, tiles.low_full(to), 0,
                                    tile * BM + rank * BM / 2);
            };
            if (adapter >= 0) keep(MAX_STEPS, maps.up, column - x.adapters[adapter].first, 0);
            bring_low(0);
            for (int k = 0; k < x.steps; k++) keep(k, maps.b, column, k * BK);
            Ring<NUM_STAGES> ring;
            for (int number = 0, tile = first; tile < x.row_tiles; number++, tile += next) {
                bring_low(number + 1);
                for (int k = 0; k < x.steps; k++) {
                    wait(tiles.empty(ring.stage), ring.parity ^ 1);
                    u32 full = tiles.full(ring.stage);
                    arrive_with_bytes(full, Tiles::A);
                    copy_matrix_to_both(tiles.a(ring.stage) + rank * BM / 2 * 128, maps.a, full, k * BK,
                                        tile * BM + rank * BM / 2);
                    ring.advance();
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int own = group - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
        Dropout dropout(random, x.stream, x.limit);
        for (int number = own, tile = first + own * next; tile < x.row_tiles; number += 2, tile += 2 * next) {
            int row = tile * BM + warp * 16 + lane / 4;
            float d[BN / 2];
            if (adapter >= 0) {
                const Adapter& term = x.adapters[adapter];
                if (number == own) wait(tiles.ready(MAX_STEPS), 0);
                wait(tiles.low_full(own), number / 2 & 1);
                products_begin();
                for (int part = 0; part < term.parts; part++) {
                    u64 left = by_row(tiles.low(own) + part * 32);
                    if (B_BY_COLUMN)
                        multiply<0, 1>(d, left, by_column(tiles.b(MAX_STEPS) + part * 16 * 128, BK * 128), part > 0);
                    else
                        multiply<0, 0>(d, left, by_row(tiles.b(MAX_STEPS) + part * 32), part > 0);
                }
                products_end();
                products_wait<0>();
                settle(d);
                if (threadIdx.x % 128 < 2) arrive_in(tiles.low_empty(own), threadIdx.x % 128);
                if (dropout.threshold) {
                    float scale = term.scale * dropout.scale;
#pragma unroll
                    for (int low = 0; low < 2; low++) {
                        u32 base = dropout.row(row + low * 8);
#pragma unroll
                        for (int j = 0; j < BN / 8; j++) {
                            float &left = d[4 * j + 2 * low], &right = d[4 * j + 2 * low + 1];
                            left *= scale, right *= scale;
                            dropout.drop(dropout.pair(base, column - term.first + 8 * j + 2 * t), left, right);
                        }
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < BN / 2; j++) d[j] *= term.scale;
                }
            } else {
#pragma unroll
                for (int j = 0; j < BN / 2; j++) d[j] = 0.0f;
            }
            // What the derivative is taken at: on its way while the tile is multiplied.
            uint4 at[2][BN / 32];
            if (KIND == BACKWARD) {
#pragma unroll
                for (int low = 0; low < 2; low++)
#pragma unroll
                    for (int j = 0; j < BN / 32; j++) {
                        int from = column + 8 * (4 * j + t);
                        bool is_there = row + low * 8 < x.rows && from < x.columns;
                        at[low][j] = is_there ? *(const uint4*)(before + (u64)(row + low * 8) * x.stride + from)
                                              : make_uint4(0, 0, 0, 0);
                    }
            }
            // Stages come round: one is waited for only when the other warpgroup has seen all before it.
            if (number > 0) wait(tiles.turn(own), (number - 1) / 2 & 1);
            u32 place = number * x.steps, stage = place % NUM_STAGES, parity = place / NUM_STAGES & 1, last = 0;
            for (int k = 0; k < x.steps; k++) {
                if (number == own) wait(tiles.ready(k), 0);
                wait(tiles.full(stage), parity);
                if (k == x.steps - 1 && threadIdx.x % 128 == 0) arrive(tiles.turn(own ^ 1));
                u32 a = tiles.a(stage), b = tiles.b(k);
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
                    if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(last), threadIdx.x % 128);
                }
                last = stage;
                if (++stage == NUM_STAGES) stage = 0, parity ^= 1;
            }
            products_wait<0>();
            settle(d);
            if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(last), threadIdx.x % 128);
            if (bias) {
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    int from = column + 8 * j + 2 * t;
                    if (from < x.columns) {
                        float left = bias[from], right = bias[from + 1];
                        d[4 * j] += left, d[4 * j + 1] += right, d[4 * j + 2] += left, d[4 * j + 3] += right;
                    }
                }
            }
#pragma unroll
            for (int low = 0; low < 2; low++)
#pragma unroll
                for (int j = 0; j < BN / 32; j++) {
                    u32 w[4], v[4];
                    if (KIND == BACKWARD) {
                        v[0] = at[low][j].x, v[1] = at[low][j].y, v[2] = at[low][j].z, v[3] = at[low][j].w;
                        exchange(v, t);
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float left = d[4 * (4 * j + i) + 2 * low], right = d[4 * (4 * j + i) + 2 * low + 1];
                        if (KIND == BACKWARD) {
                            left *= Gelu::slope(low_half(v[i]));
                            right *= Gelu::slope(high_half(v[i]));
                        }
                        w[i] = pack2(left, right);
                        // Of what C has, not of what it is rounded from: the same as in a pass of its own.
                        if (KIND == FORWARD)
                            v[i] = pack2(Gelu::value(low_half(w[i])), Gelu::value(high_half(w[i])));
                    }
                    int to = column + 8 * (4 * j + t);
                    bool is_there = row + low * 8 < x.rows && to < x.columns;
                    u64 offset = (u64)(row + low * 8) * x.stride + to;
                    if (KIND == FORWARD) {
                        exchange(v, t);
                        if (is_there) *(uint4*)(y + offset) = make_uint4(v[0], v[1], v[2], v[3]);
                        if (!c) continue;
                    }
                    exchange(w, t);
                    if (is_there) *(uint4*)(c + offset) = make_uint4(w[0], w[1], w[2], w[3]);
                }
        }
    }
    __syncwarp();
    // A block must be there as long as the other one copies to it or arrives at its barriers.
    cluster_meet();
}

// `c` may be null where `y` is written, and is `y` of a derivative; `before` is X of a derivative.
#define PRODUCTS(name, by_columns, kind)                                                             \
    KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(NUM_THREADS, 1)                               \
    name(const __grid_constant__ Sum x, const __grid_constant__ TensorMap a,                         \
         const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap low0,                \
         const __grid_constant__ TensorMap low1, const __grid_constant__ TensorMap low2,             \
         const __grid_constant__ TensorMap up0, const __grid_constant__ TensorMap up1,               \
         const __grid_constant__ TensorMap up2, real* c, real* y, const real* before,                \
         const float* bias, const u32* random) {                                                      \
        int adapter = adapter_of(x);                                                                 \
        const TensorMap* low = adapter == 2 ? &low2 : adapter == 1 ? &low1 : &low0;                  \
        const TensorMap* up = adapter == 2 ? &up2 : adapter == 1 ? &up1 : &up0;                      \
        product_sum<by_columns, kind>(x, adapter, Maps{&a, &b, low, up}, c, y, before, bias, random); \
    }

PRODUCTS(short_rows, 0, NONE)
PRODUCTS(short_rows_gelu, 0, FORWARD)
PRODUCTS(short_columns, 1, NONE)
PRODUCTS(short_columns_gelu_backward, 1, BACKWARD)
