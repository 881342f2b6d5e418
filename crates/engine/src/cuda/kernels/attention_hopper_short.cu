// The backward of softmax attention for sm_90a over short sequences: heads of 32 columns in bf16 or
// f16, at most 512 positions, every query sees every key that counts, and every query head has keys
// of its own. The equations are those of attention_backward.cu, and lengths mean what they do in
// attention.cuh.
//
//   Sᵀ = K·Qᵀ   dPᵀ = V·dOᵀ   dV += (P∘M)ᵀ·dO   dK += dSᵀ·Q   dQ += dS·K
//
// So narrow a head leaves little to the matrix units: exponentials, random numbers and what is
// between them take the time. A block has a whole head, and no other block adds to its gradients.
// Each of four warpgroups has 64 keys with their dK and dV in registers, and walks all tiles of 64
// queries; then come the next 256 keys. Of a tile it has the scores of 32 queries at a time, a part,
// for which 104 registers are enough: while it sums what belongs to one part, the scores of the next
// are multiplied. A fifth warpgroup has dQ: it multiplies the dS that the four leave in shared memory
// with their keys, always in the same order. What earlier keys gave to a tile it keeps in shared
// memory, where every thread finds its own numbers again. While its products are under way it sees to
// a tile that is ahead, also over the end of a head: has it brought by the copy engine, and computes
// what is the same for all keys of a query, once for each head: lse in powers of two, δ = Σ dO∘O, and
// the number that the random ones are made of.
//
// The four tell the fifth only that their dS of a tile is there, when they are done altogether with
// the tile before. So nothing else has to be given back.

#include "hopper.cuh"
#include "sequence.cuh"

#if !defined(REAL_F32)

#define D 32
// Keys of a warpgroup, and queries of a tile.
#define ROWS 64
#define GROUPS 4
#define STAGES 4
#define MOST_TILES 8
// Queries whose scores a warpgroup has at once.
#define PART 32

struct Problem {
    const real *o, *grad;
    const float* lse;
    real *dq, *dk, *dv;
    u32 q_stride, kv_stride;
    int batch, seq, heads;
    float scale;
    const u32* random;
    u32 stream, threshold;
    const i32* lengths;
};

// A head that a block has.
struct Head {
    int b, h, length;

    __device__ __forceinline__ bool take(const Problem& x, int turn) {
        int index = turn * (int)gridDim.x + (int)blockIdx.x;
        if (index >= x.batch * x.heads) return false;
        // From the first lane, so that the compiler knows them to be the same in the whole warp.
        b = __shfl_sync(0xffffffffu, index / x.heads, 0);
        h = __shfl_sync(0xffffffffu, index % x.heads, 0);
        length = __shfl_sync(0xffffffffu, sequence_length(x.lengths, b, x.seq), 0);
        return true;
    }
    // Of lse and random numbers.
    __device__ __forceinline__ u32 first_row(const Problem& x) const {
        return (u32)(b * x.heads + h) * x.seq;
    }
    // Tiles of queries, which are also the blocks of keys; and how often the warpgroups walk.
    __device__ __forceinline__ int tiles() const { return (length + ROWS - 1) / ROWS; }
    __device__ __forceinline__ int rounds() const { return (tiles() + GROUPS - 1) / GROUPS; }
    // Warpgroups that have keys in a round.
    __device__ __forceinline__ int active(int round) const {
        return min(tiles() - round * GROUPS, GROUPS);
    }
    // Whether rows that do not count follow in the tile from `row` on, inside the tensor.
    __device__ __forceinline__ bool is_cut(const Problem& x, int row) const {
        return length < x.seq && row + ROWS > length;
    }
};

// A tile in the order in which all walk: tiles of a round, rounds of a head, heads of the block.
struct Walk {
    Head head;
    int turn = -1, round = 0, tile = 0;
    // Tiles and rounds before it, of all heads.
    u32 number = 0, round_number = 0;
    // Which of two heads it is that have numbers for each query.
    u32 numbers = 1;

