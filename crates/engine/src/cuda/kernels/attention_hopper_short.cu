// The backward of softmax attention for sm_90a over short sequences: heads of 32 columns in bf16 or
// f16, at most 512 positions, every query sees every key that counts, and every query head has keys
// of its own. The equations are those of attention_backward.cu, and lengths mean what they do in
// attention.cuh.
//
//   Sᵀ = K·Qᵀ   dPᵀ = V·dOᵀ   dV += (P∘M)ᵀ·dO   dK += dSᵀ·Q   dQ += dS·K
//
// So narrow a head leaves little to the matrix units: exponentials, random numbers and what is
// between them take the time. A block has a whole head, and no other block adds to its gradients.
// Each of three warpgroups has 64 keys with their dK and dV in registers, and walks all tiles of 64
// queries; then come the next 192 keys. A fourth warpgroup has dQ: it multiplies the dS that the
// three leave in shared memory with their keys, always in the same order. What earlier keys gave to
// a tile it keeps in shared memory, where every thread finds its own numbers again. One warp brings
// everything by the copy engine, ahead of the others also over the end of a head. Three more compute
// what is the same for all keys of a query, once for each head and ahead as well: lse in powers of
// two, δ = Σ dO∘O, and the number that the random ones are made of.

#include "hopper.cuh"
#include "sequence.cuh"

#if !defined(REAL_F32)

#define D 32
// Keys of a warpgroup, and queries of a tile.
#define ROWS 64
#define GROUPS 3
#define STAGES 6
#define MOST_TILES 8

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
    int index, b, h, length;
    // Tiles of queries, which are also the blocks of keys; and how often the warpgroups walk.
    int tiles, rounds;

    __device__ __forceinline__ bool take(const Problem& x, int turn) {
        index = turn * (int)gridDim.x + (int)blockIdx.x;
        if (index >= x.batch * x.heads) return false;
        // From the first lane, so that the compiler knows them to be the same in the whole warp.
        b = __shfl_sync(0xffffffffu, index / x.heads, 0);
        h = __shfl_sync(0xffffffffu, index % x.heads, 0);
        length = __shfl_sync(0xffffffffu, sequence_length(x.lengths, b, x.seq), 0);
        tiles = (length + ROWS - 1) / ROWS;
        rounds = (tiles + GROUPS - 1) / GROUPS;
        return true;
    }
    // Warpgroups that have keys in a round.
    __device__ __forceinline__ int active(int round) const {
        return min(tiles - round * GROUPS, GROUPS);
    }
    // Whether rows that do not count follow in the tile from `row` on, inside the tensor.
    __device__ __forceinline__ bool is_cut(const Problem& x, int row) const {
        return length < x.seq && row + ROWS > length;
    }
};

// ---------------------------------------------------------------- shared memory

struct Memory {
    static constexpr u32 TILE = ROWS * D * 2, SCORES = ROWS * ROWS * 2, SUM = ROWS * D * 4;
    static constexpr u32 NUMBERS = MOST_TILES * ROWS * 4;
    static constexpr u32 TILES = 2 * GROUPS * 2 * TILE, GRADIENTS = TILES + STAGES * 2 * TILE;
    static constexpr u32 SUMS = GRADIENTS + GROUPS * 2 * SCORES;
    static constexpr u32 STATISTICS = SUMS + MOST_TILES * SUM;
    static constexpr u32 BARRIERS = STATISTICS + 2 * 3 * NUMBERS;
    u32 base;

    // Keys are side 0, values side 1; two rounds.
    __device__ __forceinline__ u32 keys(int side, u32 stage, int group) const {
        return base + ((stage * GROUPS + group) * 2 + side) * TILE;
    }
    // Queries are side 0, gradients of the output side 1.
    __device__ __forceinline__ u32 tile(int side, u32 stage) const {
        return base + TILES + (stage * 2 + side) * TILE;
    }
    // Of all queries of a head: lse, δ and random numbers; two heads.
    __device__ __forceinline__ u32 numbers(int side, u32 stage) const {
        return base + STATISTICS + (stage * 3 + side) * NUMBERS;
    }
    __device__ __forceinline__ u32 scores(u32 stage, int group) const {
        return base + GRADIENTS + (stage * GROUPS + group) * SCORES;
    }
    __device__ __forceinline__ u32 sums(int tile) const { return base + SUMS + tile * SUM; }
    __device__ __forceinline__ u32 barrier(int i) const { return base + BARRIERS + i * 8; }
    __device__ __forceinline__ u32 cut() const { return barrier(0); }
    __device__ __forceinline__ u32 keys_full(u32 stage) const { return barrier(1 + stage); }
    __device__ __forceinline__ u32 keys_empty(u32 stage) const { return barrier(3 + stage); }
    __device__ __forceinline__ u32 scores_full(u32 stage) const { return barrier(5 + stage); }
    __device__ __forceinline__ u32 scores_empty(u32 stage) const { return barrier(7 + stage); }
    __device__ __forceinline__ u32 full(u32 stage) const { return barrier(9 + stage); }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barrier(9 + STAGES + stage); }
    __device__ __forceinline__ u32 numbers_empty(u32 stage) const {
        return barrier(9 + 2 * STAGES + stage);
    }
    __device__ __forceinline__ u32 numbers_full(u32 stage, int tile) const {
        return barrier(11 + 2 * STAGES + stage * MOST_TILES + tile);
    }
};

