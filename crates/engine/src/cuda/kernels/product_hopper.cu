// Sums of matrix products on sm_90a: C[m,n] = bias + Σ scale·A[m,k]·B[k,n], all terms in one pass.
//
// An adapter's product is a term of the sum, so that what it adds to is never written and read back.
// The first term may be dropped in part (`dropped`): elements of it are cleared before others add, and
// the sum may be added to what C has.
// Two blocks (a cluster) have neighbouring tiles of C: with the same columns each brings half of B's
// tile for both, with the same rows half of A's. In a block one thread feeds the copy engine, and two
// warpgroups multiply, each 64 or 128 rows. Blocks stay, and take tile after tile.
//
// B is [k, n] (`columns`) or [n, k] (`rows`); the numbers in a kernel's name are the rows and columns
// of its tile. Which tiles are best depends on how they fill a card in whole rounds.

#include "hopper.cuh"
#include "cluster.cuh"

constexpr int BK = 64, NUM_STAGES = 4, NUM_THREADS = 384, MAX_TERMS = 4;
// What the blocks of a cluster have in common.
constexpr int SAME_COLUMNS = 0, SAME_ROWS = 1;

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
    // What the first term is dropped by, if it is; then whether C is added to.
    u32 stream, limit, adds;
};

struct Maps {
    const TensorMap *a[MAX_TERMS], *b[MAX_TERMS];
};

// d[64×N] += a[64×16]·b[16×N], as `multiply` has it.
template <int TB>
__device__ __forceinline__ void add_product(float (&d)[84], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n168k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7")
                 "%80, %81, %82, %83}, %84, %85, 1, 1, 1, 0, %86;"
                 : RESULTS32(0), RESULTS32(32), RESULTS16(64), RESULTS4(80)
                 : "l"(a), "l"(b), "n"(TB));
}
template <int TB>
__device__ __forceinline__ void add_product(float (&d)[88], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n176k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7")
                 "%80, %81, %82, %83, %84, %85, %86, %87}, %88, %89, 1, 1, 1, 0, %90;"
                 : RESULTS32(0), RESULTS32(32), RESULTS16(64), RESULTS4(80), RESULTS4(84)
                 : "l"(a), "l"(b), "n"(TB));
}
template <int TB>
__device__ __forceinline__ void add_product(float (&d)[96], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7") OPERANDS10("8")
                 "%90, %91, %92, %93, %94, %95}, %96, %97, 1, 1, 1, 0, %98;"
                 : RESULTS32(0), RESULTS32(32), RESULTS32(64)
                 : "l"(a), "l"(b), "n"(TB));
}
template <int TB>
__device__ __forceinline__ void add_product(float (&d)[112], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n224k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7") OPERANDS10("8") OPERANDS10("9")
                 OPERANDS10("10")
                 "%110, %111}, %112, %113, 1, 1, 1, 0, %114;"
                 : RESULTS32(0), RESULTS32(32), RESULTS32(64), RESULTS16(96)
                 : "l"(a), "l"(b), "n"(TB));
}
template <int TB>
__device__ __forceinline__ void add_product(float (&d)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENTS " {"
                 OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")
                 OPERANDS10("5") OPERANDS10("6") OPERANDS10("7") OPERANDS10("8") OPERANDS10("9")
                 OPERANDS10("10") OPERANDS10("11")
                 "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, 1, 1, 1, 0, %130;"
                 : RESULTS32(0), RESULTS32(32), RESULTS32(64), RESULTS32(96)
                 : "l"(a), "l"(b), "n"(TB));
}

