// Pointwise functions, alone and as gates of another tensor, their gradients, and the sum of two
// tensors. A thread has a 16-byte
// vector at a time; what is left over at the end goes to the first threads, one element each.
// Outputs may be inputs: an element is read before it is written, by the same thread.
#include "common.cuh"
#include "pointwise.cuh"

constexpr int VECTOR = 16 / sizeof(real);

template <typename F>
__device__ __forceinline__ void forward(const real* x, real* y, u64 elements) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 vectors = elements / VECTOR;
    for (u64 i = thread; i < vectors; i += threads) {
        float v[VECTOR];
        load(x + i * VECTOR, v);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) v[j] = F::value(v[j]);
        store(y + i * VECTOR, v);
    }
    u64 last = vectors * VECTOR + thread;
    if (last < elements) y[last] = from_float<real>(F::value(to_float(x[last])));
}

// dx = dy·f′(x) and, unless y is null, y = f(x)
template <typename F>
__device__ __forceinline__ void backward(const real* dy, const real* x, real* dx, real* y,
                                         u64 elements) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 vectors = elements / VECTOR;
    for (u64 i = thread; i < vectors; i += threads) {
        float d[VECTOR], v[VECTOR];
        load(dy + i * VECTOR, d);
        load(x + i * VECTOR, v);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            d[j] *= F::slope(v[j]);
            if (y) v[j] = F::value(v[j]);
        }
        store(dx + i * VECTOR, d);
        if (y) store(y + i * VECTOR, v);
    }
    u64 last = vectors * VECTOR + thread;
    if (last < elements) {
        float d = to_float(dy[last]), v = to_float(x[last]);
        dx[last] = from_float<real>(d * F::slope(v));
        if (y) y[last] = from_float<real>(F::value(v));
    }
}

KERNEL gelu_tanh(const real* x, real* y, u64 elements) {
    await_earlier();
    forward<GeluTanh>(x, y, elements);
}
KERNEL gelu(const real* x, real* y, u64 elements) {
    await_earlier();
    forward<Gelu>(x, y, elements);
}
KERNEL silu(const real* x, real* y, u64 elements) {
    await_earlier();
    forward<Silu>(x, y, elements);
}
KERNEL relu(const real* x, real* y, u64 elements) {
    await_earlier();
    forward<Relu>(x, y, elements);
}

KERNEL gelu_tanh_backward(const real* dy, const real* x, real* dx, real* y, u64 elements) {
    await_earlier();
    backward<GeluTanh>(dy, x, dx, y, elements);
}
KERNEL gelu_backward(const real* dy, const real* x, real* dx, real* y, u64 elements) {
    await_earlier();
    backward<Gelu>(dy, x, dx, y, elements);
}
KERNEL silu_backward(const real* dy, const real* x, real* dx, real* y, u64 elements) {
    await_earlier();
    backward<Silu>(dy, x, dx, y, elements);
}
KERNEL relu_backward(const real* dy, const real* x, real* dx, real* y, u64 elements) {
    await_earlier();
    backward<Relu>(dy, x, dx, y, elements);
}

KERNEL add(const real* a, const real* b, real* y, u64 elements) {
    await_earlier();
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 vectors = elements / VECTOR;
    for (u64 i = thread; i < vectors; i += threads) {
        float u[VECTOR], v[VECTOR];
        load(a + i * VECTOR, u);
        load(b + i * VECTOR, v);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) u[j] += v[j];
        store(y + i * VECTOR, u);
    }
    u64 last = vectors * VECTOR + thread;
    if (last < elements) y[last] = from_float<real>(to_float(a[last]) + to_float(b[last]));
}

// Sums and the like are fp32 in every precision.
KERNEL add_single(const float* a, const float* b, float* y, u64 elements) {
    await_earlier();
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread; i < elements; i += threads) y[i] = a[i] + b[i];
}

// ---------------------------------------------------------------- gates

// y = f(gate)·up
template <typename F>
__device__ __forceinline__ void gated(const real* gate, const real* up, real* y, u64 elements) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 vectors = elements / VECTOR;
    for (u64 i = thread; i < vectors; i += threads) {
        float g[VECTOR], u[VECTOR];
        load(gate + i * VECTOR, g);
        load(up + i * VECTOR, u);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) u[j] *= F::value(g[j]);
        store(y + i * VECTOR, u);
    }
    u64 last = vectors * VECTOR + thread;
    if (last < elements)
        y[last] = from_float<real>(to_float(up[last]) * F::value(to_float(gate[last])));
}

// dgate = dy·up·f′(gate), dup = dy·f(gate) and, unless y is null, y = f(gate)·up
template <typename F>
__device__ __forceinline__ void gated_backward(const real* dy, const real* gate, const real* up,
                                               real* dgate, real* dup, real* y,
                                               u64 elements) {
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 vectors = elements / VECTOR;
    for (u64 i = thread; i < vectors; i += threads) {
        float d[VECTOR], g[VECTOR], u[VECTOR];
        load(dy + i * VECTOR, d);
        load(gate + i * VECTOR, g);
        load(up + i * VECTOR, u);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            float slope = F::slope(g[j]), value = F::value(g[j]);
            g[j] = u[j] * value;
            u[j] *= d[j] * slope;
            d[j] *= value;
        }
        store(dgate + i * VECTOR, u);
        store(dup + i * VECTOR, d);
        if (y) store(y + i * VECTOR, g);
    }
    u64 last = vectors * VECTOR + thread;
    if (last < elements) {
        float d = to_float(dy[last]), g = to_float(gate[last]), u = to_float(up[last]);
        dgate[last] = from_float<real>(d * u * F::slope(g));
        dup[last] = from_float<real>(d * F::value(g));
        if (y) y[last] = from_float<real>(u * F::value(g));
    }
}

KERNEL geglu_tanh(const real* gate, const real* up, real* y, u64 elements) {
    await_earlier();
    gated<GeluTanh>(gate, up, y, elements);
}
KERNEL geglu(const real* gate, const real* up, real* y, u64 elements) {
    await_earlier();
    gated<Gelu>(gate, up, y, elements);
}
KERNEL swiglu(const real* gate, const real* up, real* y, u64 elements) {
    await_earlier();
    gated<Silu>(gate, up, y, elements);
}
KERNEL reglu(const real* gate, const real* up, real* y, u64 elements) {
    await_earlier();
    gated<Relu>(gate, up, y, elements);
}
KERNEL geglu_tanh_backward(const real* dy, const real* gate, const real* up, real* dgate, real* dup,
                           real* y, u64 elements) {
    await_earlier();
    gated_backward<GeluTanh>(dy, gate, up, dgate, dup, y, elements);
}
KERNEL geglu_backward(const real* dy, const real* gate, const real* up, real* dgate, real* dup,
                      real* y, u64 elements) {
    await_earlier();
    gated_backward<Gelu>(dy, gate, up, dgate, dup, y, elements);
}
KERNEL swiglu_backward(const real* dy, const real* gate, const real* up, real* dgate, real* dup,
                       real* y, u64 elements) {
    await_earlier();
    gated_backward<Silu>(dy, gate, up, dgate, dup, y, elements);
}
KERNEL reglu_backward(const real* dy, const real* gate, const real* up, real* dgate, real* dup,
                      real* y, u64 elements) {
    await_earlier();
    gated_backward<Relu>(dy, gate, up, dgate, dup, y, elements);
}