    __device__ __forceinline__ Walk(const Problem& x) { take(x); }
    // The next head that has tiles, or one of none behind the last.
    __device__ __forceinline__ void take(const Problem& x) {
        bool is_there;
        do {
            is_there = head.take(x, ++turn);
        } while (is_there && head.length == 0);
        if (!is_there) head.length = 0;
        numbers ^= 1;
    }
    __device__ __forceinline__ bool is_there() const { return head.length > 0; }
    __device__ __forceinline__ void advance(const Problem& x) {
        number++;
        if (++tile < head.tiles()) return;
        tile = 0;
        round_number++;
        if (++round < head.rounds()) return;
        round = 0;
        take(x);
    }
};

// ---------------------------------------------------------------- shared memory

struct Memory {
    static constexpr u32 TILE = ROWS * D * 2, SCORES = ROWS * ROWS * 2, SUM = ROWS * D * 4;
    static constexpr u32 VALUES = 2 * GROUPS * TILE, TILES = VALUES + GROUPS * TILE;
    static constexpr u32 GRADIENTS = TILES + STAGES * 2 * TILE;
    static constexpr u32 SUMS = GRADIENTS + GROUPS * 2 * SCORES;
    static constexpr u32 STATISTICS = SUMS + MOST_TILES * SUM;
    // One number for each query of a part, and the three that there are.
    static constexpr u32 NUMBERS = PART * 4, PART_NUMBERS = 3 * NUMBERS;
    static constexpr u32 HEAD_NUMBERS = MOST_TILES * (ROWS / PART) * PART_NUMBERS;
    static constexpr u32 BARRIERS = STATISTICS + 2 * HEAD_NUMBERS;
    u32 base;

    // Of two rounds.
    __device__ __forceinline__ u32 keys(u32 stage, int group) const {
        return base + (stage * GROUPS + group) * TILE;
    }
    // Of one: they go to registers.
    __device__ __forceinline__ u32 values(int group) const { return base + VALUES + group * TILE; }
    // Queries are side 0, gradients of the output side 1.
    __device__ __forceinline__ u32 tile(int side, u32 stage) const {
        return base + TILES + (stage * 2 + side) * TILE;
    }
    // Of all queries of a head, part after part: lse, δ and random numbers; two heads. The eight
    // queries of which a thread has scores lie side by side.
    __device__ __forceinline__ u32 numbers(u32 stage) const {
        return base + STATISTICS + stage * HEAD_NUMBERS;
    }
    __device__ __forceinline__ u32 number(int side, u32 stage, int row) const {
        int place = row % 8 / 2 * 8 + row % PART / 8 * 2 + row % 2;
        return numbers(stage) + row / PART * PART_NUMBERS + side * NUMBERS + place * 4;
    }
    __device__ __forceinline__ u32 scores(u32 stage, int group) const {
        return base + GRADIENTS + (stage * GROUPS + group) * SCORES;
    }
    __device__ __forceinline__ u32 sums(int tile) const { return base + SUMS + tile * SUM; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS + i * 8; }
    __device__ __forceinline__ u32 cut() const { return barrier(0); }
    __device__ __forceinline__ u32 keys_full(u32 stage) const { return barrier(1 + stage); }
    __device__ __forceinline__ u32 scores_full(u32 stage) const { return barrier(3 + stage); }
    __device__ __forceinline__ u32 scores_empty(u32 stage) const { return barrier(5 + stage); }
    __device__ __forceinline__ u32 full(u32 stage) const { return barrier(7 + stage); }
};

// Four numbers that lie one after the other.
__device__ __forceinline__ void load_numbers(float (&x)[4], u32 from) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(from)
                 : "memory");
}

