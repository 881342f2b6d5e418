// The backward of softmax attention for sm_90a, in one pass: heads of 64 or 128 columns in bf16 or
// f16. The equations and the meaning of lengths, window and starts are those of
// attention_backward.cu and attention.cuh.
//
//   Sᵀ = K·Qᵀ   dPᵀ = V·dOᵀ   dV += (P∘M)ᵀ·dO   dK += dSᵀ·Q   dQ += dS·K
//
// A block has KEYS keys of one query head and walks the tiles of queries that see them. Of those
// keys each of two warpgroups has 64 with their dK and dV in registers. A tile's dS goes through
// shared memory, and the two warpgroups compute half each of what these keys add to dQ.
//
// What different blocks add to one dQ is summed in `sums` in one order, always the same: a counter
// for each tile says whose turn it is. The first stores, the others let the copy engine add, and
// the block at the tile's own keys writes dQ once all have added. The blocks of one head are a team
// that runs at the same time, and their walks are laid out so that a tile's turns come one after
// the other without waiting: at causal order block n starts at its own diagonal, in every other
// head from the end. A block that had the most queries of one head gets the fewest of the next.
//
// Where several query heads share a key head, their dK and dV are summed in the order of the heads
// in the same way, in one of `key_places` for the key heads under way. Nobody waits for a block
// that is not running, as long as all blocks of the launch find room at the same time: there are
// never more than multiprocessors.

#include "hopper.cuh"
#include "sequence.cuh"

#if !defined(REAL_F32)

#define KEYS 128

struct Problem {
    const float *lse, *delta;
    float *sums, *key_sums;
    u32 *turns, *key_turns;
    const i32* lows;
    real *dq, *dk, *dv;
    u32 q_stride, kv_stride;
    int batch, seq, heads, kv_heads, causal;
    float scale;
    const u32* random;
    u32 stream, threshold;
    const i32* lengths;
    int window;
    const i32* starts;
    // Which heads a team has: one after the other, `rounds` of them, and how far apart they are.
    int rounds, apart;
    // Key heads that have sums at the same time.
    int key_places;

    // Blocks of keys of a sequence.
    __device__ __forceinline__ int blocks() const { return (seq + KEYS - 1) / KEYS; }
};

// What a block does for one head. `ROWS` are the queries of a tile.
template <int ROWS> struct Round {
    int index, b, h, block, length;
    // Tiles of queries, from `begin` to before `end`; none where the keys do not count. At any
    // order but the causal one the walk starts in between and goes round.
    int begin, end;
    bool backwards;
    // The first block of keys that each tile of queries sees, or null.
    const i32* lows;

    __device__ __forceinline__ bool take(const Problem& x, int round) {
        int blocks = x.blocks(), team = blockIdx.x / blocks, slot = blockIdx.x % blocks;
        int head = x.apart == 1 ? team * x.rounds + round : team + round * x.apart;
        if (round >= x.rounds || head >= x.batch * x.heads) return false;
        index = round;
        b = head / x.heads;
        h = head % x.heads;
        length = sequence_length(x.lengths, b, x.seq);
        backwards = x.causal && (round & 1);
        block = backwards ? blocks - 1 - slot : slot;
        lows = x.lows ? x.lows + b * blocks * (KEYS / ROWS) : nullptr;
        begin = block * (KEYS / ROWS);
        end = (length + ROWS - 1) / ROWS;
        if (block * KEYS >= length) end = begin;
        if (lows && begin < end) {
            // The first tile that sees only later blocks.
            int low = begin + 1;
            while (low < end) {
                int middle = (low + end) / 2;
                if (lows[middle] > block)
                    end = middle;
                else
                    low = middle + 1;
            }
        }
        return true;
    }

    __device__ __forceinline__ int num_tiles(const Problem& x) const {
        return x.causal || begin == end ? end - begin : end;
    }
    __device__ __forceinline__ int tile(const Problem& x, int step) const {
        if (backwards) return end - 1 - step;
        int tile = begin + step;
        return tile < end ? tile : tile - end;
    }

    // How many blocks add to a tile's sum, and how many of them before this one.
    __device__ __forceinline__ int addends(const Problem& x, int tile) const {
        if (tile * ROWS >= length) return 0;
        if (!x.causal) return (length + KEYS - 1) / KEYS;
        return tile / (KEYS / ROWS) - (lows ? lows[tile] : 0) + 1;
    }
    __device__ __forceinline__ int rank(const Problem& x, int tile) const {
        int home = tile / (KEYS / ROWS);
        if (backwards) return block - (lows ? lows[tile] : 0);
        int rank = home - block;
        return rank < 0 ? rank + (length + KEYS - 1) / KEYS : rank;
    }
};

