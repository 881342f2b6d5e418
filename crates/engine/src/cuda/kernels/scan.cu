// The selective scan of Mamba, gated, and its gradient. Per channel with N states:
//
//   Δ_t = softplus(dt_t)            A = −exp(A_log)
//   h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t x_t B_t          h_{−1} = 0
//   s_t = ⟨h_t, C_t⟩ + D x_t        y_t = s_t · silu(z_t)
//
// A block has 32 channels of one sequence and 128 threads: four neighbouring lanes share a
// channel, each with K of its states in registers (K = 4, 8, 16 for N up to 16, 32, 64; states
// above N have A = B = C = 0 and stay zero). Time runs in tiles. While a tile is computed, the next
// one is copied into shared memory as it is (a copy through registers would wait for each load
// before the next: the two ways of loading meet in a conversion). What every lane of a channel
// needs, Δ with Δx, and B and C, is then staged as float; what one lane needs for its step is
// read, and results are left, in the copy itself. Steps past a tile's end have Δ = x = dy = 0,
// which leaves every state as it is, so loops run in groups of steps without a test.
//
// Where a batch has too few channels for the card, time is cut into segments too. The recurrence
// is linear: a segment takes the state h to exp(A ΣΔ) h + e, with e its end when started from
// zero. A first launch finds (ΣΔ, e) of every segment, then each block starts from the sum of
// those before it.

#include "common.cuh"

constexpr int THREADS = 128;
constexpr int CHANNELS = 32;
constexpr int PIECES_PER_ROW = CHANNELS / 4;
constexpr int ROWS_AT_ONCE = THREADS / PIECES_PER_ROW;
// Elements from one step of a tile to the next, such that the four steps of eight channels that a
// warp takes at once lie in different banks.
constexpr int PITCH = 36;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

typedef Pack<real, 4> Piece;

struct Scan {
    const real *x, *z, *p, *dt;
    const float *a_log, *skip;
    // Of rows of x and of z.
    u32 x_stride, z_stride;
    u32 length, inner, state, rank;
    // Steps between kept states; steps of a segment.
    u32 chunk, segment;
    // What can be loaded four elements at once: 1 for channels, 2 for B and C.
    u32 vector;

    __device__ __forceinline__ u32 first() const { return blockIdx.x * CHANNELS; }
    __device__ __forceinline__ u32 width() const { return rank + 2 * state; }
    // The row of this block's sequence at a time.
    __device__ __forceinline__ u64 row(u32 time) const { return (u64)blockIdx.z * length + time; }
    // Where a [batch, segments, inner] array has a channel.
    __device__ __forceinline__ u64 at(u32 segments, u32 index, u32 channel) const {
        return ((u64)blockIdx.z * segments + index) * inner + channel;
    }
};

#define INPUTS                                                                                   \
    const real *x, const real *z, const real *p, const real *dt, const float *a_log,             \
        const float *skip
#define SIZES                                                                                    \
    u32 x_stride, u32 z_stride, u32 length, u32 inner, u32 state, u32 rank, u32 chunk,           \
        u32 segment, u32 vector
#define SCAN                                                                                     \
    Scan {                                                                                       \
        x, z, p, dt, a_log, skip, x_stride, z_stride, length, inner, state, rank, chunk,         \
            segment, vector                                                                      \
    }

// ---------------------------------------------------------------- tiles

// Two floats of a channel and step that are always read together.
struct alignas(8) Pair { float x, y; };

// Copies a piece, or zeros, into shared memory without waiting.
__device__ __forceinline__ void copy_async(real* target, const real* source, bool inside) {
    u32 address = (u32)__cvta_generic_to_shared(target);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(source),
                 "n"((int)sizeof(Piece)), "r"(inside ? (int)sizeof(Piece) : 0)
                 : "memory");
}

// Waits for this thread's copies.
__device__ __forceinline__ void copies_arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Starts the copy of a tile [STEPS, 32 channels]. `rows` is the first step at the block's first
// channel; what lies outside is zero.
template <int STEPS>
__device__ __forceinline__ void fetch(
    real* tile, const real* rows, u32 stride, u32 steps, u32 channels, u32 vector) {
    const u32 first_step = threadIdx.x / PIECES_PER_ROW;
    const u32 column = threadIdx.x % PIECES_PER_ROW * 4;
    const real* source = rows + (u64)first_step * stride + column;
    real* target = tile + first_step * PITCH + column;
    if (vector & 1) {
#pragma unroll
        for (int i = 0; i < STEPS; i += ROWS_AT_ONCE) {
            u32 step = first_step + i;
            bool inside = step < steps && column < channels;
            if (STEPS % ROWS_AT_ONCE == 0 || step < STEPS)
                copy_async(target + i * PITCH, inside ? source + (u64)i * stride : rows, inside);
        }
    } else {
        for (int i = 0; i < STEPS && first_step + i < STEPS; i += ROWS_AT_ONCE)
            for (int j = 0; j < 4; j++) {
                bool inside = first_step + i < steps && column + j < channels;
                target[i * PITCH + j] =
                    inside ? source[(u64)i * stride + j] : from_float<real>(0.0f);
            }
    }
}

