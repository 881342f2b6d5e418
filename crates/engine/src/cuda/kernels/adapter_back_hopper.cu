// All that an adapter's matrices have in the backward, in one pass over what is wide: with W[n, 8] the
// second of them, t what it read and x what the first one read,
//
//   dt[m, 8] = scale·dy[m, n]·W      dW[n, 8] = scale·dyᵀ·t      dA[8, k] = scale·dtᵀ·drop(x)[m, k]
//
// the last two as sums over the rows of a block, parts[block][all of dW, then dA]. PAIRS adapters beside
// each other have columns that follow each other, in dy, t, dt and dA, and matrices of their own; they
// read one x, dropped once. A kernel's name has PAIRS, n and k, and the warps of a block.
//
// A block has rows, 16 at a time, which the copy engine brings some steps ahead, and each warp an equal
// share of the columns of dy and of x. Warps add up what they have of dt in shared memory; meanwhile
// each clears what is dropped of x, and turns it: of four rows, which its lane has in pairs, a thread
// takes neighbouring columns, and two columns' elements of two rows become those of two rows' columns.
// Rows begin at multiples of 16 bytes.
#include "hopper.cuh"
#include "matrix.cuh"

// Rows of a step, and of its pieces each is a row of dy or x.
constexpr u32 RANK = 8, ROWS = 16, PIECES = 2 * ROWS;

template <int WARPS, int PAIRS, int WIDE, int INNER, int STAGES> struct Tiles {
    static constexpr u32 DY = PAIRS * WIDE, LOW = PAIRS * RANK;
    // Eight rows of a matrix begin in different banks.
    struct Stage {
        alignas(16) real dy[ROWS][DY + 8];
        alignas(16) real x[ROWS][INNER + 8];
    };
    Stage stages[STAGES];
    float sums[WARPS][ROWS][RANK];
    alignas(16) real dt[ROWS][LOW];
    // What the random numbers of rows are made of.
    u32 bases[ROWS];
    alignas(8) u64 full[STAGES];
};

struct Sides {
    u32 rows, dy_stride, t_stride, dt_stride, x_stride, rows_of_part;
};

template <int WARPS, int PAIRS, int WIDE, int INNER, int STAGES>
__device__ __forceinline__ void back(const real* dy, const real* t, const real* w, const real* x, real* dt,
                                     float* parts, const Sides& sides, float dt_scale, float scale,
                                     float first_scale, const u32* random, u32 stream, u32 limit) {
    typedef Tiles<WARPS, PAIRS, WIDE, INNER, STAGES> Shared;
    constexpr u32 DY = Shared::DY, LOW = Shared::LOW;
    // Of a warp: columns, and tiles of 16 of them. A thread has 2·WORDS neighbours of x at a time.
    constexpr u32 OF_DY = DY / WARPS, OF_X = INNER / WARPS, OF_PAIR = WARPS / PAIRS;
    constexpr int TILES = OF_DY / 16, WORDS = OF_X % 64 == 0 ? 4 : 2, TURNS = OF_X / (16 * WORDS);
    static_assert(OF_DY % 16 == 0 && WIDE % OF_DY == 0 && OF_X % 32 == 0, "warps have equal shares");
    static_assert(64 * PAIRS <= 32 * WARPS && PIECES <= 32 * WARPS, "a thread has two numbers, and a piece");
    extern __shared__ char dynamic_shared[];
    Shared& shared = *(Shared*)dynamic_shared;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    u32 begin = blockIdx.x * sides.rows_of_part, end = min(begin + sides.rows_of_part, sides.rows);
    u32 first = warp * OF_DY, pair = first / WIDE, first_x = warp * OF_X + g * (2 * WORDS);
    // A lane brings a row of dy or x: the copy engine is asked lane by lane, so that all warps share it.
    u32 piece = lane * WARPS + warp, row_of_piece = piece / 2;
    bool is_x = piece % 2;
    u32 bytes = (is_x ? INNER : DY) * sizeof(real), stride = is_x ? sides.x_stride : sides.dy_stride;
    const real* source = (is_x ? x : dy) + (u64)row_of_piece * stride;
    auto bring = [&](u32 from, u32 stage) {
        if (piece >= PIECES) return;
        typename Shared::Stage& to = shared.stages[stage];
        u32 barrier = shared_address(&shared.full[stage]);
        real* place = is_x ? to.x[row_of_piece] : to.dy[row_of_piece];
        if (from + row_of_piece < end) {
            arrive_with_bytes(barrier, bytes);
            copy_bytes(shared_address(place), source + (u64)from * stride, bytes, barrier);
        } else {
#pragma unroll 1
            for (u32 i = 0; i < bytes; i += 16) *(uint4*)((char*)place + i) = uint4{};
            arrive(barrier);
        }
    };
    // Of t a warp has little, and a step ahead in registers.
    u32 low[2];
    auto bring_low = [&](u32 from) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = from + half * 8 + g;
            low[half] = row < end ? *(const u32*)(t + (u64)row * sides.t_stride + pair * RANK + 2 * q) : 0u;
        }
    };
    if (threadIdx.x < STAGES) {
        barrier_init(shared_address(&shared.full[threadIdx.x]), PIECES);
        barriers_are_there();
    }
    __syncthreads();
#pragma unroll 1
    for (u32 i = 0; i < STAGES; i++)
        if (begin + i * ROWS < end) bring(begin + i * ROWS, i);
    bring_low(begin);
    Dropout dropout(random, stream, limit);
    u32 right[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const real* from = w + (first - pair * WIDE + i * 16 + half * 8 + 2 * q) * RANK + g;
            right[i][half] = (u32)from[0].bits | (u32)from[RANK].bits << 16;
        }
    float of_second[TILES][4] = {}, of_first[PAIRS][TURNS][WORDS][4] = {};
    Ring<STAGES> ring;
