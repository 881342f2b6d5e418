// Sums over the rows of a matrix: the gradient of a bias, and the last stage of every sum that
// blocks have made in parts. Two launches, no atomics: the order of additions is fixed.
#include "common.cuh"

constexpr int VECTOR = 16 / sizeof(real);

// Blocks of 32×8 threads. Each thread has N neighbouring columns of every eighth row that
// belongs to its block of rows, blockIdx.y.
template <int N>
__device__ __forceinline__ void column_partials_of(const real* x, float* partials, u32 rows,
                                                   u32 width) {
    __shared__ float sums[8][32 * N];
    u32 column = (blockIdx.x * 32 + threadIdx.x) * N;
    float sum[N] = {};
    if (column < width) {
        u32 first = blockIdx.y * 8 + threadIdx.y, step = gridDim.y * 8;
        u32 count = num_turns(first, rows, step);
#pragma unroll 4
        for (u32 turn = 0; turn < count; turn++) {
            float v[N];
            load(x + (u64)(first + turn * step) * width + column, v);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) sums[threadIdx.y][threadIdx.x * N + i] = sum[i];
    __syncthreads();
    // Now a column to a thread.
    for (u32 i = threadIdx.y * 32 + threadIdx.x; i < 32 * N; i += 256) {
        u32 at = blockIdx.x * 32 * N + i;
        if (at >= width) continue;
        float total = 0.0f;
#pragma unroll
        for (int y = 0; y < 8; y++) total += sums[y][i];
        partials[(u64)blockIdx.y * width + at] = total;
    }
}

// partials[gridDim.y, width] from x[rows, width], width a whole number of 16-byte vectors.
KERNEL __launch_bounds__(256)
column_partials(const real* x, float* partials, u32 rows, u32 width) {
    await_earlier();
    column_partials_of<VECTOR>(x, partials, rows, width);
}

// The same for any width.
KERNEL __launch_bounds__(256)
column_partials_any(const real* x, float* partials, u32 rows, u32 width) {
    await_earlier();
    column_partials_of<1>(x, partials, rows, width);
}

// out[width] (+)= Σ partials[rows, width]; with gridDim.y = 2, `second` likewise from the
// partials that follow. Blocks of 32×32: a column to a thread, every 32nd row.
KERNEL __launch_bounds__(1024)
sum_partials(const float* partials, float* first, float* second, u32 rows, u32 width,
             u32 first_adds, u32 second_adds) {
    await_earlier();
    __shared__ float sums[32][33];
    u32 column = blockIdx.x * 32 + threadIdx.x;
    const float* from = partials + (u64)blockIdx.y * rows * width;
    float sum = 0.0f;
    if (column < width) {
        u32 count = num_turns(threadIdx.y, rows, 32);
#pragma unroll 8
        for (u32 turn = 0; turn < count; turn++)
            sum += from[(u64)(threadIdx.y + turn * 32) * width + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Each warp adds up the 32 sums of one column.
    float total = warp_sum(sums[threadIdx.x][threadIdx.y]);
    column = blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x != 0 || column >= width) return;
    float* out = blockIdx.y ? second : first;
    bool adds = blockIdx.y ? second_adds : first_adds;
    out[column] = adds ? out[column] + total : total;
}

// The sum of one of 32 neighbouring columns of partials[rows, width], a multiple of four, in the first 32
// threads. A thread has four columns of every 32nd row.
__device__ __forceinline__ float column_total(const float* from, u32 rows, u32 width, u32 first) {
    __shared__ float4 sums[32][8];
    u32 x = threadIdx.x % 8, y = threadIdx.x / 8, column = first + x * 4;
    float4 sum = {};
    if (column < width) {
        u32 count = num_turns(y, rows, 32);
#pragma unroll 8
        for (u32 turn = 0; turn < count; turn++) {
            float4 four = *(const float4*)(from + (u64)(y + turn * 32) * width + column);
            sum.x += four.x;
            sum.y += four.y;
            sum.z += four.z;
            sum.w += four.w;
        }
    }
    sums[y][x] = sum;
    __syncthreads();
    float total = 0.0f;
    if (threadIdx.x >= 32) return total;
#pragma unroll
    for (int i = 0; i < 32; i++) total += ((const float*)sums[i])[threadIdx.x];
    return total;
}

// Of up to three likewise, each of a width that is a multiple of four. A block has 32 columns.
KERNEL __launch_bounds__(256)
sum_many_partials(const float* partials, float* first, float* second, float* third, u32 rows, u32 width,
                  u32 adds) {
    await_earlier();
    u32 column = blockIdx.x * 32 + threadIdx.x;
    float total = column_total(partials + (u64)blockIdx.y * rows * width, rows, width, blockIdx.x * 32);
    if (threadIdx.x >= 32 || column >= width) return;
    float* out = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
    out[column] = adds ? out[column] + total : total;
}

// Of up to four that lie beside each other in partials[rows, width]: up to three of `each` columns, and
// the last has the others. All of them are multiples of 32.
KERNEL __launch_bounds__(256)
sum_partials_beside(const float* partials, float* first, float* second, float* third, float* last, u32 rows,
                    u32 width, u32 each, u32 last_column, u32 adds, u32 last_adds) {
    await_earlier();
    u32 column = blockIdx.x * 32;
    float total = column_total(partials, rows, width, column);
    if (threadIdx.x >= 32) return;
    bool is_last = column >= last_column;
    u32 number = column / each;
    float* out = is_last ? last : number == 0 ? first : number == 1 ? second : third;
    column += threadIdx.x - (is_last ? last_column : number * each);
    out[column] = (is_last ? last_adds : adds) ? out[column] + total : total;
}
