// The depthwise causal convolution over time in front of a selective scan, with SiLU:
//
//   u_t = b + Σ_j w_j x_{t−(W−1)+j}        y_t = silu(u_t)        x = 0 before a sequence starts
//
// A thread has V neighbouring channels and a run of time, and keeps the last values of x in
// registers. Threads are numbered along channels first, so a warp reads one stretch of memory a
// step. A window narrower than the compiled W is filled up with zero weights in front.

#include "common.cuh"

// Steps of a run.
constexpr int RUN = 32;

struct Convolution {
    const real* x;
    const float *weight, *bias;
    // Elements between rows of x; W of the weight.
    u32 stride, batch, length, channels, width;
    // Whether V channels can be loaded as one.
    u32 vector;
};

// V channels of a row, zero where `inside` is false or the channels end.
template <int V>
__device__ __forceinline__ void read(
    const real* row, u32 channels, bool inside, u32 vector, float (&x)[V]) {
#pragma unroll
    for (int v = 0; v < V; v++) x[v] = 0.0f;
    if (!inside) return;
    if (vector) {
        load(row, x);
    } else {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (v < channels) x[v] = to_float(row[v]);
    }
}

template <int V>
__device__ __forceinline__ void write(real* row, u32 channels, u32 vector, const float (&x)[V]) {
    if (vector) {
        store(row, x);
    } else {
#pragma unroll
        for (int v = 0; v < V; v++)
            if (v < channels) row[v] = from_float<real>(x[v]);
    }
}

// A thread's place, its parameters, and the window of x, oldest first.
template <int W, int V> struct Window {
    u32 channel, run, begin, end;
    // Channels from this thread's first one on.
    u32 channels;
    // Row 0 of the sequence, at `channel`.
    const real* rows;
    u64 first_row;
    float w[W][V], b[V], x[W][V];

    // Whether the thread has work.
    __device__ __forceinline__ bool start(const Convolution& op) {
        u32 pieces = (op.channels + V - 1) / V, runs = (op.length + RUN - 1) / RUN;
        u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
        if (index >= (u64)pieces * runs * op.batch) return false;
        channel = index % pieces * V;
        run = index / pieces;
        channels = op.channels - channel;
        begin = run % runs * RUN;
        end = min(begin + RUN, op.length);
        first_row = (u64)(run / runs) * op.length;
        rows = op.x + first_row * op.stride + channel;
        const u32 missing = W - op.width;
#pragma unroll
        for (int v = 0; v < V; v++) {
            b[v] = v < channels ? op.bias[channel + v] : 0.0f;
#pragma unroll
            for (int j = 0; j < W; j++) {
                bool is_there = v < channels && j >= missing;
                w[j][v] = is_there ? op.weight[(u64)(channel + v) * op.width + j - missing] : 0.0f;
            }
        }
        // As if the step before `begin` had just been taken.
#pragma unroll
        for (int j = 1; j < W; j++) {
            i32 time = (i32)begin - W + j;
            bool inside = time >= 0 && j > missing;
            read(rows + (long long)time * op.stride, channels, inside, op.vector, x[j]);
        }
        return true;
    }

    // Takes in x of a step and gives u.
    __device__ __forceinline__ void advance(const Convolution& op, u32 time, float (&u)[V]) {
#pragma unroll
        for (int j = 1; j < W; j++)
#pragma unroll
            for (int v = 0; v < V; v++) x[j - 1][v] = x[j][v];
        read(rows + (u64)time * op.stride, channels, true, op.vector, x[W - 1]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            u[v] = b[v];
#pragma unroll
            for (int j = 0; j < W; j++) u[v] = fmaf(w[j][v], x[j][v], u[v]);
        }
    }
};

template <int W, int V> __device__ __forceinline__ void forward(const Convolution& op, real* y) {
    Window<W, V> window;
    if (!window.start(op)) return;
    y += window.first_row * op.channels + window.channel;
#pragma unroll 4
    for (u32 time = window.begin; time < window.end; time++) {
        float u[V];
        window.advance(op, time, u);
#pragma unroll
        for (int v = 0; v < V; v++) u[v] *= sigmoid(u[v]);
        write(y + (u64)time * op.channels, window.channels, op.vector, u);
    }
}

