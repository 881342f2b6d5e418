// Sums of matrix products on sm_90a whose end is work of its own:
//
//   C[m,n]        = bias + Σ scale·A[m,k]·B[k,n]
//   activation:     Y = f(C), C being written as well where somebody reads it
//   its derivative: C·f′(X), and Y = f(X) where somebody reads it again
//   gate:           Y = f(X)·C, C being written as well where somebody reads it
//   its gradients:  C·U·f′(X) and C·f(X), and Y = f(X)·U where somebody reads it again
//
// Two warpgroups take turns: while one multiplies its tile, the other ends the one before. Two blocks
// (a cluster) have neighbouring rows of C and the same columns: each brings half of B's tile, for
// both. One thread feeds the copy engine. Blocks stay, and take tile after tile.
//
// B is [k, n] (`columns`) or [n, k] (`rows`).

#include "hopper.cuh"
#include "cluster.cuh"
#include "pointwise.cuh"

constexpr int BM = 128, BN = 192, BK = 64, NUM_STAGES = 5, NUM_THREADS = 384, MAX_TERMS = 4;
constexpr int BLOCKS = BM / 64, B_PANELS = BN / 64;

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

// What a tail reads and writes, all of C's shape; what is null is not written.
struct Ends {
    real* c;
    const real *x, *u;
    real *y, *du;
    const float* bias;
};

// d[64×N] += a[64×16]·b[16×N], as `multiply` has it.
template <int TB>
__device__ __forceinline__ void add_product(float (&d)[96], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7") OPERANDS10("8")
                 "%90, %91, %92, %93, %94, %95}, %96, %97, 1, 1, 1, 0, %98;"
                 : RESULTS32(0), RESULTS32(32), RESULTS32(64)
                 : "l"(a), "l"(b), "n"(TB));
}
struct Tiles {
    static constexpr u32 A = BM * BK * 2, STAGE = A + BN * BK * 2;
    u32 base;
    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * STAGE; }
    __device__ __forceinline__ u32 b(u32 stage) const { return base + stage * STAGE + A; }
    __device__ __forceinline__ u32 barrier(u32 index) const { return base + NUM_STAGES * STAGE + index * 8; }
    __device__ __forceinline__ u32 full(u32 stage) const { return barrier(stage); }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barrier(NUM_STAGES + stage); }
    __device__ __forceinline__ u32 turn(u32 group) const { return barrier(2 * NUM_STAGES + group); }
};

// Where a cluster's tiles begin.
struct Place {
    int row, column;
    __device__ __forceinline__ bool take(const Sum& x, int index) {
        if (index >= x.row_pairs * x.column_tiles) return false;
        int whole = x.together * x.column_tiles, set = index / whole, rest = index % whole;
        int members = min(x.together, x.row_pairs - set * x.together);
        row = (set * x.together + rest % members) * 2 * BM;
        column = rest / members * BN;
        return true;
    }
    __device__ __forceinline__ bool meets(const Term& term) const {
        return column < term.first + term.width && column + BN > term.first;
    }
    // The scale of the term after `i`, or 1 after the last.
    __device__ __forceinline__ float next_scale(const Sum& x, int i) const {
        for (i++; i < x.num_terms; i++)
            if (meets(x.terms[i])) return x.terms[i].scale;
        return 1.0f;
    }
    // Steps of all terms.
    __device__ __forceinline__ u32 steps(const Sum& x) const {
        u32 steps = 0;
        for (int i = 0; i < x.num_terms; i++)
            if (meets(x.terms[i])) steps += x.terms[i].steps;
        return steps;
    }
};

__device__ __forceinline__ void load4(u32 (&w)[4], const real* from, bool is_there) {
    uint4 x = is_there ? *(const uint4*)from : make_uint4(0, 0, 0, 0);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
}
__device__ __forceinline__ void store4(real* to, const u32 (&w)[4], bool is_there) {
    if (is_there) *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
}

