// Sums of matrix products with a short inner dimension on sm_90a, and what comes right after them:
//
//   C[m,n]  = bias + A[m,k]·B[k,n] + drop(scale·low[m,r]·up[r,n])
//   forward:  Y = gelu(C), C being written as well where somebody reads it
//   narrow:   Z[m,8] = drop(Y)·Wᵀ besides, W being [8, n]
//   backward: C·gelu′(X) in C's place, and Y = gelu(X) where it is to be had again
//
// With few steps of k a tile is finished as soon as it is begun, so that its end is what takes time.
// A block keeps its columns of B in shared memory for good, and only rows of A pass by. Two blocks (a
// cluster) have neighbouring columns and the same rows: each brings half of them, for both. In a block
// one thread feeds the copy engine, and three warpgroups take turns: while one multiplies, the others
// end their tiles and begin the next ones with the adapter's product, of which nothing waits for the
// main one's.
//
// At the end of a tile each warp has its 16 rows for itself, 64 columns at a time: they are put
// together in shared memory, from where the copy engine writes them. X comes the other way round, into
// the place that is written next. A block has Z's sums over its own columns only; `short_narrow_sum`
// adds them up.
//
// B is [k, n] (`columns`) or [n, k] (`rows`). r is 16 at the most.

#include "hopper.cuh"
#include "cluster.cuh"
#include "matrix.cuh"
#include "pointwise.cuh"

constexpr int BM = 64, BN = 192, BK = 64, MAX_STEPS = 6, NUM_STAGES = 5, NUM_GROUPS = 3, MAX_ADAPTERS = 3, RANK = 16;
constexpr int NUM_THREADS = 128 * (NUM_GROUPS + 1);
constexpr int NONE = 0, FORWARD = 1, NARROW = 2, BACKWARD = 3, BACKWARD_VALUE = 4;

struct Adapter {
    // Columns of C that it adds to: B's column 0 belongs to the first.
    int first, width;
    float scale;
};

struct Sum {
    int rows, columns, stride;
    // Of C: rows by 64, and pairs of tiles of columns.
    int row_tiles, column_pairs;
    // Of the inner dimension.
    int steps;
    int c_is_written;
    int num_adapters;
    Adapter adapters[MAX_ADAPTERS];
    // Of what the adapters add, or of what the narrow product reads.
    u32 stream, limit;
};

struct Maps {
    const TensorMap *a, *b, *low, *up, *c, *y, *before;
};

// Shared memory: what a block keeps of B, the stages of A, for each warp 16 rows by 64 columns of what
// it writes, what it keeps of an adapter's, what an adapter reads for each warpgroup, the block's
// columns of W as the matrix units take them, and of the bias, and barriers.
struct Tiles {
    static constexpr u32 A = BM * BK * 2, B = BN * BK * 2, PANEL = 16 * 128, UP_BYTES = BN * RANK * 2,
                         LOW_BYTES = BM * RANK * 2;
    static constexpr u32 STAGES = MAX_STEPS * B, PANELS = STAGES + NUM_STAGES * A,
                         UP = PANELS + NUM_GROUPS * 4 * PANEL, LOW = UP + UP_BYTES,
                         WEIGHT = LOW + NUM_GROUPS * LOW_BYTES, BIAS = WEIGHT + BN * 16, BARRIERS = BIAS + BN * 4;
    u32 base;
    __device__ __forceinline__ u32 b(u32 step) const { return base + step * B; }
    __device__ __forceinline__ u32 a(u32 stage) const { return base + STAGES + stage * A; }
    __device__ __forceinline__ u32 panel(u32 warp) const { return base + PANELS + warp * PANEL; }
    __device__ __forceinline__ u32 up() const { return base + UP; }
    __device__ __forceinline__ u32 low(u32 group) const { return base + LOW + group * LOW_BYTES; }
    // The lanes' operands of sixteen columns, one after the other, are followed by those of the next.
    __device__ __forceinline__ u32 weight(u32 index) const { return base + WEIGHT + index * 8; }
    __device__ __forceinline__ u32 bias(u32 column) const { return base + BIAS + column * 4; }
    __device__ __forceinline__ u32 barrier(u32 index) const { return base + BARRIERS + index * 8; }
    __device__ __forceinline__ u32 full(u32 stage) const { return barrier(stage); }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barrier(NUM_STAGES + stage); }
    __device__ __forceinline__ u32 low_full(u32 group) const { return barrier(2 * NUM_STAGES + group); }
    __device__ __forceinline__ u32 low_empty(u32 group) const { return barrier(2 * NUM_STAGES + NUM_GROUPS + group); }
    __device__ __forceinline__ u32 turn(u32 group) const { return barrier(2 * NUM_STAGES + 2 * NUM_GROUPS + group); }
    __device__ __forceinline__ u32 ready(u32 step) const { return barrier(2 * NUM_STAGES + 3 * NUM_GROUPS + step); }
    __device__ __forceinline__ u32 before_full(u32 warp) const {
        return barrier(2 * NUM_STAGES + 3 * NUM_GROUPS + MAX_STEPS + 1 + warp);
    }
};

