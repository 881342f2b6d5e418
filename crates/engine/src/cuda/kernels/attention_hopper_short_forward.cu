// The forward of softmax attention for sm_90a over short sequences: heads of 32 columns in bf16 or
// f16, at most 512 positions, and every query sees every key that counts. The equations are those of
// attention_tensor.cu, and lengths mean what they do in attention.cuh.
//
// So narrow a head leaves little to the matrix units: the time goes to exponentials, random numbers
// and what is between them, and of that as much as possible is left out. Keys, values and queries of
// a whole head are in shared memory, those of the next head on their way. Each of four warpgroups has
// 64 queries at a time and walks the keys without meeting anybody; while the matrix units multiply,
// it draws random numbers. Tiles of queries are dealt out one by one, to blocks as to warpgroups, and
// only those that count.
//
// Exponentials are relative to the largest score of the first 64 keys, not of all: no score but
// those is compared, and nothing is rescaled. Where a score is so much larger that a probability
// leaves the range of f16, the sum of its row says so, and the tile is done again, relative to the
// largest score of all keys. A row's sum is that of its probabilities as the product with the values
// takes them, before any is dropped: a product with ones, of four instructions for a tile.
//
// The values of sixteen keys lie in the order 0, 8, 2, 10, 4, 12, 6, 14, 1, 9, …: so two keys with
// one random number lie side by side in the left operand, and one instruction drops both.

#include "hopper.cuh"
#include "sequence.cuh"

#if !defined(REAL_F32)

#define D 32
// Queries of a warpgroup, and keys of a tile.
#define ROWS 64
#define GROUPS 4
#define MOST_ROWS 512
// Heads in shared memory.
#define STAGES 2
// Sums up to here are of probabilities that f16 holds: of 512 of the largest it is 3.4e7.
#define MOST_SUM 1e9f
// Probabilities are smaller than they would have to be by this power of two: room for larger scores.
#define HEADROOM 8.0f

struct Problem {
    const real *q, *k, *v;
    real* o;
    float* lse;
    u32 q_stride, kv_stride;
    int batch, seq, heads, group;
    float scale;
    const u32* random;
    u32 stream, threshold;
    const i32* lengths;
};

// The tiles of queries that count, of which every sequence has at least one.
__device__ __forceinline__ int count_tiles(const Problem& x, int b) {
    return max((sequence_length(x.lengths, b, x.seq) + ROWS - 1) / ROWS, 1);
}

// ---------------------------------------------------------------- who does what

// Where a block begins, and how many tiles it has.
struct Share {
    int b, h, tile, count;
};