// What becomes of C. READS tensors are read at the place of what is written, and come in as pairs of
// neighbours; `end` makes of a pair of C, kept in `c`, what is written to WRITES tensors.
struct Plain {
    static constexpr int READS = 0, WRITES = 1;
    static __device__ __forceinline__ const real* from(const Ends& e, int) { return nullptr; }
    static __device__ __forceinline__ real* to(const Ends& e, int) { return e.c; }
    static __device__ __forceinline__ void end(float left, float right, const u32 (&)[1], u32 (&w)[1]) {
        w[0] = pack2(left, right);
    }
};
template <typename F> struct Activation {
    static constexpr int READS = 0, WRITES = 2;
    static __device__ __forceinline__ const real* from(const Ends& e, int) { return nullptr; }
    static __device__ __forceinline__ real* to(const Ends& e, int i) { return i ? e.y : e.c; }
    // Of what C has, not of what it is rounded from: the same as in a pass of its own.
    static __device__ __forceinline__ void end(float left, float right, const u32 (&)[1], u32 (&w)[2]) {
        w[0] = pack2(left, right);
        w[1] = pack2(F::value(low_half(w[0])), F::value(high_half(w[0])));
    }
};
template <typename F> struct Derivative {
    static constexpr int READS = 1, WRITES = 2;
    static __device__ __forceinline__ const real* from(const Ends& e, int) { return e.x; }
    static __device__ __forceinline__ real* to(const Ends& e, int i) { return i ? e.y : e.c; }
    static __device__ __forceinline__ void end(float left, float right, const u32 (&r)[1], u32 (&w)[2]) {
        float x0 = low_half(r[0]), x1 = high_half(r[0]);
        w[0] = pack2(left * F::slope(x0), right * F::slope(x1));
        w[1] = pack2(F::value(x0), F::value(x1));
    }
};
template <typename F> struct Gate {
    static constexpr int READS = 1, WRITES = 2;
    static __device__ __forceinline__ const real* from(const Ends& e, int) { return e.x; }
    static __device__ __forceinline__ real* to(const Ends& e, int i) { return i ? e.y : e.c; }
    static __device__ __forceinline__ void end(float left, float right, const u32 (&r)[1], u32 (&w)[2]) {
        w[0] = pack2(left, right);
        w[1] = pack2(low_half(w[0]) * F::value(low_half(r[0])), high_half(w[0]) * F::value(high_half(r[0])));
    }
};
template <typename F> struct GateGradients {
    static constexpr int READS = 2, WRITES = 3;
    static __device__ __forceinline__ const real* from(const Ends& e, int i) { return i ? e.u : e.x; }
    static __device__ __forceinline__ real* to(const Ends& e, int i) { return i == 2 ? e.y : i ? e.du : e.c; }
    static __device__ __forceinline__ void end(float left, float right, const u32 (&r)[2], u32 (&w)[3]) {
        float x0 = low_half(r[0]), x1 = high_half(r[0]), u0 = low_half(r[1]), u1 = high_half(r[1]);
        float y0 = F::value(x0), y1 = F::value(x1);
        w[0] = pack2(u0 * (left * F::slope(x0)), u1 * (right * F::slope(x1)));
        w[1] = pack2(left * y0, right * y1);
        w[2] = pack2(u0 * y0, u1 * y1);
    }
};

// How far a tail has read when it ends a piece: registers of what is ended are free for more.
template <typename E> __device__ constexpr int reach(int piece) {
    int ahead = (E::READS == 1 ? 2 : 1) + piece, most = E::READS == 1 ? 6 : 4;
    return E::READS == 0 ? 0 : piece + (ahead < most ? ahead : most);
}
constexpr int PIECES = BLOCKS * 2 * BN / 32;

// A thread's pieces of a tile: 8 of 32 columns in a row each.
struct Pieces {
    int row, column, t;
    __device__ __forceinline__ int row_of(int piece) const { return row + piece / (BN / 16) * 64 + piece / (BN / 32) % 2 * 8; }
    __device__ __forceinline__ int column_of(int piece) const { return column + piece % (BN / 32) * 32 + 8 * t; }
    __device__ __forceinline__ bool is_there(const Sum& x, int piece) const {
        return row_of(piece) < x.rows && column_of(piece) < x.columns;
    }
    __device__ __forceinline__ u64 offset(const Sum& x, int piece) const {
        return (u64)row_of(piece) * x.stride + column_of(piece);
    }
};

