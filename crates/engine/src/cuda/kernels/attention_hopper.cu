// The forward of softmax attention for sm_90a: heads of 32, 64 or 128 columns in bf16 or f16. The
// equations and the meaning of lengths, window and starts are those of attention_tensor.cu
// and attention.cuh.
//
// A block stays on its multiprocessor and takes one piece of work after the other: 64·GROUPS
// queries of one head. One warp brings queries, keys and values to shared memory by the copy
// engine, as many stages ahead as there is room, also over the end of a piece. Each of GROUPS
// warpgroups has 64 of the queries and walks the keys from the last that it sees to the first, so
// that tiles with hidden keys come first and every query sees a key in its first tile. While the
// matrix units multiply the probabilities of one tile with its values, the warpgroup computes the
// exponentials of the next.

#include "hopper.cuh"
#include "sequence.cuh"

#if !defined(REAL_F32)

#define KEYS 128

struct Problem {
    int batch, seq, heads, kv_heads, causal;
    float scale;
    const u32* random;
    u32 stream, threshold;
    const i32* lengths;
    int window;
    const i32* starts;
    // Heads whose keys and values fit into the cache: their work is done before that of others.
    int together;
};

// A piece of work: the queries from `first` on of one head.
template <int ROWS> struct Piece {
    int b, h, first, length;
    // Tiles of keys, from `begin` to `last`; none where the queries do not count.
    int begin, last;
    bool bounded;

    // The pieces of some heads, those with the most keys first. Blocks take them in turn, forwards
    // and backwards, so that none gets the long ones of all rounds.
    __device__ __forceinline__ bool take(const Problem& x, int round) {
        int blocks = gridDim.x, block = blockIdx.x;
        int index = round * blocks + (round & 1 ? blocks - 1 - block : block);
        int tiles = (x.seq + ROWS - 1) / ROWS, all_heads = x.batch * x.heads;
        if (index >= tiles * all_heads) return false;
        int set = index / (tiles * x.together), rest = index % (tiles * x.together);
        int members = min(x.together, all_heads - set * x.together);
        int head = set * x.together + rest % members;
        first = (tiles - 1 - rest / members) * ROWS;
        b = head / x.heads;
        h = head % x.heads;
        length = sequence_length(x.lengths, b, x.seq);
        bounded = x.window < x.seq || x.starts;
        int end = x.causal ? min(length, first + ROWS) : length;
        last = (end - 1) / KEYS;
        begin = bounded ? first_key(starts(x), x.window, first, x.seq) / KEYS : 0;
        return true;
    }

    __device__ __forceinline__ const i32* starts(const Problem& x) const {
        return x.starts ? x.starts + (u64)b * x.seq : nullptr;
    }
    __device__ __forceinline__ bool is_padding() const { return first >= length; }
};

template <int D, int GROUPS, int STAGES> struct Memory {
    static constexpr int ROWS = 64 * GROUPS;
    static constexpr u32 QUERIES = ROWS * D * 2, TILE = KEYS * D * 2;
    static constexpr u32 BARRIERS = 2 * QUERIES + 2 * STAGES * TILE;
    u32 base;

    __device__ __forceinline__ u32 queries() const { return base; }
    __device__ __forceinline__ u32 keys(u32 stage) const { return base + QUERIES + stage * TILE; }
    __device__ __forceinline__ u32 values(u32 stage) const {
        return base + QUERIES + (STAGES + stage) * TILE;
    }
    __device__ __forceinline__ u32 output() const { return base + QUERIES + 2 * STAGES * TILE; }
    __device__ __forceinline__ u32 queries_full() const { return base + BARRIERS; }
    __device__ __forceinline__ u32 queries_empty() const { return base + BARRIERS + 8; }
    // Keys and values have barriers of their own.
    __device__ __forceinline__ u32 full(int side, u32 stage) const {
        return base + BARRIERS + 16 + (side * STAGES + stage) * 8;
    }
    __device__ __forceinline__ u32 empty(int side, u32 stage) const {
        return base + BARRIERS + 16 + ((2 + side) * STAGES + stage) * 8;
    }
    __device__ __forceinline__ u32 cut() const { return base + BARRIERS + 16 + 4 * STAGES * 8; }
};