// ---------------------------------------------------------------- the warp that brings everything

// Two tiles of the same rows, the rows beyond the end zeroed, by a whole warp.
__device__ __forceinline__ void fill_two_cut(const u32 (&to)[2], const TensorMap* const (&maps)[2],
                                             u32 barrier, u32& parity, const Head& head, int row) {
    if (threadIdx.x % 32 == 0) {
        arrive_with_bytes(barrier, 2 * Memory::TILE);
#pragma unroll
        for (int side = 0; side < 2; side++)
            copy_tile<D, ROWS>(to[side], maps[side], barrier, head.h, row, head.b);
    }
    __syncwarp();
    wait(barrier, parity);
    parity ^= 1;
#pragma unroll
    for (int side = 0; side < 2; side++)
        clear_rows<D, ROWS>(to[side], max(head.length - row, 0));
    publish_shared();
    __syncwarp();
}

__device__ __forceinline__ void bring(const Problem& x, const Memory& at, const TensorMap* q,
                                      const TensorMap* k, const TensorMap* v,
                                      const TensorMap* d_o) {
    int lane = threadIdx.x % 32;
    bool leads = lane == 0;
    const TensorMap *const key_maps[2] = {k, v}, *const query_maps[2] = {q, d_o};
    Ring<2> keys;
    Ring<STAGES> ring;
    u32 cut_parity = 0;
    Head head;
    for (int turn = 0; head.take(x, turn); turn++) {
        for (int round = 0; round < head.rounds; round++, keys.advance()) {
            wait(at.keys_empty(keys.stage), keys.parity ^ 1);
            u32 full = at.keys_full(keys.stage);
            int first = round * GROUPS, whole = head.active(round);
            // Only the last block of keys ends inside.
            if (head.is_cut(x, (first + whole - 1) * ROWS)) {
                whole--;
                u32 to[2] = {at.keys(0, keys.stage, whole), at.keys(1, keys.stage, whole)};
                fill_two_cut(to, key_maps, at.cut(), cut_parity, head, (first + whole) * ROWS);
            }
            // Every lane arrives, after what it wrote itself.
            if (leads) {
                expect_bytes(full, whole * 2 * at.TILE);
                for (int group = 0; group < whole; group++)
#pragma unroll
                    for (int side = 0; side < 2; side++)
                        copy_tile<D, ROWS>(at.keys(side, keys.stage, group), key_maps[side], full,
                                           head.h, (first + group) * ROWS, head.b);
            }
            arrive(full);
            for (int tile = 0; tile < head.tiles; tile++, ring.advance()) {
                int row = tile * ROWS;
                u32 stage = ring.stage, to[2] = {at.tile(0, stage), at.tile(1, stage)};
                wait(at.empty(stage), ring.parity ^ 1);
                bool cut = head.is_cut(x, row);
                if (cut) fill_two_cut(to, query_maps, at.cut(), cut_parity, head, row);
                if (leads && !cut) {
                    u32 full = at.full(stage);
                    expect_bytes(full, 2 * at.TILE);
#pragma unroll
                    for (int side = 0; side < 2; side++)
                        copy_tile<D, ROWS>(to[side], query_maps[side], full, head.h, row, head.b);
                }
                arrive(at.full(stage));
            }
        }
    }
}

// ---------------------------------------------------------------- the warps with what queries have