// ---------------------------------------------------------------- turns

// A use of a sum is this many turns: more than there are blocks of keys.
#define TURNS_OF_A_USE 256u
// Some blocks of a team are this many heads ahead of others.
#define HEADS_WITH_SUMS 4

// ---------------------------------------------------------------- shared memory

template <int D, int ROWS> struct Memory {
    static constexpr u32 KEY_TILE = KEYS * D * 2, TILE = ROWS * D * 2, SCORES = KEYS * ROWS * 2;
    static constexpr u32 SUM = ROWS * D * 4, NUMBERS = ROWS * 4;
    static constexpr u32 TILES = 2 * KEY_TILE, GRADIENTS = TILES + 4 * TILE;
    static constexpr u32 SUMS = GRADIENTS + 2 * SCORES, STATISTICS = SUMS + 2 * SUM;
    static constexpr u32 BARRIERS = STATISTICS + 4 * NUMBERS;
    u32 base;

    __device__ __forceinline__ u32 keys() const { return base; }
    __device__ __forceinline__ u32 values() const { return base + KEY_TILE; }
    // Queries are side 0, gradients of the output side 1; with them lse and delta.
    __device__ __forceinline__ u32 tile(int side, u32 stage) const {
        return base + TILES + (side * 2 + stage) * TILE;
    }
    __device__ __forceinline__ u32 numbers(int side, u32 stage) const {
        return base + STATISTICS + (side * 2 + stage) * NUMBERS;
    }
    __device__ __forceinline__ u32 scores(u32 stage) const {
        return base + GRADIENTS + stage * SCORES;
    }
    __device__ __forceinline__ u32 sums(u32 stage) const { return base + SUMS + stage * SUM; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS + i * 8; }
    __device__ __forceinline__ u32 keys_full() const { return barrier(0); }
    __device__ __forceinline__ u32 keys_empty() const { return barrier(1); }
    __device__ __forceinline__ u32 cut() const { return barrier(2); }
    __device__ __forceinline__ u32 full(int side, u32 stage) const {
        return barrier(3 + side * 2 + stage);
    }
    __device__ __forceinline__ u32 empty(int side, u32 stage) const {
        return barrier(7 + side * 2 + stage);
    }
    __device__ __forceinline__ u32 sums_full(u32 stage) const { return barrier(11 + stage); }
    __device__ __forceinline__ u32 sums_empty(u32 stage) const { return barrier(13 + stage); }
};

// ---------------------------------------------------------------- the warp that brings everything

