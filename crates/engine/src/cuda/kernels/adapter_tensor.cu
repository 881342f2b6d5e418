// The products of adapters of ranks up to 32. Each reads or writes what is wide once; where it is
// dropped, elements are cleared in registers on the way, so that nothing dropped ever exists in
// memory. Masks are those of common.cuh.
//
//   reads      y[m, n] = scale·drop(x)[m, k]·W, where W is [n, k] (`rows`) or [k, n] (`columns`)
//   streams    the same of many rows, with dropout
//   gradient   parts[p][n, k] = scale·dy[m, n]ᵀ·drop(x)[m, k] over the rows of part p
//   adds       dx[m, k] (+)= drop(scale·dy[m, n]·W[n, k])
//
// n is 8, 16, 24 or 32 and in the name of a kernel, in eights; k is a multiple of 32. Rows begin at
// multiples of 16 bytes. For 16-bit element types.
#include "common.cuh"
#include "matrix.cuh"

struct alignas(16) Eight {
    u32 pairs[4];
};

__device__ __forceinline__ Eight load_eight(const real* p, bool is_there) {
    return is_there ? *(const Eight*)p : Eight{};
}

// Clears the elements that are dropped; those that are kept are not scaled yet.
__device__ __forceinline__ void drop(Eight& x, const Dropout& dropout, u32 base, u32 column) {
#pragma unroll
    for (int i = 0; i < 4; i++) x.pairs[i] &= dropout.kept(base, column + 2 * i);
}

// The same, where `from` is what the numbers of the first pair are made of.
__device__ __forceinline__ void drop(Eight& x, const Dropout& dropout, u32 from) {
#pragma unroll
    for (int i = 0; i < 4; i++) x.pairs[i] &= dropout.kept_of(Dropout::word(from + i * Dropout::STEP));
}

// ---------------------------------------------------------------- reads

// A block has 32 rows; its warps, eight at the most, take 32 columns of x in turn, and their sums
// are added up in the order of the warps. Of 32 columns a thread has eight that are neighbours: which
// of them meet in an instruction does not matter as long as x and W agree.
template <int EIGHTS, bool IS_DROPPED, bool BY_COLUMN>
__device__ __forceinline__ void reads(const real* x, const real* w, real* y, u32 rows, u32 k, u32 x_stride,
                                      u32 w_stride, u32 y_stride, float scale, const Dropout& dropout) {
    constexpr int ROWS = 32, N = 8 * EIGHTS;
    __shared__ float sums[8][ROWS][N];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u32 g = lane / 4, t = lane % 4, first = blockIdx.x * ROWS;
    u32 bases[4];
#pragma unroll
    for (int i = 0; i < 4; i++) bases[i] = IS_DROPPED ? dropout.row(first + i * 8 + g) : 0u;
    float c[2][EIGHTS][4] = {};
    for (u32 column = warp * 32 + t * 8; column < k; column += warps * 32) {
        Eight a[4], b[EIGHTS];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 row = first + i * 8 + g;
            a[i] = load_eight(x + (u64)row * x_stride + column, row < rows);
        }
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            if (BY_COLUMN) {
                const real* from = w + (u64)column * w_stride + j * 8 + g;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    b[j].pairs[i] = (u32)from[2 * i * w_stride].bits | (u32)from[(2 * i + 1) * w_stride].bits << 16;
            } else {
                b[j] = load_eight(w + (u64)(j * 8 + g) * w_stride + column, true);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (IS_DROPPED) drop(a[i], dropout, bases[i], column);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int tile = 0; tile < 2; tile++) {
                const Eight &upper = a[2 * tile], &lower = a[2 * tile + 1];
                u32 left[4] = {upper.pairs[2 * half], lower.pairs[2 * half], upper.pairs[2 * half + 1],
                               lower.pairs[2 * half + 1]};
#pragma unroll
                for (int j = 0; j < EIGHTS; j++)
                    multiply(c[tile][j], left, b[j].pairs[2 * half], b[j].pairs[2 * half + 1]);
            }
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[warp][tile * 16 + i / 2 * 8 + g][j * 8 + 2 * t + i % 2] = c[tile][j][i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < ROWS * N; i += blockDim.x) {
        u32 row = i / N, column = i % N;
        if (first + row >= rows) break;
        float sum = 0.0f;
        for (u32 other = 0; other < warps; other++) sum += sums[other][row][column];
        y[(u64)(first + row) * y_stride + column] = from_float<real>(sum * scale);
    }
}