// Two warps compute δ, four lanes a row; the third has lse and random numbers, a row for each lane.
template <bool DROPOUT> __device__ __forceinline__ void measure(const Problem& x, const Memory& at) {
    constexpr int LANES = D / 8, AT_ONCE = 2 * 32 / LANES;
    int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32, place = (warp * 32 + lane) / LANES;
    ScoreDropout dropout(x.random, x.stream, x.threshold, x.heads);
    auto put = [&](int side, u32 stage, int row, u32 number) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at.numbers(side, stage) + row * 4), "r"(number)
                     : "memory");
    };
    Head head;
    for (int turn = 0; head.take(x, turn); turn++) {
        u32 stage = turn % 2;
        wait(at.numbers_empty(stage), turn / 2 % 2 ^ 1);
        for (int tile = 0; tile < MOST_TILES; tile++) {
            int first = tile * ROWS, end = tile < head.tiles ? first + ROWS : first;
            if (warp < 2) {
#pragma unroll 1
                for (int group = first; group < end; group += 2 * AT_ONCE) {
                    // Two rows, so that more is on its way; those that do not count are the last one.
                    Pack<real, 8> y[2], grad[2];
                    float delta[2] = {};
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int row = min(group + i * AT_ONCE + place, head.length - 1);
                        u64 from = (u64)((u32)head.b * x.seq + row) * (u32)(x.heads * D) +
                                   head.h * D + lane % LANES * 8;
                        y[i] = *reinterpret_cast<const Pack<real, 8>*>(x.o + from);
                        grad[i] = *reinterpret_cast<const Pack<real, 8>*>(x.grad + from);
                    }
#pragma unroll
                    for (int i = 0; i < 2; i++) {
#pragma unroll
                        for (int e = 0; e < 8; e++)
                            delta[i] = fmaf(to_float(y[i].v[e]), to_float(grad[i].v[e]), delta[i]);
                        delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], 1);
                        delta[i] += __shfl_xor_sync(0xffffffffu, delta[i], 2);
                        // dS = P∘(M∘dP − δ). The factor of what is kept is applied to the gradients
                        // as a whole, so that δ is divided by it.
                        if (DROPOUT) delta[i] *= dropout.kept_share();
                        if (lane % LANES == 0)
                            put(1, stage, group + i * AT_ONCE + place, __float_as_uint(delta[i]));
                    }
                }
            } else {
#pragma unroll 1
                for (int row = first + lane; row < end; row += 32) {
                    u32 index = (u32)head.index * x.seq + row;
                    // A query that does not count has probabilities of 0.
                    float lse = row < head.length ? x.lse[index] * LOG2_E : PLUS_INFINITY;
                    put(0, stage, row, __float_as_uint(lse));
                    if (DROPOUT)
                        put(2, stage, row, dropout.row(index));
                }
            }
            __syncwarp();
            if (lane == 0) arrive(at.numbers_full(stage, tile));
        }
    }
}

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

__device__ __forceinline__ void sum_queries(const Problem& x, const Memory& at, float scale) {
    int lane = threadIdx.x % 32;
    Ring<2> keys, scores;
    auto release = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };
    Head head;
    for (int turn = 0; head.take(x, turn); turn++) {
        real* dq = x.dq + (u64)head.b * x.seq * x.q_stride + (u64)head.h * D;
        for (int round = 0; round < head.rounds; round++, keys.advance()) {
            int active = head.active(round);
            wait(at.keys_full(keys.stage), keys.parity);
            for (int tile = 0; tile < head.tiles; tile++, scores.advance()) {
                float add[D / 2];
                wait(at.scores_full(scores.stage), scores.parity);
                products_begin();
#pragma unroll
                for (int group = 0; group < GROUPS; group++)
                    if (group < active) {
                        u32 left = at.scores(scores.stage, group);
                        u32 right = at.keys(0, keys.stage, group);
#pragma unroll
                        for (int k = 0; k < ROWS / 16; k++)
                            multiply<1, 1>(add, by_column(left + k * 16 * 128, 0),
                                           by_column<64>(right + k * 16 * 64, 0),
                                           group > 0 || k > 0);
                    }
                products_end();
                products_wait<0>();
                settle(add);
                release(at.scores_empty(scores.stage));
                u32 sum = at.sums(tile) + threadIdx.x % 128 * 16;
                if (round > 0) {
#pragma unroll
                    for (int i = 0; i < D / 8; i++) {
                        float z[4];
                        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                                     : "=f"(z[0]), "=f"(z[1]), "=f"(z[2]), "=f"(z[3])
                                     : "r"(sum + i * 128 * 16)
                                     : "memory");
#pragma unroll
                        for (int e = 0; e < 4; e++) add[4 * i + e] += z[e];
                    }
                }
                if (round + 1 == head.rounds) {
                    write_rows(add, scale, dq, x.q_stride, tile * ROWS, head.length);
                    continue;
                }
#pragma unroll
                for (int i = 0; i < D / 8; i++)
                    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(sum +
                                                                                  i * 128 * 16),
                                 "f"(add[4 * i]), "f"(add[4 * i + 1]), "f"(add[4 * i + 2]),
                                 "f"(add[4 * i + 3])
                                 : "memory");
            }
            release(at.keys_empty(keys.stage));
        }
    }
}

