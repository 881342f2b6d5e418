// What the selective scan of Mamba, gated, and its gradient have in common. Per channel with N
// states:
//
//   Δ_t = softplus(dt_t)            A = −exp(A_log)
//   h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t x_t B_t          h_{−1} = 0
//   s_t = ⟨h_t, C_t⟩ + D x_t        y_t = s_t · silu(z_t)
//
// A block has 32 channels of one sequence and 128 threads. Eight lanes of a warp, those with the
// same lane % 4, hold the states of two channels, of each S (S = 2, 4, 8 for N up to 16, 32, 64;
// states above N have A = B = C = 0 and stay zero): what is read of B and C serves both, and what
// they give to the gradients of B and C is added where it is. Time runs in tiles. While a tile is
// computed, the next one is copied into shared memory as it is (a copy through registers would wait
// for each load before the next: the two ways of loading meet in a conversion). What every lane of
// a channel needs, Δ with Δx, and B and C, is then staged as float; what one lane needs for its
// step is read, and results are left, in the copy itself. Steps past a tile's end have
// Δ = x = dy = 0, which leaves every state as it is, so loops run in groups of steps without a test.
//
// The compiler moves no load of shared memory before a store, which may be to the same place. So
// what a stretch of code reads there it reads first, and what it writes it writes last.
//
// Where a batch has too few channels for the card, time is cut into segments too. The recurrence
// is linear: a segment takes the state h to exp(A ΣΔ) h + e, with e its end when started from
// zero. A first launch finds (ΣΔ, e) of every segment, then each block starts from the sum of
// those before it.

#include "common.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int CHANNELS = 32;
// Elements from one step of a tile to the next, such that the four steps of eight channels that a
// warp takes at once lie in different banks.
constexpr int PITCH = 36;
// Channels of a lane.
constexpr int SLOTS = 2;

// Steps of a tile.
__device__ constexpr int tile_steps(int s) { return 64 / s; }

typedef Pack<real, 4> Piece;

struct Scan {
    const real *x, *z, *p, *dt;
    const float *a_log, *skip;
    // Of rows of x and of z.
    u32 x_stride, z_stride;
    u32 length, inner, state, rank;
    // Steps between kept states; steps of a segment.
    u32 chunk, segment;
    // Whether all can be copied four elements at once.
    u32 fours;

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
        u32 segment, u32 fours
#define SCAN                                                                                     \
    Scan {                                                                                       \
        x, z, p, dt, a_log, skip, x_stride, z_stride, length, inner, state, rank, chunk,         \
            segment, fours                                                                       \
    }

// ---------------------------------------------------------------- tiles

// Two floats of a channel and step that are always read together.
struct alignas(8) Pair { float x, y; };
// Pairs from one step to the next.
constexpr int PAIRS = 36;

// Copies a piece, or zeros, into shared memory without waiting.
__device__ __forceinline__ void copy_async(real* target, const real* source, bool inside) {
    u32 address = (u32)__cvta_generic_to_shared(target);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(source),
                 "n"((int)sizeof(Piece)), "r"(inside ? (int)sizeof(Piece) : 0)
                 : "memory");
}

// Waits for this thread's copies.
__device__ __forceinline__ void copies_arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Where a thread begins in rows that follow each other in time.
template <typename T> struct Track {
    T* origin;
    u32 stride;

    __device__ __forceinline__ Track(T* from, u32 stride) : stride(stride) {
        // One value: otherwise its sum is made anew for every tile.
        asm volatile("mov.u64 %0, %1;" : "=l"(origin) : "l"(from));
    }
    __device__ __forceinline__ T* at(u32 time) const {
        T* row = origin + (u64)time * stride;
        // What `mov` has hidden.
        __builtin_assume(__isGlobal(row));
        return row;
    }
};