// A tile of C: two warpgroups with BLOCKS times 64 rows each, and BN columns.
template <int BLOCKS_, int BN_, int SHARED_, int B_BY_COLUMN_> struct Shape {
    static constexpr int BLOCKS = BLOCKS_, BN = BN_, SHARED = SHARED_, B_BY_COLUMN = B_BY_COLUMN_;
    static constexpr int BM = 2 * BLOCKS * 64;
    // Of a cluster's two tiles.
    static constexpr int ROWS = SHARED == SAME_COLUMNS ? 2 * BM : BM, COLUMNS = SHARED == SAME_COLUMNS ? BN : 2 * BN;
    // Panels of 64 columns, where B lies by columns; the last may be used in part.
    static constexpr int PANELS = (BN + 63) / 64;
    static constexpr u32 A = BM * BK * 2, B = (B_BY_COLUMN ? PANELS * 64 : BN) * BK * 2, STAGE = A + B;
    static constexpr u32 A_PART = SHARED == SAME_ROWS ? A / 2 : A;
    static_assert(BN / 2 % 8 == 0 || B_BY_COLUMN || SHARED == SAME_ROWS, "parts of tiles begin at multiples of 1024 bytes");
};

template <typename S> struct Tiles {
    u32 base;
    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * S::STAGE; }
    __device__ __forceinline__ u32 b(u32 stage) const { return base + stage * S::STAGE + S::A; }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + NUM_STAGES * S::STAGE + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(NUM_STAGES + stage); }
};

// Where a cluster's tiles begin.
template <typename S> struct Place {
    int row, column;
    __device__ __forceinline__ bool take(const Sum& x, int index) {
        if (index >= x.row_pairs * x.column_tiles) return false;
        int whole = x.together * x.column_tiles, set = index / whole, rest = index % whole;
        int members = min(x.together, x.row_pairs - set * x.together);
        row = (set * x.together + rest % members) * S::ROWS;
        column = rest / members * S::COLUMNS;
        return true;
    }
    // Whether a term adds to some of them: blocks that share what they read have the same terms.
    __device__ __forceinline__ bool meets(const Term& term) const {
        return column < term.first + term.width && column + S::COLUMNS > term.first;
    }
    // The scale of the term after `i`, or 1 after the last.
    __device__ __forceinline__ float next_scale(const Sum& x, int i) const {
        for (i++; i < x.num_terms; i++)
            if (meets(x.terms[i])) return x.terms[i].scale;
        return 1.0f;
    }
};

// The producer's part: brings what a block reads of a step, or its half of it for both.
template <typename S>
__device__ __forceinline__ void bring(const Tiles<S>& tiles, u32 stage, const TensorMap* a, const TensorMap* b, int k,
                                      int row, int column, u32 rank) {
    u32 full = tiles.full(stage), to = tiles.b(stage);
    arrive_with_bytes(full, S::STAGE);
    if constexpr (S::SHARED == SAME_ROWS) {
        copy_matrix_to_both(tiles.a(stage) + rank * S::A / 2, a, full, k * BK, row + rank * S::BM / 2);
        if constexpr (S::B_BY_COLUMN) {
#pragma unroll
            for (int panel = 0; panel < S::PANELS; panel++)
                copy_matrix(to + panel * BK * 128, b, full, column + panel * 64, k * BK);
        } else {
            copy_matrix(to, b, full, k * BK, column);
        }
    } else {
        copy_matrix(tiles.a(stage), a, full, k * BK, row);
        if constexpr (S::B_BY_COLUMN) {
#pragma unroll
            for (int panel = 0; panel < S::PANELS; panel++)
                copy_matrix_to_both(to + panel * BK * 128 + rank * BK / 2 * 128, b, full, column + panel * 64,
                                    k * BK + rank * BK / 2);
        } else {
            copy_matrix_to_both(to + rank * S::BN / 2 * 128, b, full, k * BK, column + rank * S::BN / 2);
        }
    }
}

// Writes 64 rows of a tile, or those of them that C has.
template <int BN, bool MAY_ADD>
__device__ __forceinline__ void store(const Sum& x, float (&d)[BN / 2], real* c, const float* bias, int first_row,
                                      int first_column) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, t = lane % 4;
    if (bias) {
#pragma unroll
        for (int j = 0; j < BN / 8; j++) {
            int column = first_column + 8 * j + 2 * t;
            if (column >= x.columns) continue;
            float2 added = *(const float2*)(bias + column);
            d[4 * j] += added.x, d[4 * j + 1] += added.y, d[4 * j + 2] += added.x, d[4 * j + 3] += added.y;
        }
    }