// The opposite way.
template <int STEPS>
__device__ __forceinline__ void put(
    const real* tile, real* rows, u32 stride, u32 steps, u32 channels, u32 vector) {
    const u32 first_step = threadIdx.x / PIECES_PER_ROW;
    const u32 column = threadIdx.x % PIECES_PER_ROW * 4;
    const real* source = tile + first_step * PITCH + column;
    real* target = rows + (u64)first_step * stride + column;
    if (vector & 1) {
#pragma unroll
        for (int i = 0; i < STEPS; i += ROWS_AT_ONCE)
            if (first_step + i < steps && column < channels)
                *reinterpret_cast<Piece*>(target + (u64)i * stride) =
                    *reinterpret_cast<const Piece*>(source + i * PITCH);
    } else {
        for (int i = 0; i < STEPS && first_step + i < steps; i += ROWS_AT_ONCE)
            for (int j = 0; j < 4; j++)
                if (column + j < channels) target[(u64)i * stride + j] = source[i * PITCH + j];
    }
}

// B and C of a tile [STEPS, 2, 4·K], zero where there is no state: two pieces for each thread.
template <int K, int STEPS>
__device__ __forceinline__ void fetch_projection(
    real* tile, const Scan& scan, u32 time, u32 steps) {
    const real* rows = scan.p + scan.row(time) * scan.width() + scan.rank;
    if (scan.vector & 2) {
#pragma unroll
        for (int i = 0; i < STEPS * 2 * K; i += THREADS) {
            u32 index = threadIdx.x + i;
            u32 step = index / (2 * K), part = index / K % 2, n = index % K * 4;
            bool inside = step < steps && n < scan.state;
            u64 at = (u64)step * scan.width() + part * scan.state + n;
            copy_async(tile + index * 4, inside ? rows + at : rows, inside);
        }
    } else {
        for (u32 index = threadIdx.x; index < STEPS * 8 * K; index += THREADS) {
            u32 step = index / (8 * K), part = index / (4 * K) % 2, n = index % (4 * K);
            bool inside = step < steps && n < scan.state;
            u64 at = (u64)step * scan.width() + part * scan.state + n;
            tile[index] = inside ? rows[at] : from_float<real>(0.0f);
        }
    }
}

// The same as floats, [STEPS, 2, K / 2, COPIES, 4 lanes, 2] for slot 2j + e of lane q, which is
// read in pairs. In copy c, slot k is state k ^ c: see `share`. Steps are eight floats further
// apart, so that a warp writes four of them without a conflict.
template <int K, int COPIES> struct Projection {
    static constexpr int C = 4 * K * COPIES, STEP = 2 * C + 8;

    template <int STEPS>
    static __device__ __forceinline__ void stage(const real* source, float* tile) {
#pragma unroll
        for (int i = 0; i < STEPS * 2 * K; i += THREADS) {
            u32 index = threadIdx.x + i;
            u32 step = index / (2 * K), part = index / K % 2, n = index % K * 4;
            float* target = tile + step * STEP + part * C + n % K * 4 * COPIES + n / K * 2;
            float values[4];
            load(source + index * 4, values);
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) {
                float low[2] = {values[copy], values[1 ^ copy]};
                float high[2] = {values[2 ^ copy], values[3 ^ copy]};
                store(target + copy * 8, low);
                store(target + copy * 8 + 8 * COPIES, high);
            }
        }
    }

    // B of the lane with `row` = tile + step · STEP + copy · 8 + q · 2; C from `row` + C.
    static __device__ __forceinline__ void read(const float* row, float (&slots)[K]) {
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            float pair[2];
            load(row + k * 4 * COPIES, pair);
            slots[k] = pair[0];
            slots[k + 1] = pair[1];
        }
    }
};