// ---------------------------------------------------------------- the warpgroups with keys

// Zeroes the gradients of rows that do not count, by the threads of GROUPS warpgroups.
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

// What lies a tile further on in an operand.
constexpr u32 NEXT = Memory::TILE / 16;

// d[64×64] = a·bᵀ over the columns of a head, and d[64×32] += p[64×64]·b.
__device__ __forceinline__ void multiply_rows(float (&d)[ROWS / 2], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) multiply<0, 0>(d, a + k * 2, b + k * 2, k > 0);
}
__device__ __forceinline__ void add_rows(float (&d)[D / 2], const u32 (&p)[ROWS / 4], u64 b) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        u32 a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
        multiply_registers<1>(d, a, b + k * 64);
    }
}

template <bool DROPOUT>
__device__ __forceinline__ void differentiate(const Problem& x, const Memory& at,
                                              const u8* shared) {
    // From the first lane, so that the compiler knows it to be the same in the whole warp.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 2;
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float c = x.scale * LOG2_E;
    ScoreDropout dropout(x.random, x.stream, x.threshold, x.heads);
    Ring<2> keys, scores;
    Ring<STAGES> ring;
    auto release = [&](u32 barrier) {
        __syncwarp();
        if (lane == 0) arrive(barrier);
    };
    Head head;
    // A round in which it has no keys.
    auto keep_step = [&]() {
        wait(at.keys_full(keys.stage), keys.parity);
        for (int tile = 0; tile < head.tiles; tile++, ring.advance(), scores.advance()) {
            wait(at.full(ring.stage), ring.parity);
            wait(at.scores_empty(scores.stage), scores.parity ^ 1);
            release(at.scores_full(scores.stage));
            arrive(at.empty(ring.stage));
        }
        release(at.keys_empty(keys.stage));
    };
    // Where the row begins that a lane stores, of the four matrices of a store.
    int stored = warp * 16 + lane % 16;
    u32 scores_row = stored * 128 + ((lane / 16 ^ stored % 8) << 4);
    for (int turn = 0; head.take(x, turn); turn++) {
        u32 numbers = turn % 2;
        if (x.lengths) clear_padding(x, head, threadIdx.x - 256);
        for (int round = 0; round < head.rounds; round++, keys.advance()) {
            int own = (round * GROUPS + group) * ROWS, key = own + warp * 16 + g;
            if (group >= head.active(round)) {
                keep_step();
                continue;
            }
            u32 offset = ScoreDropout::offset(key);
            // The values are behind the keys.
            u64 own_keys = by_row<64>(at.keys(0, keys.stage, group));
            float grad_key[D / 2], grad_value[D / 2];
#pragma unroll
            for (int i = 0; i < D / 2; i++) grad_key[i] = grad_value[i] = 0.0f;
            wait(at.keys_full(keys.stage), keys.parity);
            for (int tile = 0; tile < head.tiles; tile++, ring.advance(), scores.advance()) {
                u32 stage = ring.stage;
                wait(at.full(stage), ring.parity);
                // Q as operand, and dO behind it: by row for scores and dP, by column for sums.
                u64 rows = by_row<64>(at.tile(0, stage));
                u64 columns = by_column<64>(at.tile(0, stage), 0);
                float s[ROWS / 2], ds[ROWS / 2];
                products_begin();
                multiply_rows(s, own_keys, rows);
                products_end();
                multiply_rows(ds, own_keys + NEXT, rows + NEXT);
                products_end();
                const u8* own_numbers = shared + (at.numbers(0, numbers) - at.base) +
                                        tile * ROWS * 4 + t * 8;
                if (round == 0) wait(at.numbers_full(numbers, tile), turn / 2 % 2);
                // Read while the products are under way.
                float2 largest[ROWS / 8];
#pragma unroll
                for (int j = 0; j < ROWS / 8; j++)
                    largest[j] = *reinterpret_cast<const float2*>(own_numbers + j * 32);
                products_wait<1>();
                settle(s);
                if (own + ROWS > head.length) {
#pragma unroll
                    for (int i = 0; i < ROWS / 2; i++)
                        if (key + i / 2 % 2 * 8 >= head.length) s[i] = MINUS_INFINITY;
                }
#pragma unroll
                for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        s[4 * j + e] = exp2_fast(
                            fmaf(s[4 * j + e], c, -(e % 2 ? largest[j].y : largest[j].x)));
                products_wait<0>();
                settle(ds);
#pragma unroll
                for (int j = 0; j < ROWS / 8; j++) {
                    float2 mean =
                        *reinterpret_cast<const float2*>(own_numbers + at.NUMBERS + j * 32);
                    uint2 random;
                    if (DROPOUT)
                        random =
                            *reinterpret_cast<const uint2*>(own_numbers + 2 * at.NUMBERS + j * 32);
                    // Two queries; of each the thread's key and that eight further on.
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float* p = s + 4 * j + e;
                        float* dp = ds + 4 * j + e;
                        // Dropping P drops dP as well.
                        float subtract = e ? mean.y : mean.x;
                        float all[2] = {p[0] * subtract, p[2] * subtract};
                        if (DROPOUT) {
                            u32 word =
                                ScoreDropout::word((e ? random.y : random.x) + offset);
                            dropout.drop(word, p[0], p[2]);
                        }
                        dp[0] = fmaf(p[0], dp[0], -all[0]);
                        dp[2] = fmaf(p[2], dp[2], -all[1]);
                    }
                }
                u32 p[ROWS / 4], q[ROWS / 4];
                pack(p, s);
                pack(q, ds);
                products_begin();
                add_rows(grad_value, p, columns + NEXT);
                products_end();

                // 64 queries, 128 bytes, are a row of dS.
                wait(at.scores_empty(scores.stage), scores.parity ^ 1);
                u32 to = at.scores(scores.stage, group) + scores_row;
#pragma unroll
                for (int j = 0; j < ROWS / 8; j += 2)
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], "
                                 "{%1, %2, %3, %4};" ::"r"(to ^ (j << 4)),
                                 "r"(q[2 * j]), "r"(q[2 * j + 1]), "r"(q[2 * j + 2]),
                                 "r"(q[2 * j + 3])
                                 : "memory");
                // The product comes before the fence, which takes its time.
                products_begin();
                add_rows(grad_key, q, columns);
                products_end();
                publish_shared();
                release(at.scores_full(scores.stage));
                products_wait<0>();
                settle(grad_key);
                settle(grad_value);
                // Every lane arrives, after what it read itself.
                arrive(at.empty(stage));
            }
            release(at.keys_empty(keys.stage));
            // Anew every time, because there are no registers for them.
            int b = head.b;
            asm volatile("" : "+r"(b));
            u64 kv_start = (u64)b * x.seq * x.kv_stride + (u64)head.h * D;
            float factor = 1.0f;
            if (DROPOUT)
                asm volatile("rcp.approx.ftz.f32 %0, %1;"
                             : "=f"(factor)
                             : "f"(dropout.kept_share()));
            write_rows(grad_key, x.scale * factor, x.dk + kv_start, x.kv_stride, own, head.length);
            write_rows(grad_value, factor, x.dv + kv_start, x.kv_stride, own, head.length);
        }
        release(at.numbers_empty(numbers));
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
            // The lanes of one warp; then warps: those with keys, and those that sum dQ.
            barrier_init(at.keys_full(stage), 32);
            barrier_init(at.keys_empty(stage), 4 * GROUPS + 4);
            barrier_init(at.scores_full(stage), 4 * GROUPS);
            barrier_init(at.scores_empty(stage), 4);
            // Those with keys; and those that compute numbers.
            barrier_init(at.numbers_empty(stage), 4 * GROUPS);
            for (int tile = 0; tile < MOST_TILES; tile++)
                barrier_init(at.numbers_full(stage, tile), 3);
        }
        for (int stage = 0; stage < STAGES; stage++) {
            // The lanes of that warp, and of all those with keys.
            barrier_init(at.full(stage), 32);
            barrier_init(at.empty(stage), 128 * GROUPS);
        }
        barriers_are_there();
    }
    __syncthreads();
    await_earlier();
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
        if (threadIdx.x < 32)
            bring(x, at, q, k, v, d_o);
        else
            measure<DROPOUT>(x, at);
    } else if (group == 1) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 48;");
        float factor = ScoreDropout(x.random, x.stream, x.threshold, x.heads).scale;
        sum_queries(x, at, DROPOUT ? x.scale * factor : x.scale);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 128;");
        differentiate<DROPOUT>(x, at, shared);
    }
}

// ---------------------------------------------------------------- instances

#define SCALARS                                                                                    \
    u32 q_stride, u32 kv_stride, int batch, int seq, int heads, float scale, const u32 *random,    \
        u32 stream, u32 threshold, const i32 *lengths
#define INSTANCE(NAME, DROPOUT)                                                                    \
    KERNEL __launch_bounds__(128 * (GROUPS + 2), 1)                                                \
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