template <int D, int ROWS>
__device__ __forceinline__ void bring(const Problem& x, const Memory<D, ROWS>& at,
                                      const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                      const TensorMap* d_o) {
    bool leads = threadIdx.x % 32 == 0;
    Ring<2> ring;
    u32 keys_parity = 1, cut_parity = 0;
    Round<ROWS> round;
    for (int r = 0; round.take(x, r); r++) {
        int steps = round.num_tiles(x), kv_head = round.h / (x.heads / x.kv_heads);
        u64 padded = (u64)x.blocks() * KEYS, head = (u64)round.b * x.heads + round.h;
        for (int step = 0; step < steps; step++, ring.advance()) {
            int row = round.tile(x, step) * ROWS;
            bool cut = round.length < x.seq && row + ROWS > round.length;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const TensorMap* map = side ? d_o : q;
                const float* numbers = (side ? x.delta : x.lse) + head * padded + row;
                u32 full = at.full(side, ring.stage), tile = at.tile(side, ring.stage);
                wait(at.empty(side, ring.stage), ring.parity ^ 1);
                if (cut) fill_cut<D, ROWS>(tile, map, at.cut(), cut_parity, round.h, row, round.b,
                                           round.length);
                if (leads) {
                    arrive_with_bytes(full, at.NUMBERS + (cut ? 0 : at.TILE));
                    copy_bytes(at.numbers(side, ring.stage), numbers, at.NUMBERS, full);
                    if (!cut) copy_tile<D, ROWS>(tile, map, full, round.h, row, round.b);
                }
            }
            if (step > 0) continue;
            int first = round.block * KEYS;
            cut = round.length < x.seq && first + KEYS > round.length;
            wait(at.keys_empty(), keys_parity);
            keys_parity ^= 1;
            if (cut) {
                fill_cut<D, KEYS>(at.keys(), k, at.cut(), cut_parity, kv_head, first, round.b,
                                  round.length);
                fill_cut<D, KEYS>(at.values(), v, at.cut(), cut_parity, kv_head, first, round.b,
                                  round.length);
                if (leads) arrive(at.keys_full());
            } else if (leads) {
                arrive_with_bytes(at.keys_full(), 2 * at.KEY_TILE);
                copy_tile<D, KEYS>(at.keys(), k, at.keys_full(), kv_head, first, round.b);
                copy_tile<D, KEYS>(at.values(), v, at.keys_full(), kv_head, first, round.b);
            }
        }
    }
}

// ---------------------------------------------------------------- the warps that sum dQ

// Sums are in the order of the threads' registers: [warpgroup][i][thread][4]. A team has those of
// some heads, with their counters, at a time.
template <int D, int ROWS> struct Sums {
    u32* turns;
    float* sums;
    u32 use;

    __device__ __forceinline__ Sums(const Problem& x, int round) {
        int team = blockIdx.x / x.blocks(), tiles = x.blocks() * (KEYS / ROWS);
        u64 place = ((u64)team * HEADS_WITH_SUMS + round % HEADS_WITH_SUMS) * tiles;
        turns = x.turns + place;
        sums = x.sums + place * ROWS * D;
        use = round / HEADS_WITH_SUMS * TURNS_OF_A_USE;
    }
};

// One thread of each of two warps, which take every other tile: while one waits for the copy
// engine, the other starts the next.
template <int D, int ROWS>
__device__ __forceinline__ void send(const Problem& x, const Memory<D, ROWS>& at, u32 stage) {
    u32 parity = 0, steps_before = 0;
    Round<ROWS> round;
    for (int r = 0; round.take(x, r); r++) {
        Sums<D, ROWS> to(x, r);
        int steps = round.num_tiles(x);
        for (int step = (stage ^ steps_before) & 1; step < steps; step += 2) {
            int tile = round.tile(x, step);
            u32 rank = round.rank(x, tile);
            float* sum = to.sums + (u64)tile * ROWS * D;
            wait(at.sums_full(stage), parity);
            parity ^= 1;
            wait_for_turn(to.turns + tile, to.use + rank);
            with_copy_engine();
            if (rank == 0)
                asm volatile(
                    "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sum),
                    "r"(at.sums(stage)), "r"(at.SUM)
                    : "memory");
            else
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                             "[%0], [%1], %2;" ::"l"(sum),
                             "r"(at.sums(stage)), "r"(at.SUM)
                             : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            arrive(at.sums_empty(stage));
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            with_copy_engine();
            set_turn(to.turns + tile, to.use + rank + 1);
        }
        steps_before += steps;
    }
}