// By one warp: the same number of tiles for every block, one after the other.
__device__ __forceinline__ Share take_share(const Problem& x) {
    int lane = threadIdx.x % 32;
    int total = 0;
    for (int first = 0; first < x.batch; first += 32) {
        int tiles = first + lane < x.batch ? count_tiles(x, first + lane) : 0;
        total += __reduce_add_sync(0xffffffffu, tiles);
    }
    u64 all = (u64)total * x.heads;
    u64 begin = all * blockIdx.x / gridDim.x, end = all * (blockIdx.x + 1) / gridDim.x;
    Share share = {0, 0, 0, (int)(end - begin)};
    // Tiles before the sequences from `first` on, of one head.
    u64 before = 0;
    for (int first = 0; first < x.batch; first += 32) {
        int tiles = first + lane < x.batch ? count_tiles(x, first + lane) : 0, upto = tiles;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            int other = __shfl_up_sync(0xffffffffu, upto, offset);
            if (lane >= offset) upto += other;
        }
        u32 behind = __ballot_sync(0xffffffffu, begin < (before + upto) * x.heads);
        if (behind) {
            int found = __ffs(behind) - 1;
            tiles = __shfl_sync(0xffffffffu, tiles, found);
            before += __shfl_sync(0xffffffffu, upto, found) - tiles;
            int rest = (int)(begin - before * x.heads);
            share.b = first + found;
            share.h = rest / tiles;
            share.tile = rest % tiles;
            break;
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
    return share;
}

// A head of which a block has the tiles from `begin` to before `end`.
struct Head {
    int b, h, length, tiles, begin, end;
    int left;

    __device__ __forceinline__ Head(const Problem& x, const Share& share)
        : b(__shfl_sync(0xffffffffu, share.b, 0)), h(__shfl_sync(0xffffffffu, share.h, 0)),
          begin(__shfl_sync(0xffffffffu, share.tile, 0)),
          left(__shfl_sync(0xffffffffu, share.count, 0)) {
        measure(x);
    }
    __device__ __forceinline__ bool is_there() const { return left > 0; }
    __device__ __forceinline__ void advance(const Problem& x) {
        left -= end - begin;
        begin = 0;
        if (++h == x.heads) {
            h = 0;
            b++;
        }
        if (left > 0) measure(x);
    }
    __device__ __forceinline__ void measure(const Problem& x) {
        // From the first lane, so that the compiler knows it to be the same in the whole warp.
        length = __shfl_sync(0xffffffffu, sequence_length(x.lengths, b, x.seq), 0);
        tiles = max((length + ROWS - 1) / ROWS, 1);
        end = min(tiles, begin + left);
    }
};

// ---------------------------------------------------------------- shared memory

struct Memory {
    static constexpr u32 TILE = ROWS * D * 2, SIDE = MOST_ROWS * D * 2;
    static constexpr u32 BARRIERS = 3 * STAGES * SIDE;
    u32 base;

    // Keys are side 0, values side 1; queries are side 2, in whose place the output is put together.
    __device__ __forceinline__ u32 rows(int side, u32 stage) const {
        return base + (stage * 3 + side) * SIDE;
    }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const {
        return base + BARRIERS + (STAGES + stage) * 8;
    }
};

// ---------------------------------------------------------------- the warps that bring rows

// Zeroes where `inside` is false.
__device__ __forceinline__ void copy_piece(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void bring(const Problem& x, const Memory& at, const Share& share) {
    constexpr int PIECES = D / 8, APART = 128 / PIECES;
    int thread = threadIdx.x % 128, piece = thread % PIECES, first = thread / PIECES;
    // Rows of a thread are a multiple of 32 apart: they have one place among eight, and sixteen.
    int slot = first & ~15 | (first & 1) << 3 | (first & 6) | (first >> 3 & 1);
    u32 row_place = first * 64 + ((piece ^ (first >> 1 & 3)) << 4);
    u32 value_place = slot * 64 + ((piece ^ (slot >> 1 & 3)) << 4);
    Ring<STAGES> ring;
    for (Head head(x, share); head.is_there(); head.advance(x), ring.advance()) {
        // One warp asks for all four, and leaves the others' turns to those who compute.
        if (threadIdx.x < 32) wait(at.empty(ring.stage), ring.parity ^ 1);
        meet(1 + GROUPS, 128);
        u64 row = (u64)head.b * x.seq + first;
        u64 from = row * x.kv_stride + (u64)(head.h / x.group) * D + piece * 8;
        u32 keys = at.rows(0, ring.stage) + row_place, values = at.rows(1, ring.stage) + value_place;
        for (int i = 0; i < head.tiles * (ROWS / APART); i++) {
            bool inside = first + i * APART < head.length;
            u64 place = inside ? from + (u64)(i * APART) * x.kv_stride : 0;
            copy_piece(keys + i * APART * 64, x.k + place, inside);
            copy_piece(values + i * APART * 64, x.v + place, inside);
        }
        from = row * x.q_stride + (u64)head.h * D + piece * 8;
        u32 queries = at.rows(2, ring.stage) + row_place;
        for (int i = head.begin * (ROWS / APART); i < head.end * (ROWS / APART); i++) {
            bool inside = first + i * APART < head.length;
            u64 place = inside ? from + (u64)(i * APART) * x.q_stride : 0;
            copy_piece(queries + i * APART * 64, x.q + place, inside);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        publish_shared();
        arrive(at.full(ring.stage));
    }
}

// ---------------------------------------------------------------- products

// Scores of the warpgroup's queries with a tile of keys, both as operands.
__device__ __forceinline__ void score(float (&s)[ROWS / 2], u64 queries, u64 keys) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<0, 0>(s, queries + k * 2, keys + k * 2, k > 0);
}

// Adds what the probabilities of a tile make of its values.
__device__ __forceinline__ void add_values(float (&out)[D / 2], const u32 (&p)[ROWS / 4],
                                           u64 values) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        u32 left[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
        multiply_registers<1>(out, left, values + k * 64);
    }
}

// Adds the sums of a warp's rows of 16 columns: in d[0] and d[1] that of row g, in d[2] and d[3] that
// of row g + 8, in all four lanes.
__device__ __forceinline__ void add_columns(float (&d)[4], const u32 (&a)[4]) {
#if defined(REAL_F16)
    constexpr u32 ONES = 0x3c003c00u;
#define LEFT_AND_RIGHT "f16.f16"
#else
    constexpr u32 ONES = 0x3f803f80u;
#define LEFT_AND_RIGHT "bf16.bf16"
#endif
    asm("mma.sync.aligned.m16n8k16.row.col.f32." LEFT_AND_RIGHT ".f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(ONES));
}

// ---------------------------------------------------------------- the warpgroups

// Hides the scores of keys from `end` on of a tile.
__device__ __forceinline__ void hide(float (&s)[ROWS / 2], int end) {
    end -= threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        if (i / 4 * 8 + i % 2 >= end) s[i] = MINUS_INFINITY;
}

// Which probabilities of a tile are kept, for each register of the left operand. `numbers` are those
// of the lane's two rows, as far on as the tile is; then as far as the next one.
__device__ __forceinline__ void draw(u32 (&kept)[ROWS / 4], u32 (&numbers)[2],
                                     const ScoreDropout& dropout) {
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        u32 x = numbers[i % 2] + (i / 4 * 8 + i / 2 % 2) * 0x9e3779b9u;
        asm volatile("set.ge.u32.f16x2 %0, %1, %2;"
                     : "=r"(kept[i])
                     : "r"(ScoreDropout::word(x)), "r"(dropout.thresholds));
    }
#pragma unroll
    for (int half = 0; half < 2; half++) numbers[half] += ScoreDropout::offset(ROWS);
}

// Where a lane reads or writes its row of the four matrices of 8 × 8 of the first 16 columns of a
// warp's 16 rows; of the other 16 columns it is two pieces further.
__device__ __forceinline__ u32 matrix_rows(u32 tile) {
    int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16;
    return tile + row * 64 + ((threadIdx.x % 32 / 16 ^ (row >> 1 & 3)) << 4);
}

// A warpgroup's 64 queries of one head, from `own` on, whose output takes their place.
template <bool DROPOUT>
__device__ __forceinline__ void attend_tile(const Problem& x, const Head& head, int own, u32 keys,
                                            u32 values, u32 queries,
                                            const ScoreDropout& dropout, int group) {
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row = own + warp * 16 + g, index = head.b * x.heads + head.h;
    float c = x.scale * LOG2_E;
    // The random numbers of the lane's two rows, as far on as the next tile is.
    u32 numbers[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (DROPOUT)
            numbers[half] = dropout.row((u32)index * x.seq + row + half * 8) +
                            ScoreDropout::offset(2 * t);
    float s[ROWS / 2], out[D / 2], largest[2], sums[4], offset[2];
    // What lies a tile further on in an operand.
    constexpr u32 NEXT = Memory::TILE / 16;
    u64 all_queries = by_row<64>(queries), all_keys = by_row<64>(keys);
    u64 all_values = by_column<64>(values, 0);
    auto begin_scores = [&](int tile) {
        products_begin();
        score(s, all_queries, all_keys + tile * NEXT);
        products_end();
    };
    auto compare = [&](int tile) {
        products_wait<0>();
        settle(s);
        if ((tile + 1) * ROWS > head.length) hide(s, head.length - tile * ROWS);
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
    };
    // Once relative to the first tile of keys, and again relative to all where that does not do.
    for (bool again = false;; again = true) {
        largest[0] = largest[1] = MINUS_INFINITY;
        for (int tile = again ? head.tiles - 1 : 0; tile > 0; tile--) {
            begin_scores(tile);
            compare(tile);
        }
        u32 p[ROWS / 4], kept[ROWS / 4];
        auto exponentials = [&]() {
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++)
                s[i] = exp2_fast(fmaf(s[i], c, -offset[i / 2 % 2]));
#pragma unroll
            for (int k = 0; k < ROWS / 16; k++) {
                u32 all[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* pair = s + k * 8 + i % 2 * 2 + i / 2;
                    all[i] = pack2(pair[0], pair[4]);
                }
                add_columns(sums, all);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    p[4 * k + i] = DROPOUT ? kept[4 * k + i] & all[i] : all[i];
            }
        };
        begin_scores(0);
        if (DROPOUT) draw(kept, numbers, dropout);
        compare(0);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The four lanes of a row.
            float top = largest[half];
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            offset[half] = fmaf(top, c, HEADROOM);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 2; i++) out[i] = 0.0f;
        exponentials();
        for (int tile = 1; tile < head.tiles; tile++) {
            begin_scores(tile);
            add_values(out, p, all_values + (tile - 1) * NEXT);
            products_end();
            if (DROPOUT) draw(kept, numbers, dropout);
            // A wait on either side: before the branch, it would come before the numbers are drawn.
            if ((tile + 1) * ROWS > head.length) {
                products_wait<0>();
                settle(s);
                settle(out);
                hide(s, head.length - tile * ROWS);
            } else {
                products_wait<0>();
                settle(s);
                settle(out);
            }
            exponentials();
        }
        products_begin();
        add_values(out, p, all_values + (head.tiles - 1) * NEXT);
        products_end();
        u32 fits = sums[0] <= MOST_SUM && sums[2] <= MOST_SUM, all_fit;
        products_wait<0>();
        settle(out);
        // The products are of all four warps.
        asm volatile("{ .reg .pred fits, all; setp.ne.b32 fits, %1, 0; "
                     "barrier.cta.red.and.pred all, %2, 128, fits; selp.b32 %0, 1, 0, all; }"
                     : "=r"(all_fit)
                     : "r"(fits), "r"(1 + group)
                     : "memory");
        if (__shfl_sync(0xffffffffu, all_fit, 0) || again) break;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (DROPOUT) numbers[half] -= head.tiles * ScoreDropout::offset(ROWS);
    }

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = sums[2 * half], logarithm;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse[half]) : "f"(total));
        asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(total));
        inverse[half] *= dropout.scale;
        int query = row + half * 8;
        if (t == 0 && query < head.length)
            x.lse[(u64)index * x.seq + query] = (offset[half] + logarithm) * LN_2;
    }
    // By way of the warp's own queries' place, so that whole pieces are written.
    u32 rows = matrix_rows(queries);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* pair = out + k * 8 + i / 2 * 4 + i % 2 * 2;
            pairs[i] = pack2(pair[0] * inverse[i % 2], pair[1] * inverse[i % 2]);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         rows ^ k << 5),
                     "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                     : "memory");
    }
    __syncwarp();
    constexpr int PIECES = D / 8, AT_ONCE = 32 / PIECES;
    real* to = x.o + (((u64)head.b * x.seq + own) * x.heads + head.h) * D + lane % PIECES * 8;
