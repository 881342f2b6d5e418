// The backward of causal attention for sm_90a where few heads of a moderate length leave nothing
// to balance the load with: heads of 64 or 128 columns in bf16 or f16. The equations are those of
// attention_backward.cu.
//
//   Sᵀ = K·Qᵀ   dPᵀ = V·dOᵀ   dV += Pᵀ·dO   dK += dSᵀ·Q   dQ += dS·K
//
// A step is one tile of queries of one head against one block of KEYS keys. All steps stand in one
// line: key head, block of keys, query head of that key head, tile of queries from the diagonal on.
// Every block of the launch has an equal stretch of that line, whatever it holds, and keeps dK and
// dV in registers as long as it stays with a block of keys; what it leaves there when it goes on is
// a part of their sum. `attention_finish_dealt` adds the parts, in the order of the line.
//
// What different blocks add to one dQ is summed in `sums` in one order, always the same: that in
// which the steps are due when all take equally long, so that a turn is hardly waited for. The
// first stores, the others let the copy engine add. A step waits for those alone that are due
// before it, and all blocks of the launch find room at the same time: there are never more than
// multiprocessors.

#include "hopper.cuh"

#if !defined(REAL_F32)

// Keys of a block, queries of a tile, and tiles as long as a block.
#define KEYS 128
#define ROWS 64
#define TILES (KEYS / ROWS)

// Where each step stands in the line.
struct Line {
    // Blocks of keys of a sequence, query heads of a key head, key heads of the batch.
    u32 blocks, group, kv_heads;
    // Blocks of the launch.
    u32 stretches;

    __device__ __forceinline__ Line(int batch, int seq, int heads, int kv_heads, u32 stretches)
        : blocks((seq + KEYS - 1) / KEYS),
          group(heads / kv_heads),
          kv_heads(batch * kv_heads),
          stretches(stretches) {}

    // Steps before block `n` of a key head.
    __device__ __forceinline__ u32 before(u32 n) const {
        return group * TILES * (n * blocks - n * (n - 1) / 2);
    }
    __device__ __forceinline__ u32 of_key_head() const { return before(blocks); }
    __device__ __forceinline__ u32 length() const { return kv_heads * of_key_head(); }
    __device__ __forceinline__ u32 begin(u32 stretch) const {
        return stretch * length() / stretches;
    }
    __device__ __forceinline__ u32 stretch(u32 step) const {
        return ((step + 1) * stretches - 1) / length();
    }
    // Where a stretch leaves its part of a block of keys that it shares with others. A stretch has
    // at most two such blocks, its first and its last.
    __device__ __forceinline__ u32 part(u32 stretch, u32 kv_head, u32 n) const {
        if (kv_heads * blocks <= stretches) return stretch + kv_head * blocks + n;
        return 2 * stretch + (kv_head * of_key_head() + before(n) > begin(stretch));
    }
    // Of a tile of queries and one of the blocks that it sees: after how many others of its
    // stretch it is due.
    __device__ __forceinline__ u32 due(u32 kv_head, u32 member, u32 tile, u32 n) const {
        u32 step = kv_head * of_key_head() + before(n) + member * TILES * (blocks - n) + tile -
                   n * TILES;
        return step - begin(stretch(step));
    }
};

// What a block does with one block of keys.
struct Stay {
    u32 next, end;
    u32 kv_head, n, member, tile, steps;
    // Whether nobody else has these keys.
    bool is_all;

    __device__ __forceinline__ Stay(const Line& line)
        : next(line.begin(blockIdx.x)), end(line.begin(blockIdx.x + 1)) {}

