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

// What steps give to dB and dC, summed over the warp's eight channels: of each a lane holds dB or dC
// of half of its states, already summed over its two channels. Where they go in shared memory is
// [steps, 2, 8·S].
template <int S> struct Sums {
    float* row;
    bool odd, upper;

    // Lane t of four gets dC where t is odd, and the upper half of the states where t ≥ 2.
    __device__ __forceinline__ explicit Sums(float* shares) {
        odd = threadIdx.x & 1;
        upper = threadIdx.x & 2;
        row = shares + (odd ? 8 * S : 0) + threadIdx.x % 32 / 4 * S + (upper ? S / 2 : 0);
    }
    __device__ __forceinline__ void add(
        const float (&to_b)[S], const float (&to_c)[S], float (&half)[S / 2]) const {
        float one[S];
#pragma unroll
        for (int s = 0; s < S; s++)
            one[s] = choose(odd, to_c[s], to_b[s]) + exchange(choose(odd, to_b[s], to_c[s]), 1);
#pragma unroll
        for (int s = 0; s < S / 2; s++)
            half[s] = choose(upper, one[s + S / 2], one[s]) +
                exchange(choose(upper, one[s], one[s + S / 2]), 2);
    }
    __device__ __forceinline__ void put(int step, const float (&half)[S / 2]) const {
        store(row + step * 16 * S, half);
    }
};

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

