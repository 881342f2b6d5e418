// The selective scan, forward: the states from the first step to the last, and what comes out. The
// equations and how a block works are in scan.cuh.

#include "scan.cuh"

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
    const float* b_row = Projected::b_row(projected, lane.q, 0);
    const float* c_row = Projected::c_row(projected, lane.q, 0);
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

        for (int group = 0; group < steps; group += GROUP) {
            const Pair* pair_column = pairs + group * PITCH + lane.column;
            const float* b_group = b_row + group * Projected::STEP;
            const float* c_group = c_row + group * Projected::STEP;
            float s[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                Pair pair = pair_column[i * PITCH];
                float b[K], c[K];
                Projected::read(b_group + i * Projected::STEP, b);
                lane.advance(pair.x, pair.y, b, h);
                if (LOCAL) {
                    total += pair.x;
                    continue;
                }
                Projected::read(c_group + i * Projected::STEP, c);
                s[i] = 0.0f;
#pragma unroll
                for (int k = 0; k < K; k++) s[i] = fmaf(h[k], c[k], s[i]);
            }
            // Each lane of a channel finishes one of four steps.
            if constexpr (!LOCAL) {
#pragma unroll
                for (int i = 0; i < GROUP; i += 4) {
                    int at = (group + i) * PITCH + lane.q * PITCH + lane.column;
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

// Grid: blocks of 32 channels, segments, sequences; 128 threads. In the launch for segments' ends
// there is one segment less.
#define SCAN_KERNELS(K)                                                                          \
    KERNEL __launch_bounds__(THREADS, 4)                                                         \
        scan_forward_local_##K(INPUTS, float* ends, float* totals, SIZES) {                      \
        forward<K, true>(SCAN, nullptr, nullptr, ends, totals);                                  \
    }                                                                                            \
    KERNEL __launch_bounds__(THREADS, 4) scan_forward_##K(                                       \
        INPUTS, real* y, float* states, float* ends, float* totals, SIZES) {                     \
        forward<K, false>(SCAN, y, states, ends, totals);                                        \
    }

SCAN_KERNELS(4)
SCAN_KERNELS(8)
SCAN_KERNELS(16)
