// The forward of softmax attention for sm_90a over short sequences: heads of 32 columns in bf16 or
// f16, at most 512 positions, and every query sees every key that counts. The equations are those of
// attention_tensor.cu, and lengths mean what they do in attention.cuh.
//
// So narrow a head leaves little to the matrix units: the time goes to exponentials, random numbers
// and what is between them, and of that as much as possible is left out. Keys and values of a whole
// head are in shared memory, those of the next head on their way. Each of four warpgroups has 64
// queries at a time and walks the keys without meeting anybody; while the matrix units multiply, it
// draws random numbers. Tiles of queries are dealt out one by one, to blocks as to warpgroups, and
// only those that count.
//
// Exponentials are relative to the largest score of the first 64 keys, not of all: no score but
// those is compared, and nothing is rescaled. Where a score is so much larger that a probability
// leaves the range of f16, the sum of its row says so, and the tile is done again, relative to the
// largest score of all keys.
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
// Sums of a lane up to here are of probabilities that f16 holds.
#define MOST_SUM 60000.0f
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
    static constexpr u32 OUTPUT = 2 * STAGES * SIDE, NUMBERS = OUTPUT + GROUPS * TILE;
    static constexpr u32 BARRIERS = NUMBERS + GROUPS * ROWS * 4;
    u32 base;

    // Keys are side 0, values side 1.
    __device__ __forceinline__ u32 keys(int side, u32 stage) const {
        return base + (stage * 2 + side) * SIDE;
    }
    // The random numbers of a warpgroup's rows.
    __device__ __forceinline__ u32 numbers(int group) const {
        return base + NUMBERS + group * ROWS * 4;
    }
    __device__ __forceinline__ u32 full(u32 stage) const { return base + BARRIERS + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const {
        return base + BARRIERS + (STAGES + stage) * 8;
    }
};

// ---------------------------------------------------------------- the warps that bring keys

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
    u32 key_place = first * 64 + ((piece ^ (first >> 1 & 3)) << 4);
    u32 value_place = slot * 64 + ((piece ^ (slot >> 1 & 3)) << 4);
    Ring<STAGES> ring;
    for (Head head(x, share); head.is_there(); head.advance(x), ring.advance()) {
        wait(at.empty(ring.stage), ring.parity ^ 1);
        u64 row = (u64)head.b * x.seq + first;
        u64 from = row * x.kv_stride + (u64)(head.h / x.group) * D + piece * 8;
        u32 keys = at.keys(0, ring.stage) + key_place, values = at.keys(1, ring.stage) + value_place;
        for (int i = 0; i < head.tiles * (ROWS / APART); i++) {
            bool inside = first + i * APART < head.length;
            u64 place = inside ? from + (u64)(i * APART) * x.kv_stride : 0;
            copy_piece(keys + i * APART * 64, x.k + place, inside);
            copy_piece(values + i * APART * 64, x.v + place, inside);
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        publish_shared();
        arrive(at.full(ring.stage));
    }
}

// ---------------------------------------------------------------- products

// d = a·b, or d += a·b, for 16 columns of the sum.
__device__ __forceinline__ void multiply_left(float (&d)[32], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENTS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, 0; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Scores of the warpgroup's queries with a tile of keys.
__device__ __forceinline__ void score(float (&s)[ROWS / 2], const u32 (&queries)[D / 16][4],
                                      u32 keys) {
    u64 right = by_row<64>(keys);
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply_left(s, queries[k], right + k * 2, k > 0);
}

// ---------------------------------------------------------------- the warpgroups

// Hides the scores of keys from `end` on of a tile.
__device__ __forceinline__ void hide(float (&s)[ROWS / 2], int end) {
    end -= threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        if (i / 4 * 8 + i % 2 >= end) s[i] = MINUS_INFINITY;
}

// Which probabilities of a tile are kept, for each register of the left operand.
struct Kept {
    u32 words[ROWS / 4];

    // `numbers` are those of the lane's two rows, and `offset` is how far the tile's are from them.
    // They are read anew for every tile: from registers, the compiler would draw before the products
    // are under way.
    __device__ __forceinline__ void draw(const ScoreDropout& dropout, u32 numbers, u32 offset) {
        u32 bases[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            asm volatile("ld.volatile.shared.b32 %0, [%1];"
                         : "=r"(bases[half])
                         : "r"(numbers + half * 8 * 4)
                         : "memory");
            bases[half] += offset;
        }
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++) {
            u32 x = bases[i % 2] + (i / 4 * 8 + i / 2 % 2) * 0x9e3779b9u;
            asm("set.ge.u32.f16x2 %0, %1, %2;"
                : "=r"(words[i])
                : "r"(ScoreDropout::word(x)), "r"(dropout.thresholds));
        }
    }
};