// The same for many rows: a warp has 16 of them, and goes through all columns of x by 32, with six of
// those on their way at once. W is in shared memory as its threads take it, as many columns at a time
// as there is room for.
constexpr u32 STREAM_WARPS = 4, STREAM_ROWS = 16;

template <int EIGHTS>
__device__ __forceinline__ void streams(const real* x, const real* w, real* y, u32 rows, u32 k, u32 x_stride,
                                        u32 y_stride, const Dropout& dropout) {
    constexpr u32 TOGETHER = 6, GROUPS = 48 / EIGHTS;
    __shared__ Eight kept[GROUPS][EIGHTS][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 upper = (blockIdx.x * STREAM_WARPS + warp) * STREAM_ROWS + g, lower = upper + 8;
    u32 bases[2] = {dropout.row(upper), dropout.row(lower)};
    const real *from_upper = x + (u64)upper * x_stride + t * 8, *from_lower = x + (u64)lower * x_stride + t * 8;
    float c[EIGHTS][4] = {};
    for (u32 first = 0; first < k; first += GROUPS * 32) {
        u32 groups = min(k - first, GROUPS * 32) / 32;
        if (first > 0) __syncthreads();
        for (u32 i = threadIdx.x; i < groups * EIGHTS * 32; i += STREAM_WARPS * 32) {
            u32 group = i / (EIGHTS * 32), j = i / 32 % EIGHTS;
            kept[group][j][lane] = load_eight(w + (u64)(j * 8 + g) * k + first + group * 32 + t * 8, true);
        }
        __syncthreads();
        for (u32 begin = 0; begin < groups; begin += TOGETHER) {
            Eight a[TOGETHER][2];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                u32 column = first + (begin + i) * 32;
                bool is_there = begin + i < groups;
                a[i][0] = load_eight(from_upper + column, is_there && upper < rows);
                a[i][1] = load_eight(from_lower + column, is_there && lower < rows);
            }
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                if (begin + i >= groups) break;
                u32 column = first + (begin + i) * 32 + t * 8;
                drop(a[i][0], dropout, bases[0], column);
                drop(a[i][1], dropout, bases[1], column);
#pragma unroll
                for (int j = 0; j < EIGHTS; j++) {
                    Eight b = kept[begin + i][j][lane];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 left[4] = {a[i][0].pairs[2 * half], a[i][1].pairs[2 * half],
                                       a[i][0].pairs[2 * half + 1], a[i][1].pairs[2 * half + 1]};
                        multiply(c[j], left, b.pairs[2 * half], b.pairs[2 * half + 1]);
                    }
                }
            }
        }
    }
    float scale = dropout.scale;
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
        u32 column = j * 8 + 2 * t;
        if (upper < rows) *(u32*)(y + (u64)upper * y_stride + column) = pack2(c[j][0] * scale, c[j][1] * scale);
        if (lower < rows) *(u32*)(y + (u64)lower * y_stride + column) = pack2(c[j][2] * scale, c[j][3] * scale);
    }
}

// ---------------------------------------------------------------- gradient