// A warp that writes dQ of the block's own tiles. A lane has eight columns of one row, which four
// threads had in their registers.
template <int D, int ROWS> __device__ __forceinline__ void finish(const Problem& x) {
    int lane = threadIdx.x % 32, g = lane % 16 / 2, half = lane % 2;
    Round<ROWS> round;
    for (int r = 0; round.take(x, r); r++) {
        Sums<D, ROWS> from(x, r);
        real* dq = x.dq + (u64)round.b * x.seq * x.q_stride + (u64)round.h * D;
        for (int own = 0; own < KEYS / ROWS; own++) {
            int tile = round.block * (KEYS / ROWS) + own, addends = round.addends(x, tile);
            const float* sum = from.sums + (u64)tile * ROWS * D;
            if (lane == 0) wait_for_turn(from.turns + tile, from.use + addends);
            __syncwarp();
            for (int part = 0; part < 8 && addends > 0; part++) {
                // Warpgroup and warp; all loads are under way before the first is used.
                int group = part / 4, warp = part % 4;
                const float* y = sum + (group * 8 * 128 + warp * 32 + g * 4) * 4 + half * 2;
                float2 z[4][4];
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int t = 0; t < 4; t++)
                        z[i][t] = __ldcg(reinterpret_cast<const float2*>(
                            y + ((i * 2 + lane / 16) * 128 + t) * 4));
                int row = tile * ROWS + warp * 16 + half * 8 + g + (D == 128 ? 0 : group * 64);
                real* to = dq + (u64)row * x.q_stride + lane / 16 * 8 + (D == 128 ? group * 64 : 0);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 pairs[4];
#pragma unroll
                    for (int t = 0; t < 4; t++)
                        pairs[t] = pack2(z[i][t].x * x.scale, z[i][t].y * x.scale);
                    if (row < round.length)
                        *reinterpret_cast<uint4*>(to + i * 16) =
                            uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
                }
            }
            __syncwarp();
            if (lane == 0) set_turn(from.turns + tile, from.use + TURNS_OF_A_USE);
        }
    }
}

// ---------------------------------------------------------------- the warpgroups

// Hides scores of pairs that do not see each other. `key` is the thread's first key, `query` its
// first query.
template <int ROWS>
__device__ __forceinline__ void hide(float (&s)[ROWS / 2], const Problem& x, const i32* starts,
                                     bool bounded, int key, int query, int length) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int t = query + j * 8 + e;
            int first = bounded ? first_key(starts, x.window, t, x.seq) : 0;
            int end = x.causal ? min(t + 1, length) : length;
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (key + half * 8 < first || key + half * 8 >= end)
                    s[4 * j + 2 * half + e] = MINUS_INFINITY;
        }
}

// Which of the thread's scores are kept, a bit for each: found while products run.
template <int ROWS>
__device__ __forceinline__ void find_kept(u32 (&kept)[ROWS / 64], const ScoreDropout& dropout,
                                          u32 query, u32 key) {
    u32 offset = ScoreDropout::offset(key), limit = dropout.thresholds & 0xffffu;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        if (j % 8 == 0) kept[j / 8] = 0;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            // Of the thread's key, and of that eight further on.
            u32 word = ScoreDropout::word(dropout.row(query + j * 8 + e) + offset);
            if ((word & 0xffffu) >= limit) kept[j / 8] |= 1u << (4 * j + e) % 32;
            if (word >> 16 >= limit) kept[j / 8] |= 1u << (4 * j + 2 + e) % 32;
        }
    }
}