    __device__ __forceinline__ bool take(const Line& line) {
        if (next >= end) return false;
        kv_head = next / line.of_key_head();
        u32 rest = next % line.of_key_head();
        n = 0;
        while (line.before(n + 1) <= rest) n++;
        u32 tiles = (line.blocks - n) * TILES, done = rest - line.before(n);
        member = done / tiles;
        tile = n * TILES + done % tiles;
        steps = min(end - next, line.before(n + 1) - rest);
        is_all = steps == line.before(n + 1) - line.before(n);
        next += steps;
        return true;
    }
    __device__ __forceinline__ void step(const Line& line) {
        if (++tile < line.blocks * TILES) return;
        tile = n * TILES;
        member++;
    }
};

struct Problem {
    const float *lse, *delta;
    float *sums, *parts;
    u32* turns;
    real *dk, *dv;
    u32 kv_stride;
    int seq, heads, kv_heads;
    float scale;
};

// ---------------------------------------------------------------- shared memory

template <int D> struct Memory {
    static constexpr u32 KEY_TILE = KEYS * D * 2, TILE = ROWS * D * 2, SCORES = KEYS * ROWS * 2;
    static constexpr u32 SUM = ROWS * D * 4, NUMBERS = ROWS * 4;
    static constexpr u32 QUERIES = 2 * KEY_TILE, GRADIENTS = QUERIES + 4 * TILE;
    static constexpr u32 SUMS = GRADIENTS + 2 * SCORES, STATISTICS = SUMS + 2 * SUM;
    static constexpr u32 BARRIERS = STATISTICS + 4 * NUMBERS;
    u32 base;

    __device__ __forceinline__ u32 keys() const { return base; }
    __device__ __forceinline__ u32 values() const { return base + KEY_TILE; }
    // Queries are side 0, gradients of the output side 1; with them lse and delta.
    __device__ __forceinline__ u32 tile(int side, u32 stage) const {
        return base + QUERIES + (side * 2 + stage) * TILE;
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
    __device__ __forceinline__ u32 full(int side, u32 stage) const {
        return barrier(2 + side * 2 + stage);
    }
    __device__ __forceinline__ u32 empty(int side, u32 stage) const {
        return barrier(6 + side * 2 + stage);
    }
    __device__ __forceinline__ u32 sums_full(u32 stage) const { return barrier(10 + stage); }
    __device__ __forceinline__ u32 sums_empty(u32 stage) const { return barrier(12 + stage); }

    // By one thread, before the block meets.
    __device__ __forceinline__ void make_barriers() const {
        barrier_init(keys_full(), 1);
        barrier_init(keys_empty(), 8);
        for (int stage = 0; stage < 2; stage++) {
            for (int side = 0; side < 2; side++) {
                barrier_init(full(side, stage), 1);
                barrier_init(empty(side, stage), 8);
            }
            barrier_init(sums_full(stage), 256);
            barrier_init(sums_empty(stage), 1);
        }
        barriers_are_there();
    }
};

// ---------------------------------------------------------------- the thread that brings everything

template <int D>
__device__ __forceinline__ void bring(const Line& line, const Problem& x, const Memory<D>& at,
                                      const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                      const TensorMap* d_o) {
    Ring<2> ring;
    u32 keys_parity = 1;
    u64 padded = line.blocks * KEYS;
    Stay stay(line);
    while (stay.take(line)) {
        int b = stay.kv_head / x.kv_heads, kv_head = stay.kv_head % x.kv_heads;
        for (u32 step = 0; step < stay.steps; step++, stay.step(line), ring.advance()) {
            int h = kv_head * line.group + stay.member, row = stay.tile * ROWS;
            u64 number = ((u64)b * x.heads + h) * padded + row;
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 full = at.full(side, ring.stage);
                wait(at.empty(side, ring.stage), ring.parity ^ 1);
                arrive_with_bytes(full, at.NUMBERS + at.TILE);
                copy_bytes(at.numbers(side, ring.stage), (side ? x.delta : x.lse) + number,
                           at.NUMBERS, full);
                copy_tile<D, ROWS>(at.tile(side, ring.stage), side ? d_o : q, full, h, row, b);
            }
            if (step > 0) continue;
            wait(at.keys_empty(), keys_parity);
            keys_parity ^= 1;
            arrive_with_bytes(at.keys_full(), 2 * at.KEY_TILE);
            copy_tile<D, KEYS>(at.keys(), k, at.keys_full(), kv_head, stay.n * KEYS, b);
            copy_tile<D, KEYS>(at.values(), v, at.keys_full(), kv_head, stay.n * KEYS, b);
        }
    }
}