// The warp that brings everything.
template <int D, int GROUPS, int STAGES>
__device__ __forceinline__ void bring(const Problem& x, const Memory<D, GROUPS, STAGES>& at,
                                      const TensorMap* q, const TensorMap* k, const TensorMap* v) {
    constexpr int ROWS = 64 * GROUPS;
    bool leads = threadIdx.x % 32 == 0;
    Ring<STAGES> ring;
    u32 queries_parity = 1, cut_parity = 0;
    Piece<ROWS> piece;
    for (int round = 0; piece.take(x, round); round++) {
        if (piece.is_padding()) continue;
        int kv_head = piece.h / (x.heads / x.kv_heads);
        for (int tile = piece.last; tile >= piece.begin; tile--, ring.advance()) {
            u32 stage = ring.stage;
            wait(at.empty(0, stage), ring.parity ^ 1);
            if (leads) {
                arrive_with_bytes(at.full(0, stage), at.TILE);
                copy_tile<D, KEYS>(at.keys(stage), k, at.full(0, stage), kv_head, tile * KEYS,
                                   piece.b);
            }
            if (tile == piece.last) {
                wait(at.queries_empty(), queries_parity);
                queries_parity ^= 1;
                if (leads) {
                    arrive_with_bytes(at.queries_full(), at.QUERIES);
                    copy_tile<D, ROWS>(at.queries(), q, at.queries_full(), piece.h, piece.first,
                                       piece.b);
                }
            }
            wait(at.empty(1, stage), ring.parity ^ 1);
            // Not a number times a probability of zero is not zero.
            if (piece.length < x.seq && (tile + 1) * KEYS > piece.length) {
                fill_cut<D, KEYS>(at.values(stage), v, at.cut(), cut_parity, kv_head, tile * KEYS,
                                  piece.b, piece.length);
                if (leads) arrive(at.full(1, stage));
            } else if (leads) {
                arrive_with_bytes(at.full(1, stage), at.TILE);
                copy_tile<D, KEYS>(at.values(stage), v, at.full(1, stage), kv_head, tile * KEYS,
                                   piece.b);
            }
        }
    }
}

// Hides scores of keys behind the query, before its first, or behind the sequence's end. `row` is
// the thread's first query.
__device__ __forceinline__ void hide(float (&s)[KEYS / 2], const Problem& x, const i32* starts,
                                     bool bounded, int row, int first, int length) {
    int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = row + half * 8;
        int end = (x.causal ? min(length, query + 1) : length) - first - 2 * t;
        int begin = bounded ? first_key(starts, x.window, query, x.seq) - first - 2 * t : 0;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int key = j * 8 + e;
                if (key >= end || key < begin) s[4 * j + 2 * half + e] = MINUS_INFINITY;
            }
    }
}

// Scores to exponentials; the largest score and the sum of each of the thread's two rows, and by
// what the result so far shrinks.
__device__ __forceinline__ void exponentials(float (&s)[KEYS / 2], float c, float (&largest)[2],
                                             float (&sum)[2], float (&shrink)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = largest[half];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
            top = fmaxf(top, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
        // The four lanes of a row.
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        shrink[half] = exp2_fast((largest[half] - top) * c);
        largest[half] = top;
        float offset = top * c, added = 0.0f;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                s[4 * j + e] = exp2_fast(fmaf(s[4 * j + e], c, -offset));
                added += s[4 * j + e];
            }
        // Only this lane's columns: the lanes are added up at the end.
        sum[half] = fmaf(sum[half], shrink[half], added);
    }
}