// ---------------------------------------------------------------- one step

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A choice that stays one instruction: written as ?:, several choices by one lane's condition
// become a branch, and the shuffles among them run once for each side of it.
__device__ __forceinline__ float choose(bool condition, float yes, float no) {
    float y;
    asm("{ .reg .pred p; setp.ne.u32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
        : "=f"(y)
        : "f"(yes), "f"(no), "r"((u32)condition));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float open_gate(float z) {
    return reciprocal(1.0f + exp2_fast(-LOG2_E * z));
}

// softplus, with the quick logarithm for 16-bit inputs; that one loses the digits of a small
// exponential, for which the series is used.
__device__ __forceinline__ float step_size(float dt) {
    if (sizeof(real) == 4) return softplus(dt);
    float e = exp2_fast(-LOG2_E * fabsf(dt));
    float series = e * fmaf(-e, fmaf(-e, fmaf(-e, 0.25f, 0.33333333f), 0.5f), 1.0f);
    return fmaxf(dt, 0.0f) + choose(e < 0.03125f, series, __logf(1.0f + e));
}

__device__ __forceinline__ float exchange(float x, int mask) {
    return __shfl_xor_sync(~0u, x, mask);
}

// Four values, one for each step, summed over the four lanes of a channel: lane q of them gets
// the sum for step q.
__device__ __forceinline__ float deal(const float* v, int q) {
    bool high = q & 2, odd = q & 1;
    float even_step = choose(high, v[2], v[0]) + exchange(choose(high, v[0], v[2]), 2);
    float odd_step = choose(high, v[3], v[1]) + exchange(choose(high, v[1], v[3]), 2);
    return choose(odd, odd_step, even_step) + exchange(choose(odd, even_step, odd_step), 1);
}

// What a thread is: lane q of a channel, its K states at n = q·K + (k ^ copy), and
// a = A·log2(e) for them.
template <int K> struct Lane {
    int q, copy, column;
    u32 channel, state;
    bool inside;
    float a[K];

    __device__ __forceinline__ Lane(const Scan& scan, int copies) {
        q = threadIdx.x % 4;
        column = threadIdx.x / 4;
        copy = column % copies;
        channel = scan.first() + column;
        state = scan.state;
        inside = channel < scan.inner;
#pragma unroll
        for (int k = 0; k < K; k++)
            a[k] = has(k) ? -expf(scan.a_log[(u64)channel * state + n(k)]) * LOG2_E : 0.0f;
    }

    __device__ __forceinline__ u32 n(int k) const { return q * K + (k ^ copy); }
    __device__ __forceinline__ bool has(int k) const { return inside && n(k) < state; }

    // The states of one channel, N floats: where they are kept in memory.
    __device__ __forceinline__ void read(const float* states, float (&h)[K]) const {
#pragma unroll
        for (int k = 0; k < K; k++) h[k] = has(k) ? states[n(k)] : 0.0f;
    }
    __device__ __forceinline__ void write(float* states, const float (&h)[K]) const {
#pragma unroll
        for (int k = 0; k < K; k++)
            if (has(k)) states[n(k)] = h[k];
    }

    // What segment `index` does to a value that passes through it: h ← exp(A ΣΔ) h + end.
    __device__ __forceinline__ void pass(
        const Scan& scan, const float* ends, const float* totals, u32 index, float (&h)[K]) const {
        if (!inside) return;
        u64 at = scan.at(gridDim.y, index, channel);
        float end[K];
        read(ends + at * state, end);
#pragma unroll
        for (int k = 0; k < K; k++) h[k] = fmaf(exp2_fast(a[k] * totals[at]), h[k], end[k]);
    }

    // h ← exp(Δ A) h + u B.
    __device__ __forceinline__ void advance(
        float delta, float u, const float (&b)[K], float (&h)[K]) const {
#pragma unroll
        for (int k = 0; k < K; k++) h[k] = fmaf(exp2_fast(delta * a[k]), h[k], u * b[k]);
    }
};

// ---------------------------------------------------------------- forward

// LOCAL: only the end of a segment that starts from zero, and ΣΔ; the grid leaves out the last
// segment. Otherwise y and, where `states` is given, the state before each chunk.
template <int K, bool LOCAL>
__device__ __forceinline__ void forward(
    const Scan& scan, real* y, float* states, float* ends, float* totals) {
    constexpr int STEPS = 128 / K, GROUP = K == 4 ? 8 : 4, TILE = STEPS * PITCH;
    constexpr int TILES = LOCAL ? 2 : 3;
    // x, dt, and z, then y: the tile at hand and the next one.
    __shared__ __align__(16) real tiles[2 * TILES * TILE];
    __shared__ __align__(16) real projection[STEPS * 8 * K];
    // Δ and Δx, each channel's written and read by its own warp.
    __shared__ __align__(16) Pair pairs[TILE];
    typedef Projection<K, 1> Projected;
    __shared__ __align__(16) float projected[STEPS * Projected::STEP];

    const Lane<K> lane(scan, 1);
    const float* own_row = projected + lane.q * 2;
    const u32 first = scan.first(), channels = scan.inner - first, vector = scan.vector;
    const u32 num_chunks = (scan.length + scan.chunk - 1) / scan.chunk;
    const u32 begin = blockIdx.y * scan.segment;
    const u32 end = min(begin + scan.segment, scan.length);
    const float skip = lane.inside ? scan.skip[lane.channel] : 0.0f;
    // A tile ends where a state is to be kept.
    auto steps_from = [&](u32 time) {
        u32 steps = min((u32)STEPS, end - time);
        return states ? min(steps, scan.chunk - time % scan.chunk) : steps;
    };
    auto fetch_all = [&](real* tile, u32 time, u32 steps) {
        u64 row = scan.row(time);
        fetch<STEPS>(
            tile, scan.x + row * scan.x_stride + first, scan.x_stride, steps, channels, vector);
        fetch<STEPS>(
            tile + TILE, scan.dt + row * scan.inner + first, scan.inner, steps, channels, vector);
        if (!LOCAL)
            fetch<STEPS>(tile + 2 * TILE, scan.z + row * scan.z_stride + first, scan.z_stride,
                         steps, channels, vector);
        fetch_projection<K, STEPS>(projection, scan, time, steps);
    };

    u32 time = begin, steps = steps_from(begin);
    real *tile = tiles, *other = tiles + TILES * TILE;
    fetch_all(tile, time, steps);
    float h[K], total = 0.0f;
#pragma unroll
    for (int k = 0; k < K; k++) h[k] = 0.0f;
    if (!LOCAL)
        for (u32 index = 0; index < blockIdx.y; index++)
            lane.pass(scan, ends, totals, index, h);

    while (time < end) {
        copies_arrive();
        __syncthreads();
#pragma unroll
        for (u32 step = lane.q; step < STEPS; step += 4) {
            u32 at = step * PITCH + lane.column;
            float delta = choose(step < steps, step_size(to_float(tile[TILE + at])), 0.0f);
            pairs[at] = Pair{delta, delta * to_float(tile[at])};
        }
        Projected::template stage<STEPS>(projection, projected);
        __syncthreads();

        u32 next = time + steps, next_steps = next < end ? steps_from(next) : 0;
        if (next < end) fetch_all(other, next, next_steps);
        if (!LOCAL && states && lane.inside && time % scan.chunk == 0)
            lane.write(states + scan.at(num_chunks, time / scan.chunk, lane.channel) * scan.state, h);

        for (u32 group = 0; group < steps; group += GROUP) {
            float s[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                u32 step = group + i;
                Pair pair = pairs[step * PITCH + lane.column];
                float b[K], c[K];
                Projected::read(own_row + step * Projected::STEP, b);
                lane.advance(pair.x, pair.y, b, h);
                if (LOCAL) {
                    total += pair.x;
                    continue;
                }
                Projected::read(own_row + step * Projected::STEP + Projected::C, c);
                s[i] = 0.0f;
#pragma unroll
                for (int k = 0; k < K; k++) s[i] = fmaf(h[k], c[k], s[i]);
            }
            // Each lane of a channel finishes one of four steps.
            if constexpr (!LOCAL) {
#pragma unroll
                for (int i = 0; i < GROUP; i += 4) {
                    u32 at = (group + i + lane.q) * PITCH + lane.column;
                    float gate = to_float(tile[2 * TILE + at]);
                    float sum = fmaf(skip, to_float(tile[at]), deal(s + i, lane.q));
                    tile[2 * TILE + at] = from_float<real>(sum * gate * open_gate(gate));
                }
            }
        }
        if (!LOCAL) {
            __syncthreads();
            put<STEPS>(tile + 2 * TILE, y + scan.row(time) * scan.inner + first, scan.inner, steps,
                       channels, vector);
        }
        time = next;
        steps = next_steps;
        real* swap = tile;
        tile = other;
        other = swap;
    }
    if (LOCAL && lane.inside) {
        u64 at = scan.at(gridDim.y + 1, blockIdx.y, lane.channel);
        lane.write(ends + at * scan.state, h);
        if (lane.q == 0) totals[at] = total;
    }
}

// ---------------------------------------------------------------- backward
//
// With g_t = ∂L/∂h_t, ds_t = dy_t silu(z_t), decay_t = exp(Δ_t A), u_t = Δ_t x_t and
// f_t = decay_t ⊙ g_t, what flows to the step before:
//
//   g_t  = ds_t C_t + f_{t+1}
//   dC_t = Σ_channels ds_t h_t              dB_t = Σ_channels g_t u_t
//   du_t = ⟨g_t, B_t⟩                       q_t  = f_t ⊙ h_{t−1}
//   dΔ_t = ⟨q_t, A⟩ + du_t x_t              ddt  = dΔ · σ(dt)
//   dx_t = du_t Δ_t + ds_t D                dz_t = dy_t s_t · σ(z)(1 + z(1 − σ(z)))
//   dA_log = A ⊙ Σ_t q_t Δ_t                dD   = Σ_t ds_t x_t
//
// Spans of time (whole chunks) run from the last to the first. A span of several tiles first runs
// forward from the kept state, leaving the state before each tile in the workspace; then its tiles
// run from the last to the first. A tile is a few parts of PART steps: it runs forward once,
// leaving the state before each part in shared memory, and then each part from the last to the
// first runs forward again, now keeping its states and decays in registers, and then backward.

// Sums `to_b` and `to_c` over the warp's eight channels. Slot k of a thread is state
// q·K + (k ^ copy), copy being the low two bits of its channel: so in the first two exchanges
// every lane keeps the same slots and gives away the same others, without choosing. In the last
// one, half the lanes get B and half get C. Result r is for state q·K + 4r + copy.
template <int K>
__device__ __forceinline__ void share(
    float (&to_b)[K], float (&to_c)[K], bool takes_c, float (&result)[K / 4]) {
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        to_b[k] += exchange(to_b[k + 1], 4);
        to_c[k] += exchange(to_c[k + 1], 4);
    }
#pragma unroll
    for (int k = 0; k < K; k += 4) {
        to_b[k] += exchange(to_b[k + 2], 8);
        to_c[k] += exchange(to_c[k + 2], 8);
        float given = exchange(choose(takes_c, to_b[k], to_c[k]), 16);
        result[k / 4] = choose(takes_c, to_c[k], to_b[k]) + given;
    }
}