// Writes a warp's 16 rows, times a factor, by way of its own 16 rows of 128 bytes of shared memory.
template <int D>
__device__ __forceinline__ void write_rows(const float (&y)[D / 2], float factor, u8* space,
                                           real* matrix, u64 stride, int first, int limit) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int panel = 0; panel < D / 64; panel++) {
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                int i = panel * 32 + 4 * j + 2 * half, r = half * 8 + g;
                *reinterpret_cast<u32*>(space + r * 128 + ((j ^ (r & 7)) << 4) + t * 4) =
                    pack2(y[i] * factor, y[i + 1] * factor);
            }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = i * 4 + lane / 8, j = lane % 8;
            uint4 value = *reinterpret_cast<const uint4*>(space + r * 128 + ((j ^ (r & 7)) << 4));
            if (first + r < limit)
                *reinterpret_cast<uint4*>(matrix + (u64)(first + r) * stride + panel * 64 + j * 8) =
                    value;
        }
    }
    // The next head's dS takes the place of what other lanes have read here.
    __syncwarp();
}

// Where the query heads of a key head sum dK and dV of a block of keys: [warpgroup][dK, dV] in the
// order of the threads' registers, with a counter.
struct KeySums {
    u64 place;
    u32 use;

    __device__ __forceinline__ KeySums(const Problem& x, int round, int kv_head, int block) {
        int group = x.heads / x.kv_heads, places = x.key_places, index = kv_head, first = 0;
        if (places < x.batch * x.kv_heads && x.apart == 1) {
            // A team has two places for its own heads.
            places = 2;
            first = blockIdx.x / x.blocks() * 2;
            index = round / group;
        }
        place = (u64)(first + index % places) * x.blocks() + block;
        use = index / places * TURNS_OF_A_USE;
    }
};

// Adds what earlier heads left (`part` > 0) and leaves the sum for later ones.
template <int N>
__device__ __forceinline__ void pass_on(float (&y)[N], float* sums, int part, bool is_last) {
    float4* at = reinterpret_cast<float4*>(sums) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (part > 0) {
            float4 z = __ldcg(at + i * 128);
            y[4 * i] += z.x;
            y[4 * i + 1] += z.y;
            y[4 * i + 2] += z.z;
            y[4 * i + 3] += z.w;
        }
        if (!is_last)
            __stcg(at + i * 128, float4{y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]});
    }
}