#pragma unroll
    for (int low = 0; low < 2; low++) {
        int row = first_row + warp * 16 + lane / 4 + low * 8;
        // The four threads of a row turn four blocks of eight columns, so that each stores one.
#pragma unroll
        for (int j = 0; j < BN / 8; j += 4) {
            int column = first_column + 8 * (j + t);
            bool is_there = row < x.rows && column < x.columns && j + t < BN / 8;
            uint4* to = (uint4*)(c + (u64)row * x.stride + column);
            u32 w[4], had[4] = {};
            if (MAY_ADD && x.adds) {
                uint4 old = is_there ? *to : uint4{};
                had[0] = old.x, had[1] = old.y, had[2] = old.z, had[3] = old.w;
                exchange(had, t);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int at = 4 * (j + i) + 2 * low;
                w[i] = 0;
                if (j + i >= BN / 8) continue;
                if (MAY_ADD) d[at] += low_half(had[i]), d[at + 1] += high_half(had[i]);
                w[i] = pack2(d[at], d[at + 1]);
            }
            exchange(w, t);
            if (is_there) *to = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
}

// Clears what is dropped of 64 rows of a tile whose first column is one of the term's.
template <int BN>
__device__ __forceinline__ void drop(const Dropout& dropout, float (&d)[BN / 2], int first_row, int first_column) {
    int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int low = 0; low < 2; low++) {
        u32 base = dropout.row(row + low * 8);
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
            dropout.drop(dropout.pair(base, first_column + 8 * j + 2 * (lane % 4)), d[4 * j + 2 * low],
                         d[4 * j + 2 * low + 1]);
    }
}