// What is computed of it is computed every time, because there are no registers to keep it in.
__device__ __forceinline__ int anew(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// ---------------------------------------------------------------- what is ahead

// A tile of queries that comes next, with all that belongs to it: the keys and values of a round come
// with its first tile, the numbers of queries with those of a head's first round. By a warpgroup.
template <bool DROPOUT> struct Supply {
    static constexpr int LANES = D / 8, AT_ONCE = 128 / LANES;
    static_assert(ROWS == 2 * AT_ONCE, "two rows for every four lanes");
    const Problem& x;
    const Memory& at;
    const TensorMap *q, *k, *v, *d_o;
    ScoreDropout dropout;
    Walk next;
    u32 cut_parity = 0;
    // A quarter of a row of O and of dO, of each of two rows.
    uint4 y[2], grad[2];
    float lse;

    __device__ __forceinline__ Supply(const Problem& x, const Memory& at, const TensorMap* q,
                                      const TensorMap* k, const TensorMap* v, const TensorMap* d_o)
        : x(x), at(at), q(q), k(k), v(v), d_o(d_o),
          dropout(x.random, x.stream, x.threshold, x.heads), next(x) {}
    // Whether there is room for it: in the ring when so many tiles are done with, and for values in
    // the rounds up to this one.
    __device__ __forceinline__ bool is_due(u32 tiles, u32 rounds) const {
        return next.is_there() && next.number < tiles + STAGES && next.round_number <= rounds;
    }
    // Which of the four lanes of its rows it is.
    __device__ __forceinline__ static int side() { return threadIdx.x % LANES; }
    __device__ __forceinline__ int row(int i) const {
        return next.tile * ROWS + i * AT_ONCE + (int)threadIdx.x / LANES;
    }
    // Rows that do not count are like the last one.
    __device__ __forceinline__ u32 counted(int i) const { return min(row(i), next.head.length - 1); }
    __device__ __forceinline__ static void put(u32 to, u32 number) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(number) : "memory");
    }
    // Sets on its way what the numbers of the tile are computed from.
    __device__ __forceinline__ void load() {
        const Head& head = next.head;
        if (!next.is_there() || next.round > 0) return;
        u64 first = (u64)(head.b * x.seq) * (u32)(x.heads * D) + head.h * D + side() * 8;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u64 from = first + counted(i) * (u32)(x.heads * D);
            y[i] = *reinterpret_cast<const uint4*>(x.o + from);
            grad[i] = *reinterpret_cast<const uint4*>(x.grad + from);
        }
        lse = x.lse[head.first_row(x) + counted(side() % 2)];
    }
    // Four lanes have two rows: in the end each has lse or δ of one, and two have a random number.
    __device__ __forceinline__ void measure() {
        const Head& head = next.head;
        float delta[2] = {};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Not taken apart before, which would be to wait for them.
            asm volatile("" : "+r"(y[i].x), "+r"(y[i].y), "+r"(y[i].z), "+r"(y[i].w));
            asm volatile("" : "+r"(grad[i].x), "+r"(grad[i].y), "+r"(grad[i].z), "+r"(grad[i].w));
            auto left = *reinterpret_cast<const Pack<real, 8>*>(&y[i]);
            auto right = *reinterpret_cast<const Pack<real, 8>*>(&grad[i]);
#pragma unroll
            for (int e = 0; e < 8; e++)
                delta[i] = fmaf(to_float(left.v[e]), to_float(right.v[e]), delta[i]);
            delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], 1);
            delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], 2);
        }
        int row = this->row(side() % 2);
        // A query that does not count has probabilities of 0.
        float number = row < head.length ? lse * LOG2_E : PLUS_INFINITY;
        // dS = P∘(M∘dP − δ). The factor of what is kept is applied to the gradients as a whole, so
        // that δ is divided by it.
        if (side() >= 2)
            number = (side() % 2 ? delta[1] : delta[0]) * (DROPOUT ? dropout.kept_share() : 1.0f);
        u32 to = at.number(0, next.numbers, row);
        put(to + side() / 2 * at.NUMBERS, __float_as_uint(number));
        if (DROPOUT && side() < 2)
            put(to + 2 * at.NUMBERS, dropout.row(head.first_row(x) + row) * ScoreDropout::FACTOR);
    }
    // Brings it, and goes on to the next tile.
    __device__ __forceinline__ void bring() {
        const Head& head = next.head;
        int lane = threadIdx.x % 32, first = next.tile * ROWS;
        u32 stage = next.number % STAGES, keys = next.round_number % 2;
        bool cut = head.is_cut(x, first);
        if (threadIdx.x == 0) {
            if (next.tile == 0) {
                u32 full = at.keys_full(keys);
                int active = head.active(next.round);
                arrive_with_bytes(full, active * 2 * at.TILE);
#pragma unroll 1
                for (int group = 0; group < active; group++) {
                    int row = (next.round * GROUPS + group) * ROWS;
                    copy_tile<D, ROWS>(at.keys(keys, group), k, full, head.h, row, head.b);
                    copy_tile<D, ROWS>(at.values(group), v, full, head.h, row, head.b);
                }
            }
            u32 full = cut ? at.cut() : at.full(stage);
            expect_bytes(full, 2 * at.TILE);
            copy_tile<D, ROWS>(at.tile(0, stage), q, full, head.h, first, head.b);
            copy_tile<D, ROWS>(at.tile(1, stage), d_o, full, head.h, first, head.b);
        }
        if (next.round == 0) measure();
        if (cut && threadIdx.x < 32) {
            if (lane == 0) arrive(at.cut());
            wait(at.cut(), cut_parity);
            cut_parity ^= 1;
#pragma unroll
            for (int side = 0; side < 2; side++)
                clear_rows<D, ROWS>(at.tile(side, stage), head.length - first);
            publish_shared();
        }
        __syncwarp();
        if (lane == 0) arrive(at.full(stage));
        next.advance(x);
    }
};

