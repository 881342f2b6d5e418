// Rotary position embedding: of each head, the columns i and i + head_dim/2 at position t turn by
// the angle t·base^(−2i/head_dim).
//
// A block has one position, whose sines serve every head of every sequence. An angle can be
// thousands of turns, of which only the fraction counts: frequencies are taken in turns and as a
// sum of two floats, so that the whole turns drop out without taking the fraction's digits along.
#include "common.cuh"

constexpr int VECTOR = 16 / sizeof(real);

// The cosine and sine of `t` turns of base^(−2i/head_dim) / 2π.
__device__ __forceinline__ void position_angle(int t, int i, double rate, float& cosine,
                                               float& sine) {
    double turns = exp2(-(double)i * rate) * 0.15915494309189533577;
    float high = (float)turns, low = (float)(turns - (double)high), position = (float)t;
    float product = position * high;
    // What rounding took from the product, exactly, and the rest of the frequency.
    float rest = fmaf(position, low, fmaf(position, high, -product));
    sincospif(2.0f * ((product - rintf(product)) + rest), &sine, &cosine);
}

// Turns the rows at this position, N pairs to a thread at a time.
template <int N>
__device__ __forceinline__ void turn(const real* x, real* y, const float* cosines,
                                     const float* sines, int batch, int seq, int heads, int half) {
    u32 per_head = half / N, per_row = heads * per_head;
    u32 count = batch * per_row, stride = gridDim.y * blockDim.x;
    for (u32 index = blockIdx.y * blockDim.x + threadIdx.x; index < count; index += stride) {
        u32 piece = index % per_row, i = piece % per_head * N;
        u64 row = (u64)(index / per_row) * seq + blockIdx.x;
        u64 at = (row * heads + piece / per_head) * 2 * half + i;
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

// The grid is (positions, parts of the batch). `rate` has the bits of the double
// 2·log2(base)/head_dim, `sign` is −1 for the inverse, and `vector` says that head_dim/2 is a
// multiple of a vector's elements. Shared memory: head_dim floats. y may be x: a thread reads what
// it writes before it does so.
KERNEL __launch_bounds__(256) rotary(const real* x, real* y, u64 rate, int batch, int seq,
                                     int heads, int head_dim, float sign, int vector) {
    extern __shared__ float table[];
    int half = head_dim / 2;
    float *cosines = table, *sines = table + half;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        float cosine, sine;
        position_angle(blockIdx.x, i, __longlong_as_double((long long)rate), cosine, sine);
        cosines[i] = cosine;
        sines[i] = sign * sine;
    }
    __syncthreads();
    if (vector)
        turn<VECTOR>(x, y, cosines, sines, batch, seq, heads, half);
    else
        turn<1>(x, y, cosines, sines, batch, seq, heads, half);
}
