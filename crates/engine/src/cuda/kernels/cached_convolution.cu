// The depthwise causal convolution in front of a selective scan, over tokens that follow others:
//
//   u_t = b + Σ_j w_j x_{t−(W−1)+j}        y_t = silu(u_t)
//
// x [B, T, channels] with rows `stride` elements apart, weight [channels, W], bias [channels],
// positions [B, T], y [B, T, channels]. The cache [B, W − 1, channels] holds the last x before the
// first step, oldest first, or counts as zero where the first position is 0; it is left with the
// last x of these. A thread has one channel of one sequence.

#include "common.cuh"

constexpr int MOST = 16;

KERNEL __launch_bounds__(128) cached_convolution(
    const real* x, const float* weight, const float* bias, const i32* positions, real* y,
    real* cache, u32 stride, u32 batch, u32 length, u32 channels, u32 width) {
    await_earlier();
    u64 index = (u64)blockIdx.x * 128 + threadIdx.x;
    if (index >= (u64)batch * channels) return;
    u32 channel = index % channels, b = index / channels;
    bool begins = positions[(u64)b * length] <= 0;
    // The window ends at the end of the registers, whatever its width.
    u32 missing = MOST - width;
    float w[MOST], past[MOST];
#pragma unroll
    for (int j = 0; j < MOST; j++) {
        bool is_there = j >= missing;
        w[j] = is_there ? weight[(u64)channel * width + j - missing] : 0.0f;
        bool kept = j > missing && !begins;
        u64 place = ((u64)b * (width - 1) + (j - missing - 1)) * channels + channel;
        past[j] = kept ? to_float(cache[place]) : 0.0f;
    }
    float offset = bias[channel];
    for (u32 time = 0; time < length; time++) {
        u64 row = (u64)b * length + time;
#pragma unroll
        for (int j = 1; j < MOST; j++) past[j - 1] = past[j];
        past[MOST - 1] = to_float(x[row * stride + channel]);
        float u = offset;
#pragma unroll
        for (int j = 0; j < MOST; j++) u = fmaf(w[j], past[j], u);
        y[row * channels + channel] = from_float<real>(u * sigmoid(u));
    }
#pragma unroll
    for (int j = 0; j < MOST; j++)
        if (j > missing)
            cache[((u64)b * (width - 1) + (j - missing - 1)) * channels + channel] =
                from_float<real>(past[j]);
}