// The grid is (blocks of 128 columns, parts). Of a block two warps are side by side, with 64 columns
// each, and four below each other, with a fourth of the part's rows. A warp goes through its rows by 16,
// with AHEAD of those on their way in registers, and turns what it has dropped elements of in shared
// memory of its own. At the end the warps below each other add up what they have, in their order.
template <int EIGHTS, int AHEAD>
__device__ __forceinline__ void gradient(const real* dy, const real* x, float* parts, u32 rows, u32 k,
                                         u32 dy_stride, u32 x_stride, u32 rows_of_part, float scale,
                                         const u32* random, u32 stream, u32 limit) {
    constexpr u32 BESIDE = 2, BELOW = 4, GROUPS = 2, COLUMNS = 32 * GROUPS, WIDTH = BESIDE * COLUMNS;
    constexpr u32 N = 8 * EIGHTS;
    // Eight rows of a matrix begin in different banks.
    __shared__ alignas(16) real turned[BESIDE * BELOW][16][32 + 8];
    __shared__ float sums[N][WIDTH + 8];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    u32 beside = warp % BESIDE, below = warp / BESIDE, of_warp = rows_of_part / BELOW;
    u32 column = blockIdx.x * WIDTH + beside * COLUMNS + t * 8;
    u32 begin = blockIdx.y * rows_of_part + below * of_warp, end = min(begin + of_warp, rows);
    Eight wide[AHEAD][GROUPS][2];
    u32 narrow[AHEAD][EIGHTS][2];
    auto bring = [&](u32 from, Eight(&wide)[GROUPS][2], u32(&narrow)[EIGHTS][2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = from + half * 8 + g;
            bool is_there = row < end;
            const real* from_x = x + (u64)row * x_stride + column;
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                wide[i][half] = load_eight(from_x + i * 32, is_there && column + i * 32 < k);
            const real* at = dy + (u64)row * dy_stride + 2 * t;
#pragma unroll
            for (int j = 0; j < EIGHTS; j++) narrow[j][half] = is_there ? *(const u32*)(at + j * 8) : 0u;
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) bring(begin + i * 16, wide[i], narrow[i]);
    Dropout dropout(random, stream, limit);
    float c[GROUPS][2][EIGHTS][4] = {};
    for (u32 from = begin; from < end;) {
        // Rows beyond the end are zeros.
#pragma unroll
        for (int step = 0; step < AHEAD; step++, from += 16) {
            u32 right[EIGHTS][2], numbers[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                numbers[half] = dropout.row(from + half * 8 + g) + column / 2 * Dropout::STEP;
#pragma unroll
                for (int j = 0; j < EIGHTS; j++) right[j][half] = transpose(narrow[step][j][half]);
            }
#pragma unroll
            for (int i = 0; i < GROUPS; i++) {
                __syncwarp();
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    drop(wide[step][i][half], dropout, numbers[half] + i * 16 * Dropout::STEP);
                    *(Eight*)&turned[warp][half * 8 + g][t * 8] = wide[step][i][half];
                }
                __syncwarp();
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    u32 left[4], row = lane % 8 + lane / 16 * 8, at = tile * 16 + lane / 8 % 2 * 8;
                    load_matrices_transposed(left, shared_address(&turned[warp][row][at]));
#pragma unroll
                    for (int j = 0; j < EIGHTS; j++) multiply(c[i][tile][j], left, right[j][0], right[j][1]);
                }
            }
            bring(from + AHEAD * 16, wide[step], narrow[step]);
        }
    }
    scale *= dropout.scale;
#pragma unroll 1
    for (u32 turn = 0; turn < BELOW; turn++) {
        if (turn > 0) __syncthreads();
        if (below != turn) continue;
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
#pragma unroll
                for (int j = 0; j < EIGHTS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        u32 at = beside * COLUMNS + i * 32 + tile * 16 + e / 2 * 8 + g;
                        float& sum = sums[j * 8 + 2 * t + e % 2][at];
                        sum = (turn > 0 ? sum : 0.0f) + c[i][tile][j][e] * scale;
                    }
    }
    __syncthreads();
    parts += (u64)blockIdx.y * N * k + blockIdx.x * WIDTH;
    for (u32 i = threadIdx.x; i < N * WIDTH; i += 32 * BESIDE * BELOW) {
        u32 row = i / WIDTH, at = i % WIDTH;
        if (blockIdx.x * WIDTH + at < k) parts[(u64)row * k + at] = sums[row][at];
    }
}

// ---------------------------------------------------------------- adds

