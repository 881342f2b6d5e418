// Numbers for what products read while they are timed.
#include "common.cuh"

// Words of 16 bits, all of which change: numbers of either sign between 1 and 2 as f16, and between
// 1/128 and 2 as bf16 or as the upper half of a float.
KERNEL noise(u16* x, u64 words) {
    await_earlier();
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = thread; i < words; i += threads) {
        u32 bits = mix((u32)i);
        x[i] = (u16)((bits & 0x83ffu) | 0x3c00u);
    }
}