// ---------------------------------------------------------------- the warps that sum dQ

// Two warps, which take every other tile: while one waits for the copy engine, the other starts the
// next. Sums are in the order of the threads' registers: [warpgroup][i][thread][4].
template <int D>
__device__ __forceinline__ void send(const Line& line, const Problem& x, const Memory<D>& at,
                                     u32 stage) {
    u32 parity = 0, taken = 0, lane = threadIdx.x % 32;
    Stay stay(line);
    while (stay.take(line)) {
        for (u32 step = 0; step < stay.steps; step++, stay.step(line), taken++) {
            if ((taken & 1) != stage) continue;
            // How many of the blocks that add to this tile are due before this one.
            u32 own = line.due(stay.kv_head, stay.member, stay.tile, stay.n), rank = 0;
            for (u32 first = 0; first * TILES <= stay.tile; first += 32) {
                u32 n = first + lane, due = ~0u;
                if (n * TILES <= stay.tile)
                    due = line.due(stay.kv_head, stay.member, stay.tile, n);
                rank += __popc(
                    __ballot_sync(0xffffffffu, due < own || (due == own && n < stay.n)));
            }
            if (lane == 0) {
                u64 head = (u64)stay.kv_head * line.group + stay.member;
                u64 tile = head * line.blocks * TILES + stay.tile;
                float* sum = x.sums + tile * ROWS * D;
                wait(at.sums_full(stage), parity);
                wait_for_turn(x.turns + tile, rank);
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
                set_turn(x.turns + tile, rank + 1);
            }
            parity ^= 1;
            __syncwarp();
        }
    }
}

// ---------------------------------------------------------------- the warpgroups

// Leaves a part of a sum: 64 rows in the order of the threads' registers.
template <int N> __device__ __forceinline__ void leave(const float (&y)[N], float* part) {
    float4* at = reinterpret_cast<float4*>(part) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
        __stcg(at + i * 128, float4{y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]});
}

// Writes a whole sum: the thread's rows of a matrix, from `row` on, at its first column.
template <int N>
__device__ __forceinline__ void write(const float (&y)[N], float factor, real* matrix, u64 stride,
                                      int row, int limit) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < N / 4; j++)
            if (row + half * 8 < limit)
                *reinterpret_cast<u32*>(matrix + (u64)(row + half * 8) * stride + 8 * j) =
                    pack2(y[4 * j + 2 * half] * factor, y[4 * j + 2 * half + 1] * factor);
}