template <int D, int ROWS, bool DROPOUT>
__device__ __forceinline__ void differentiate(const Problem& x, const Memory<D, ROWS>& at,
                                              u8* shared) {
    // From the first lane, so that the compiler knows it to be the same in the whole warp.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float c = x.scale * LOG2_E;
    ScoreDropout dropout(x.random, x.stream, x.threshold, x.heads);
    bool bounded = x.window < x.seq || x.starts;
    u32 keys = at.keys() + group * 64 * 128, values = at.values() + group * 64 * 128;
    u32 keys_parity = 0;
    // The thread's place in rows of dS: 64 queries, 128 bytes, are a row of a panel.
    int own_row = group * 64 + warp * 16 + g;
    // Tiles, dS and sums for dQ are all two deep.
    Ring<2> ring;
    auto release = [&](u32 barrier) {
        if (lane == 0) arrive(barrier);
    };

    Round<ROWS> round;
    for (int r = 0; round.take(x, r); r++) {
        int first = round.block * KEYS, heads_of_key = x.heads / x.kv_heads;
        int part = round.h % heads_of_key, kv_head = round.h / heads_of_key;
        u64 kv_start = (u64)round.b * x.seq * x.kv_stride + (u64)kv_head * D;
        bool is_last_part = part == heads_of_key - 1;
        if (x.lengths) {
            int begin = max(first, round.length), end = min(first + KEYS, x.seq);
            for (int i = threadIdx.x - 128; i < (end - begin) * (D / 8); i += 256) {
                u64 row = begin + i / (D / 8), column = i % (D / 8) * 8;
                u64 q_start = (u64)round.b * x.seq * x.q_stride + (u64)round.h * D;
                *reinterpret_cast<uint4*>(x.dq + q_start + row * x.q_stride + column) = uint4{};
                if (!is_last_part) continue;
                *reinterpret_cast<uint4*>(x.dk + kv_start + row * x.kv_stride + column) = uint4{};
                *reinterpret_cast<uint4*>(x.dv + kv_start + row * x.kv_stride + column) = uint4{};
            }
        }
        int steps = round.num_tiles(x);
        KeySums key_sums(x, r, round.b * x.kv_heads + kv_head, round.block);
        u32 next_turn = is_last_part ? key_sums.use + TURNS_OF_A_USE : key_sums.use + part + 1;
        if (steps == 0) {
            // Nothing to add: the counter goes on all the same.
            if (heads_of_key > 1 && threadIdx.x == 128) {
                wait_for_turn(x.key_turns + key_sums.place, key_sums.use + part);
                set_turn(x.key_turns + key_sums.place, next_turn);
            }
            continue;
        }
        const i32* starts = x.starts ? x.starts + (u64)round.b * x.seq : nullptr;
        u32 head = round.b * x.heads + round.h;
        int own = first + group * 64, key = first + own_row;

        float grad_key[D / 2], grad_value[D / 2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) grad_key[i] = grad_value[i] = 0.0f;
        wait(at.keys_full(), keys_parity);
        keys_parity ^= 1;
        for (int step = 0; step < steps; step++) {
            int row = round.tile(x, step) * ROWS;
            u32 stage = ring.stage;
            float s[ROWS / 2], ds[ROWS / 2];
            wait(at.full(0, stage), ring.parity);
            products_begin();
            multiply_rows<D, KEYS, ROWS>(s, keys, at.tile(0, stage));
            products_end();
            wait(at.full(1, stage), ring.parity);
            multiply_rows<D, KEYS, ROWS>(ds, values, at.tile(1, stage));
            products_end();
            u32 kept[ROWS / 64];
            if (DROPOUT) find_kept<ROWS>(kept, dropout, head * x.seq + row + 2 * t, key);
            products_wait<1>();
            settle(s);
            bool cut = x.causal ? row < own + 63 : own + 64 > round.length;
            if (cut || (bounded && first_key(starts, x.window, row + ROWS - 1, x.seq) > own))
                hide<ROWS>(s, x, starts, bounded, key, row + 2 * t, round.length);
            const float* offsets =
                reinterpret_cast<const float*>(shared + (at.numbers(0, stage) - at.base)) + 2 * t;
            const float* means =
                reinterpret_cast<const float*>(shared + (at.numbers(1, stage) - at.base)) + 2 * t;
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++) {
                float2 offset = *reinterpret_cast<const float2*>(offsets + 8 * j);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    s[4 * j + e] =
                        exp2_fast(fmaf(s[4 * j + e], c, -(e % 2 ? offset.y : offset.x)));
            }
            products_wait<0>();
            settle(ds);
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++) {
                float2 mean = *reinterpret_cast<const float2*>(means + 8 * j);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float p = s[4 * j + e], factor = 1.0f;
                    if (DROPOUT)
                        factor = kept[j / 8] >> (4 * j + e) % 32 & 1 ? dropout.scale : 0.0f;
                    ds[4 * j + e] = p * fmaf(ds[4 * j + e], factor, -(e % 2 ? mean.y : mean.x));
                    if (DROPOUT) s[4 * j + e] = p * factor;
                }
            }
            u32 p[ROWS / 4], q[ROWS / 4];
            pack(p, s);
            pack(q, ds);
            products_begin();
            add_product<ROWS>(grad_value, p, at.tile(1, stage));
            products_end();

            u32 scores = at.scores(stage) + own_row * 128 + t * 4;