// ---------------------------------------------------------------- rows of gradients

// Writes a warpgroup's 64 rows from `first` on, times a factor. What four lanes have of a row are 16
// bytes; the other pieces of a sector follow at once.
__device__ __forceinline__ void write_rows(const float (&y)[D / 2], float factor, real* matrix,
                                           u32 stride, int first, int length) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = first + threadIdx.x % 128 / 32 * 16 + half * 8 + g;
        u32* to = reinterpret_cast<u32*>(matrix + (u64)row * stride + 2 * t);
        if (row < length) {
#pragma unroll
            for (int j = 0; j < D / 8; j++)
                to[j * 4] = pack2(y[4 * j + 2 * half] * factor, y[4 * j + 2 * half + 1] * factor);
        }
    }
}

// ---------------------------------------------------------------- the warpgroup that sums dQ

template <bool DROPOUT>
__device__ __forceinline__ void sum_queries(const Problem& x, const Memory& at,
                                            Supply<DROPOUT>& supply) {
    supply.load();
    for (Walk now(x); now.is_there(); now.advance(x)) {
        const Head& head = now.head;
        // Scores are there when the next tile of the round is. At the beginning, and behind shorter
        // heads, both may be missing.
        while (supply.is_due(now.number - 1, now.round_number)) {
            supply.bring();
            supply.load();
        }
        float add[D / 2];
        u32 stage = now.number % 2;
        wait(at.scores_full(stage), now.number / 2 % 2);
        // Sixteen keys are as many rows of 128 bytes here and of 64 there.
        u64 left = by_column(at.scores(stage, 0), 0);
        u64 right = by_column<64>(at.keys(now.round_number % 2, 0), 0);
        products_begin();
#pragma unroll
        for (int k = 0; k < GROUPS * ROWS / 16; k++)
            multiply<1, 1>(add, left + k * 128, right + k * 64, k > 0);
        products_end();
        if (supply.is_due(now.number, now.round_number + 1)) {
            supply.bring();
            supply.load();
        }
        products_wait<0>();
        settle(add);
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(at.scores_empty(stage));
        u32 sum = at.sums(now.tile) + threadIdx.x * 16;
        if (now.round > 0) {
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                float z[4];
                load_numbers(z, sum + i * 128 * 16);
#pragma unroll
                for (int e = 0; e < 4; e++) add[4 * i + e] += z[e];
            }
        }
        if (now.round + 1 == head.rounds()) {
            real* dq = x.dq + (u64)head.b * x.seq * x.q_stride + (u64)head.h * D;
            float scale = DROPOUT ? x.scale * supply.dropout.scale : x.scale;
            write_rows(add, scale, dq, x.q_stride, now.tile * ROWS, head.length);
        } else {
#pragma unroll
            for (int i = 0; i < D / 8; i++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(sum + i * 128 * 16),
                             "f"(add[4 * i]), "f"(add[4 * i + 1]), "f"(add[4 * i + 2]),
                             "f"(add[4 * i + 3])
                             : "memory");
        }
    }
}