// What a thread copies of tiles [STEPS, 32 channels]: four channels of each TURN-th step, at once
// where FOURS.
template <int STEPS> struct Share {
    static constexpr int TURN = THREADS / (CHANNELS / 4);
    u32 step, column;
    // How many of these channels there are.
    u32 channels;

    __device__ __forceinline__ explicit Share(const Scan& scan) {
        step = threadIdx.x / (CHANNELS / 4);
        column = threadIdx.x % (CHANNELS / 4) * 4;
        u32 channel = scan.first() + column;
        channels = channel < scan.inner ? scan.inner - channel : 0;
    }
    template <typename T>
    __device__ __forceinline__ Track<T> track(const Scan& scan, T* rows, u32 stride) const {
        return Track<T>(rows + (scan.row(0) + step) * stride + scan.first() + column, stride);
    }
    // Starts the copy into a tile of so many steps; what lies outside is zero.
    template <bool FOURS>
    __device__ __forceinline__ void fetch(
        const Track<const real>& track, real* tile, u32 time, u32 steps) const {
        const real* source = track.at(time);
        real* target = tile + step * PITCH + column;
        if constexpr (FOURS) {
            u32 there = channels ? steps : 0;
#pragma unroll
            for (int i = 0; i < STEPS; i += TURN)
                if (STEPS % TURN == 0 || step + i < STEPS)
                    copy_async(target + i * PITCH, source + (u64)i * track.stride,
                               step + i < there);
        } else {
            for (int i = 0; i < STEPS && step + i < STEPS; i += TURN)
                for (int j = 0; j < 4; j++)
                    target[i * PITCH + j] = step + i < steps && j < channels
                        ? source[(u64)i * track.stride + j]
                        : from_float<real>(0.0f);
        }
    }
    // The opposite way.
    template <bool FOURS>
    __device__ __forceinline__ void put(
        const Track<real>& track, const real* tile, u32 time, u32 steps) const {
        const real* source = tile + step * PITCH + column;
        real* target = track.at(time);
        if constexpr (FOURS) {
            u32 there = channels ? steps : 0;
#pragma unroll
            for (int i = 0; i < STEPS; i += TURN)
                if (step + i < there)
                    *reinterpret_cast<Piece*>(target + (u64)i * track.stride) =
                        *reinterpret_cast<const Piece*>(source + i * PITCH);
        } else {
            for (int i = 0; i < STEPS && step + i < steps; i += TURN)
                for (int j = 0; j < 4 && j < channels; j++)
                    target[(u64)i * track.stride + j] = source[i * PITCH + j];
        }
    }
};