#pragma unroll
            for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(scores + j / 8 * KEYS * 128 +
                                                                 half * 8 * 128 +
                                                                 ((j % 8 ^ (own_row & 7)) << 4)),
                                 "r"(q[2 * j + half])
                                 : "memory");
            publish_shared();
            meet(1, 256);

            // ROWS × D over two warpgroups: half of the columns, or half of the rows.
            float add[32];
            u64 left = by_column(at.scores(stage) + (D == 128 ? 0 : group * KEYS * 128), 0);
            u64 right = by_column(at.keys() + (D == 128 ? group * KEYS * 128 : 0), 0);
            products_begin();
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++)
                multiply<1, 1>(add, left + k * 128, right + k * 128, k > 0);
            products_end();
            add_product<ROWS>(grad_key, q, at.tile(0, stage));
            products_end();

            products_wait<1>();
            settle(add);
            release(at.empty(1, stage));
            wait(at.sums_empty(stage), ring.parity ^ 1);
            u32 to = at.sums(stage) + group * 64 * 64 * 4 + threadIdx.x % 128 * 16;
#pragma unroll
            for (int i = 0; i < 8; i++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 128 * 16),
                             "f"(add[4 * i]), "f"(add[4 * i + 1]), "f"(add[4 * i + 2]),
                             "f"(add[4 * i + 3])
                             : "memory");
            publish_shared();
            arrive(at.sums_full(stage));
            products_wait<0>();
            settle(grad_key);
            settle(grad_value);
            release(at.empty(0, stage));
            ring.advance();
        }
        release(at.keys_empty());
        // Both are done with the last dS, whose place is now free for rows on their way out.
        meet(1, 256);
        if (heads_of_key > 1) {
            u32* turns = x.key_turns + key_sums.place;
            float* sums = x.key_sums + (key_sums.place * 2 + group) * 64 * D * 2;
            if (lane == 0) wait_for_turn(turns, key_sums.use + part);
            __syncwarp();
            pass_on(grad_key, sums, part, is_last_part);
            pass_on(grad_value, sums + 64 * D, part, is_last_part);
            __threadfence();
            meet(1, 256);
            if (threadIdx.x == 128) set_turn(turns, next_turn);
            if (!is_last_part) continue;
        }
        u8* space = shared + (at.scores(0) - at.base) + (group * 64 + warp * 16) * 128;
        int row = own + warp * 16;
        write_rows<D>(grad_key, x.scale, space, x.dk + kv_start, x.kv_stride, row, round.length);
        write_rows<D>(grad_value, 1.0f, space, x.dv + kv_start, x.kv_stride, row, round.length);
    }
}

template <int D, int ROWS, bool DROPOUT>
__device__ __forceinline__ void backward(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                         const TensorMap* d_o, const Problem& x) {
    extern __shared__ __align__(1024) u8 shared[];
    Memory<D, ROWS> at = {shared_address(shared)};
    if (threadIdx.x == 0) {
        barrier_init(at.keys_full(), 1);
        barrier_init(at.keys_empty(), 8);
        barrier_init(at.cut(), 1);
        for (int side = 0; side < 2; side++)
            for (int stage = 0; stage < 2; stage++) {
                barrier_init(at.full(side, stage), 1);
                barrier_init(at.empty(side, stage), 8);
            }
        for (int stage = 0; stage < 2; stage++) {
            barrier_init(at.sums_full(stage), 256);
            barrier_init(at.sums_empty(stage), 1);
        }
        barriers_are_there();
    }
    __syncthreads();
    await_earlier();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (warp == 0)
            bring<D, ROWS>(x, at, q, k, v, d_o);
        else if (warp == 3)
            finish<D, ROWS>(x);
        else if (threadIdx.x % 32 == 0)
            send<D, ROWS>(x, at, warp - 1);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        differentiate<D, ROWS, DROPOUT>(x, at, shared);
    }
}

// ---------------------------------------------------------------- instances

#define SCALARS                                                                                    \
    u32 q_stride, u32 kv_stride, int batch, int seq, int heads, int kv_heads, float scale,         \
        int causal, const u32 *random, u32 stream, u32 threshold, const i32 *lengths, int window,  \
        const i32 *starts, int rounds, int apart, int key_places