// ---------------------------------------------------------------- the warpgroups with keys

// Zeroes the gradients of rows that do not count, by the threads of all warpgroups with keys.
__device__ __forceinline__ void clear_padding(const Problem& x, const Head& head, int thread) {
    u64 first = (u64)head.b * x.seq + head.length, column = (u64)head.h * D;
    for (int i = thread; i < (x.seq - head.length) * (D / 8); i += GROUPS * 128) {
        u64 row = first + i / (D / 8);
        u64 q = row * x.q_stride + column + i % (D / 8) * 8;
        u64 kv = row * x.kv_stride + column + i % (D / 8) * 8;
        *reinterpret_cast<uint4*>(x.dq + q) = uint4{};
        *reinterpret_cast<uint4*>(x.dk + kv) = uint4{};
        *reinterpret_cast<uint4*>(x.dv + kv) = uint4{};
    }
}

// What lies a tile, or a part of its rows, further on in an operand.
constexpr u32 NEXT = Memory::TILE / 16, PART_ROWS = PART * D * 2 / 16;

// A warpgroup's 64 rows of a tile as left operand, for all columns of a head.
__device__ __forceinline__ void load_rows(u32 (&a)[D / 16][4], u32 tile) {
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                     : "r"(tile + row * 64 + ((k * 2 + lane / 16 ^ row / 2 % 4) << 4))
                     : "memory");
}
// d[64×32] = a·bᵀ over the columns of a head, where a is in shared memory or in registers; and
// d[64×32] += p[64×32]·b.
__device__ __forceinline__ void multiply_rows(float (&d)[PART / 2], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<0, 0>(d, a + k * 2, b + k * 2, k > 0);
}
__device__ __forceinline__ void multiply_rows(float (&d)[PART / 2], const u32 (&a)[D / 16][4],
                                              u64 b) {
    multiply_registers<0, false>(d, a[0], b);
#pragma unroll
    for (int k = 1; k < D / 16; k++) multiply_registers<0>(d, a[k], b + k * 2);
}
__device__ __forceinline__ void add_rows(float (&d)[D / 2], const u32 (&p)[PART / 4], u64 b) {
#pragma unroll
    for (int k = 0; k < PART / 16; k++) {
        u32 a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
        multiply_registers<1>(d, a, b + k * 64);
    }
}