template <int S>
__device__ __forceinline__ void backward(const Scan& scan, const Gradients& gradients) {
    constexpr int K = SLOTS * S, STATES = 8 * S;
    constexpr int STEPS = tile_steps(S), PART = S == 2 ? 8 : 4, PARTS = STEPS / PART;
    constexpr int TILE = STEPS * PITCH;
    // With 8 states of two channels there are no registers for the decays.
    constexpr bool KEEPS_DECAY = S <= 4;
    typedef Lane<S> Lane;
    typedef Projection<S> Projection;
    extern __shared__ __align__(16) float shared[];
    Pair* pairs = reinterpret_cast<Pair*>(shared);
    float* projected = shared + 2 * STEPS * PAIRS;
    // [warps, STEPS, 2, STATES]
    float* warp_shares = projected + Projection::FLOATS;
    // Before each part but the last [parts − 1, threads, K], each thread's own.
    float* h_tile = warp_shares + WARPS * STEPS * 2 * STATES;
    real* copied = reinterpret_cast<real*>(h_tile + (PARTS - 1) * THREADS * K);
    // x, then dx; dt, then ddt; z, then dz; dy: the tile at hand and the next one.
    real* tiles = copied + Projection::ELEMENTS;

    const Lane lane(scan);
    const Share<STEPS> share(scan);
    const Projection projection(scan);
    const Track<const real> sources[4] = {share.track(scan, scan.x, scan.x_stride),
                                          share.track(scan, scan.dt, scan.inner),
                                          share.track(scan, scan.z, scan.z_stride),
                                          share.track(scan, gradients.dy, scan.inner)};
    const Track<real> results[3] = {share.track(scan, gradients.dx, scan.x_stride),
                                    share.track(scan, gradients.ddt, scan.inner),
                                    share.track(scan, gradients.dz, scan.z_stride)};
    const Sums<S> sums(warp_shares + threadIdx.x / 32 * STEPS * 2 * STATES);
    const u32 first = scan.first();
    const u32 span = gradients.span;
    const u32 num_chunks = (scan.length + scan.chunk - 1) / scan.chunk;
    const u32 begin = blockIdx.y * scan.segment;
    const u32 end = min(begin + scan.segment, scan.length);
    float* const block_shares = gradients.shares +
        ((u64)blockIdx.x * gridDim.z * scan.length + scan.row(0)) * 2 * scan.state;
    const u64 part_of_batch = (u64)blockIdx.z * gridDim.y + blockIdx.y;
    const u32 max_boundaries = (min(span, scan.length) + STEPS - 1) / STEPS - 1;
    float* boundaries = gradients.boundaries +
        ((part_of_batch * gridDim.x + blockIdx.x) * max_boundaries * THREADS + threadIdx.x) * K;
    const float skip = lane.inside(0) ? scan.skip[lane.channel(0)] : 0.0f;

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
        int count = reverse ? 4 : 2;
        fetch<S>(scan, share, projection, sources, count, tile, copied, time, steps);
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
            lane.read(gradients.states + scan.at(num_chunks, start / scan.chunk, first) * scan.state,
                      h);
        } else {
            load(boundaries + (u64)(index - 1) * THREADS * K, h);
        }
        copies_arrive();
        __syncthreads();
        float b_and_c[4 * Projection::PIECES];
        projection.take(copied, b_and_c);
        stage<S>(tile + TILE, pairs, steps, [&](u32 at, const float (&delta)[4], float (&u)[4]) {
            load(tile + at, u);
#pragma unroll
            for (int j = 0; j < 4; j++) u[j] *= delta[j];
        });
        projection.stage(b_and_c, projected);
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

        const float* row = Projection::row(projected);
        float* h_row = h_tile + threadIdx.x * K;
        auto advance_part = [&](int begin_step) {
            const Pair* pair_part = pairs + begin_step * PAIRS;
            const float* row_part = row + begin_step * Projection::STEP;
#pragma unroll
            for (int i = 0; i < PART; i++) {
                Pair step[SLOTS];
                float b[S];
                lane.read_pairs(pair_part + i * PAIRS, step);
                Projection::read_b(row_part + i * Projection::STEP, b);
                lane.advance(step, b, h);
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
        for (int part = last_part; part >= 0; part--) {
            const int begin_step = part * PART;
            const Pair* pair_part = pairs + begin_step * PAIRS;
            const float* row_part = row + begin_step * Projection::STEP;
            if (part < last_part) load(h_row + part * THREADS * K, h);
            // Each lane of a channel starts and finishes one of four steps.
            const int own_step = begin_step + lane.turn;
            const int own = own_step * PITCH + lane.column(0);
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
                Pair step[SLOTS];
                float b[S], c[S], parts[SLOTS];
                lane.read_pairs(pair_part + i * PAIRS, step);
                Projection::read(row_part + i * Projection::STEP, b, c);
#pragma unroll
                for (int k = 0; k < K; k++) {
                    before[i][k] = h[k];
                    decay[i][k] = exp2_fast(step[k / S].x * lane.a[k]);
                    h[k] = fmaf(decay[i][k], h[k], step[k / S].y * b[k % S]);
                    parts[k / S] = k % S ? fmaf(h[k], c[k % S], parts[k / S]) : h[k] * c[0];
                }
                s[i] = lane.joined(parts);
            }
#pragma unroll
            for (int i = 0; i < PART / 4; i++) {
                int at = own + 4 * i * PITCH;
                float sum = fmaf(skip, to_float(now_tile[at]), lane.deal(s + 4 * i));
                now_tile[2 * TILE + at] = from_float<real>(own_dz[i] * sum);
            }

            float du[PART], ddelta[PART], shares[PART][S / 2];
#pragma unroll
            for (int i = PART - 1; i >= 0; i--) {
                Pair step[SLOTS];
                float b[S], c[S], to_b[S], to_c[S], ds[SLOTS], du_parts[SLOTS], ddelta_parts[SLOTS];
                lane.read_pairs(pair_part + i * PAIRS, step);
                Projection::read(row_part + i * Projection::STEP, b, c);
#pragma unroll
                for (int j = 0; j < SLOTS; j++)
                    ds[j] = __shfl_sync(~0u, own_ds[i / 4],
                                        i % 4 * 8 + (threadIdx.x % 8 ^ (j ? Lane::SWAP : 0)));
#pragma unroll
                for (int k = 0; k < K; k++) {
                    const int j = k / S, e = k % S;
                    float g = fmaf(ds[j], c[e], flow[k]);
                    du_parts[j] = e ? fmaf(g, b[e], du_parts[j]) : g * b[0];
                    to_b[e] = j ? fmaf(g, step[j].y, to_b[e]) : g * step[0].y;
                    to_c[e] = j ? fmaf(ds[j], h[k], to_c[e]) : ds[0] * h[k];
                    flow[k] = g * (KEEPS_DECAY ? decay[i][k] : exp2_fast(step[j].x * lane.a[k]));
                    float q = flow[k] * before[i][k];
                    ddelta_parts[j] = e ? fmaf(q, lane.a[k], ddelta_parts[j]) : q * lane.a[k];
                    da[k] = fmaf(q, step[j].x, da[k]);
                    h[k] = before[i][k];
                }
                du[i] = lane.joined(du_parts);
                ddelta[i] = lane.joined(ddelta_parts);
                sums.add(to_b, to_c, shares[i]);
            }
#pragma unroll
            for (int i = 0; i < PART; i++) sums.put(begin_step + i, shares[i]);
#pragma unroll
            for (int i = 0; i < PART / 4; i++) {
                int at = own + 4 * i * PITCH;
                float du_sum = lane.deal(du + 4 * i);
                float ddelta_sum = lane.deal(ddelta + 4 * i) * LN_2;
                float delta = pairs[(own_step + 4 * i) * PAIRS + lane.column(0)].x;
                float value = to_float(now_tile[at]);
                float slope = open_gate(to_float(now_tile[TILE + at]));
                dskip = fmaf(own_ds[i], value, dskip);
                now_tile[at] = from_float<real>(fmaf(du_sum, delta, own_ds[i] * skip));
                now_tile[TILE + at] = from_float<real>(slope * fmaf(du_sum, value, ddelta_sum));
            }
        }
        __syncthreads();

        // dB and dC of the tile, over the block: four neighbours at once.
        float* shares = block_shares + (u64)now * 2 * scan.state;
#pragma unroll
        for (int i = 0; i < STEPS * 2 * STATES; i += 4 * THREADS) {
            u32 element = threadIdx.x * 4 + i, step = element / (2 * STATES);
            float sum[4] = {};
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) {
                float more[4];
                load(warp_shares + warp * STEPS * 2 * STATES + element, more);
#pragma unroll
                for (int e = 0; e < 4; e++) sum[e] += more[e];
            }
            if (step >= now_steps) continue;
            if (scan.state == STATES) {
                store(shares + element, sum);
            } else {
                u32 which = element / STATES % 2, n = element % STATES;
                float* target = shares + (step * 2 + which) * scan.state + n;
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (n + e < scan.state) target[e] = sum[e];
            }
        }
        put(scan, share, results, now_tile, now, now_steps);
    }

    // Over the lanes with the same own channel.
    dskip += exchange(dskip, 8);
    dskip += exchange(dskip, 16);
    u64 at = part_of_batch * scan.inner + first;
    lane.write(gradients.da + at * scan.state, da);
    if (lane.turn == 0 && lane.inside(0)) gradients.dskip[at + lane.column(0)] = dskip;
}