template <typename S, bool IS_DROPPED>
__device__ __forceinline__ void product_sum(const Sum& x, const Maps& maps, real* c, const float* bias,
                                            const u32* random) {
    extern __shared__ char dynamic_shared[];
    Tiles<S> tiles{(shared_address(dynamic_shared) + 1023) & ~1023u};
    u32 rank = cluster_rank();
    // The same in all threads of a warp, which the compiler cannot see by itself.
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < NUM_STAGES; i++) {
            barrier_init(tiles.full(i), 1);
            barrier_init(tiles.empty(i), 4);
        }
        barriers_are_there();
    }
    cluster_meet();
    await_earlier();
    int cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    // Of the cluster's tiles, this block's.
    int own_row = S::SHARED == SAME_COLUMNS ? rank * S::BM : 0, own_column = S::SHARED == SAME_ROWS ? rank * S::BN : 0;
    Ring<NUM_STAGES> ring;
    Place<S> place;
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x % 128 == 0) {
            for (int index = cluster; place.take(x, index); index += clusters) {
                for (int i = 0; i < x.num_terms; i++) {
                    const Term& term = x.terms[i];
                    if (!place.meets(term)) continue;
                    for (int k = 0; k < term.steps; k++) {
                        wait(tiles.empty(ring.stage), ring.parity ^ 1);
                        bring<S>(tiles, ring.stage, maps.a[i], maps.b[i], k, place.row + own_row,
                                 place.column + own_column - term.first, rank);
                        ring.advance();
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int first = group * S::BLOCKS * 64;
        Dropout dropout(IS_DROPPED ? random : nullptr, x.stream, x.limit);
        for (int index = cluster; place.take(x, index); index += clusters) {
            float d[S::BLOCKS][S::BN / 2];
#pragma unroll
            for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
                for (int j = 0; j < S::BN / 2; j++) d[block][j] = 0.0f;
            for (int i = 0; i < x.num_terms; i++) {
                const Term& term = x.terms[i];
                if (!place.meets(term)) continue;
                u32 before = 0;
                for (int k = 0; k < term.steps; k++) {
                    wait(tiles.full(ring.stage), ring.parity);
                    u32 a = tiles.a(ring.stage) + first * 128, b = tiles.b(ring.stage);
                    products_begin();
#pragma unroll
                    for (int part = 0; part < BK / 16; part++) {
                        u64 right = S::B_BY_COLUMN ? by_column(b + part * 16 * 128, BK * 128) : by_row(b + part * 32);
#pragma unroll
                        for (int block = 0; block < S::BLOCKS; block++)
                            add_product<S::B_BY_COLUMN>(d[block], by_row(a + block * 64 * 128 + part * 32), right);
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
#pragma unroll
                for (int block = 0; block < S::BLOCKS; block++) settle(d[block]);
                if (threadIdx.x % 128 < 2) arrive_in(tiles.empty(before), threadIdx.x % 128);
                // The sum so far as a multiple of the next term's scale, in the end of 1.
                float change = term.scale / place.next_scale(x, i);
                if (IS_DROPPED && i == 0) {
                    change *= dropout.scale;
#pragma unroll
                    for (int block = 0; block < S::BLOCKS; block++)
                        drop<S::BN>(dropout, d[block], place.row + own_row + first + block * 64,
                                    place.column + own_column - term.first);
                }
                if (change != 1.0f) {
#pragma unroll
                    for (int block = 0; block < S::BLOCKS; block++)
#pragma unroll
                        for (int j = 0; j < S::BN / 2; j++) d[block][j] *= change;
                }
            }
#pragma unroll
            for (int block = 0; block < S::BLOCKS; block++)
                store<S::BN, IS_DROPPED>(x, d[block], c, bias, place.row + own_row + first + block * 64, place.column + own_column);
        }
    }
    __syncwarp();
    // A block must be there as long as the other one copies to it or arrives at its barriers.
    cluster_meet();
}

#define OPERANDS                                                                                    \
    const __grid_constant__ Sum x, const __grid_constant__ TensorMap a0,                            \
        const __grid_constant__ TensorMap a1, const __grid_constant__ TensorMap a2,                 \
        const __grid_constant__ TensorMap a3, const __grid_constant__ TensorMap b0,                 \
        const __grid_constant__ TensorMap b1, const __grid_constant__ TensorMap b2,                 \
        const __grid_constant__ TensorMap b3, real *c, const float *bias
#define MAPS Maps{{&a0, &a1, &a2, &a3}, {&b0, &b1, &b2, &b3}}

#define PRODUCTS(name, blocks, bn, shared, by_columns)                                              \
    KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(NUM_THREADS, 1) name(OPERANDS) {             \
        product_sum<Shape<blocks, bn, shared, by_columns>, false>(x, MAPS, c, bias, nullptr);       \
    }
// What is dropped adds to a gradient, whose B is a layer's weight as it lies: by columns.
#define DROPPED(name, blocks, bn, shared)                                                           \
    KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(NUM_THREADS, 1)                              \
    name(OPERANDS, const u32* random) {                                                             \
        product_sum<Shape<blocks, bn, shared, 1>, true>(x, MAPS, c, bias, random);                  \
    }

PRODUCTS(products_rows_128_176, 1, 176, SAME_COLUMNS, 0)
PRODUCTS(products_columns_128_176, 1, 176, SAME_COLUMNS, 1)
PRODUCTS(products_rows_128_192, 1, 192, SAME_COLUMNS, 0)
PRODUCTS(products_columns_128_192, 1, 192, SAME_COLUMNS, 1)
PRODUCTS(products_rows_128_224, 1, 224, SAME_COLUMNS, 0)
PRODUCTS(products_columns_128_224, 1, 224, SAME_COLUMNS, 1)
PRODUCTS(products_rows_128_256, 1, 256, SAME_COLUMNS, 0)
PRODUCTS(products_columns_128_256, 1, 256, SAME_COLUMNS, 1)
PRODUCTS(products_rows_256_168, 2, 168, SAME_ROWS, 0)
PRODUCTS(products_columns_256_168, 2, 168, SAME_ROWS, 1)
PRODUCTS(products_rows_256_176, 2, 176, SAME_ROWS, 0)
PRODUCTS(products_columns_256_176, 2, 176, SAME_ROWS, 1)
PRODUCTS(products_rows_256_192, 2, 192, SAME_ROWS, 0)
PRODUCTS(products_columns_256_192, 2, 192, SAME_ROWS, 1)
DROPPED(dropped_columns_128_192, 1, 192, SAME_COLUMNS)
DROPPED(dropped_columns_256_192, 2, 192, SAME_ROWS)