// B and C of a tile: as they come [STEPS, 2, 8·S], zero where there is no state; then as floats,
// such that a lane reads in fours: of a step, [8 lanes, B then C, 2] for S = 2, and
// [B then C, S / 4, 8 lanes, 4] above.
template <int S> struct Projection {
    static constexpr int ELEMENTS = tile_steps(S) * 16 * S, PIECES = ELEMENTS / 4 / THREADS;
    static constexpr int STEP = 16 * S + 4, FLOATS = tile_steps(S) * STEP;
    static constexpr int C = S == 2 ? 2 : 8 * S;
    // A thread's pieces are of each TURN-th step.
    static constexpr int TURN = THREADS / (4 * S);
    u32 step, part, n, state;
    Track<const real> track;

    __device__ __forceinline__ explicit Projection(const Scan& scan)
        : step(threadIdx.x / (4 * S)), part(threadIdx.x / (2 * S) % 2),
          n(threadIdx.x % (2 * S) * 4), state(scan.state),
          track(scan.p + (scan.row(0) + step) * scan.width() + scan.rank + part * state + n,
                scan.width()) {}

    template <bool FOURS>
    __device__ __forceinline__ void fetch(real* tile, u32 time, u32 steps) const {
        const real* source = track.at(time);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            real* target = tile + (threadIdx.x + i * THREADS) * 4;
            const real* from = source + (u64)(i * TURN) * track.stride;
            if constexpr (FOURS) {
                copy_async(target, from, n < state && step + i * TURN < steps);
            } else {
                for (int j = 0; j < 4; j++)
                    target[j] = n + j < state && step + i * TURN < steps ? from[j]
                                                                         : from_float<real>(0.0f);
            }
        }
    }

    // The copy into registers, and from there to floats.
    __device__ __forceinline__ void take(const real* copy, float (&values)[4 * PIECES]) const {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            float four[4];
            load(copy + (threadIdx.x + i * THREADS) * 4, four);
#pragma unroll
            for (int e = 0; e < 4; e++) values[4 * i + e] = four[e];
        }
    }
    __device__ __forceinline__ void stage(const float (&values)[4 * PIECES], float* tile) const {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const float* v = values + 4 * i;
            float* target = tile + (step + i * TURN) * STEP + part * C;
            if constexpr (S == 2) {
                float low[2] = {v[0], v[1]}, high[2] = {v[2], v[3]};
                store(target + n * 2, low);
                store(target + n * 2 + 4, high);
            } else {
                float four[4] = {v[0], v[1], v[2], v[3]};
                store(target + n % S * 8 + n / S * 4, four);
            }
        }
    }

    // Where a lane reads the first step; later ones from + STEP on.
    static __device__ __forceinline__ const float* row(const float* tile) {
        return tile + threadIdx.x % 32 / 4 * 4;
    }
    static __device__ __forceinline__ void read_b(const float* row, float (&b)[S]) {
        if constexpr (S == 2) {
            load(row, b);
        } else {
#pragma unroll
            for (int s = 0; s < S; s += 4) {
                float four[4];
                load(row + s * 8, four);
#pragma unroll
                for (int e = 0; e < 4; e++) b[s + e] = four[e];
            }
        }
    }
    static __device__ __forceinline__ void read_c(const float* row, float (&c)[S]) {
        read_b(row + C, c);
    }
    static __device__ __forceinline__ void read(const float* row, float (&b)[S], float (&c)[S]) {
        if constexpr (S == 2) {
            float four[4];
            load(row, four);
            b[0] = four[0], b[1] = four[1], c[0] = four[2], c[1] = four[3];
        } else {
            read_b(row, b);
            read_c(row, c);
        }
    }
};

// Starts the copies of a tile: of the first `count` tracks, each to a tile of its own, and of B and C.
template <bool FOURS, int S, int N>
__device__ __forceinline__ void fetch_by(
    const Share<tile_steps(S)>& share, const Projection<S>& projection,
    const Track<const real> (&tracks)[N], int count, real* tile, real* copied, u32 time, u32 steps) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i < count)
            share.template fetch<FOURS>(tracks[i], tile + i * tile_steps(S) * PITCH, time, steps);
    projection.template fetch<FOURS>(copied, time, steps);
}
template <int S, int N>
__device__ __forceinline__ void fetch(
    const Scan& scan, const Share<tile_steps(S)>& share, const Projection<S>& projection,
    const Track<const real> (&tracks)[N], int count, real* tile, real* copied, u32 time, u32 steps) {
    if (scan.fours)
        fetch_by<true, S>(share, projection, tracks, count, tile, copied, time, steps);
    else
        fetch_by<false, S>(share, projection, tracks, count, tile, copied, time, steps);
}

// The opposite way.
template <int STEPS, int N>
__device__ __forceinline__ void put(
    const Scan& scan, const Share<STEPS>& share, const Track<real> (&tracks)[N], const real* tile,
    u32 time, u32 steps) {
#pragma unroll
    for (int i = 0; i < N; i++)
        if (scan.fours)
            share.template put<true>(tracks[i], tile + i * STEPS * PITCH, time, steps);
        else
            share.template put<false>(tracks[i], tile + i * STEPS * PITCH, time, steps);
}

// ---------------------------------------------------------------- one step

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