// A warp has 32 columns of 96 rows, and goes through those by 16, with AHEAD of them on their way. The
// columns of W that an instruction takes are chosen so that a thread gets eight neighbouring columns of
// dx.
template <int EIGHTS, int AHEAD>
__device__ __forceinline__ void adds(const real* dy, const real* w, real* dx, u32 rows, u32 k, u32 dy_stride,
                                     u32 dx_stride, u32 is_added, float scale, const u32* random, u32 stream,
                                     u32 limit) {
    constexpr u32 ROWS = 96;
    static_assert(ROWS % (16 * AHEAD) == 0, "rows are brought in whole turns");
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, groups = k / 32;
    u32 unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u32 first = unit / groups * ROWS, group = unit % groups * 32, column = group + t * 8;
    if (first >= rows) return;
    u32 end = min(first + ROWS, rows);
    Eight before[AHEAD][2];
    u32 narrow[AHEAD][EIGHTS][2];
    auto bring = [&](u32 from, Eight(&before)[2], u32(&narrow)[EIGHTS][2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = from + half * 8 + g;
            bool is_there = row < end;
            before[half] = load_eight(dx + (u64)row * dx_stride + column, is_there && is_added);
            const real* at = dy + (u64)row * dy_stride + 2 * t;
#pragma unroll
            for (int s = 0; s < EIGHTS; s++) narrow[s][half] = is_there ? *(const u32*)(at + s * 8) : 0u;
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) bring(first + i * 16, before[i], narrow[i]);
    u32 b[EIGHTS][4];
#pragma unroll
    for (int s = 0; s < EIGHTS; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const real* from = w + (u64)(s * 8 + 2 * t) * k + group + g / 2 * 8 + 2 * j + g % 2;
            b[s][j] = (u32)from[0].bits | (u32)from[k].bits << 16;
        }
    Dropout dropout(random, stream, limit);
    scale *= dropout.scale;
    for (u32 from = first; from < end;) {
#pragma unroll
        for (int step = 0; step < AHEAD; step++, from += 16) {
            float c[4][4] = {};
#pragma unroll
            for (int s = 0; s < EIGHTS; s++)
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_short(c[j], narrow[step][s], b[s][j]);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = from + half * 8 + g, numbers = dropout.row(row) + column / 2 * Dropout::STEP;
                Eight sum;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float factors[2] = {scale, scale};
                    dropout.drop(Dropout::word(numbers + i * Dropout::STEP), factors[0], factors[1]);
                    u32 pair = before[step][half].pairs[i];
                    float low = to_float(real{(u16)pair}), high = to_float(real{(u16)(pair >> 16)});
                    sum.pairs[i] = pack2(fmaf(c[i][half * 2], factors[0], low),
                                         fmaf(c[i][half * 2 + 1], factors[1], high));
                }
                if (row < end) *(Eight*)(dx + (u64)row * dx_stride + column) = sum;
            }
            bring(from + AHEAD * 16, before[step], narrow[step]);
        }
    }
}

// ---------------------------------------------------------------- kernels

// The product alone.
#define NARROW(name, eights, by_column)                                                                     \
    KERNEL __launch_bounds__(256)                                                                           \
    name(const real* x, const real* w, real* y, u32 rows, u32 k, u32 x_stride, u32 w_stride, u32 y_stride,  \
         float scale) {                                                                                     \
        await_earlier();                                                                                    \
        reads<eights, false, by_column>(x, w, y, rows, k, x_stride, w_stride, y_stride, scale,              \
                                        Dropout(nullptr, 0u, 0u));                                          \
    }

#define ADAPTER(eights, ahead, blocks)                                                                      \
    KERNEL __launch_bounds__(256)                                                                           \
    adapter_reads_##eights(const real* x, const real* w, real* y, u32 rows, u32 k, u32 x_stride,            \
                           u32 y_stride, const u32* random, u32 stream, u32 limit) {                        \
        await_earlier();                                                                                    \
        Dropout dropout(random, stream, limit);                                                             \
        reads<eights, true, false>(x, w, y, rows, k, x_stride, k, y_stride, dropout.scale, dropout);        \
    }                                                                                                       \
    KERNEL __launch_bounds__(128)                                                                           \
    adapter_streams_##eights(const real* x, const real* w, real* y, u32 rows, u32 k, u32 x_stride,          \
                             u32 y_stride, const u32* random, u32 stream, u32 limit) {                      \
        await_earlier();                                                                                    \
        streams<eights>(x, w, y, rows, k, x_stride, y_stride, Dropout(random, stream, limit));              \
    }                                                                                                       \
    NARROW(narrow_rows_##eights, eights, false)                                                             \
    NARROW(narrow_columns_##eights, eights, true)                                                           \
    KERNEL __launch_bounds__(256, 2)                                                                        \
    adapter_gradient_##eights(const real* dy, const real* x, float* parts, u32 rows, u32 k, u32 dy_stride,  \
                              u32 x_stride, u32 rows_of_part, float scale, const u32* random, u32 stream,   \
                              u32 limit) {                                                                  \
        await_earlier();                                                                                    \
        gradient<eights, ahead>(dy, x, parts, rows, k, dy_stride, x_stride, rows_of_part, scale, random,    \
                                stream, limit);                                                             \
    }                                                                                                       \
    KERNEL __launch_bounds__(128, blocks)                                                                   \
    adapter_adds_##eights(const real* dy, const real* w, real* dx, u32 rows, u32 k, u32 dy_stride,          \
                          u32 dx_stride, u32 is_added, float scale, const u32* random, u32 stream,          \
                          u32 limit) {                                                                      \
        await_earlier();                                                                                    \
        adds<eights, 3>(dy, w, dx, rows, k, dy_stride, dx_stride, is_added, scale, random, stream, limit);  \
    }

ADAPTER(1, 3, 6)
ADAPTER(2, 2, 6)
ADAPTER(3, 2, 5)
ADAPTER(4, 2, 4)