// A warpgroup with 64 queries of each piece.
template <int D, int GROUPS, int STAGES, bool DROPOUT>
__device__ __forceinline__ void attend(const Problem& x, const Memory<D, GROUPS, STAGES>& at,
                                       u8* shared_output, real* o, float* lse) {
    constexpr int ROWS = 64 * GROUPS;
    // From the first lane, so that the compiler knows it to be the same in the whole warp.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    int g = lane / 4, t = lane % 4;
    u64 width = (u64)x.heads * D;
    float c = x.scale * LOG2_E;
    ScoreDropout dropout(x.random, x.stream, x.threshold, x.heads);
    u32 queries = at.queries() + group * 64 * ROW_BYTES<D>, queries_parity = 0;
    // Values are read a tile later than keys.
    Ring<STAGES> keys, values;
    auto release = [&](u32 barrier) {
        if (lane == 0) arrive(barrier);
    };
    // Warpgroups take turns in giving work to the matrix units.
    auto take_turn = [&]() {
        meet(1 + group, 256);
    };
    auto give_turn = [&]() {
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + (group + 1) % GROUPS) : "memory");
    };
    if (group == GROUPS - 1) give_turn();

    Piece<ROWS> piece;
    for (int round = 0; piece.take(x, round); round++) {
        int own = piece.first + group * 64, row = own + warp * 16 + g;
        int head = piece.b * x.heads + piece.h;
        real* out_rows = o + (u64)piece.b * x.seq * width + (u64)piece.h * D;
        if (x.lengths) {
            int begin = max(own, piece.length), end = min(own + 64, x.seq);
            for (int i = threadIdx.x % 128; i < (end - begin) * (D / 8); i += 128) {
                real* to = out_rows + (u64)(begin + i / (D / 8)) * width + i % (D / 8) * 8;
                *reinterpret_cast<uint4*>(to) = uint4{};
            }
            for (int i = begin + threadIdx.x % 128; i < end; i += 128)
                lse[(u64)head * x.seq + i] = 0.0f;
            if (piece.is_padding()) continue;
        }
        const i32* starts = piece.starts(x);
        bool idle = own >= piece.length;
        wait(at.queries_full(), queries_parity);
        queries_parity ^= 1;
        // Tiles that only other warpgroups see.
        int tile = piece.last;
        while (tile >= piece.begin && (idle || (x.causal && tile * KEYS > own + 63))) {
            wait(at.full(0, keys.stage), keys.parity);
            wait(at.full(1, values.stage), values.parity);
            take_turn();
            give_turn();
            release(at.empty(0, keys.stage));
            release(at.empty(1, values.stage));
            keys.advance();
            values.advance();
            tile--;
        }
        if (idle) {
            release(at.queries_empty());
            continue;
        }

        // From here on every query of the warpgroup sees the keys before its own.
        int all_see = piece.bounded ? first_key(starts, x.window, own + 63, x.seq) : 0;
        float s[KEYS / 2], out[D / 2], largest[2], sum[2], shrink[2];
        u32 p[KEYS / 4], bases[2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) out[i] = 0.0f;
        largest[0] = largest[1] = MINUS_INFINITY;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++)
            bases[half] = DROPOUT ? dropout.row((u32)head * x.seq + row + half * 8) : 0;
        auto probabilities = [&](int tile) {
            int first = tile * KEYS;
            bool cut = x.causal ? first + KEYS - 1 > own : first + KEYS > piece.length;
            if (cut || first < all_see)
                hide(s, x, starts, piece.bounded, row, first, piece.length);
            exponentials(s, c, largest, sum, shrink);
            // The factor of what is kept is applied to the output as a whole.
            if (DROPOUT) {
                u32 first_word = ScoreDropout::offset(tile * KEYS + 2 * t);
#pragma unroll
                for (int i = 0; i < KEYS / 4; i++) {
                    // Of eight numbers each the first four go with the last four.
                    int at = i / 4 * 8 + i % 4;
                    u32 x = bases[i / 2 % 2] + first_word + (i / 4 * 8 + i % 2) * 0x9e3779b9u;
                    dropout.drop(ScoreDropout::word(x), s[at], s[at + 4]);
                }
            }
        };

        wait(at.full(0, keys.stage), keys.parity);
        take_turn();
        products_begin();
        multiply_rows<D, ROWS, KEYS>(s, queries, at.keys(keys.stage));
        products_end();
        give_turn();
        products_wait<0>();
        settle(s);
        release(at.empty(0, keys.stage));
        keys.advance();
        probabilities(tile);
        pack(p, s);
        for (tile--; tile >= piece.begin; tile--) {
            wait(at.full(0, keys.stage), keys.parity);
            take_turn();
            products_begin();
            multiply_rows<D, ROWS, KEYS>(s, queries, at.keys(keys.stage));
            products_end();
            wait(at.full(1, values.stage), values.parity);
            add_product<KEYS>(out, p, at.values(values.stage));
            products_end();
            give_turn();
            products_wait<1>();
            settle(s);
            release(at.empty(0, keys.stage));
            keys.advance();
            probabilities(tile);
            products_wait<0>();
            settle(out);
            release(at.empty(1, values.stage));
            values.advance();
#pragma unroll
            for (int i = 0; i < D / 2; i++) out[i] *= shrink[i / 2 % 2];
            pack(p, s);
        }
        release(at.queries_empty());
        wait(at.full(1, values.stage), values.parity);
        products_begin();
        add_product<KEYS>(out, p, at.values(values.stage));
        products_end();
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            inverse[half] = dropout.scale / total;
            int query = row + half * 8;
            if (t == 0 && query < piece.length)
                lse[(u64)head * x.seq + query] = largest[half] * x.scale + logf(total);
        }
        products_wait<0>();
        settle(out);
        release(at.empty(1, values.stage));
        values.advance();

        // By way of the warp's own rows in shared memory, in 16-byte pieces, permuted so that
        // neither way two lanes meet in a bank.
        constexpr int PIECES = D / 8;
        auto piece_at = [](int r, int j) {
            return r * D * 2 + ((j ^ (PIECES < 8 ? r / 2 % PIECES : r % 8)) << 4);
        };
        u8* rows = shared_output + (group * 64 + warp * 16) * D * 2;
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                u32 pair = pack2(out[4 * j + 2 * half] * inverse[half],
                                 out[4 * j + 2 * half + 1] * inverse[half]);
                int r = half * 8 + g;
                *reinterpret_cast<u32*>(rows + piece_at(r, j) + t * 4) = pair;
            }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16 * PIECES / 32; i++) {
            int index = i * 32 + lane, r = index / PIECES, j = index % PIECES;
            int query = own + warp * 16 + r;
            uint4 value = *reinterpret_cast<const uint4*>(rows + piece_at(r, j));
            if (query < piece.length)
                *reinterpret_cast<uint4*>(out_rows + (u64)query * width + j * 8) = value;
        }
    }
}