template <typename E> struct Read {
    static constexpr int READS = E::READS ? E::READS : 1, DEPTH = 8;
    u32 w[DEPTH][READS][4];
    __device__ __forceinline__ void bring(const Sum& x, const Ends& ends, const Pieces& pieces, int piece) {
        if constexpr (E::READS > 0)
#pragma unroll
            for (int i = 0; i < E::READS && piece < PIECES; i++)
                load4(w[piece % DEPTH][i], E::from(ends, i) + pieces.offset(x, piece), pieces.is_there(x, piece));
    }
};

template <typename E>
__device__ __forceinline__ void end_tile(const Sum& x, const Ends& ends, const Pieces& pieces, Read<E>& read,
                                         const float (&d)[BLOCKS][BN / 2]) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        int block = piece / (BN / 16), low = piece / (BN / 32) % 2, j = piece % (BN / 32);
        u32 r[Read<E>::READS][4], w[E::WRITES][4];
#pragma unroll
        for (int i = 0; i < E::READS; i++) {
#pragma unroll
            for (int n = 0; n < 4; n++) r[i][n] = read.w[piece % Read<E>::DEPTH][i][n];
            exchange(r[i], pieces.t);
        }
#pragma unroll
        for (int next = reach<E>(piece); next < reach<E>(piece + 1); next++)
            read.bring(x, ends, pieces, next);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            int at = 4 * (4 * j + n) + 2 * low;
            u32 in[Read<E>::READS], out[E::WRITES];
#pragma unroll
            for (int i = 0; i < E::READS; i++) in[i] = r[i][n];
            E::end(d[block][at], d[block][at + 1], in, out);
#pragma unroll
            for (int i = 0; i < E::WRITES; i++) w[i][n] = out[i];
        }
        u64 offset = pieces.offset(x, piece);
        bool is_there = pieces.is_there(x, piece);
#pragma unroll
        for (int i = 0; i < E::WRITES; i++) {
            // Without a branch, which pieces could not be computed across.
            real* to = E::to(ends, i);
            exchange(w[i], pieces.t);
            store4(to + offset, w[i], is_there && to);
        }
    }
}