// Where the gradients go, and the workspace.
struct Gradients {
    const real* dy;
    const float* states;
    real *dx, *dz, *ddt;
    // dB and dC of each block of channels [blocks, rows, 2N]; Σ q Δ [batch·segments, inner, N] and
    // dD [batch·segments, inner]; states before tiles [blocks of the grid, tiles − 1, threads, K].
    float *shares, *da, *dskip, *boundaries;
    // What a segment lets flow to the one before when nothing flows into it, and ΣΔ.
    const float *ends, *totals;
    u32 span;
};

template <int K>
__device__ __forceinline__ void backward(const Scan& scan, const Gradients& gradients) {
    constexpr int STEPS = 128 / K, PART = K == 4 ? 8 : 4, PARTS = STEPS / PART;
    constexpr int TILE = STEPS * PITCH;
    // With 16 states there are no registers for the decays.
    constexpr bool KEEPS_DECAY = K <= 8;
    extern __shared__ __align__(16) float shared[];
    // Δ and Δx, each channel's written and read by its own warp.
    Pair* pairs = reinterpret_cast<Pair*>(shared);
    typedef Projection<K, 4> Projected;
    float* projected = shared + 2 * TILE;
    // [4 warps, PART, 2, 4·K]
    float* warp_shares = projected + STEPS * Projected::STEP;
    // Before each part but the last [parts − 1, threads, K], each thread's own.
    float* h_tile = warp_shares + 4 * PART * 8 * K;
    real* projection = reinterpret_cast<real*>(h_tile + (PARTS - 1) * THREADS * K);
    // x, then dx; dt, then ddt; z, then dz; dy: the tile at hand and the next one.
    real* tiles = projection + STEPS * 8 * K;

    const Lane<K> lane(scan, 4);
    const u32 first = scan.first(), channels = scan.inner - first, vector = scan.vector;
    const u32 span = gradients.span;
    const u32 num_chunks = (scan.length + scan.chunk - 1) / scan.chunk;
    const u32 begin = blockIdx.y * scan.segment;
    const u32 end = min(begin + scan.segment, scan.length);
    const u64 rows = (u64)gridDim.z * scan.length;
    const u64 part_of_batch = (u64)blockIdx.z * gridDim.y + blockIdx.y;
    const u32 max_boundaries = (min(span, scan.length) + STEPS - 1) / STEPS - 1;
    float* boundaries = gradients.boundaries +
        ((part_of_batch * gridDim.x + blockIdx.x) * max_boundaries * THREADS + threadIdx.x) * K;
    const float skip = lane.inside ? scan.skip[lane.channel] : 0.0f;

    // The places of a block's work in order: in each span, all tiles but the last forward
    // (`turn` < tiles − 1), then all tiles in reverse.
    u32 start = begin + (end - 1 - begin) / span * span, turn = 0;
    u32 num_tiles, index, time, steps;
    bool reverse;
    auto locate = [&]() {
        u32 span_steps = min(span, scan.length - start);
        num_tiles = (span_steps + STEPS - 1) / STEPS;
        reverse = turn + 1 >= num_tiles;
        index = reverse ? 2 * (num_tiles - 1) - turn : turn;
        time = start + index * STEPS;
        steps = min((u32)STEPS, span_steps - index * STEPS);
    };
    auto fetch_all = [&](real* tile) {
        u64 row = scan.row(time), at = row * scan.inner + first;
        fetch<STEPS>(
            tile, scan.x + row * scan.x_stride + first, scan.x_stride, steps, channels, vector);
        fetch<STEPS>(tile + TILE, scan.dt + at, scan.inner, steps, channels, vector);
        if (reverse) {
            fetch<STEPS>(tile + 2 * TILE, scan.z + row * scan.z_stride + first, scan.z_stride,
                         steps, channels, vector);
            fetch<STEPS>(tile + 3 * TILE, gradients.dy + at, scan.inner, steps, channels, vector);
        }
        fetch_projection<K, STEPS>(projection, scan, time, steps);
    };

    real *tile = tiles, *other = tiles + 4 * TILE;
    locate();
    fetch_all(tile);
    float h[K], flow[K], da[K], dskip = 0.0f;
#pragma unroll
    for (int k = 0; k < K; k++) flow[k] = da[k] = 0.0f;
    for (u32 after = gridDim.y - 1; after > blockIdx.y; after--)
        lane.pass(scan, gradients.ends, gradients.totals, after, flow);

    for (bool more = true; more;) {
        if (index == 0) {
            u64 at = scan.at(num_chunks, start / scan.chunk, lane.inside ? lane.channel : 0);
            lane.read(gradients.states + at * scan.state, h);
        } else {
            load(boundaries + (u64)(index - 1) * THREADS * K, h);
        }
        copies_arrive();
        __syncthreads();
#pragma unroll
        for (u32 step = lane.q; step < STEPS; step += 4) {
            u32 at = step * PITCH + lane.column;
            float delta = choose(step < steps, step_size(to_float(tile[TILE + at])), 0.0f);
            pairs[at] = Pair{delta, delta * to_float(tile[at])};
        }
        Projected::template stage<STEPS>(projection, projected);
        __syncthreads();

        // This place, and on to fetch the next one.
        const u32 now = time, now_index = index, now_steps = steps;
        const bool now_reverse = reverse;
        real* const now_tile = tile;
        if (++turn > 2 * (num_tiles - 1)) {
            more = start > begin;
            start -= span;
            turn = 0;
        }
        if (more) {
            locate();
            fetch_all(other);
        }
        tile = other;
        other = now_tile;

        const Pair* pair_column = pairs + lane.column;
        const float* b_row = projected + lane.copy * 8 + lane.q * 2;
        const float* c_row = b_row + Projected::C;
        float* h_row = h_tile + threadIdx.x * K;
        auto advance_part = [&](u32 begin_step) {
#pragma unroll
            for (int i = 0; i < PART; i++) {
                Pair pair = pair_column[(begin_step + i) * PITCH];
                float b[K];
                Projected::read(b_row + (begin_step + i) * Projected::STEP, b);
                lane.advance(pair.x, pair.y, b, h);
            }
        };
        if (!now_reverse) {
            for (u32 step = 0; step < now_steps; step += PART) advance_part(step);
            store(boundaries + (u64)now_index * THREADS * K, h);
            continue;
        }

        const int last_part = (now_steps - 1) / PART;
        for (int part = 0; part < last_part; part++) {
            store(h_row + part * THREADS * K, h);
            advance_part(part * PART);
        }
        const bool takes_c = lane.column & 4;
        float* share_row = warp_shares + threadIdx.x / 32 * PART * 8 * K +
            (takes_c ? 4 * K : 0) + lane.q * K + lane.copy;
        for (int part = last_part; part >= 0; part--) {
            const u32 begin_step = part * PART;
            if (part < last_part) load(h_row + part * THREADS * K, h);
            // Each lane of a channel starts and finishes one of four steps.
            const u32 own = (begin_step + lane.q) * PITCH + lane.column;
            float own_ds[PART / 4], own_dz[PART / 4], s[PART];
#pragma unroll
            for (int i = 0; i < PART / 4; i++) {
                float gate = to_float(now_tile[2 * TILE + own + 4 * i * PITCH]);
                float dy = to_float(now_tile[3 * TILE + own + 4 * i * PITCH]);
                float open = open_gate(gate);
                own_ds[i] = dy * gate * open;
                own_dz[i] = dy * open * fmaf(gate, 1.0f - open, 1.0f);
            }

            float before[PART][K], decay[PART][K];
#pragma unroll
            for (int i = 0; i < PART; i++) {
                Pair pair = pair_column[(begin_step + i) * PITCH];
                float b[K], c[K];
                Projected::read(b_row + (begin_step + i) * Projected::STEP, b);
                Projected::read(c_row + (begin_step + i) * Projected::STEP, c);
                s[i] = 0.0f;
#pragma unroll
                for (int k = 0; k < K; k++) {
                    before[i][k] = h[k];
                    decay[i][k] = exp2_fast(pair.x * lane.a[k]);
                    h[k] = fmaf(decay[i][k], h[k], pair.y * b[k]);
                    s[i] = fmaf(h[k], c[k], s[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < PART / 4; i++) {
                u32 at = own + 4 * i * PITCH;
                float sum = fmaf(skip, to_float(now_tile[at]), deal(s + 4 * i, lane.q));
                now_tile[2 * TILE + at] = from_float<real>(own_dz[i] * sum);
            }

            float du[PART], ddelta[PART];
#pragma unroll
            for (int i = PART - 1; i >= 0; i--) {
                u32 step = begin_step + i;
                Pair pair = pair_column[step * PITCH];
                float ds = __shfl_sync(~0u, own_ds[i / 4], (threadIdx.x & 28) + i % 4);
                float b[K], c[K], to_b[K], to_c[K], result[K / 4];
                Projected::read(b_row + step * Projected::STEP, b);
                Projected::read(c_row + step * Projected::STEP, c);
                du[i] = ddelta[i] = 0.0f;
#pragma unroll
                for (int k = 0; k < K; k++) {
                    float g = fmaf(ds, c[k], flow[k]);
                    du[i] = fmaf(g, b[k], du[i]);
                    to_b[k] = g * pair.y;
                    to_c[k] = ds * h[k];
                    flow[k] = g * (KEEPS_DECAY ? decay[i][k] : exp2_fast(pair.x * lane.a[k]));
                    float q = flow[k] * before[i][k];
                    ddelta[i] = fmaf(q, lane.a[k], ddelta[i]);
                    da[k] = fmaf(q, pair.x, da[k]);
                    h[k] = before[i][k];
                }
                share(to_b, to_c, takes_c, result);
#pragma unroll
                for (int r = 0; r < K / 4; r++) share_row[i * 8 * K + 4 * r] = result[r];
            }
#pragma unroll
            for (int i = 0; i < PART / 4; i++) {
                u32 at = own + 4 * i * PITCH;
                float du_sum = deal(du + 4 * i, lane.q);
                float ddelta_sum = deal(ddelta + 4 * i, lane.q) * LN_2;
                float value = to_float(now_tile[at]);
                float slope = open_gate(to_float(now_tile[TILE + at]));
                dskip = fmaf(own_ds[i], value, dskip);
                now_tile[at] = from_float<real>(fmaf(du_sum, pairs[at].x, own_ds[i] * skip));
                now_tile[TILE + at] = from_float<real>(slope * fmaf(du_sum, value, ddelta_sum));
            }
            __syncthreads();

            // dB and dC of the part, over the block.
            float* shares = gradients.shares +
                (blockIdx.x * rows + scan.row(now + begin_step)) * 2 * scan.state;
#pragma unroll
            for (int i = 0; i < PART * 8 * K / THREADS; i++) {
                u32 element = threadIdx.x + i * THREADS;
                u32 step = element / (8 * K), which = element / (4 * K) % 2, n = element % (4 * K);
                float sum = 0.0f;
#pragma unroll
                for (int warp = 0; warp < 4; warp++)
                    sum += warp_shares[warp * PART * 8 * K + element];
                if (begin_step + step < now_steps && n < scan.state)
                    shares[(u64)step * 2 * scan.state + which * scan.state + n] = sum;
            }
            __syncthreads();
        }

        u64 row = scan.row(now);
        put<STEPS>(now_tile, gradients.dx + row * scan.x_stride + first, scan.x_stride, now_steps,
                   channels, vector);
        put<STEPS>(now_tile + TILE, gradients.ddt + row * scan.inner + first, scan.inner,
                   now_steps, channels, vector);
        put<STEPS>(now_tile + 2 * TILE, gradients.dz + row * scan.z_stride + first, scan.z_stride,
                   now_steps, channels, vector);
    }

    dskip += exchange(dskip, 1);
    dskip += exchange(dskip, 2);
    if (lane.inside) {
        u64 at = part_of_batch * scan.inner + lane.channel;
        lane.write(gradients.da + at * scan.state, da);
        if (lane.q == 0) gradients.dskip[at] = dskip;
    }
}

// What flows out of a segment at its start when nothing flows in at its end, and ΣΔ. The grid
// leaves out the first segment.
template <int K>
__device__ __forceinline__ void backward_local(
    const Scan& scan, const real* dy_rows, float* ends, float* totals) {
    constexpr int STEPS = 128 / K, TILE = STEPS * PITCH;
    // dt, z and dy: the tile at hand and the next one.
    __shared__ __align__(16) real tiles[6 * TILE];
    __shared__ __align__(16) real projection[STEPS * 8 * K];
    // Δ and ds.
    __shared__ __align__(16) Pair pairs[TILE];
    typedef Projection<K, 1> Projected;
    __shared__ __align__(16) float projected[STEPS * Projected::STEP];

    const Lane<K> lane(scan, 1);
    const float* own_row = projected + lane.q * 2;
    const u32 first = scan.first(), channels = scan.inner - first, vector = scan.vector;
    const u32 begin = (blockIdx.y + 1) * scan.segment;
    const u32 end = min(begin + scan.segment, scan.length);
    auto fetch_all = [&](real* tile, u32 time, u32 steps) {
        u64 row = scan.row(time), at = row * scan.inner + first;
        fetch<STEPS>(tile, scan.dt + at, scan.inner, steps, channels, vector);
        fetch<STEPS>(tile + TILE, scan.z + row * scan.z_stride + first, scan.z_stride, steps,
                     channels, vector);
        fetch<STEPS>(tile + 2 * TILE, dy_rows + at, scan.inner, steps, channels, vector);
        fetch_projection<K, STEPS>(projection, scan, time, steps);
    };

    real *tile = tiles, *other = tiles + 3 * TILE;
    u32 steps = min((u32)STEPS, end - begin), time = end - steps;
    fetch_all(tile, time, steps);
    float flow[K], total = 0.0f;
#pragma unroll
    for (int k = 0; k < K; k++) flow[k] = 0.0f;
    for (;;) {
        copies_arrive();
        __syncthreads();
#pragma unroll
        for (u32 step = lane.q; step < STEPS; step += 4) {
            u32 at = step * PITCH + lane.column;
            float delta = choose(step < steps, step_size(to_float(tile[at])), 0.0f);
            float gate = to_float(tile[TILE + at]);
            pairs[at] = Pair{delta, to_float(tile[2 * TILE + at]) * gate * open_gate(gate)};
        }
        Projected::template stage<STEPS>(projection, projected);
        __syncthreads();
        const u32 next_steps = min((u32)STEPS, time - begin), next = time - next_steps;
        if (next_steps > 0) fetch_all(other, next, next_steps);
        for (int group = (int)(steps - 1) / 4 * 4; group >= 0; group -= 4) {
#pragma unroll
            for (int i = 3; i >= 0; i--) {
                u32 step = group + i;
                Pair pair = pairs[step * PITCH + lane.column];
                float c[K];
                Projected::read(own_row + step * Projected::STEP + Projected::C, c);
                total += pair.x;
#pragma unroll
                for (int k = 0; k < K; k++)
                    flow[k] = exp2_fast(pair.x * lane.a[k]) * fmaf(pair.y, c[k], flow[k]);
            }
        }
        if (next_steps == 0) break;
        time = next;
        steps = next_steps;
        real* swap = tile;
        tile = other;
        other = swap;
    }
    if (lane.inside) {
        u64 at = scan.at(gridDim.y + 1, blockIdx.y + 1, lane.channel);
        lane.write(ends + at * scan.state, flow);
        if (lane.q == 0) totals[at] = total;
    }
}

// ---------------------------------------------------------------- kernels

// Grid: blocks of 32 channels, segments, sequences; 128 threads. In the launches for segments'
// ends there is one segment less.
#define SCAN_KERNELS(K)                                                                          \
    KERNEL __launch_bounds__(THREADS, 4)                                                         \
        scan_forward_local_##K(INPUTS, float* ends, float* totals, SIZES) {                      \
        forward<K, true>(SCAN, nullptr, nullptr, ends, totals);                                  \
    }                                                                                            \
    KERNEL __launch_bounds__(THREADS, 4) scan_forward_##K(                                       \
        INPUTS, real* y, float* states, float* ends, float* totals, SIZES) {                     \
        forward<K, false>(SCAN, y, states, ends, totals);                                        \
    }                                                                                            \
    KERNEL __launch_bounds__(THREADS, 4) scan_backward_local_##K(                                \
        const real* dy, INPUTS, float* ends, float* totals, SIZES) {                             \
        backward_local<K>(SCAN, dy, ends, totals);                                               \
    }                                                                                            \
    KERNEL __launch_bounds__(THREADS, K == 4 ? 4 : 2) scan_backward_##K(                         \
        const real* dy, INPUTS, const float* states, real* dx, real* dz, real* ddt,              \
        float* shares, float* da, float* dskip, float* boundaries, const float* ends,            \
        const float* totals, u32 span, SIZES) {                                                  \
        backward<K>(SCAN, Gradients{dy, states, dx, dz, ddt, shares, da, dskip, boundaries,      \
                                    ends, totals, span});                                        \
    }

