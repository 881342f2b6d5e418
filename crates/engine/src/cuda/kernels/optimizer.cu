// The end of a step: the norm of all gradients with the factor that clips them, and AdamW.
// Everything that changes from step to step is read from device memory, so that the launches can
// be replayed.
#include "common.cuh"

// The sum over a block, in a fixed order, in thread 0. `scratch` has 32 doubles.
__device__ __forceinline__ double block_total(double x, double* scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    if (warp != 0) return 0.0;
    x = lane < warps ? scratch[lane] : 0.0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_down_sync(0xffffffffu, x, offset);
    return x;
}

// partials[b] = Σ x² over elements b·share to (b+1)·share, share being a multiple of 4: each
// thread adds up its few elements as floats, the rest is in double.
template <typename T>
__device__ __forceinline__ void sum_squares(const T* x, double* partials, u64 elements, u32 share) {
    __shared__ double scratch[32];
    u64 start = (u64)blockIdx.x * share;
    u64 end = start + share < elements ? start + share : elements;
    float sum = 0.0f;
    u64 whole = end - (end - start) % 4;
    u32 count = num_turns(threadIdx.x * 4, (u32)(whole - start), blockDim.x * 4);
#pragma unroll 8
    for (u32 turn = 0; turn < count; turn++) {
        float v[4];
        load(x + start + (turn * blockDim.x + threadIdx.x) * 4, v);
#pragma unroll
        for (int j = 0; j < 4; j++) sum = fmaf(v[j], v[j], sum);
    }
    if (whole + threadIdx.x < end) {
        float last = to_float(x[whole + threadIdx.x]);
        sum = fmaf(last, last, sum);
    }
    double total = block_total((double)sum, scratch);
    if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

KERNEL __launch_bounds__(256)
gradient_squares(const float* x, double* partials, u64 elements, u32 share) {
    await_earlier();
    sum_squares(x, partials, elements, share);
}

// Gradients that are kept in the compute type.
KERNEL __launch_bounds__(256)
gradient_squares_real(const real* x, double* partials, u64 elements, u32 share) {
    await_earlier();
    sum_squares(x, partials, elements, share);
}

// Ends of the loss scale and the good steps after which it doubles: see the graph's LossScale.
constexpr float SMALLEST_SCALE = 1.0f, LARGEST_SCALE = 2147483648.0f, SCALE_INTERVAL = 2000.0f;

// out = [norm, factor]. The small constant is PyTorch's, and keeps a zero norm from dividing;
// without clipping max_norm is infinite. `scaling`, or null: [scale, good steps, skipped steps,
// whether this one is skipped]. The gradients are then `scale` times too large, which the factor
// takes out, and a norm that is not finite gives the factor 0.
KERNEL __launch_bounds__(1024)
gradient_norm(const double* partials, float* out, float* scaling, u32 count, float max_norm) {
    await_earlier();
    __shared__ double scratch[32];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    double total = block_total(sum, scratch);
    if (threadIdx.x != 0) return;
    double norm = sqrt(total), scale = scaling ? (double)scaling[0] : 1.0;
    norm /= scale;
    out[0] = (float)norm;
    out[1] = (float)(fmin((double)max_norm / (norm + 1e-6), 1.0) / scale);
    if (!scaling) return;
    bool finite = norm < 1.0e300;
    if (!finite) {
        out[1] = 0.0f;
        scaling[0] = fmaxf(scaling[0] * 0.5f, SMALLEST_SCALE);
        scaling[1] = 0.0f;
        scaling[2] += 1.0f;
        scaling[3] = 1.0f;
        return;
    }
    float good = scaling[1] + 1.0f;
    bool grows = good >= SCALE_INTERVAL;
    if (grows) scaling[0] = fminf(scaling[0] * 2.0f, LARGEST_SCALE);
    scaling[1] = grows ? 0.0f : good;
    scaling[3] = 0.0f;
}

struct Update {
    float factor, keep, weight1, beta2, weight2, step, root2, epsilon;

    //   g = factor·gradient                          p ← p·(1 − lr·decay)
    //   m ← m + (1 − β₁)(g − m)                      v ← β₂ v + (1 − β₂) g²
    //   p ← p − lr/c₁ · m / (√v/√c₂ + ε)             c₁, c₂ the bias corrections
    __device__ __forceinline__ void apply(float& p, float gradient, float& m, float& v) const {
        float g = gradient * factor;
        m = fmaf(weight1, g - m, m);
        v = fmaf(beta2, v, weight2 * g * g);
        float root = fmaf(sqrtf(v), root2, epsilon);
        p = p * keep - step * m / root;
    }
};

// Adam's numbers of a parameter, whose learning rate is `rate` times the step's.
__device__ __forceinline__ Update make_update(const float* scalars, float factor, float decay,
                                              float rate, float weight1, float beta2,
                                              float weight2, float epsilon) {
    Update update;
    float learning_rate = scalars[0] * rate;
    update.factor = factor;
    update.keep = fmaf(-learning_rate, decay, 1.0f);
    update.weight1 = weight1;
    update.beta2 = beta2;
    update.weight2 = weight2;
    update.step = learning_rate / scalars[1];
    update.root2 = 1.0f / sqrtf(scalars[2]);
    update.epsilon = epsilon;
    return update;
}

// A parameter in the table of a launch. Tensors are named by their offset from the arena's start,
// the moments by that from `states`, in units of 256 bytes; the copy in the compute type may be
// absent. `kept` says which of them are in the compute type: the rest are floats.
struct Entry {
    u32 parameter, gradient, m, v, copy;
    u32 elements, first_block, kept;
    float decay, rate;
};

constexpr u32 PARAMETER_AS_READ = 1, GRADIENT_AS_READ = 2, MOMENTS_AS_READ = 4;
constexpr int ENTRIES = 96;
constexpr u32 UNIT = 256, NO_COPY = 0xffffffffu;
struct Table { Entry entries[ENTRIES]; };

// Elements of a block, four to a thread at a time.
constexpr u32 SHARE = 8192, UPDATE_THREADS = 256;

template <typename T> __device__ __forceinline__ T* at(u8* arena, u32 units) {
    return reinterpret_cast<T*>(arena + (u64)units * UNIT);
}

// A block's share of an entry, of a parameter in P with a gradient in G and moments in M.
template <typename P, typename G, typename M>
__device__ __forceinline__ void update_share(const Entry& entry, u8* arena, u8* states,
                                             const Update& update) {
    P* parameter = at<P>(arena, entry.parameter);
    const G* gradient = at<G>(arena, entry.gradient);
    M* m = at<M>(states, entry.m);
    M* v = at<M>(states, entry.v);
    real* copy = entry.copy == NO_COPY ? nullptr : at<real>(arena, entry.copy);
    u32 start = (blockIdx.x - entry.first_block) * SHARE;
    u32 end = entry.elements - start < SHARE ? entry.elements : start + SHARE;
    u32 whole = end - end % 4;
#pragma unroll 2
    for (u32 i = start + threadIdx.x * 4; i < whole; i += UPDATE_THREADS * 4) {
        float p[4], g[4], first[4], second[4];
        load(parameter + i, p);
        load(gradient + i, g);
        load(m + i, first);
        load(v + i, second);
#pragma unroll
        for (int j = 0; j < 4; j++) update.apply(p[j], g[j], first[j], second[j]);
        store(parameter + i, p);
        store(m + i, first);
        store(v + i, second);
        if (copy) store(copy + i, p);
    }
    u32 last = whole + threadIdx.x;
    if (last < end) {
        float p = to_float(parameter[last]);
        float first = to_float(m[last]), second = to_float(v[last]);
        update.apply(p, to_float(gradient[last]), first, second);
        parameter[last] = from_float<P>(p);
        m[last] = from_float<M>(first);
        v[last] = from_float<M>(second);
        if (copy) copy[last] = from_float<real>(p);
    }
}

// AdamW for `count` parameters at once; entries are in the order of their blocks. `states` is the
// arena or mapped memory of the host: each moment is read and written once, in order, so that it
// streams over the bus. `clipping`, or null, is [norm, factor], `scalars` [learning rate, c₁, c₂]. A factor of 0 marks a step that is skipped:
// a finite norm never gives it.
KERNEL __launch_bounds__(256)
adamw(const __grid_constant__ Table table, u32 count, u8* arena, u8* states,
      const float* clipping, const float* scalars, float weight1, float beta2, float weight2, float epsilon) {
    await_earlier();
    float factor = clipping ? clipping[1] : 1.0f;
    if (factor == 0.0f) return;
    // The last entry that begins at this block or before.
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (table.entries[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    const Entry& entry = table.entries[low];
    Update update =
        make_update(scalars, factor, entry.decay, entry.rate, weight1, beta2, weight2, epsilon);
    switch (entry.kept) {
    case 0: return update_share<float, float, float>(entry, arena, states, update);
    case PARAMETER_AS_READ: return update_share<real, float, float>(entry, arena, states, update);
    case PARAMETER_AS_READ | GRADIENT_AS_READ:
        return update_share<real, real, float>(entry, arena, states, update);
    case PARAMETER_AS_READ | MOMENTS_AS_READ:
        return update_share<real, float, real>(entry, arena, states, update);
    default: return update_share<real, real, real>(entry, arena, states, update);
    }
}

// Moments in eight bits: codes in blocks with a scale each. In units of the scale
//
//   m = sign(q)·(q/127)²,  q a signed byte         v = 2^e·(1 + f/8),  code − 255 = 8·e + f, 0 for 0
//
// so the code of v is the sign-free float of its upper bits; see the CPU's eight_bit.rs.
constexpr u32 CODE_BLOCK = 256, LANE_CODES = 8, BLOCKS_PER_LAUNCH_BLOCK = 8;
constexpr float LARGEST_CODE = 127.0f;
constexpr int DROPPED_BITS = 20, CODE_OFFSET = (0x3f800000 >> DROPPED_BITS) - 255;

__device__ __forceinline__ float decode_signed(u8 code, float unit) {
    float q = (float)(signed char)code;
    return q * fabsf(q) * unit;
}

__device__ __forceinline__ u8 encode_signed(float value, float scale) {
    // Adding 1.5·2²³ leaves the nearest integer, as two's complement, in the low bits.
    float q = LARGEST_CODE * sqrtf(fabsf(value) / scale);
    return (u8)__float_as_uint(copysignf(q, value) + 12582912.0f);
}

__device__ __forceinline__ float decode_unsigned(u8 code, float scale) {
    float value = __int_as_float(((int)code + CODE_OFFSET) << DROPPED_BITS) * scale;
    return code == 0 ? 0.0f : value;
}

__device__ __forceinline__ u8 encode_unsigned(float value, float scale) {
    int bits = __float_as_int(value / scale);
    int code = ((bits + (1 << (DROPPED_BITS - 1))) >> DROPPED_BITS) - CODE_OFFSET;
    code = code < 1 ? 1 : code > 255 ? 255 : code;
    return value > 0.0f ? (u8)code : (u8)0;
}

// The largest magnitude over a warp, 1 where all are zero. Magnitudes compare like their bits.
__device__ __forceinline__ float warp_largest(const float (&x)[LANE_CODES]) {
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < LANE_CODES; j++) most = max(most, __float_as_uint(fabsf(x[j])));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
    return most == 0 ? 1.0f : __uint_as_float(most);
}

// AdamW of one parameter [elements] whose moments are codes [elements] and scales
// [⌈elements/256⌉]: a warp decodes a block, updates it and encodes it again, eight numbers to a
// lane. Moments may be in mapped memory of the host. `copy` and `clipping` may be null.
template <typename P, typename G>
__device__ __forceinline__ void
update_codes(P* parameter, const G* gradient, u8* m, u8* v, float* m_scales, float* v_scales,
             real* copy, const float* clipping, const float* scalars, u64 elements, float decay,
             float rate, float weight1, float beta2, float weight2, float epsilon) {
    float factor = clipping ? clipping[1] : 1.0f;
    u64 block = (u64)blockIdx.x * BLOCKS_PER_LAUNCH_BLOCK + threadIdx.x / 32;
    if (factor == 0.0f || block * CODE_BLOCK >= elements) return;
    Update update = make_update(scalars, factor, decay, rate, weight1, beta2, weight2, epsilon);
    u64 start = block * CODE_BLOCK + (threadIdx.x % 32) * LANE_CODES;
    bool whole = start + LANE_CODES <= elements;
    float m_unit = m_scales[block] / (LARGEST_CODE * LARGEST_CODE), v_scale = v_scales[block];
    float p[LANE_CODES] = {}, g[LANE_CODES] = {}, first[LANE_CODES], second[LANE_CODES];
    Pack<u8, LANE_CODES> m_codes = {}, v_codes = {};
    if (whole) {
        load(parameter + start, p);
        load(gradient + start, g);
        m_codes = *reinterpret_cast<const Pack<u8, LANE_CODES>*>(m + start);
        v_codes = *reinterpret_cast<const Pack<u8, LANE_CODES>*>(v + start);
    } else {
        for (int j = 0; j < LANE_CODES && start + j < elements; j++) {
            p[j] = to_float(parameter[start + j]);
            g[j] = to_float(gradient[start + j]);
            m_codes.v[j] = m[start + j];
            v_codes.v[j] = v[start + j];
        }
    }
#pragma unroll
    for (int j = 0; j < LANE_CODES; j++) {
        first[j] = decode_signed(m_codes.v[j], m_unit);
        second[j] = decode_unsigned(v_codes.v[j], v_scale);
        // Beyond the end all is zero and stays so.
        update.apply(p[j], g[j], first[j], second[j]);
    }
    float m_scale = warp_largest(first);
    v_scale = warp_largest(second);
#pragma unroll
    for (int j = 0; j < LANE_CODES; j++) {
        m_codes.v[j] = encode_signed(first[j], m_scale);
        v_codes.v[j] = encode_unsigned(second[j], v_scale);
    }
    if (whole) {
        store(parameter + start, p);
        *reinterpret_cast<Pack<u8, LANE_CODES>*>(m + start) = m_codes;
        *reinterpret_cast<Pack<u8, LANE_CODES>*>(v + start) = v_codes;
        if (copy) store(copy + start, p);
    } else {
        for (int j = 0; j < LANE_CODES && start + j < elements; j++) {
            parameter[start + j] = from_float<P>(p[j]);
            m[start + j] = m_codes.v[j];
            v[start + j] = v_codes.v[j];
            if (copy) copy[start + j] = from_float<real>(p[j]);
        }
    }
    if (threadIdx.x % 32 == 0) {
        m_scales[block] = m_scale;
        v_scales[block] = v_scale;
    }
}

KERNEL __launch_bounds__(256)
adamw_8bit(float* parameter, const float* gradient, u8* m, u8* v, float* m_scales, float* v_scales,
           real* copy, const float* clipping, const float* scalars, u64 elements, float decay,
           float rate, float weight1, float beta2, float weight2, float epsilon) {
    await_earlier();
    update_codes(parameter, gradient, m, v, m_scales, v_scales, copy, clipping, scalars, elements,
                 decay, rate, weight1, beta2, weight2, epsilon);
}

// A parameter without a master.
KERNEL __launch_bounds__(256)
adamw_8bit_as_read(real* parameter, const float* gradient, u8* m, u8* v, float* m_scales, float* v_scales,
                   real* copy, const float* clipping, const float* scalars, u64 elements, float decay,
                   float rate, float weight1, float beta2, float weight2, float epsilon) {
    await_earlier();
    update_codes(parameter, gradient, m, v, m_scales, v_scales, copy, clipping, scalars, elements,
                 decay, rate, weight1, beta2, weight2, epsilon);
}

// The same with a gradient that is kept in its type.
KERNEL __launch_bounds__(256)
adamw_8bit_all_as_read(real* parameter, const real* gradient, u8* m, u8* v, float* m_scales, float* v_scales,
                       real* copy, const float* clipping, const float* scalars, u64 elements, float decay,
                       float rate, float weight1, float beta2, float weight2, float epsilon) {
    await_earlier();
    update_codes(parameter, gradient, m, v, m_scales, v_scales, copy, clipping, scalars, elements,
                 decay, rate, weight1, beta2, weight2, epsilon);
}

// Floats in the compute type: weights after loading, and the bias that a product adds.
KERNEL copy_to_real(const float* from, real* to, u64 elements) {
    await_earlier();
    u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    u64 vectors = elements / 4;
    for (u64 i = thread; i < vectors; i += threads) {
        float v[4];
        load(from + i * 4, v);
        store(to + i * 4, v);
    }
    u64 last = vectors * 4 + thread;
    if (last < elements) to[last] = from_float<real>(from[last]);
}
