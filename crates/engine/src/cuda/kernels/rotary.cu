// Rotary position embedding: of each head, the columns i and i + head_dim/2 at position t turn by
// the angle t·frequency[i].
//
// A block has one position, whose sines serve every head, and every sequence where all have the
// same positions. An angle can be thousands of turns, of which only the fraction counts:
// frequencies come in turns and as a sum of two floats, so that the whole turns drop out without
// taking the fraction's digits along.
#include "common.cuh"

constexpr int VECTOR = 16 / sizeof(real);

// Turns from one position to the next: the float nearest to each, and what is left.
struct Table { float high[256]; float low[256]; };

__device__ __forceinline__ void position_angle(float position, float high, float low,
                                               float& cosine, float& sine) {
    float product = position * high;
    // What rounding took from the product, exactly, and the rest of the frequency.
    float rest = fmaf(position, low, fmaf(position, high, -product));
    sincospif(2.0f * ((product - rintf(product)) + rest), &sine, &cosine);
}

// Turns the rows at this position, N pairs to a thread at a time.
template <int N>
__device__ __forceinline__ void turn(const real* x, real* y, const float* cosines,
                                     const float* sines, int batch, int seq, int heads, int half,
                                     u32 width) {
    u32 per_head = half / N, per_row = heads * per_head;
    u32 count = batch * per_row, stride = gridDim.y * blockDim.x;
    for (u32 index = blockIdx.y * blockDim.x + threadIdx.x; index < count; index += stride) {
        u32 piece = index % per_row, i = piece % per_head * N;
        u64 row = (u64)(index / per_row) * seq + blockIdx.x;
        u64 at = row * width + piece / per_head * 2 * half + i;
        float a[N], b[N], cosine[N], sine[N];
        load(x + at, a);
        load(x + at + half, b);
        load(cosines + i, cosine);
        load(sines + i, sine);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float first = a[j];
            a[j] = fmaf(first, cosine[j], -b[j] * sine[j]);
            b[j] = fmaf(b[j], cosine[j], first * sine[j]);
        }
        store(y + at, a);
        store(y + at + half, b);
    }
}

// The grid is (positions, parts of the batch). With `positions` there is one for each row, and
// batch is 1. Rows have `width` elements, of which those of `heads` heads turn and are multiplied
// by `scale`; `sign` is −1 for the inverse, and `vector` says that head_dim/2 and the width are
// multiples of a vector's elements. Shared memory: head_dim floats. y may be x: a thread reads what
// it writes before it does so.
KERNEL __launch_bounds__(256) rotary(const __grid_constant__ Table table, const real* x, real* y,
                                     const i32* positions, int batch, int seq, int heads,
                                     int head_dim, u32 width, float scale, float sign,
                                     int vector) {
    await_earlier();
    extern __shared__ float turns[];
    int half = head_dim / 2;
    float *cosines = turns, *sines = turns + half;
    float position = (float)(positions ? positions[blockIdx.x] : (int)blockIdx.x);
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float cosine, sine;
        position_angle(position, table.high[i], table.low[i], cosine, sine);
        cosines[i] = scale * cosine;
        sines[i] = scale * sign * sine;
    }
    __syncthreads();
    if (vector)
        turn<VECTOR>(x, y, cosines, sines, batch, seq, heads, half, width);
    else
        turn<1>(x, y, cosines, sines, batch, seq, heads, half, width);
}