// What a warpgroup does with its 64 of a block's keys.
template <int D> struct Work {
    const Memory<D>& at;
    const u8* shared;
    // Of the scores' base 2.
    float factor;
    int group, warp, lane;
    // Tiles, dS and sums for dQ are all two deep.
    Ring<2> ring;
    // Of the keys the first of the warpgroup, and the first of the thread.
    int own, key;
    float grad_key[D / 2], grad_value[D / 2];

    __device__ __forceinline__ void release(u32 barrier) const {
        if (lane == 0) arrive(barrier);
    }
    __device__ __forceinline__ const float* numbers(int side, u32 stage) const {
        return reinterpret_cast<const float*>(shared + (at.numbers(side, stage) - at.base)) +
               2 * (lane % 4);
    }

    __device__ __forceinline__ void begin(int block) {
        own = block * KEYS + group * 64;
        key = own + warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < D / 2; i++) grad_key[i] = grad_value[i] = 0.0f;
    }

    // Probabilities from scores. A query sees no later key.
    __device__ __forceinline__ void weigh(float (&s)[ROWS / 2], int row, u32 stage) const {
        if (row < own + 63) {
            int query = row + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++)
                if (key + i % 4 / 2 * 8 > query + i / 4 * 8 + i % 2) s[i] = MINUS_INFINITY;
        }
        const float* offsets = numbers(0, stage);
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
            float2 offset = *reinterpret_cast<const float2*>(offsets + 8 * j);
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[4 * j + e] =
                    exp2_fast(fmaf(s[4 * j + e], factor, -(e % 2 ? offset.y : offset.x)));
        }
    }

    // dS from dP.
    __device__ __forceinline__ void differentiate(float (&ds)[ROWS / 2],
                                                  const float (&p)[ROWS / 2], u32 stage) const {
        const float* means = numbers(1, stage);
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
            float2 mean = *reinterpret_cast<const float2*>(means + 8 * j);
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[4 * j + e] = p[4 * j + e] * (ds[4 * j + e] - (e % 2 ? mean.y : mean.x));
        }
    }

    // dS to where both warpgroups read it: 64 queries, 128 bytes, are a row of a panel.
    __device__ __forceinline__ void share(const u32 (&q)[ROWS / 4], u32 stage) const {
        int row = group * 64 + warp * 16 + lane / 4;
        u32 to = at.scores(stage) + row * 128 + lane % 4 * 4;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + half * 8 * 128 +
                                                             ((j ^ (row & 7)) << 4)),
                             "r"(q[2 * j + half])
                             : "memory");
        publish_shared();
        meet(1, 256);
    }

    // What these keys add to dQ, half of the columns by each warpgroup.
    __device__ __forceinline__ void multiply_keys(float (&add)[D / 4], u32 stage) const {
        u64 left = by_column(at.scores(stage), 0);
        u64 right = by_column(at.keys() + group * (D == 128 ? KEYS * 128 : 64), 0);
        products_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            multiply<1, 1>(add, left + k * 128, right + k * 128, k > 0);
        products_end();
    }

    __device__ __forceinline__ void hand_over(const float (&add)[D / 4], u32 stage) const {
        wait(at.sums_empty(stage), ring.parity ^ 1);
        u32 to = at.sums(stage) + group * (at.SUM / 2) + threadIdx.x % 128 * 16;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 128 * 16),
                         "f"(add[4 * i]), "f"(add[4 * i + 1]), "f"(add[4 * i + 2]),
                         "f"(add[4 * i + 3])
                         : "memory");
        publish_shared();
        arrive(at.sums_full(stage));
    }

    // The tile of queries at `row`.
    __device__ __forceinline__ void step(int row) {
        u32 stage = ring.stage, own_keys = group * 64 * 128;
        float s[ROWS / 2], ds[ROWS / 2], add[D / 4];
        wait(at.full(0, stage), ring.parity);
        products_begin();
        multiply_rows<D, KEYS, ROWS>(s, at.keys() + own_keys, at.tile(0, stage));
        products_end();
        wait(at.full(1, stage), ring.parity);
        multiply_rows<D, KEYS, ROWS>(ds, at.values() + own_keys, at.tile(1, stage));
        products_end();
        products_wait<1>();
        settle(s);
        weigh(s, row, stage);
        u32 p[ROWS / 4], q[ROWS / 4];
        pack(p, s);
        products_wait<0>();
        settle(ds);
        differentiate(ds, s, stage);
        pack(q, ds);
        products_begin();
        add_product<ROWS>(grad_value, p, at.tile(1, stage));
        products_end();
        share(q, stage);
        multiply_keys(add, stage);
        add_product<ROWS>(grad_key, q, at.tile(0, stage));
        products_end();
        products_wait<1>();
        settle(add);
        settle(grad_value);
        release(at.empty(1, stage));
        hand_over(add, stage);
        products_wait<0>();
        settle(grad_key);
        release(at.empty(0, stage));
        ring.advance();
    }
};

