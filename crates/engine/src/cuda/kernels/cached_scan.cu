// The selective scan over tokens that follow others, gated (the equations are those of scan.cuh):
//
//   h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t x_t B_t        y_t = (⟨h_t, C_t⟩ + D x_t)·silu(z_t)
//
// x and z [B, T, inner] with rows x_stride and z_stride elements apart, p [B, T, rank + 2N] whose
// last columns are B and C, dt [B, T, inner], A_log [inner, N], D [inner], positions [B, T]. The
// state [B, inner, N] is h before the first step, or counts as zero where the first position is
// 0, and is left as h after the last.
//
// Sixteen threads share the states of a channel. A chunk of tokens is short, so time is not cut.

#include "common.cuh"

constexpr int LANES = 16;
constexpr int CHANNELS = 8;
// States of a thread at the most: 64 in a channel.
constexpr int STATES = 4;

// Grid (channels in blocks of 8, B), 128 threads.
KERNEL __launch_bounds__(128) cached_scan(
    const real* x, const real* z, const real* p, const real* dt, const float* a_log,
    const float* skip, const i32* positions, real* y, float* state, u32 x_stride, u32 z_stride,
    u32 length, u32 inner, u32 states, u32 rank) {
    await_earlier();
    u32 lane = threadIdx.x % LANES, b = blockIdx.y;
    u32 channel = blockIdx.x * CHANNELS + threadIdx.x / LANES;
    bool inside = channel < inner;
    // Threads beyond the channels take part in the sums, with the last one's numbers.
    channel = min(channel, inner - 1);
    bool begins = positions[(u64)b * length] <= 0;
    float* own = state + ((u64)b * inner + channel) * states;
    float h[STATES], a[STATES];
#pragma unroll
    for (int i = 0; i < STATES; i++) {
        u32 n = lane + LANES * i;
        bool is_there = n < states;
        h[i] = is_there && !begins ? own[n] : 0.0f;
        a[i] = is_there ? -__expf(a_log[(u64)channel * states + n]) : 0.0f;
    }
    float d = skip[channel];
    u32 columns = rank + 2 * states;
#pragma unroll 4
    for (u32 time = 0; time < length; time++) {
        u64 row = (u64)b * length + time;
        float input = to_float(x[row * x_stride + channel]);
        float delta = softplus(to_float(dt[row * inner + channel]));
        float u = delta * input, sum = 0.0f;
        const real* projected = p + row * columns + rank;
#pragma unroll
        for (int i = 0; i < STATES; i++) {
            u32 n = lane + LANES * i;
            if (n < states) {
                h[i] = fmaf(__expf(delta * a[i]), h[i], u * to_float(projected[n]));
                sum = fmaf(h[i], to_float(projected[states + n]), sum);
            }
        }
#pragma unroll
        for (int offset = LANES / 2; offset > 0; offset /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane == 0 && inside) {
            float gate = to_float(z[row * z_stride + channel]);
            y[row * inner + channel] = from_float<real>(fmaf(d, input, sum) * gate * sigmoid(gate));
        }
    }
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < STATES; i++) {
        u32 n = lane + LANES * i;
        if (n < states) own[n] = h[i];
    }
}