// What flows out of a segment at its start when nothing flows in at its end, and ΣΔ. The grid
// leaves out the first segment.
template <int S>
__device__ __forceinline__ void backward_local(
    const Scan& scan, const real* dy_rows, float* ends, float* totals) {
    constexpr int STEPS = tile_steps(S), TILE = STEPS * PITCH, GROUP = 4;
    typedef Lane<S> Lane;
    typedef Projection<S> Projection;
    // dt, z and dy: the tile at hand and the next one.
    __shared__ __align__(16) real tiles[6 * TILE];
    __shared__ __align__(16) real copied[Projection::ELEMENTS];
    // Δ and ds.
    __shared__ __align__(16) Pair pairs[STEPS * PAIRS];
    __shared__ __align__(16) float projected[Projection::FLOATS];

    const Lane lane(scan);
    const Share<STEPS> share(scan);
    const Projection projection(scan);
    const Track<const real> sources[3] = {share.track(scan, scan.dt, scan.inner),
                                          share.track(scan, scan.z, scan.z_stride),
                                          share.track(scan, dy_rows, scan.inner)};
    const u32 begin = (blockIdx.y + 1) * scan.segment;
    const u32 end = min(begin + scan.segment, scan.length);
    auto fetch_all = [&](real* tile, u32 time, u32 steps) {
        fetch<S>(scan, share, projection, sources, 3, tile, copied, time, steps);
    };

    real *tile = tiles, *other = tiles + 3 * TILE;
    u32 steps = min((u32)STEPS, end - begin), time = end - steps;
    fetch_all(tile, time, steps);
    float flow[Lane::K], total[SLOTS] = {};
#pragma unroll
    for (int k = 0; k < Lane::K; k++) flow[k] = 0.0f;
    const float* row = Projection::row(projected);
    for (;;) {
        copies_arrive();
        __syncthreads();
        float b_and_c[4 * Projection::PIECES];
        projection.take(copied, b_and_c);
        stage<S>(tile, pairs, steps, [&](u32 at, const float (&)[4], float (&ds)[4]) {
            float gate[4];
            load(tile + TILE + at, gate);
            load(tile + 2 * TILE + at, ds);
#pragma unroll
            for (int j = 0; j < 4; j++) ds[j] *= gate[j] * open_gate(gate[j]);
        });
        projection.stage(b_and_c, projected);
        __syncthreads();
        const u32 next_steps = min((u32)STEPS, time - begin), next = time - next_steps;
        if (next_steps > 0) fetch_all(other, next, next_steps);
        for (int group = (int)(steps - 1) / GROUP * GROUP; group >= 0; group -= GROUP) {
#pragma unroll
            for (int i = GROUP - 1; i >= 0; i--) {
                Pair step[SLOTS];
                float c[S];
                lane.read_pairs(pairs + (group + i) * PAIRS, step);
                Projection::read_c(row + (group + i) * Projection::STEP, c);
#pragma unroll
                for (int j = 0; j < SLOTS; j++) total[j] += step[j].x;
#pragma unroll
                for (int k = 0; k < Lane::K; k++) {
                    float g = fmaf(step[k / S].y, c[k % S], flow[k]);
                    flow[k] = exp2_fast(step[k / S].x * lane.a[k]) * g;
                }
            }
        }
        if (next_steps == 0) break;
        time = next;
        steps = next_steps;
        real* swap = tile;
        tile = other;
        other = swap;
    }
    lane.leave(scan, ends, totals, blockIdx.y + 1, flow, total);
}