// softplus(dt) = max(dt, 0) + ln(1 + e), e = exp(−|dt|). For 16-bit inputs ln(1 + e) / e is a
// polynomial on [0, 1], to 9e-6 of it: fewer instructions than the quick logarithm, which loses
// the digits of a small e.
__device__ __forceinline__ float step_size(float dt) {
    if (sizeof(real) == 4) return softplus(dt);
    float e = exp2_fast(-LOG2_E * fabsf(dt)), ratio = -0.0238691159f;
    ratio = fmaf(ratio, e, 0.101222217f);
    ratio = fmaf(ratio, e, -0.210048661f);
    ratio = fmaf(ratio, e, 0.325206697f);
    ratio = fmaf(ratio, e, -0.499361366f);
    ratio = fmaf(ratio, e, 0.999991596f);
    return fmaf(e, ratio, fmaxf(dt, 0.0f));
}

__device__ __forceinline__ float exchange(float x, int mask) {
    return __shfl_xor_sync(~0u, x, mask);
}

// One value for each of four steps, summed over the four lanes that differ in the bits `high` and
// `low`: lane q of them gets the sum for step q.
__device__ __forceinline__ float deal(const float* v, int q, int high, int low) {
    bool upper = q & 2, odd = q & 1;
    float even_step = choose(upper, v[2], v[0]) + exchange(choose(upper, v[0], v[2]), high);
    float odd_step = choose(upper, v[3], v[1]) + exchange(choose(upper, v[1], v[3]), high);
    return choose(odd, odd_step, even_step) + exchange(choose(odd, even_step, odd_step), low);
}