template <int D, int GROUPS, int STAGES, bool DROPOUT>
__device__ __forceinline__ void forward(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                        real* o, float* lse, const Problem& x) {
    extern __shared__ __align__(1024) u8 shared[];
    Memory<D, GROUPS, STAGES> at = {shared_address(shared)};
    if (threadIdx.x == 0) {
        barrier_init(at.queries_full(), 1);
        barrier_init(at.queries_empty(), 4 * GROUPS);
        for (int side = 0; side < 2; side++)
            for (int stage = 0; stage < STAGES; stage++) {
                barrier_init(at.full(side, stage), 1);
                barrier_init(at.empty(side, stage), 4 * GROUPS);
            }
        barrier_init(at.cut(), 1);
        barriers_are_there();
    }
    __syncthreads();
    await_earlier();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 3 ? 32 : 24));
        if (threadIdx.x < 32) bring<D, GROUPS, STAGES>(x, at, q, k, v);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 3 ? 160 : 240));
        u8* output = shared + (at.output() - at.base);
        attend<D, GROUPS, STAGES, DROPOUT>(x, at, output, o, lse);
    }
}

// ---------------------------------------------------------------- instances

#define SCALARS                                                                                    \
    int batch, int seq, int heads, int kv_heads, float scale, int causal, const u32 *random,       \
        u32 stream, u32 threshold, const i32 *lengths, int window, const i32 *starts, int together
#define INSTANCE(NAME, D, GROUPS, STAGES, DROPOUT)                                                 \
    KERNEL __launch_bounds__(128 + 128 * GROUPS, 1)                                                \
        NAME(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,             \
             const __grid_constant__ TensorMap v, real* o, float* lse, SCALARS) {                  \
        Problem x = {batch,  seq,       heads,   kv_heads, causal, scale,   random,                \
                     stream, threshold, lengths, window,   starts, together};                      \
        forward<D, GROUPS, STAGES, DROPOUT>(&q, &k, &v, o, lse, x);                                \
    }

INSTANCE(attention_forward_hopper_32, 32, 3, 4, false)
INSTANCE(attention_forward_hopper_32_dropout, 32, 3, 4, true)
INSTANCE(attention_forward_hopper_64, 64, 3, 4, false)
INSTANCE(attention_forward_hopper_64_dropout, 64, 2, 4, true)
INSTANCE(attention_forward_hopper_128, 128, 2, 2, false)
INSTANCE(attention_forward_hopper_128_dropout, 128, 2, 2, true)

#endif  // !REAL_F32