// Grid: blocks of 32 channels, segments, sequences. In the launch for segments' ends there is one
// segment less.
#define SCAN_KERNELS(S)                                                                          \
    KERNEL __launch_bounds__(THREADS, 4) scan_backward_local_##S(                                \
        const real* dy, INPUTS, float* ends, float* totals, SIZES) {                             \
        await_earlier();                                                                         \
        backward_local<S>(SCAN, dy, ends, totals);                                               \
    }                                                                                            \
    KERNEL __launch_bounds__(THREADS, 2) scan_backward_##S(                                      \
        const real* dy, INPUTS, const float* states, real* dx, real* dz, real* ddt,              \
        float* shares, float* da, float* dskip, float* boundaries, const float* ends,            \
        const float* totals, u32 span, SIZES) {                                                  \
        await_earlier();                                                                         \
        backward<S>(SCAN, Gradients{dy, states, dx, dz, ddt, shares, da, dskip, boundaries,      \
                                    ends, totals, span});                                        \
    }

SCAN_KERNELS(2)
SCAN_KERNELS(4)
SCAN_KERNELS(8)

// EACH neighbours of dp, which lie on one side of the rank.
template <int EACH>
__device__ __forceinline__ void projected(
    u32 launch_block, const float* shares, real* dp, u32 blocks, u32 rows, u32 state, u32 rank) {
    u64 index = ((u64)launch_block * blockDim.x + threadIdx.x) * EACH;
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

// dA_log [inner, N] and dD [inner] from the parts of each sequence and segment in order. One
// thread for each element of both.
__device__ __forceinline__ void parameters(
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

// What the blocks have left, added up. The first `parameter_blocks` blocks of the launch have the
// parameters, which are few; the rest have dp [rows, rank + 2N]: the blocks' shares of dB and dC in
// order, zero in the columns before. A thread has `each` elements of it, one or four; four where rank
// and 2N are multiples of it.
KERNEL scan_backward_sums(
    const float* da, const float* dskip, const float* a_log, float* da_log, float* dskip_sum,
    u32 parts, u32 inner, u32 adds_a_log, u32 adds_skip, u32 parameter_blocks, const float* shares,
    real* dp, u32 blocks, u32 rows, u32 state, u32 rank, u32 each) {
    await_earlier();
    if (blockIdx.x < parameter_blocks)
        return parameters(da, dskip, a_log, da_log, dskip_sum, parts, inner, state, adds_a_log,
                          adds_skip);
    u32 launch_block = blockIdx.x - parameter_blocks;
    if (each == 4)
        projected<4>(launch_block, shares, dp, blocks, rows, state, rank);
    else
        projected<1>(launch_block, shares, dp, blocks, rows, state, rank);
}