template <bool DROPOUT>
__device__ __forceinline__ void differentiate(const Problem& x, const Memory& at) {
    // From the first lane, so that the compiler knows it to be the same in the whole warp.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float c = x.scale * LOG2_E;
    ScoreDropout dropout(x.random, x.stream, x.threshold, x.heads);
    // Tiles and rounds before, of all heads.
    u32 number = 0, round_number = 0;
    auto release = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };
    Head head;
    // What it left of dS in the tile before, behind the fence that takes its time.
    auto publish_scores = [&]() {
        publish_shared();
        release(at.scores_full((number - 1) % 2));
    };
    // A round in which it has no keys: zeroes, which are multiplied as well.
    auto keep_step = [&]() {
        auto clear = [](u32 from, u32 bytes) {
            for (u32 i = threadIdx.x % 128 * 16; i < bytes; i += 128 * 16)
                asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(from + i), "r"(0)
                             : "memory");
        };
        wait(at.keys_full(round_number % 2), round_number / 2 % 2);
        clear(at.keys(round_number % 2, group), at.TILE);
        for (int tile = 0; tile < head.tiles(); number++, tile++) {
            wait(at.full(number % STAGES), number / STAGES % 2);
            wait(at.scores_empty(number % 2), number / 2 % 2 ^ 1);
            clear(at.scores(number % 2, group), at.SCORES);
            publish_shared();
            release(at.scores_full(number % 2));
        }
    };
    // Where the row begins that a lane stores, of the four matrices of a store.
    int stored = warp * 16 + lane % 16;
    u32 scores_row = stored * 128 + ((lane / 16 ^ stored % 8) << 4);
    u32 numbers = 0;
    for (int turn = 0; head.take(x, turn); turn++) {
        if (x.lengths) clear_padding(x, head, threadIdx.x - 128);
        for (int round = 0; round < head.rounds(); round++, round_number++) {
            int own = (round * GROUPS + group) * ROWS, key = own + warp * 16 + g;
            if (group >= head.active(round)) {
                keep_step();
                continue;
            }
            u32 offset = ScoreDropout::offset(key) * ScoreDropout::FACTOR;
            float grad_key[D / 2], grad_value[D / 2];
#pragma unroll
            for (int i = 0; i < D / 2; i++) grad_key[i] = grad_value[i] = 0.0f;
            u32 keys = round_number % 2;
            wait(at.keys_full(keys), round_number / 2 % 2);
            if (head.is_cut(x, own)) {
                if (warp == 0) {
                    clear_rows<D, ROWS>(at.keys(keys, group), head.length - own);
                    clear_rows<D, ROWS>(at.values(group), head.length - own);
                    publish_shared();
                }
                meet(1 + group, 128);
            }
            u64 own_keys = by_row<64>(at.keys(keys, group));
            u32 own_values[D / 16][4];
            load_rows(own_values, at.values(group));
            for (int tile = 0; tile < head.tiles(); tile++, number++) {
                u32 stage = number % STAGES;
                // Q as operand, and dO behind it: by row for scores and dP, by column for sums.
                u64 rows = by_row<64>(at.tile(0, stage));
                u64 columns = by_column<64>(at.tile(0, stage), 0);
                // Eight numbers for each of the lanes of a row.
                u32 own_numbers =
                    at.numbers(numbers) + tile * (ROWS / PART) * at.PART_NUMBERS + t * 32;
                float s[PART / 2], ds[PART / 2];
                // Those of the first part begin with the tile and not behind the sums of the one
                // before: where results under way go over the end of a loop, or come from under a
                // condition, the compiler waits for every product at once.
                auto begin_scores = [&](int part) {
                    products_begin();
                    multiply_rows(s, own_keys, rows + part * PART_ROWS);
                    products_end();
                };
                wait(at.full(stage), number / STAGES % 2);
                begin_scores(0);
                if (tile > 0) publish_scores();
#pragma unroll
                for (int part = 0; part < ROWS / PART; part++) {
                    u32 part_numbers = own_numbers + part * at.PART_NUMBERS;
                    float largest[2][4];
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        load_numbers(largest[half], part_numbers + half * 16);
                    // Behind the sums before, of which the operands have the registers of dP.
                    products_wait<1>();
                    products_begin();
                    multiply_rows(ds, own_values, rows + NEXT + part * PART_ROWS);
                    products_end();
                    products_wait<1>();
                    settle(s);
#pragma unroll
                    for (int i = 0; i < PART / 2; i++)
                        s[i] = exp2_fast(fmaf(s[i], c, -largest[i / 8][i / 4 % 2 * 2 + i % 2]));
                    // A branch here also keeps the compiler from waiting for dP first.
                    if (own + ROWS > head.length) {
#pragma unroll
                        for (int i = 0; i < PART / 2; i++)
                            if (key + i / 2 % 2 * 8 >= head.length) s[i] = 0.0f;
                    }
                    products_wait<0>();
                    settle(ds);
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float mean[4], random[4];
                        load_numbers(mean, part_numbers + at.NUMBERS + half * 16);
                        if (DROPOUT) load_numbers(random, part_numbers + 2 * at.NUMBERS + half * 16);
                        // Of each query the thread's key and that eight further on.
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            float* p = s + half * 8 + i / 2 * 4 + i % 2;
                            float* dp = ds + half * 8 + i / 2 * 4 + i % 2;
                            // Dropping P drops dP as well.
                            float all[2] = {p[0] * mean[i], p[2] * mean[i]};
                            if (DROPOUT) {
                                u32 word = ScoreDropout::word_of_product(
                                    __float_as_uint(random[i]) + offset);
                                dropout.drop(word, p[0], p[2]);
                            }
                            dp[0] = fmaf(p[0], dp[0], -all[0]);
                            dp[2] = fmaf(p[2], dp[2], -all[1]);
                        }
                    }
                    u32 p[PART / 4], q[PART / 4];
                    pack(p, s);
                    pack(q, ds);
                    products_begin();
                    add_rows(grad_value, p, columns + NEXT + part * PART_ROWS);
                    add_rows(grad_key, q, columns + part * PART_ROWS);
                    products_end();
                    if (part == 0) {
                        begin_scores(1);
                        wait(at.scores_empty(number % 2), number / 2 % 2 ^ 1);
                    }
                    // 64 queries, 128 bytes, are a row of dS.
                    u32 to = at.scores(number % 2, group) + scores_row;
#pragma unroll
                    for (int j = 0; j < PART / 8; j += 2)
                        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], "
                                     "{%1, %2, %3, %4};" ::"r"(to ^ (part * (PART / 8) + j << 4)),
                                     "r"(q[2 * j]), "r"(q[2 * j + 1]), "r"(q[2 * j + 2]),
                                     "r"(q[2 * j + 3])
                                     : "memory");
                }
            }
            publish_scores();
            products_wait<0>();
            settle(grad_key);
            settle(grad_value);
            u64 kv_start = (u64)anew(head.b) * x.seq * x.kv_stride + (u64)head.h * D;
            float factor = 1.0f;
            if (DROPOUT)
                asm volatile("rcp.approx.ftz.f32 %0, %1;"
                             : "=f"(factor)
                             : "f"(dropout.kept_share()));
            write_rows(grad_key, x.scale * factor, x.dk + kv_start, x.kv_stride, own, head.length);
            write_rows(grad_value, factor, x.dv + kv_start, x.kv_stride, own, head.length);
        }
        if (head.rounds() > 0) numbers ^= 1;
    }
}