#pragma unroll
    for (int i = 0; i < 16 / AT_ONCE; i++) {
        int r = warp * 16 + i * AT_ONCE + lane / PIECES;
        u32 z[4], from = queries + r * 64 + ((lane % PIECES ^ (r >> 1 & 3)) << 4);
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(z[0]), "=r"(z[1]), "=r"(z[2]), "=r"(z[3])
                     : "r"(from)
                     : "memory");
        if (own + r < head.length)
            *reinterpret_cast<uint4*>(to + (u64)r * x.heads * D) = uint4{z[0], z[1], z[2], z[3]};
    }
}

// Zeroes what belongs to positions that do not count.
__device__ __forceinline__ void clear_padding(const Problem& x, const Head& head) {
    int thread = threadIdx.x % 128, index = head.b * x.heads + head.h;
    for (int i = thread; i < (x.seq - head.length) * (D / 8); i += 128) {
        u64 position = (u64)head.b * x.seq + head.length + i / (D / 8);
        real* to = x.o + (position * x.heads + head.h) * D + i % (D / 8) * 8;
        *reinterpret_cast<uint4*>(to) = uint4{};
    }
    for (int i = head.length + thread; i < x.seq; i += 128) x.lse[(u64)index * x.seq + i] = 0.0f;
}

template <bool DROPOUT>
__device__ __forceinline__ void attend(const Problem& x, const Memory& at, const Share& share) {
    // From the first lane, so that the compiler knows it to be the same in the whole warp.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
    ScoreDropout dropout(x.random, x.stream, x.threshold, x.heads);
    Ring<STAGES> ring;
    // Tiles before the warpgroup's next.
    int before = group;
    for (Head head(x, share); head.is_there(); head.advance(x), ring.advance()) {
        wait(at.full(ring.stage), ring.parity);
        u32 keys = __shfl_sync(0xffffffffu, at.rows(0, ring.stage), 0);
        int tile = head.begin + before;
        for (; tile < head.end; tile += GROUPS) {
            if (x.lengths && tile == head.tiles - 1) clear_padding(x, head);
            if (head.length > 0)
                attend_tile<DROPOUT>(x, head, tile * ROWS, keys, keys + Memory::SIDE,
                                     keys + 2 * Memory::SIDE + tile * Memory::TILE, dropout, group);
        }
        before = tile - head.end;
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(at.empty(ring.stage));
    }
}