// Two numbers times the slopes at a pair.
__device__ __forceinline__ u32 times_slopes(float left, float right, u32 at) {
    float slopes[2] = {Gelu::slope_below(low_half(at)), Gelu::slope_below(high_half(at))};
#if defined(REAL_F16)
#define COMPARE_PAIR "setp.ge.f16x2"
#else
#define COMPARE_PAIR "setp.ge.bf16x2"
#endif
    asm("{ .reg .pred p, q; " COMPARE_PAIR " p|q, %2, %3; "
        "@p sub.f32 %0, 0f3f800000, %0; @q sub.f32 %1, 0f3f800000, %1; }"
        : "+f"(slopes[0]), "+f"(slopes[1])
        : "r"(at), "r"(0));
    return pack2(left * slopes[0], right * slopes[1]);
}

// Brings a part of a matrix to the cache.
__device__ __forceinline__ void announce_matrix(const TensorMap* map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(column), "r"(row)
                 : "memory");
}
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
__device__ __forceinline__ void product_sum(const Sum& x, int adapter, const Maps& maps, const float* bias,
                                            const u32* random, const real* weight, float* parts) {
    constexpr bool IS_BACKWARD = KIND == BACKWARD || KIND == BACKWARD_VALUE;
    extern __shared__ char dynamic_shared[];
    Tiles tiles{(shared_address(dynamic_shared) + 1023) & ~1023u};
    u32 rank = cluster_rank();
    // The same for all threads of a warp, as the compiler sees by this.
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    // A cluster stays with its columns; those that have the same share the rows.
    int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    int pair = pair_of(x), first = cluster / x.column_pairs;
    int next = (clusters - pair + x.column_pairs - 1) / x.column_pairs;
    int column_tile = 2 * pair + rank, column = column_tile * BN;
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(tiles.full(i), 1);
            barrier_init(tiles.empty(i), 2);
        }
        for (int i = 0; i < NUM_GROUPS; i++) {
            barrier_init(tiles.low_full(i), 1);
            barrier_init(tiles.low_empty(i), 2);
            barrier_init(tiles.turn(i), 1);
        }
        for (int i = 0; i <= MAX_STEPS; i++) barrier_init(tiles.ready(i), 1);
        for (int i = 0; i < 4 * NUM_GROUPS; i++) barrier_init(tiles.before_full(i), 1);
        barriers_are_there();
    }
    await_earlier();
    for (int i = threadIdx.x; i < BN; i += NUM_THREADS) {
        float value = bias && column + i < x.columns ? bias[column + i] : 0.0f;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(tiles.bias(i)), "f"(value) : "memory");
    }
    if (KIND == NARROW)
        for (int i = threadIdx.x; i < BN * 2; i += NUM_THREADS) {
            int from = column + i / 32 * 16 + i % 4 * 2;
            const real* row = weight + (u64)(i % 32 / 4) * x.columns;
            u32 left = from < x.columns ? *(const u32*)(row + from) : 0u;
            u32 right = from + 8 < x.columns ? *(const u32*)(row + from + 8) : 0u;
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(tiles.weight(i)), "r"(left), "r"(right)
                         : "memory");
        }
    cluster_meet();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (threadIdx.x == 0) {
            auto keep = [&](u32 to, u32 barrier, int depth, const TensorMap* map, int at_column, int k) {
                arrive_with_bytes(barrier, BN * depth * 2);
                if (B_BY_COLUMN) {
#pragma unroll
                    for (int panel = 0; panel < BN / 64; panel++)
                        copy_matrix(to + panel * depth * 128, map, barrier, at_column + panel * 64, k);
                } else {
                    copy_matrix(to, map, barrier, k, at_column);
                }
            };
            auto bring_low = [&](int number) {
                int tile = first + number * next, to = number % NUM_GROUPS;
                if (adapter < 0 || tile >= x.row_tiles) return;
                wait(tiles.low_empty(to), (number / NUM_GROUPS & 1) ^ 1);
                arrive_with_bytes(tiles.low_full(to), Tiles::LOW_BYTES);
                copy_matrix_to_both(tiles.low(to) + rank * Tiles::LOW_BYTES / 2, maps.low, tiles.low_full(to), 0,
                                    tile * BM + rank * BM / 2);
            };
            if (adapter >= 0)
                keep(tiles.up(), tiles.ready(MAX_STEPS), RANK, maps.up, column - x.adapters[adapter].first, 0);
            for (int number = 0; number < NUM_GROUPS - 1; number++) bring_low(number);
            for (int k = 0; k < x.steps; k++) keep(tiles.b(k), tiles.ready(k), BK, maps.b, column, k * BK);
            Ring<NUM_STAGES> ring;
            for (int number = 0, tile = first; tile < x.row_tiles; number++, tile += next) {
                bring_low(number + NUM_GROUPS - 1);
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
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        int own = group - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
        u32 panel = tiles.panel(own * 4 + warp), before_full = tiles.before_full(own * 4 + warp), num_before = 0;
        // The lane's row of the four matrices that are moved at once, two beside each other: in the
        // panel, whose 16-byte pieces are permuted within eight rows.
        u32 place = panel + lane % 16 * 128 + ((lane / 16 ^ lane & 7) << 4);
        u32 bias_at = tiles.bias(2 * t), weight_at = tiles.weight(lane);
        Dropout dropout(random, x.stream, x.limit);
        for (int number = own, tile = first + own * next; tile < x.row_tiles;
             number += NUM_GROUPS, tile += NUM_GROUPS * next) {
            int warp_row = tile * BM + warp * 16, row = warp_row + lane / 4;
            float d[BN / 2];
            if (IS_BACKWARD && lane == 0)
                for (int i = 1; i < BN / 64; i++) announce_matrix(maps.before, column + i * 64, warp_row);
            if (adapter >= 0) {
                const Adapter& term = x.adapters[adapter];
                if (number == own) wait(tiles.ready(MAX_STEPS), 0);
                wait(tiles.low_full(own), number / NUM_GROUPS & 1);
                products_begin();
                multiply_first<B_BY_COLUMN>(d, by_row<32>(tiles.low(own)),
                                            B_BY_COLUMN ? by_column(tiles.up(), RANK * 128) : by_row<32>(tiles.up()));
                products_end();
                products_wait<0>();
                settle(d);
                if (threadIdx.x % 128 < 2) arrive_in(tiles.low_empty(own), threadIdx.x % 128);
                float scale = term.scale;
                if (KIND != NARROW && dropout.threshold) {
                    scale *= dropout.scale;
#pragma unroll
                    for (int low = 0; low < 2; low++) {
                        u32 base = dropout.row(row + low * 8) + Dropout::pair_offset(column - term.first + 2 * t);
#pragma unroll
                        for (int j = 0; j < BN / 8; j++)
                            dropout.drop(Dropout::word(base + Dropout::pair_offset(8 * j)), d[4 * j + 2 * low],
                                         d[4 * j + 2 * low + 1]);
                    }
                }
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    float2 more = shared_pair(bias_at + j * 32);
#pragma unroll
                    for (int i = 0; i < 4; i++) d[4 * j + i] = fmaf(d[4 * j + i], scale, i % 2 ? more.y : more.x);
                }
            } else {
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    float2 more = shared_pair(bias_at + j * 32);
#pragma unroll
                    for (int i = 0; i < 4; i++) d[4 * j + i] = i % 2 ? more.y : more.x;
                }
            }
            // What the derivative is taken at: the first of it is on its way while the tile is multiplied.
            auto bring_before = [&](int at_column) {
                if (lane == 0) {
                    writes_have_left();
                    arrive_with_bytes(before_full, Tiles::PANEL);
                    copy_matrix(panel, maps.before, before_full, at_column, warp_row);
                }
            };
            if (IS_BACKWARD) bring_before(column);
            // Stages come round: one is waited for only when the warpgroup before has seen all before it.
            if (number > 0) wait(tiles.turn(own), (number - 1) / NUM_GROUPS & 1);
            u32 seen = number * x.steps, stage = seen % NUM_STAGES, parity = seen / NUM_STAGES & 1, last = stage;
            auto multiply_step = [&](int k) {
                if (number == own) wait(tiles.ready(k), 0);
                wait(tiles.full(stage), parity);
                if (k == x.steps - 1 && threadIdx.x % 128 == 0)
                    arrive(tiles.turn(own + 1 == NUM_GROUPS ? 0 : own + 1));
                u64 left = by_row(tiles.a(stage));
                u64 right = B_BY_COLUMN ? by_column(tiles.b(k), BK * 128) : by_row(tiles.b(k));
                products_begin();
#pragma unroll
                for (int part = 0; part < BK / 16; part++)
                    multiply_more<B_BY_COLUMN>(d, left + part * 2, right + part * (B_BY_COLUMN ? 128 : 2));
                products_end();
                last = stage;
                if (++stage == NUM_STAGES) stage = 0, parity ^= 1;
            };
            // The first by itself: in a loop that begins without a wait the compiler lets each product
            // wait for the one before.
            multiply_step(0);
            for (int k = 1; k < x.steps; k++) {
                u32 done = last;
                multiply_step(k);
                products_wait<1>();
                if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(done), threadIdx.x % 128);
            }
            products_wait<0>();
            settle(d);
            if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(last), threadIdx.x % 128);
            auto free_panel = [&] {
                if (lane == 0) writes_have_left();
                __syncwarp();
            };
            auto write_panel = [&](const TensorMap* map, int at_column) {
                publish_shared();
                __syncwarp();
                if (lane == 0) write_matrix(map, panel, at_column, warp_row);
            };
            float z[4] = {};
            u32 bases[2];
            if (KIND == NARROW)
