// The selective scan, forward: the states from the first step to the last, and what comes out. The
// equations and how a block works are in scan.cuh.

#include "scan.cuh"

// LOCAL: only the end of a segment that starts from zero, and ΣΔ; the grid leaves out the last
// segment. Otherwise y and, where `states` is given, the state before each chunk.
template <int S, bool LOCAL>
__device__ __forceinline__ void forward(
    const Scan& scan, real* y, float* states, float* ends, float* totals) {
    constexpr int STEPS = tile_steps(S), TILE = STEPS * PITCH, GROUP = 4, TILES = LOCAL ? 2 : 3;
    typedef Lane<S> Lane;
    typedef Projection<S> Projection;
    // x, dt, and z, then y: the tile at hand and the next one.
    __shared__ __align__(16) real tiles[2 * TILES * TILE];
    __shared__ __align__(16) real copied[Projection::ELEMENTS];
    __shared__ __align__(16) Pair pairs[STEPS * PAIRS];
    __shared__ __align__(16) float projected[Projection::FLOATS];

    const Lane lane(scan);
    const Share<STEPS> share(scan);
    const Projection projection(scan);
    const Track<const real> sources[3] = {share.track(scan, scan.x, scan.x_stride),
                                          share.track(scan, scan.dt, scan.inner),
                                          share.track(scan, scan.z, scan.z_stride)};
    const Track<real> out[1] = {share.track(scan, y, scan.inner)};
    const u32 begin = blockIdx.y * scan.segment;
    const u32 end = min(begin + scan.segment, scan.length);
    const float skip = lane.inside(0) ? scan.skip[lane.channel(0)] : 0.0f;
    // A tile ends where a state is to be kept: `into` steps of the chunk come before it.
    auto steps_from = [&](u32 time, u32 into) {
        u32 steps = min((u32)STEPS, end - time);
        return states ? min(steps, scan.chunk - into) : steps;
    };
    auto fetch_all = [&](real* tile, u32 time, u32 steps) {
        fetch<S>(scan, share, projection, sources, TILES, tile, copied, time, steps);
    };

    u32 time = begin, into = 0, steps = steps_from(begin, 0);
    // Where the next state is kept.
    if (states) {
        u32 num_chunks = (scan.length + scan.chunk - 1) / scan.chunk;
        states += scan.at(num_chunks, begin / scan.chunk, scan.first()) * scan.state;
    }
    real *tile = tiles, *other = tiles + TILES * TILE;
    fetch_all(tile, time, steps);
    float h[Lane::K], total[SLOTS] = {};
#pragma unroll
    for (int k = 0; k < Lane::K; k++) h[k] = 0.0f;
    if (!LOCAL)
        for (u32 index = 0; index < blockIdx.y; index++)
            lane.pass(scan, ends, totals, index, h);

    const float* row = Projection::row(projected);
    // A group of steps. What each lane has of ⟨h, C⟩ for its own channel.
    auto advance = [&](int group, float (&s)[GROUP]) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            Pair step[SLOTS];
            float b[S], c[S], parts[SLOTS];
            lane.read_pairs(pairs + (group + i) * PAIRS, step);
            if constexpr (LOCAL) {
                Projection::read_b(row + (group + i) * Projection::STEP, b);
                lane.advance(step, b, h);
#pragma unroll
                for (int j = 0; j < SLOTS; j++) total[j] += step[j].x;
            } else {
                Projection::read(row + (group + i) * Projection::STEP, b, c);
                lane.advance(step, b, h);
#pragma unroll
                for (int k = 0; k < Lane::K; k++)
                    parts[k / S] = k % S ? fmaf(h[k], c[k % S], parts[k / S]) : h[k] * c[0];
                s[i] = lane.joined(parts);
            }
        }
    };
    // y of a group: each lane of a channel finishes one of four steps.
    auto finish = [&](int group, const float (&s)[GROUP]) {
#pragma unroll
        for (int i = 0; i < GROUP; i += 4) {
            int at = (group + i + lane.turn) * PITCH + lane.column(0);
            float gate = to_float(tile[2 * TILE + at]);
            float sum = fmaf(skip, to_float(tile[at]), lane.deal(s + i));
            tile[2 * TILE + at] = from_float<real>(sum * gate * open_gate(gate));
        }
    };

    while (time < end) {
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

        const bool keeps = !LOCAL && states && into == 0;
        u32 next = time + steps;
        into += steps;
        if (into == scan.chunk) into = 0;
        u32 next_steps = next < end ? steps_from(next, into) : 0;
        if (next < end) fetch_all(other, next, next_steps);
        if (keeps) {
            lane.write(states, h);
            states += scan.inner * scan.state;
        }

        // A group is finished while the next one is under way.
        float s[GROUP];
        advance(0, s);
        int group = GROUP;
        for (; group < steps; group += GROUP) {
            float more[GROUP];
            advance(group, more);
            if constexpr (!LOCAL) {
                finish(group - GROUP, s);
#pragma unroll
                for (int i = 0; i < GROUP; i++) s[i] = more[i];
            }
        }
        if constexpr (!LOCAL) {
            finish(group - GROUP, s);
            __syncthreads();
            put(scan, share, out, tile + 2 * TILE, time, steps);
        }
        time = next;
        steps = next_steps;
        real* swap = tile;
        tile = other;
        other = swap;
    }
    if (LOCAL) lane.leave(scan, ends, totals, blockIdx.y, h, total);
}

// Grid: blocks of 32 channels, segments, sequences. In the launch for segments' ends there is one
// segment less.
#define SCAN_KERNELS(S)                                                                          \
    KERNEL __launch_bounds__(THREADS, 4)                                                         \
        scan_forward_local_##S(INPUTS, float* ends, float* totals, SIZES) {                      \
        await_earlier();                                                                         \
        forward<S, true>(SCAN, nullptr, nullptr, ends, totals);                                  \
    }                                                                                            \
    KERNEL __launch_bounds__(THREADS, S == 8 ? 2 : 4) scan_forward_##S(                          \
        INPUTS, real* y, float* states, float* ends, float* totals, SIZES) {                     \
        await_earlier();                                                                         \
        forward<S, false>(SCAN, y, states, ends, totals);                                        \
    }

SCAN_KERNELS(2)
SCAN_KERNELS(4)
SCAN_KERNELS(8)