template <bool DROPOUT> __device__ __forceinline__ void forward(const Problem& x) {
    extern __shared__ __align__(1024) u8 shared[];
    __shared__ Share share;
    Memory at = {shared_address(shared)};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(at.full(stage), 128);
            barrier_init(at.empty(stage), 4 * GROUPS);
        }
        barriers_are_there();
    }
    if (threadIdx.x < 32) {
        Share own = take_share(x);
        if (threadIdx.x == 0) share = own;
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        bring(x, at, share);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        attend<DROPOUT>(x, at, share);
    }
}

// ---------------------------------------------------------------- instances

#define SCALARS                                                                                    \
    u32 q_stride, u32 kv_stride, int batch, int seq, int heads, int kv_heads, float scale,         \
        const u32 *random, u32 stream, u32 threshold, const i32 *lengths
#define INSTANCE(NAME, DROPOUT)                                                                    \
    KERNEL __launch_bounds__(128 * (GROUPS + 1), 1)                                                \
        NAME(const real* q, const real* k, const real* v, real* o, float* lse, SCALARS) {          \
        await_earlier();                                                                           \
        Problem x = {q,     k,   v,     o,                lse,   q_stride, kv_stride,              \
                     batch, seq, heads, heads / kv_heads, scale, random,   stream,                 \
                     threshold, lengths};                                                          \
        forward<DROPOUT>(x);                                                                       \
    }

INSTANCE(attention_forward_hopper_short_32, false)
INSTANCE(attention_forward_hopper_short_32_dropout, true)

#endif  // !REAL_F32