// With du_t = dy_t silu′(u_t): dw_j = Σ_t du_t x_{t−(W−1)+j}, db = Σ_t du_t, and
// dx_{t−(W−1)} = Σ_j w_j du_{t−j}, complete when time has reached t: one pass forwards that runs
// W − 1 steps past the run, with a window of du. Those further steps count only for dx.
//
// dx has the stride of x and is added to where `adds`. `sums` [runs of the batch, W + 1, channels]
// takes dw and db of each run; null where the parameters are not trained.
template <int W, int V>
__device__ __forceinline__ void backward(
    const Convolution& op, const real* dy, real* dx, u32 adds, float* sums) {
    Window<W, V> window;
    if (!window.start(op)) return;
    dy += window.first_row * op.channels + window.channel;
    dx += window.first_row * op.stride + window.channel;
    float du[W][V], dw[W][V], db[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        db[v] = 0.0f;
#pragma unroll
        for (int j = 0; j < W; j++) du[j][v] = dw[j][v] = 0.0f;
    }
#pragma unroll 4
    for (u32 time = window.begin; time < window.end + W - 1; time++) {
        // The newest du is the first.
#pragma unroll
        for (int j = W - 1; j > 0; j--)
#pragma unroll
            for (int v = 0; v < V; v++) du[j][v] = du[j - 1][v];
#pragma unroll
        for (int v = 0; v < V; v++) du[0][v] = 0.0f;
        if (time < op.length) {
            float u[V], slope[V];
            window.advance(op, time, u);
            read(dy + (u64)time * op.channels, window.channels, true, op.vector, slope);
            bool own = time < window.end;
#pragma unroll
            for (int v = 0; v < V; v++) {
                float open = sigmoid(u[v]);
                du[0][v] = slope[v] * open * (1.0f + u[v] * (1.0f - open));
                float counted = own ? du[0][v] : 0.0f;
                db[v] += counted;
#pragma unroll
                for (int j = 0; j < W; j++)
                    dw[j][v] = fmaf(counted, window.x[j][v], dw[j][v]);
            }
        }
        if (time < window.begin + W - 1) continue;
        real* target = dx + (u64)(time - (W - 1)) * op.stride;
        float total[V];
        read(target, window.channels, adds, op.vector, total);
#pragma unroll
        for (int j = 0; j < W; j++)
#pragma unroll
            for (int v = 0; v < V; v++) total[v] = fmaf(window.w[j][v], du[j][v], total[v]);
        write(target, window.channels, op.vector, total);
    }
    if (!sums) return;
    sums += (u64)window.run * (op.width + 1) * op.channels + window.channel;
    const u32 missing = W - op.width;
#pragma unroll
    for (int v = 0; v < V; v++) {
        if (v >= window.channels) continue;
#pragma unroll
        for (int j = 0; j < W; j++)
            if (j >= missing) sums[(u64)(j - missing) * op.channels + v] = dw[j][v];
        sums[(u64)op.width * op.channels + v] = db[v];
    }
}

// 128 threads, as many blocks as the pieces of all runs need.
#define CONVOLUTION_KERNELS(W, V)                                                                \
    KERNEL __launch_bounds__(128) convolution_forward_##W(                                       \
        const real* x, const float* weight, const float* bias, real* y, u32 stride, u32 batch,   \
        u32 length, u32 channels, u32 width, u32 vector) {                                       \
        await_earlier();                                                                         \
        forward<W, V>(                                                                           \
            Convolution{x, weight, bias, stride, batch, length, channels, width, vector}, y);    \
    }                                                                                            \
    KERNEL __launch_bounds__(128) convolution_backward_##W(                                      \
        const real* dy, const real* x, const float* weight, const float* bias, real* dx,         \
        float* sums, u32 adds, u32 stride, u32 batch, u32 length, u32 channels, u32 width,       \
        u32 vector) {                                                                            \
        await_earlier();                                                                         \
        backward<W, V>(                                                                          \
            Convolution{x, weight, bias, stride, batch, length, channels, width, vector}, dy,    \
            dx, adds, sums);                                                                     \
    }

CONVOLUTION_KERNELS(4, 4)
CONVOLUTION_KERNELS(16, 1)

// dw [channels, W] and db [channels] from the sums of each run. Blocks of 256 threads: 32
// neighbouring elements, each by eight threads that take every eighth run.
KERNEL __launch_bounds__(256) convolution_parameters(
    const float* sums, float* dweight, float* dbias, u32 runs, u32 channels, u32 width,
    u32 adds_weight, u32 adds_bias) {
    await_earlier();
    __shared__ float parts[8][33];
    u32 column = threadIdx.x % 32, part = threadIdx.x / 32;
    u64 index = (u64)blockIdx.x * 32 + column, elements = (u64)(width + 1) * channels;
    float sum = 0.0f;
    if (index < elements) {
        u32 count = num_turns(part, runs, 8);
#pragma unroll 8
        for (u32 turn = 0; turn < count; turn++) sum += sums[(part + turn * 8) * elements + index];
    }
    parts[part][column] = sum;
    __syncthreads();
    if (part > 0 || index >= elements) return;
#pragma unroll
    for (int other = 1; other < 8; other++) sum += parts[other][column];
    u32 j = index / channels, channel = index % channels;
    bool is_bias = j == width;
    float* target = is_bias ? dbias + channel : dweight + (u64)channel * width + j;
    *target = (is_bias ? adds_bias : adds_weight) ? *target + sum : sum;
}