template <int B_BY_COLUMN, typename E>
__device__ __forceinline__ void product_sum(const Sum& x, const Maps& maps, const Ends& ends) {
    extern __shared__ char dynamic_shared[];
    Tiles tiles{(shared_address(dynamic_shared) + 1023) & ~1023u};
    u32 rank = cluster_rank();
    // The same in all threads of a warp, which the compiler cannot see by itself.
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(tiles.full(i), 1);
            barrier_init(tiles.empty(i), 2);
        }
        for (int i = 0; i < 2; i++) barrier_init(tiles.turn(i), 1);
        barriers_are_there();
    }
    cluster_meet();
    await_earlier();
    int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    Place place;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x % 128 == 0) {
            Ring<NUM_STAGES> ring;
            for (int index = cluster; place.take(x, index); index += clusters) {
                int row = place.row + rank * BM;
                for (int i = 0; i < x.num_terms; i++) {
                    const Term& term = x.terms[i];
                    if (!place.meets(term)) continue;
                    int column = place.column - term.first;
                    for (int k = 0; k < term.steps; k++) {
                        wait(tiles.empty(ring.stage), ring.parity ^ 1);
                        u32 full = tiles.full(ring.stage), b = tiles.b(ring.stage);
                        arrive_with_bytes(full, Tiles::STAGE);
                        copy_matrix(tiles.a(ring.stage), maps.a[i], full, k * BK, row);
                        if (B_BY_COLUMN) {
#pragma unroll
                            for (int panel = 0; panel < B_PANELS; panel++)
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
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        // Steps that were before, of both warpgroups.
        u32 done = 0;
        for (int number = 0, index = cluster; place.take(x, index); number++, index += clusters) {
            if (number % 2 != group) {
                done += place.steps(x);
                continue;
            }
            Pieces pieces{place.row + (int)rank * BM + warp * 16 + lane / 4, place.column, lane % 4};
            Read<E> read;
            float d[BLOCKS][BN / 2];
#pragma unroll
            for (int block = 0; block < BLOCKS; block++)
#pragma unroll
                for (int j = 0; j < BN / 2; j++) d[block][j] = 0.0f;
            u32 stage = done % NUM_STAGES, parity = done / NUM_STAGES & 1;
            u32 left = place.steps(x);
            done += left;
            // Stages come round: one is waited for only when the other warpgroup has seen all before it.
            if (number > 0) wait(tiles.turn(group), (number - 1) / 2 & 1);
            for (int i = 0; i < x.num_terms; i++) {
                const Term& term = x.terms[i];
                if (!place.meets(term)) continue;
                u32 before = 0;
                for (int k = 0; k < term.steps; k++) {
                    wait(tiles.full(stage), parity);
                    if (--left == 0 && threadIdx.x % 128 == 0) arrive(tiles.turn(group ^ 1));
                    u32 a = tiles.a(stage), b = tiles.b(stage);
                    products_begin();
#pragma unroll
                    for (int part = 0; part < BK / 16; part++) {
                        u64 right = B_BY_COLUMN ? by_column(b + part * 16 * 128, BK * 128) : by_row(b + part * 32);
#pragma unroll
                        for (int block = 0; block < BLOCKS; block++)
                            add_product<B_BY_COLUMN>(d[block], by_row(a + block * 64 * 128 + part * 32), right);
                    }
                    products_end();
                    if (k > 0) {
                        products_wait<1>();
                        if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(before), threadIdx.x % 128);
                    }
                    before = stage;
                    if (++stage == NUM_STAGES) stage = 0, parity ^= 1;
                }
                products_wait<0>();
#pragma unroll
                for (int block = 0; block < BLOCKS; block++) settle(d[block]);
                if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(before), threadIdx.x % 128);
                // The sum so far as a multiple of the next term's scale, in the end of 1.
                float change = term.scale / place.next_scale(x, i);
                if (change != 1.0f) {
#pragma unroll
                    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
                        for (int j = 0; j < BN / 2; j++) d[block][j] *= change;
                }
            }
#pragma unroll
            for (int piece = 0; piece < reach<E>(0); piece++) read.bring(x, ends, pieces, piece);
            if (ends.bias) {
#pragma unroll
                for (int j = 0; j < BN / 8; j++) {
                    int column = place.column + 8 * j + 2 * pieces.t;
                    if (column >= x.columns) continue;
                    float2 added = *(const float2*)(ends.bias + column);
#pragma unroll
                    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
                        for (int low = 0; low < 2; low++)
                            d[block][4 * j + 2 * low] += added.x, d[block][4 * j + 2 * low + 1] += added.y;
                }
            }
            end_tile<E>(x, ends, pieces, read, d);
        }
    }
    __syncwarp();
    // A block must be there as long as the other one copies to it or arrives at its barriers.
    cluster_meet();
}

#define PRODUCTS(name, by_columns, end)                                                             \
    KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(NUM_THREADS, 1)                              \
    name(const __grid_constant__ Sum x, const __grid_constant__ TensorMap a0,                       \
         const __grid_constant__ TensorMap a1, const __grid_constant__ TensorMap a2,                \
         const __grid_constant__ TensorMap a3, const __grid_constant__ TensorMap b0,                \
         const __grid_constant__ TensorMap b1, const __grid_constant__ TensorMap b2,                \
         const __grid_constant__ TensorMap b3, real* c, const real* before, const real* u, real* y,    \
         real* du, const float* bias) {                                                             \
        Maps maps{{&a0, &a1, &a2, &a3}, {&b0, &b1, &b2, &b3}};                                      \
        product_sum<by_columns, end>(x, maps, Ends{c, before, u, y, du, bias});                        \
    }

PRODUCTS(turns_rows, 0, Plain)
PRODUCTS(turns_rows_gelu, 0, Activation<Gelu>)
PRODUCTS(turns_rows_gelu_tanh, 0, Activation<GeluTanh>)
PRODUCTS(turns_rows_swiglu, 0, Gate<Silu>)
PRODUCTS(turns_columns, 1, Plain)
PRODUCTS(turns_columns_gelu, 1, Derivative<Gelu>)
PRODUCTS(turns_columns_gelu_tanh, 1, Derivative<GeluTanh>)
PRODUCTS(turns_columns_swiglu, 1, GateGradients<Silu>)