template <int D>
__device__ __forceinline__ void walk(const Line& line, const Problem& x, const Memory<D>& at,
                                     const u8* shared) {
    // From the first lane, so that the compiler knows it to be the same in the whole warp.
    int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;
    int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    u32 keys_parity = 0;
    Work<D> work = {at, shared, x.scale * LOG2_E, group, warp, lane};
    Stay stay(line);
    while (stay.take(line)) {
        wait(at.keys_full(), keys_parity);
        keys_parity ^= 1;
        work.begin(stay.n);
        for (u32 step = 0; step < stay.steps; step++, stay.step(line)) work.step(stay.tile * ROWS);
        work.release(at.keys_empty());
        if (stay.is_all) {
            u64 b = stay.kv_head / x.kv_heads, kv_head = stay.kv_head % x.kv_heads;
            u64 first = b * x.seq * x.kv_stride + kv_head * D + lane % 4 * 2;
            write(work.grad_key, x.scale, x.dk + first, x.kv_stride, work.key, x.seq);
            write(work.grad_value, 1.0f, x.dv + first, x.kv_stride, work.key, x.seq);
            continue;
        }
        u64 part = line.part(blockIdx.x, stay.kv_head, stay.n);
        float* left = x.parts + (part * 2 + group) * 64 * D * 2;
        leave(work.grad_key, left);
        leave(work.grad_value, left + 64 * D);
    }
}

template <int D>
__device__ __forceinline__ void backward(const TensorMap* q, const TensorMap* k, const TensorMap* v,
                                         const TensorMap* d_o, const Line& line,
                                         const Problem& x) {
    extern __shared__ __align__(1024) u8 shared[];
    Memory<D> at = {shared_address(shared)};
    if (threadIdx.x == 0) at.make_barriers();
    __syncthreads();
    await_earlier();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
        if (warp == 1 || warp == 2)
            send<D>(line, x, at, warp - 1);
        else if (threadIdx.x == 0)
            bring<D>(line, x, at, q, k, v, d_o);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        walk<D>(line, x, at, shared);
    }
}

// ---------------------------------------------------------------- instances

#define SCALARS int batch, int seq, int heads, int kv_heads, float scale
#define INSTANCE(NAME, D)                                                                          \
    KERNEL __launch_bounds__(384, 1)                                                               \
        NAME(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,             \
             const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap d_o,           \
             const float* lse, const float* delta, float* sums, float* parts, u32* turns,          \
             real* dk, real* dv, u32 kv_stride, SCALARS) {                                         \
        Line line = {batch, seq, heads, kv_heads, gridDim.x};                                      \
        Problem x = {lse, delta,     sums, parts, turns,    dk,                                    \
                     dv,  kv_stride, seq,  heads, kv_heads, scale};                                \
        backward<D>(&q, &k, &v, &d_o, line, x);                                                    \
    }

INSTANCE(attention_backward_dealt_64, 64)
INSTANCE(attention_backward_dealt_128, 128)

// ---------------------------------------------------------------- what is left

// A sum of 64 rows and 64 columns, by the 128 threads that had it in their registers or by others:
// of d[4j + e] as `multiply` says.
struct Sum {
    float4 y[8];