template <bool DROPOUT>
__device__ __forceinline__ void backward(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                         const TensorMap* d_o, const Problem& x) {
    extern __shared__ __align__(1024) u8 shared[];
    Memory at = {shared_address(shared)};
    if (threadIdx.x == 0) {
        barrier_init(at.cut(), 1);
        for (int stage = 0; stage < 2; stage++) {
            barrier_init(at.keys_full(stage), 1);
            // Warps: those with keys, and those that sum dQ.
            barrier_init(at.scores_full(stage), 4 * GROUPS);
            barrier_init(at.scores_empty(stage), 4);
        }
        for (int stage = 0; stage < STAGES; stage++) barrier_init(at.full(stage), 4);
        barriers_are_there();
    }
    __syncthreads();
    await_earlier();
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        Supply<DROPOUT> supply(x, at, q, k, v, d_o);
        sum_queries<DROPOUT>(x, at, supply);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        differentiate<DROPOUT>(x, at);
    }
}

// ---------------------------------------------------------------- instances

#define SCALARS                                                                                    \
    u32 q_stride, u32 kv_stride, int batch, int seq, int heads, float scale, const u32 *random,    \
        u32 stream, u32 threshold, const i32 *lengths
#define INSTANCE(NAME, DROPOUT)                                                                    \
    KERNEL __launch_bounds__(128 * (GROUPS + 1), 1)                                                \
        NAME(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,             \
             const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,           \
             const real* o, const real* grad, const float* lse, real* dq, real* dk, real* dv,      \
             SCALARS) {                                                                            \
        Problem x = {o,     grad, lse,   dq,    dk,     dv,     q_stride,  kv_stride,              \
                     batch, seq,  heads, scale, random, stream, threshold, lengths};               \
        backward<DROPOUT>(&q, &k, &v, &d_o, x);                                                    \
    }

INSTANCE(attention_backward_hopper_32, false)
INSTANCE(attention_backward_hopper_32_dropout, true)

#endif  // !REAL_F32
