// Columns of a matrix copied to columns of another one, or cleared: tensors joined and cut apart.
#include "common.cuh"

struct alignas(16) Line { u32 words[4]; };

// to[row·to_stride + i] = from[row·from_stride + i] for i < width, all counted in units of T;
// zeros where `from` is null.
template <typename T>
__device__ __forceinline__ void copy_rows(const T* from, T* to, u32 rows, u32 width,
                                          u32 from_stride, u32 to_stride) {
    u64 elements = (u64)rows * width, threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += threads) {
        u64 row = i / width, column = i % width;
        to[row * to_stride + column] = from ? from[row * from_stride + column] : T();
    }
}

// Units of 16, 4 and 2 bytes: the largest that rows are made of.
KERNEL __launch_bounds__(256) copy_columns_16(const Line* from, Line* to, u32 rows, u32 width,
                                              u32 from_stride, u32 to_stride) {
    await_earlier();
    copy_rows(from, to, rows, width, from_stride, to_stride);
}
KERNEL __launch_bounds__(256) copy_columns_4(const u32* from, u32* to, u32 rows, u32 width,
                                             u32 from_stride, u32 to_stride) {
    await_earlier();
    copy_rows(from, to, rows, width, from_stride, to_stride);
}
KERNEL __launch_bounds__(256) copy_columns_2(const u16* from, u16* to, u32 rows, u32 width,
                                             u32 from_stride, u32 to_stride) {
    await_earlier();
    copy_rows(from, to, rows, width, from_stride, to_stride);
}