    __device__ __forceinline__ void add(const float* part, bool is_first) {
        const float4* from = reinterpret_cast<const float4*>(part) + threadIdx.x;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float4 z = __ldcg(from + j * 128);
            y[j] = is_first ? z : float4{y[j].x + z.x, y[j].y + z.y, y[j].z + z.z, y[j].w + z.w};
        }
    }

    // Four lanes have two columns each of every eight; then each has all of every fourth eight.
    __device__ __forceinline__ void write(float factor, real* to, u64 stride, int rows) const {
        int lane = threadIdx.x % 32, t = lane % 4, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int block = 0; block < 8; block += 4) {
                u32 pairs[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float4 z = y[block + j];
                    pairs[j] = half ? pack2(z.z * factor, z.w * factor)
                                    : pack2(z.x * factor, z.y * factor);
                }
                turn_around(pairs, t);
                if (row + half * 8 < rows)
                    *reinterpret_cast<uint4*>(to + (u64)(row + half * 8) * stride +
                                              (block + t) * 8) =
                        uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
            }
    }

    // Word j of lane t becomes word t of lane j, among four lanes.
    static __device__ __forceinline__ void turn_around(u32 (&x)[4], int t) {
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // Two words whose numbers differ in this bit.
                u32 &low = x[bit == 1 ? 2 * i : i], &high = x[(bit == 1 ? 2 * i : i) + bit];
                u32 given = __shfl_xor_sync(0xffffffffu, t & bit ? low : high, bit);
                if (t & bit)
                    low = given;
                else
                    high = given;
            }
    }
};

// Sums become gradients. A block of 128 threads has 64 rows and 64 columns: first of dK and dV
// where they have parts, then of dQ.
template <int D>
__device__ __forceinline__ void finish(const Line& line, const float* sums, const float* parts,
                                       real* dq, real* dk, real* dv, u32 q_stride, u32 kv_stride,
                                       int seq, int heads, int kv_heads, float scale) {
    constexpr u32 COLUMNS = D / 64, PANEL = 64 * 64;
    u32 index = blockIdx.x, key_panels = line.kv_heads * line.blocks * 4 * COLUMNS;
    u32 column = index % COLUMNS;
    if (index < key_panels) {
        u32 of_values = index / COLUMNS % 2, group = index / COLUMNS / 2 % 2;
        u32 place = index / COLUMNS / 4, kv_head = place / line.blocks, n = place % line.blocks;
        u32 before = kv_head * line.of_key_head();
        u32 first = line.stretch(before + line.before(n));
        u32 last = line.stretch(before + line.before(n + 1) - 1);
        if (first == last) return;
        int row = n * KEYS + group * 64;
        u64 at = ((u64)(kv_head / kv_heads) * seq + row) * kv_stride +
                 (kv_head % kv_heads) * D + column * 64;
        Sum sum;
        for (u32 stretch = first; stretch <= last; stretch++) {
            u64 part = line.part(stretch, kv_head, n);
            sum.add(parts + part * 2 * KEYS * D +
                        ((group * 2 + of_values) * COLUMNS + column) * PANEL,
                    stretch == first);
        }
        sum.write(of_values ? 1.0f : scale, (of_values ? dv : dk) + at, kv_stride, seq - row);
        return;
    }
    index -= key_panels;
    u32 tiles = line.blocks * TILES;
    u32 tile = index / COLUMNS % tiles, head = index / COLUMNS / tiles;
    int row = tile * ROWS;
    u64 at = ((u64)(head / heads) * seq + row) * q_stride + (head % heads) * D + column * 64;
    Sum sum;
    sum.add(sums + (u64)index * PANEL, true);
    sum.write(scale, dq + at, q_stride, seq - row);
}

#define FINISH(D)                                                                                  \
    KERNEL __launch_bounds__(128)                                                                  \
        attention_finish_dealt_##D(const float* sums, const float* parts, real* dq, real* dk,      \
                                   real* dv, u32 q_stride, u32 kv_stride, SCALARS,                 \
                                   u32 stretches) {                                                \
        await_earlier();                                                                           \
        Line line = {batch, seq, heads, kv_heads, stretches};                                      \
        finish<D>(line, sums, parts, dq, dk, dv, q_stride, kv_stride, seq, heads, kv_heads,        \
                  scale);                                                                          \
    }

FINISH(64)
FINISH(128)

#endif  // !REAL_F32
