// Rows of a matrix after dropout, written or added somewhere else: what an adapter's first
// product reads, and the gradient of it.
#include "common.cuh"

constexpr int VECTOR = 16 / sizeof(real);

template <int N>
__device__ __forceinline__ void drop_row(const real* x, real* y, u32 width, u32 adds,
                                         const Dropout& dropout, u32 base) {
    for (u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N; column < width;
         column += gridDim.y * blockDim.x * N) {
        float values[N], before[N], factors[N];
        load(x + column, values);
        if (adds) load(y + column, before);
        dropout.factors(factors, base, column);
#pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] *= factors[i];
            if (adds) values[i] += before[i];
        }
        store(y + column, values);
    }
}

// The grid is (rows, parts of a row). Strides are elements from one row to the next; `vector` says
// that rows and columns are whole vectors. y may be x.
KERNEL __launch_bounds__(256) drop_rows(const real* x, real* y, u32 width, u32 x_stride,
                                        u32 y_stride, u32 adds, u32 vector, const u32* random,
                                        u32 stream, u32 limit) {
    await_earlier();
    Dropout dropout(random, stream, limit);
    u32 base = dropout.row(blockIdx.x);
    x += (u64)blockIdx.x * x_stride;
    y += (u64)blockIdx.x * y_stride;
    if (vector)
        drop_row<VECTOR>(x, y, width, adds, dropout, base);
    else
        drop_row<1>(x, y, width, adds, dropout, base);
}
