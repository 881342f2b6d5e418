// Codes of quantised weights back into numbers.
#include "common.cuh"

constexpr int BLOCK = 64, SCALE_BLOCK = 256;

// The numbers behind the codes of weights and of scales.
struct Table { float weights[16]; float scales[256]; };

// Sixteen codes to a thread: 8 bytes in, 16 numbers out, all of one block. `elements` is a
// multiple of two; codes after the last whole sixteen go one by one. With `scale_codes` a block's
// scale is a code itself, otherwise `scale_units` has the scales.
KERNEL __launch_bounds__(256) dequantise_nf4(const __grid_constant__ Table table, const u8* codes,
                                             const u8* scale_codes, const float* scale_units,
                                             const float* scale_mean, real* out, u64 elements) {
    await_earlier();
    __shared__ float weights[16], scales[256];
    if (threadIdx.x < 16) weights[threadIdx.x] = table.weights[threadIdx.x];
    scales[threadIdx.x] = table.scales[threadIdx.x];
    __syncthreads();
    float mean = scale_codes ? *scale_mean : 0.0f;
    u64 stride = (u64)gridDim.x * blockDim.x * 16;
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 16; at < elements; at += stride) {
        u64 block = at / BLOCK;
        float scale = scale_codes
                          ? fmaf(scales[scale_codes[block]], scale_units[block / SCALE_BLOCK], mean)
                          : scale_units[block];
        if (at + 16 <= elements) {
            uint2 packed = *reinterpret_cast<const uint2*>(codes + at / 2);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 word = half ? packed.y : packed.x;
                float values[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    // The higher half of each byte comes first.
                    int shift = (i / 2) * 8 + (i % 2 ? 0 : 4);
                    values[i] = weights[(word >> shift) & 15u] * scale;
                }
                store(out + at + 8 * half, values);
            }
        } else {
            for (u64 i = at; i < elements; i++) {
                u32 byte = codes[i / 2];
                u32 code = i % 2 ? byte & 15u : byte >> 4;
                out[i] = from_float<real>(weights[code] * scale);
            }
        }
    }
}

// A signed byte a number, in units of a 127th of its row's scale. The grid is (rows, parts).
KERNEL __launch_bounds__(256) dequantise_int8(const u8* codes, const float* scales, real* out,
                                              u32 width) {
    await_earlier();
    float unit = scales[blockIdx.x] / 127.0f;
    u64 row = (u64)blockIdx.x * width;
    for (u32 i = blockIdx.y * blockDim.x + threadIdx.x; i < width; i += gridDim.y * blockDim.x)
        out[row + i] = from_float<real>((float)(signed char)codes[row + i] * unit);
}