#pragma unroll 1
    for (u32 from = begin; from < end; from += ROWS) {
        typename Shared::Stage& own = shared.stages[ring.stage];
        if (warp == WARPS - 1 && lane < ROWS) shared.bases[lane] = dropout.row(from + lane);
        u32 right_low[2] = {transpose(low[0]), transpose(low[1])};
        bring_low(from + ROWS);
        wait(shared_address(&shared.full[ring.stage]), ring.parity);
        float sum[2][4] = {};
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            u32 left[4], turned[4], column = first + i * 16;
            load_matrices(left, shared_address(&own.dy[lane % 16][column + lane / 16 * 8]));
            multiply(sum[i % 2], left, right[i][0], right[i][1]);
            u32 row = lane % 8 + lane / 16 * 8;
            load_matrices_transposed(turned, shared_address(&own.dy[row][column + lane / 8 % 2 * 8]));
            multiply(of_second[i], turned, right_low[0], right_low[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float2 two = {sum[0][2 * i] + sum[1][2 * i], sum[0][2 * i + 1] + sum[1][2 * i + 1]};
            *(float2*)&shared.sums[warp][i * 8 + g][2 * q] = two;
        }
        __syncthreads();
        // Two neighbours to a thread.
        if (threadIdx.x < 64 * PAIRS) {
            u32 of = threadIdx.x / 64, row = threadIdx.x % 64 / 4, column = threadIdx.x % 4 * 2;
            float2 total = {};
#pragma unroll
            for (u32 i = 0; i < OF_PAIR; i++) {
                float2 other = *(const float2*)&shared.sums[of * OF_PAIR + i][row][column];
                total.x += other.x;
                total.y += other.y;
            }
            u32 both = pack2(total.x * dt_scale, total.y * dt_scale);
            column += of * RANK;
            *(u32*)&shared.dt[row][column] = both;
            if (from + row < end) *(u32*)(dt + (u64)(from + row) * sides.dt_stride + column) = both;
        }
        // x, which nobody has to wait for.
        u32 left[TURNS][WORDS][4];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            u32 column = first_x + turn * (16 * WORDS);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Pack<u32, WORDS> two[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 row = half * 8 + 2 * q + i, base = shared.bases[row];
                    two[i] = *(const Pack<u32, WORDS>*)&own.x[row][column];
#pragma unroll
                    for (int j = 0; j < WORDS; j++) two[i].v[j] &= dropout.kept(base, column + 2 * j);
                }
#pragma unroll
                for (int j = 0; j < WORDS; j++) {
                    left[turn][j][2 * half] = __byte_perm(two[0].v[j], two[1].v[j], 0x5410);
                    left[turn][j][2 * half + 1] = __byte_perm(two[0].v[j], two[1].v[j], 0x7632);
                }
            }
        }
        __syncthreads();
        // Of the stage all is read.
        if (from + STAGES * ROWS < end) bring(from + STAGES * ROWS, ring.stage);
        ring.advance();
#pragma unroll
        for (int of = 0; of < PAIRS; of++) {
            u32 narrow[4];
            load_matrices_transposed(narrow, shared_address(&shared.dt[lane % ROWS][of * RANK]));
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
                for (int j = 0; j < WORDS; j++)
                    multiply(of_first[of][turn][j], left[turn][j], narrow[0], narrow[1]);
        }
    }
    parts += (u64)blockIdx.x * (DY * RANK + LOW * INNER);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 column = first + i * 16 + half * 8 + g;
            float2 two = {of_second[i][2 * half] * scale, of_second[i][2 * half + 1] * scale};
            *(float2*)(parts + column * RANK + 2 * q) = two;
        }
    parts += DY * RANK;
    first_scale *= dropout.scale;
#pragma unroll
    for (int of = 0; of < PAIRS; of++)
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
            for (int j = 0; j < WORDS; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float(&sum)[4] = of_first[of][turn][j];
                    u32 row = of * RANK + 2 * q + i, column = first_x + turn * (16 * WORDS) + 2 * j;
                    float2 two = {sum[i] * first_scale, sum[2 + i] * first_scale};
                    *(float2*)(parts + row * INNER + column) = two;
                }
}

#define BACK(pairs, wide, inner, warps, stages, blocks)                                                      \
    KERNEL __launch_bounds__(32 * warps, blocks)                                                             \
    adapter_back_##pairs##_##wide##_##inner##_##warps(                                                       \
        const real* dy, const real* t, const real* w0, const real* w1, const real* w2, const real* x,        \
        real* dt, float* parts, u32 rows, u32 dy_stride, u32 t_stride, u32 dt_stride, u32 x_stride,          \
        u32 rows_of_part, float dt_scale, float scale, float first_scale, const u32* random, u32 stream,     \
        u32 limit) {                                                                                         \
        await_earlier();                                                                                     \
        u32 pair = threadIdx.x / 32 * (pairs * wide / warps) / wide;                                         \
        const real* w = pair == 0 ? w0 : pair == 1 ? w1 : w2;                                                \
        Sides sides = {rows, dy_stride, t_stride, dt_stride, x_stride, rows_of_part};                        \
        back<warps, pairs, wide, inner, stages>(dy, t, w, x, dt, parts, sides, dt_scale, scale, first_scale, \
                                                random, stream, limit);                                      \
    }

BACK(3, 384, 384, 6, 2, 2)
BACK(3, 384, 384, 12, 4, 1)
BACK(1, 384, 384, 6, 4, 2)
BACK(1, 384, 384, 12, 8, 1)
BACK(1, 1536, 384, 12, 3, 1)
BACK(1, 384, 1536, 12, 3, 1)