// What a thread is. Of each of its two channels it has S states, n = group·S + s, and
// a = A·log2(e) for them; the arrays have [SLOTS, S]. The first channel is its own: four lanes have
// the same one, each starting and finishing every fourth step, from `turn` on. What a lane has of
// its second channel, the lane with the bit SWAP flipped has of its own.
template <int S> struct Lane {
    static constexpr int K = SLOTS * S, SWAP = 4;
    int group, turn;
    u32 first, inner, state;
    float a[K];

    __device__ __forceinline__ explicit Lane(const Scan& scan) {
        group = threadIdx.x % 32 / 4;
        turn = threadIdx.x % 32 / 8;
        first = scan.first();
        inner = scan.inner;
        state = scan.state;
#pragma unroll
        for (int k = 0; k < K; k++)
            a[k] = has(k) ? -expf(scan.a_log[(u64)channel(k / S) * state + n(k)]) * LOG2_E : 0.0f;
    }

    __device__ __forceinline__ int column(int slot) const {
        int low = threadIdx.x % 8;
        return threadIdx.x / 32 * 8 + (slot ? low ^ SWAP : low);
    }
    __device__ __forceinline__ u32 channel(int slot) const { return first + column(slot); }
    __device__ __forceinline__ bool inside(int slot) const { return channel(slot) < inner; }
    __device__ __forceinline__ u32 n(int k) const { return group * S + k % S; }
    __device__ __forceinline__ bool has(int k) const { return inside(k / S) && n(k) < state; }

    // The states of the channels, of which `states` has the block's first: where they are kept in
    // memory.
    __device__ __forceinline__ void read(const float* states, float (&h)[K]) const {
#pragma unroll
        for (int k = 0; k < K; k++)
            h[k] = has(k) ? states[column(k / S) * state + n(k)] : 0.0f;
    }
    __device__ __forceinline__ void write(float* states, const float (&h)[K]) const {
        if (state == 8 * S) {
#pragma unroll
            for (int j = 0; j < SLOTS; j++) {
                float of_channel[S];
#pragma unroll
                for (int s = 0; s < S; s++) of_channel[s] = h[j * S + s];
                if (inside(j)) store(states + column(j) * 8 * S + group * S, of_channel);
            }
        } else {
#pragma unroll
            for (int k = 0; k < K; k++)
                if (has(k)) states[column(k / S) * state + n(k)] = h[k];
        }
    }

    // What segment `index` does to a value that passes through it: h ← exp(A ΣΔ) h + end.
    __device__ __forceinline__ void pass(
        const Scan& scan, const float* ends, const float* totals, u32 index, float (&h)[K]) const {
        u64 at = scan.at(gridDim.y, index, first);
        float end[K];
        read(ends + at * state, end);
#pragma unroll
        for (int k = 0; k < K; k++) {
            float total = inside(k / S) ? totals[at + column(k / S)] : 0.0f;
            h[k] = fmaf(exp2_fast(a[k] * total), h[k], end[k]);
        }
    }
    // What flows out of a segment, and ΣΔ for each channel, as `pass` reads it.
    __device__ __forceinline__ void leave(const Scan& scan, float* ends, float* totals, u32 index,
                                          const float (&h)[K], const float (&total)[SLOTS]) const {
        u64 at = scan.at(gridDim.y + 1, index, first);
        write(ends + at * state, h);
#pragma unroll
        for (int j = 0; j < SLOTS; j++)
            if (group == 0 && inside(j)) totals[at + column(j)] = total[j];
    }

    // Two floats of a step for each channel; `row` is the step's first channel.
    __device__ __forceinline__ void read_pairs(const Pair* row, Pair (&pairs)[SLOTS]) const {
#pragma unroll
        for (int j = 0; j < SLOTS; j++) pairs[j] = row[column(j)];
    }

    // h ← exp(Δ A) h + u B.
    __device__ __forceinline__ void advance(
        const Pair (&pairs)[SLOTS], const float (&b)[S], float (&h)[K]) const {
#pragma unroll
        for (int k = 0; k < K; k++)
            h[k] = fmaf(exp2_fast(pairs[k / S].x * a[k]), h[k], pairs[k / S].y * b[k % S]);
    }

    // The lane's part of a sum over its own channel's states, with that of the lane that has the
    // channel as its second.
    __device__ __forceinline__ float joined(const float (&parts)[SLOTS]) const {
        return parts[0] + exchange(parts[1], SWAP);
    }
    // Four such parts, one for each step, summed over the lanes that have this channel: the sum
    // for step `turn`.
    __device__ __forceinline__ float deal(const float* v) const {
        bool high = turn & 2, odd = turn & 1;
        float even_step = choose(high, v[2], v[0]) + exchange(choose(high, v[0], v[2]), 16);
        float odd_step = choose(high, v[3], v[1]) + exchange(choose(high, v[1], v[3]), 16);
        return choose(odd, odd_step, even_step) + exchange(choose(odd, even_step, odd_step), 8);
    }
};

// Stages Δ of a tile with what `second` makes of it, four channels at once, at each place. What is
// read and written of a channel is its own warp's.
template <int S, typename Second>
__device__ __forceinline__ void stage(const real* dt, Pair* pairs, u32 steps, Second second) {
    constexpr int QUADS = 2 * tile_steps(S), COUNT = QUADS < 32 ? 1 : QUADS / 32;
    const u32 lane = threadIdx.x % 32, column = threadIdx.x / 32 * 8 + lane % 2 * 4;
    if (QUADS < 32 && lane >= QUADS) return;
    float delta[COUNT][4], other[COUNT][4];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        u32 step = lane / 2 + 16 * i, at = step * PITCH + column;
        load(dt + at, delta[i]);
#pragma unroll
        for (int j = 0; j < 4; j++)
            delta[i][j] = choose(step < steps, step_size(delta[i][j]), 0.0f);
        second(at, delta[i], other[i]);
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float* target = &pairs[(lane / 2 + 16 * i) * PAIRS + column].x;
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            float two[4] = {delta[i][j], other[i][j], delta[i][j + 1], other[i][j + 1]};
            store(target + 2 * j, two);
        }
    }
}
