// The gradient of the selective scan. The scan's equations and how a block works are in scan.cuh.
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

#include "scan.cuh"

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
        const float* b_row = Projected::b_row(projected, lane.q, lane.copy);
        const float* c_row = Projected::c_row(projected, lane.q, lane.copy);
        float* h_row = h_tile + threadIdx.x * K;
        auto advance_part = [&](int begin_step) {
            const Pair* pair_part = pair_column + begin_step * PITCH;
            const float* b_part = b_row + begin_step * Projected::STEP;
#pragma unroll
            for (int i = 0; i < PART; i++) {
                Pair pair = pair_part[i * PITCH];
                float b[K];
                Projected::read(b_part + i * Projected::STEP, b);
                lane.advance(pair.x, pair.y, b, h);
            }
        };
        if (!now_reverse) {
            for (int step = 0; step < now_steps; step += PART) advance_part(step);
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
            const int begin_step = part * PART;
            const Pair* pair_part = pair_column + begin_step * PITCH;
            const float* b_part = b_row + begin_step * Projected::STEP;
            const float* c_part = c_row + begin_step * Projected::STEP;
            if (part < last_part) load(h_row + part * THREADS * K, h);
            // Each lane of a channel starts and finishes one of four steps.
            const int own = begin_step * PITCH + lane.q * PITCH + lane.column;
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
                Pair pair = pair_part[i * PITCH];
                float b[K], c[K];
                Projected::read(b_part + i * Projected::STEP, b);
                Projected::read(c_part + i * Projected::STEP, c);
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
                int at = own + 4 * i * PITCH;
                float sum = fmaf(skip, to_float(now_tile[at]), deal(s + 4 * i, lane.q));
                now_tile[2 * TILE + at] = from_float<real>(own_dz[i] * sum);
            }

            float du[PART], ddelta[PART];
#pragma unroll
            for (int i = PART - 1; i >= 0; i--) {
                Pair pair = pair_part[i * PITCH];
                float ds = __shfl_sync(~0u, own_ds[i / 4], (threadIdx.x & 28) + i % 4);
                float b[K], c[K], to_b[K], to_c[K], result[K / 4];
                Projected::read(b_part + i * Projected::STEP, b);
                Projected::read(c_part + i * Projected::STEP, c);
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
                int at = own + 4 * i * PITCH;
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
    const float* own_row = Projected::c_row(projected, lane.q, 0);
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
            const Pair* pair_column = pairs + group * PITCH + lane.column;
            const float* c_row = own_row + group * Projected::STEP;
#pragma unroll
            for (int i = 3; i >= 0; i--) {
                Pair pair = pair_column[i * PITCH];
                float c[K];
                Projected::read(c_row + i * Projected::STEP, c);
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

// Grid: blocks of 32 channels, segments, sequences; 128 threads. In the launch for segments' ends
// there is one segment less.
#define SCAN_KERNELS(K)                                                                          \
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

// EACH neighbours of dp, which lie on one side of the rank.
template <int EACH>
__device__ __forceinline__ void projected(
    const float* shares, real* dp, u32 blocks, u32 rows, u32 state, u32 rank) {
    u64 index = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * EACH;
    u32 width = rank + 2 * state;
    if (index >= (u64)rows * width) return;
    u64 row = index / width;
    u32 column = index % width;
    float sum[EACH] = {};
    if (column >= rank) {
        const float* share = shares + row * 2 * state + column - rank;
#pragma unroll 8
        for (u32 block = 0; block < blocks; block++) {
            float more[EACH];
            load(share + (u64)block * rows * 2 * state, more);
#pragma unroll
            for (int i = 0; i < EACH; i++) sum[i] += more[i];
        }
    }
    store(dp + index, sum);
}

// dp [rows, rank + 2N]: the blocks' shares of dB and dC in order, zero in the columns before. A thread
// has `each` elements, one or four; four where rank and 2N are multiples of it.
KERNEL scan_backward_projection(
    const float* shares, real* dp, u32 blocks, u32 rows, u32 state, u32 rank, u32 each) {
    if (each == 4)
        projected<4>(shares, dp, blocks, rows, state, rank);
    else
        projected<1>(shares, dp, blocks, rows, state, rank);
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
