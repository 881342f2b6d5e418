// What the selective scan of Mamba, gated, and its gradient have in common. Per channel with N
// states:
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

// The same as floats, [STEPS, 2, K / 4, COPIES, 4 lanes, 4] for slot 4j + e of lane q, which is
// read in fours. In copy c, slot k is state k ^ c: see `share`. C's copies start with the last,
// so that B and C of a step, written at once, lie in different banks.
template <int K, int COPIES> struct Projection {
    static constexpr int C = 4 * K * COPIES, STEP = 2 * C + 8;

    template <int STEPS>
    static __device__ __forceinline__ void stage(const real* source, float* tile) {
#pragma unroll
        for (int i = 0; i < STEPS * 2 * K; i += THREADS) {
            u32 index = threadIdx.x + i;
            u32 step = index / (2 * K), part = index / K % 2, n = index % K * 4;
            float* target = tile + step * STEP + part * C + n % K * 4 * COPIES + n / K * 4;
            float values[4];
            load(source + index * 4, values);
#pragma unroll
            for (int copy = 0; copy < COPIES; copy++) {
                float slots[4] = {values[copy], values[1 ^ copy], values[2 ^ copy],
                                  values[3 ^ copy]};
                store(target + (copy + part) % COPIES * 16, slots);
            }
        }
    }

    // Where a lane reads B of the first step; C, of which the copies are shifted, and of later steps
    // from + STEP on.
    static __device__ __forceinline__ const float* b_row(const float* tile, int q, int copy) {
        return tile + copy * 16 + q * 4;
    }
    static __device__ __forceinline__ const float* c_row(const float* tile, int q, int copy) {
        return tile + C + (copy + 1) % COPIES * 16 + q * 4;
    }
    static __device__ __forceinline__ void read(const float* row, float (&slots)[K]) {
#pragma unroll
        for (int k = 0; k < K; k += 4) {
            float four[4];
            load(row + k * 4 * COPIES, four);
#pragma unroll
            for (int e = 0; e < 4; e++) slots[k + e] = four[e];
        }
    }
};

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