SCAN_KERNELS(4)
SCAN_KERNELS(8)
SCAN_KERNELS(16)

// dp [rows, rank + 2N]: the blocks' shares of dB and dC in order, zero in the columns before. One
// thread for each element.
KERNEL scan_backward_projection(
    const float* shares, real* dp, u32 blocks, u32 rows, u32 state, u32 rank) {
    u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u32 width = rank + 2 * state;
    if (index >= (u64)rows * width) return;
    u64 row = index / width;
    u32 column = index % width;
    float sum = 0.0f;
    if (column >= rank) {
        const float* share = shares + row * 2 * state + column - rank;
#pragma unroll 8
        for (u32 block = 0; block < blocks; block++) sum += share[(u64)block * rows * 2 * state];
    }
    dp[index] = from_float<real>(sum);
}

// dA_log [inner, N] and dD [inner] from the parts of each sequence and segment in order. One
// thread for each element of both.
KERNEL scan_backward_parameters(
    const float* da, const float* dskip, const float* a_log, float* da_log, float* dskip_sum,
    u32 parts, u32 inner, u32 state, u32 adds_a_log, u32 adds_skip) {
    u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 elements = (u64)inner * state;
    bool is_skip = index >= elements;
    if (is_skip) index -= elements;
    if (is_skip && index >= inner) return;
    const float* source = (is_skip ? dskip : da) + index;
    u64 stride = is_skip ? inner : elements;
    float sum = 0.0f;
#pragma unroll 8
    for (u32 part = 0; part < parts; part++) sum += source[part * stride];
    if (is_skip) {
        dskip_sum[index] = adds_skip ? dskip_sum[index] + sum : sum;
    } else {
        sum *= -expf(a_log[index]);
        da_log[index] = adds_a_log ? da_log[index] + sum : sum;
    }
}