#define INSTANCE(NAME, D, ROWS, DROPOUT)                                                           \
    KERNEL __launch_bounds__(384, 1)                                                               \
        NAME(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,             \
             const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,           \
             const float* lse, const float* delta, float* sums, float* key_sums, u32* turns,       \
             u32* key_turns, const i32* lows, real* dq, real* dk, real* dv, SCALARS) {             \
        Problem x = {lse,      delta,     sums,      key_sums, turns,     key_turns, lows,         \
                     dq,       dk,        dv,        q_stride, kv_stride, batch,     seq,          \
                     heads,    kv_heads,  causal,    scale,    random,    stream,    threshold,    \
                     lengths,  window,    starts,    rounds,   apart,     key_places};             \
        backward<D, ROWS, DROPOUT>(&q, &k, &v, &d_o, x);                                           \
    }

INSTANCE(attention_backward_hopper_64, 64, 128, false)
INSTANCE(attention_backward_hopper_64_dropout, 64, 128, true)
INSTANCE(attention_backward_hopper_128, 128, 64, false)
INSTANCE(attention_backward_hopper_128_dropout, 128, 64, true)

// What the backward reads for each query, for whole blocks of keys: lse·log2 e and δ = Σ do∘o,
// [B, heads, blocks·KEYS], infinite and 0 where a query does not count, so that its probabilities
// are 0. Eight lanes for a query. Counters start at 0. Of each tile of `rows` queries the first block
// of keys that it sees, which never falls from tile to tile
// whatever starts hold: blocks wait for each other by it.
KERNEL __launch_bounds__(256)
    attention_statistics_hopper(const real* d_o, const real* o, const float* lse, float* lse_out,
                                float* delta_out, u32* counters, i32* lows, int num_counters,
                                int batch, int seq, int heads, int width, const i32* lengths,
                                int window, const i32* starts, int rows) {
    await_earlier();
    int padded = (seq + KEYS - 1) / KEYS * KEYS, tiles = padded / rows;
    u64 thread = (u64)blockIdx.x * 256 + threadIdx.x;
    constexpr int lanes = 8;
    int lane = threadIdx.x % lanes;
    // Of all positions of all heads, of which there are fewer than 2³²: divisions of 64 bits would
    // take longer than everything else.
    u32 index = blockIdx.x * (256 / lanes) + threadIdx.x / lanes;
    if (thread < num_counters) counters[thread] = 0;
    if (lows && thread < (u64)batch * tiles) {
        int b = (int)thread / tiles, low = 0;
        const i32* own = starts ? starts + (u64)b * seq : nullptr;
        for (int tile = 0; tile <= (int)thread % tiles; tile++) {
            int row = min(tile * rows, seq - 1);
            low = max(low, first_key(own, window, row, seq) / KEYS);
        }
        lows[thread] = low;
    }
    if (index >= (u64)batch * padded * heads) return;
    u32 position = index / (u32)heads;
    int h = index % (u32)heads, t = position % (u32)padded, b = position / (u32)padded;
    u64 row = ((u64)b * seq + t) * heads + h, to = ((u64)b * heads + h) * padded + t;
    bool counts = t < sequence_length(lengths, b, seq);
    float sum = 0.0f;
    if (counts) {
        for (int d = lane * 8; d < width; d += lanes * 8) {
            float x[8], y[8];
            load(d_o + row * width + d, x);
            load(o + row * width + d, y);
#pragma unroll
            for (int e = 0; e < 8; e++) sum = fmaf(x[e], y[e], sum);
        }
    }
    u32 members = ((1u << lanes) - 1) << (threadIdx.x % 32 - lane);
    for (int offset = lanes / 2; offset > 0; offset /= 2)
        sum += __shfl_xor_sync(members, sum, offset);
    if (lane > 0) return;
    lse_out[to] = counts ? lse[((u64)b * heads + h) * seq + t] * LOG2_E : PLUS_INFINITY;
    delta_out[to] = sum;
}

#endif  // !REAL_F32