// A warpgroup's 64 queries of one head.
template <bool DROPOUT>
__device__ __forceinline__ void attend_tile(const Problem& x, const Head& head, int own, u32 keys,
                                            u32 values, u32 group_numbers,
                                            const ScoreDropout& dropout, int group,
                                            u8* shared_output) {
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int row = own + warp * 16 + g, index = head.b * x.heads + head.h;
    float c = x.scale * LOG2_E;
    u32 queries[D / 16][4], numbers = group_numbers + (warp * 16 + g) * 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 position = (u64)head.b * x.seq + min(row + half * 8, x.seq - 1);
        const real* from = x.q + position * x.q_stride + (u64)head.h * D + 2 * t;
#pragma unroll
        for (int i = 0; i < D / 8; i++)
            queries[i / 2][i % 2 * 2 + half] = *reinterpret_cast<const u32*>(from + i * 8);
        // One of the four lanes of a row; those of the tile before are all read.
        if (DROPOUT) {
            __syncwarp();
            u32 number = dropout.row((u32)index * x.seq + row + half * 8);
            if (t == 0)
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(numbers + half * 8 * 4), "r"(number)
                             : "memory");
        }
    }
    __syncwarp();

    float s[ROWS / 2], out[D / 2], sum[2], offset[2];
    // The tiles of keys that the exponentials are relative to: the first, or all.
    for (int compared = 1;; compared = head.tiles) {
        float largest[2] = {MINUS_INFINITY, MINUS_INFINITY};
        for (int tile = 0; tile < compared; tile++) {
            products_begin();
            score(s, queries, keys + tile * Memory::TILE);
            products_end();
            products_wait<0>();
            settle(s);
            if ((tile + 1) * ROWS > head.length) hide(s, head.length - tile * ROWS);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            // The four lanes of a row.
            float top = largest[half];
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            offset[half] = fmaf(top, c, HEADROOM);
        }

        u32 p[ROWS / 4], key_offset = ScoreDropout::offset(2 * t);
        Kept kept;
        float sums[2][2] = {};
#pragma unroll
        for (int i = 0; i < D / 2; i++) out[i] = 0.0f;
        auto draw = [&]() {
            if (!DROPOUT) return;
            kept.draw(dropout, numbers, key_offset);
            key_offset += ScoreDropout::offset(ROWS);
        };
        auto exponentials = [&](int tile) {
            if ((tile + 1) * ROWS > head.length) hide(s, head.length - tile * ROWS);
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                int half = i / 2 % 2;
                s[i] = exp2_fast(fmaf(s[i], c, -offset[half]));
                // Only this lane's columns: the lanes are added up at the end.
                sums[half][i % 2] += s[i];
            }
        };
        auto pack_kept = [&]() {
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                const float* pair = s + i / 4 * 8 + i % 2 * 2 + i / 2 % 2;
                p[i] = pack2(pair[0], pair[4]);
                if (DROPOUT) p[i] &= kept.words[i];
            }
        };
        products_begin();
        score(s, queries, keys);
        products_end();
        draw();
        products_wait<0>();
        settle(s);
        exponentials(0);
        pack_kept();
        for (int tile = 1; tile < head.tiles; tile++) {
            products_begin();
            score(s, queries, keys + tile * Memory::TILE);
            products_end();
            add_product<ROWS>(out, p, values + (tile - 1) * Memory::TILE);
            products_end();
            draw();
            products_wait<1>();
            settle(s);
            exponentials(tile);
            products_wait<0>();
            settle(out);
            pack_kept();
        }
        products_begin();
        add_product<ROWS>(out, p, values + (head.tiles - 1) * Memory::TILE);
        products_end();
        bool fits = true;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] = sums[half][0] + sums[half][1];
            fits = fits && (sum[half] <= MOST_SUM || row + half * 8 >= head.length);
        }
        products_wait<0>();
        settle(out);
        // The products are of all four warps.
        u32 all_fit;
        asm volatile("{ .reg .pred fits, all; setp.ne.b32 fits, %1, 0; "
                     "barrier.cta.red.and.pred all, %2, 128, fits; selp.b32 %0, 1, 0, all; }"
                     : "=r"(all_fit)
                     : "r"((u32)fits), "r"(1 + group)
                     : "memory");
        if (__shfl_sync(0xffffffffu, all_fit, 0) || compared == head.tiles) break;
    }

    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = sum[half];
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        inverse[half] = dropout.scale / total;
        int query = row + half * 8;
        if (t == 0 && query < head.length)
            x.lse[(u64)index * x.seq + query] = fmaf(offset[half], LN_2, logf(total));
    }
    // By way of the warp's own rows in shared memory, in 16-byte pieces, permuted so that neither
    // way two lanes meet in a bank.
    constexpr int PIECES = D / 8;
    auto piece_at = [](int r, int j) { return r * D * 2 + ((j ^ r / 2 % PIECES) << 4); };
    u8* rows = shared_output + (group * 64 + warp * 16) * D * 2;
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            u32 pair = pack2(out[4 * j + 2 * half] * inverse[half],
                             out[4 * j + 2 * half + 1] * inverse[half]);
            *reinterpret_cast<u32*>(rows + piece_at(half * 8 + g, j) + t * 4) = pair;
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * PIECES / 32; i++) {
        int place = i * 32 + lane, r = place / PIECES, j = place % PIECES;
        int query = own + warp * 16 + r;
        uint4 value = *reinterpret_cast<const uint4*>(rows + piece_at(r, j));
        if (query < head.length) {
            u64 position = (u64)head.b * x.seq + query;
            *reinterpret_cast<uint4*>(x.o + (position * x.heads + head.h) * D + j * 8) = value;
        }
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
__device__ __forceinline__ void attend(const Problem& x, const Memory& at, const Share& share,
                                       u8* shared_output) {
    // From the first lane, so that the compiler knows it to be the same in the whole warp.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
    ScoreDropout dropout(x.random, x.stream, x.threshold, x.heads);
    Ring<STAGES> ring;
    // Tiles before the warpgroup's next.
    int before = group;
    for (Head head(x, share); head.is_there(); head.advance(x), ring.advance()) {
        wait(at.full(ring.stage), ring.parity);
        u32 keys = __shfl_sync(0xffffffffu, at.keys(0, ring.stage), 0);
        int tile = head.begin + before;
        for (; tile < head.end; tile += GROUPS) {
            if (x.lengths && tile == head.tiles - 1) clear_padding(x, head);
            if (head.length > 0)
                attend_tile<DROPOUT>(x, head, tile * ROWS, keys, keys + Memory::SIDE,
                                     at.numbers(group), dropout, group, shared_output);
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
        attend<DROPOUT>(x, at, share, shared + Memory::OUTPUT);
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