#pragma unroll
                for (int low = 0; low < 2; low++)
                    bases[low] = dropout.row(row + low * 8) + Dropout::pair_offset(column + 2 * t);
#pragma unroll
            for (int begin = 0; begin < BN; begin += 64) {
                // Of four times sixteen columns: the rows above and below of eight, and of the next eight.
                u32 w[4][4];
                auto index = [&](int i, int e) { return (begin + 16 * i) / 2 + 4 * (e / 2) + 2 * (e % 2); };
                if (IS_BACKWARD) {
                    wait(before_full, num_before++ & 1);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        u32 products[4];
                        load_matrices(w[i], place ^ i * 32);
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            products[e] = times_slopes(d[index(i, e)], d[index(i, e) + 1], w[i][e]);
                        store_matrices(place ^ i * 32, products);
                    }
                    write_panel(maps.c, column + begin);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) w[i][e] = pack2(d[index(i, e)], d[index(i, e) + 1]);
                    if (KIND == NONE || x.c_is_written) {
                        free_panel();
#pragma unroll
                        for (int i = 0; i < 4; i++) store_matrices(place ^ i * 32, w[i]);
                        write_panel(maps.c, column + begin);
                    }
                }
                if (KIND != NONE && KIND != BACKWARD) {
                    free_panel();
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        // Of what C has, not of what it is rounded from: the same as in a pass of its own.
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            w[i][e] = pack2(Gelu::value(low_half(w[i][e])), Gelu::value(high_half(w[i][e])));
                        store_matrices(place ^ i * 32, w[i]);
                    }
                    write_panel(maps.y, column + begin);
                }
                if (IS_BACKWARD && begin + 64 < BN) bring_before(column + begin + 64);
                if (KIND == NARROW) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            u32 offset = Dropout::pair_offset(begin + 16 * i + e / 2 * 8);
                            w[i][e] &= dropout.kept_of(Dropout::word(bases[e % 2] + offset));
                        }
                        float2 both = shared_pair(weight_at + (begin / 16 + i) * 256);
                        multiply(z, w[i], __float_as_uint(both.x), __float_as_uint(both.y));
                    }
                }
            }
            if (KIND == NARROW) {
#pragma unroll
                for (int low = 0; low < 2; low++)
                    if (row + low * 8 < x.rows)
                        *(float2*)(parts + ((u64)column_tile * x.rows + row + low * 8) * 8 + 2 * t) =
                            make_float2(z[2 * low], z[2 * low + 1]);
            }
        }
        if (lane == 0) writes_are_done();
    }
    __syncwarp();
    // A block must be there as long as the other one copies to it or arrives at its barriers.
    cluster_meet();
}

