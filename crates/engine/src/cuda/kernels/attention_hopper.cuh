// What the one-pass backwards of attention for sm_90a share: a block's shared memory, and a step, in
// which its two warpgroups take a tile of queries against their keys.
//
//   Sᵀ = K·Qᵀ   dPᵀ = V·dOᵀ   dV += (P∘M)ᵀ·dO   dK += dSᵀ·Q   dQ += dS·K
//
// Of a block's keys each warpgroup has 64 with their dK and dV in registers. A tile's dS goes through
// shared memory, and the two compute half each of what these keys add to dQ.

// Keys of a block, queries of a tile.
#define KEYS 128
#define ROWS 64

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
    __device__ __forceinline__ u32 cut() const { return barrier(2); }
    __device__ __forceinline__ u32 full(int side, u32 stage) const {
        return barrier(3 + side * 2 + stage);
    }
    __device__ __forceinline__ u32 empty(int side, u32 stage) const {
        return barrier(7 + side * 2 + stage);
    }
    __device__ __forceinline__ u32 sums_full(u32 stage) const { return barrier(11 + stage); }
    __device__ __forceinline__ u32 sums_empty(u32 stage) const { return barrier(13 + stage); }

    // By one thread, before the block meets.
    __device__ __forceinline__ void make_barriers() const {
        barrier_init(keys_full(), 1);
        barrier_init(keys_empty(), 8);
        barrier_init(cut(), 1);
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

// ---------------------------------------------------------------- a step

// What a warpgroup computes with its 64 of a block's keys. `Sight` says which scores do not count:
// `look` finds out while products run, `hide` is called with scores and `kept` gives the factor of a
// probability, 1 unless it drops some.
template <int D, typename Sight> struct Differentiation {
    const Memory<D>& at;
    const u8* shared;
    // Of the scores' base 2.
    float factor;
    int group, warp, lane;
    Sight sight;
    // Tiles, dS and sums for dQ are all two deep.
    Ring<2> ring;
    float grad_key[D / 2], grad_value[D / 2], s[ROWS / 2], ds[ROWS / 2];

    // What is added to dQ has the registers of dS, which is in shared memory by then.
    typedef float Add[D / 4];
    float apart[D == 128 ? 1 : D / 4];
    __device__ __forceinline__ Add& add() {
        if constexpr (D == 128)
            return ds;
        else
            return apart;
    }

    __device__ __forceinline__ u32 keys() const { return at.keys() + group * 64 * 128; }
    __device__ __forceinline__ u32 values() const { return at.values() + group * 64 * 128; }
    __device__ __forceinline__ void release(u32 barrier) const {
        if (lane == 0) arrive(barrier);
    }
    __device__ __forceinline__ const float* numbers(int side, u32 stage) const {
        return reinterpret_cast<const float*>(shared + (at.numbers(side, stage) - at.base)) +
               2 * (lane % 4);
    }

    // Probabilities from scores.
    __device__ __forceinline__ void weigh(int row, u32 stage) {
        sight.hide(s, row);
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

    // dV, and dS to where both warpgroups read it. The last products under way are those of dP.
    __device__ __forceinline__ void turn_scores(u32 stage) {
        int t = lane % 4, own_row = group * 64 + warp * 16 + lane / 4;
        u32 p[ROWS / 4];
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++)
            p[i] = pack2(s[2 * i] * sight.kept(2 * i), s[2 * i + 1] * sight.kept(2 * i + 1));
        products_begin();
        add_product<ROWS>(grad_value, p, at.tile(1, stage));
        products_end();
        products_wait<1>();
        settle(ds);
        const float* means = numbers(1, stage);
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
            float2 mean = *reinterpret_cast<const float2*>(means + 8 * j);
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[4 * j + e] = s[4 * j + e] * fmaf(ds[4 * j + e], sight.kept(4 * j + e),
                                                    -(e % 2 ? mean.y : mean.x));
        }
        // 64 queries, 128 bytes, are a row of a panel.
        u32 scores = at.scores(stage) + own_row * 128 + t * 4;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                asm volatile("st.shared.b32 [%0], %1;" ::"r"(scores + j / 8 * KEYS * 128 +
                                                             half * 8 * 128 +
                                                             ((j % 8 ^ (own_row & 7)) << 4)),
                             "r"(pack2(ds[4 * j + 2 * half], ds[4 * j + 2 * half + 1]))
                             : "memory");
        publish_shared();
        products_wait<0>();
        settle(grad_value);
        release(at.empty(1, stage));
        meet(1, 256);
    }

    // What these keys add to dQ, half of the columns by each warpgroup.
    __device__ __forceinline__ void multiply_keys(u32 stage) {
        u64 left = by_column(at.scores(stage), 0);
        u64 right = by_column(at.keys() + group * (D == 128 ? KEYS * 128 : 64), 0);
        products_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            multiply<1, 1>(add(), left + k * 128, right + k * 128, k > 0);
        products_end();
    }

    // dK: dS from where it was put, which leaves its registers to the next step.
    __device__ __forceinline__ void add_keys(u32 stage) {
        u64 left = by_row(at.scores(stage) + group * 64 * 128);
        u64 right = by_column(at.tile(0, stage), ROWS * 128);
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++)
            multiply<0, 1>(grad_key, left + (k / 4 * KEYS * 128 + k % 4 * 32) / 16, right + k * 128,
                           1);
    }

    __device__ __forceinline__ void hand_over(u32 stage, u32 parity) {
        Add& y = add();
        settle(y);
        wait(at.sums_empty(stage), parity ^ 1);
        u32 to = at.sums(stage) + group * (at.SUM / 2) + threadIdx.x % 128 * 16;
#pragma unroll
        for (int i = 0; i < D / 16; i++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 128 * 16),
                         "f"(y[4 * i]), "f"(y[4 * i + 1]), "f"(y[4 * i + 2]), "f"(y[4 * i + 3])
                         : "memory");
        publish_shared();
        arrive(at.sums_full(stage));
    }

    // Of the first step all up to its dS.
    __device__ __forceinline__ void begin(int row) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) grad_key[i] = grad_value[i] = 0.0f;
        wait(at.full(0, ring.stage), ring.parity);
        products_begin();
        multiply_rows<D, KEYS, ROWS>(s, keys(), at.tile(0, ring.stage));
        products_end();
        wait(at.full(1, ring.stage), ring.parity);
        multiply_rows<D, KEYS, ROWS>(ds, values(), at.tile(1, ring.stage));
        products_end();
        sight.look(row);
        products_wait<1>();
        settle(s);
        weigh(row, ring.stage);
        turn_scores(ring.stage);
    }

    // What is left of a step, and the next one, at `row`, up to its dS. Scores and dP of the next
    // are under way as early as there are registers for them, so that exponentials are computed
    // while products run.
    __device__ __forceinline__ void go_on(int row) {
        u32 stage = ring.stage, parity = ring.parity;
        ring.advance();
        multiply_keys(stage);
        wait(at.full(0, ring.stage), ring.parity);
        multiply_rows<D, KEYS, ROWS>(s, keys(), at.tile(0, ring.stage));
        products_end();
        add_keys(stage);
        products_end();
        products_wait<2>();
        hand_over(stage, parity);
        wait(at.full(1, ring.stage), ring.parity);
        products_begin();
        multiply_rows<D, KEYS, ROWS>(ds, values(), at.tile(1, ring.stage));
        products_end();
        sight.look(row);
        products_wait<2>();
        settle(s);
        weigh(row, ring.stage);
        products_wait<1>();
        settle(grad_key);
        release(at.empty(0, stage));
        turn_scores(ring.stage);
    }

    // What is left of the last step.
    __device__ __forceinline__ void end() {
        multiply_keys(ring.stage);
        add_keys(ring.stage);
        products_end();
        products_wait<1>();
        hand_over(ring.stage, ring.parity);
        products_wait<0>();
        settle(grad_key);
        release(at.empty(0, ring.stage));
        release(at.keys_empty());
        ring.advance();
    }
};