// `y` is GELU's, `before` is X of a derivative; `weight` and `parts` are the narrow product's.
#define PRODUCTS(name, by_columns, kind)                                                             \
    KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(NUM_THREADS, 1)                               \
    name(const __grid_constant__ Sum x, const __grid_constant__ TensorMap a,                         \
         const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap low0,                \
         const __grid_constant__ TensorMap low1, const __grid_constant__ TensorMap low2,             \
         const __grid_constant__ TensorMap up0, const __grid_constant__ TensorMap up1,               \
         const __grid_constant__ TensorMap up2, const __grid_constant__ TensorMap c,                 \
         const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap before,              \
         const float* bias, const u32* random, const real* weight, float* parts) {                   \
        int adapter = adapter_of(x);                                                                 \
        const TensorMap* low = adapter == 2 ? &low2 : adapter == 1 ? &low1 : &low0;                  \
        const TensorMap* up = adapter == 2 ? &up2 : adapter == 1 ? &up1 : &up0;                      \
        Maps maps{&a, &b, low, up, &c, &y, &before};                                                 \
        product_sum<by_columns, kind>(x, adapter, maps, bias, random, weight, parts);                \
    }

PRODUCTS(short_rows, 0, NONE)
PRODUCTS(short_rows_gelu, 0, FORWARD)
PRODUCTS(short_rows_gelu_narrow, 0, NARROW)
PRODUCTS(short_columns, 1, NONE)
PRODUCTS(short_columns_gelu_backward, 1, BACKWARD)
PRODUCTS(short_columns_gelu_backward_value, 1, BACKWARD_VALUE)

// Z of its sums over columns, parts[count][rows][8], four columns a thread.
KERNEL __launch_bounds__(256)
short_narrow_sum(const float* parts, real* z, u32 rows, u32 count, const u32* random, u32 stream, u32 limit) {
    await_earlier();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= rows * 2) return;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (u32 part = 0; part < count; part++) {
        float4 more = *(const float4*)(parts + ((u64)part * rows * 2 + i) * 4);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    float scale = Dropout(random, stream, limit).scale;
    *(uint2*)(z + (u64)i * 4) =
        make_uint2(pack2(sum.x * scale, sum.y * scale), pack2(sum.z * scale, sum.w * scale));
}
