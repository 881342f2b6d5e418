// The two products that lead to a selective scan, and their gradients, where p is 96 columns wide and
// 64 of them are read by the second:
//
//   p[m, 96] = x[m, n]·Wᵀ                      dt[m, n] = p[:, :64]·Tᵀ + bias
//
//   dT = ddtᵀ·p[:, :64]   dbias = Σ_rows ddt   dp[:, :64] += ddt·T   dW = dpᵀ·x   dx += dp·W
//
// W is [96, n], T [n, 64]. All of it is passes over what is n columns wide. Forwards a block has 64
// rows, backwards 256 rows and 256 columns. What the sums over columns come to meets in the shared
// memory of a cluster; what the sums over rows come to are parts in the workspace, which a last launch
// adds up in their order. Rows begin at multiples of 16 bytes.

#include "hopper.cuh"
#include "cluster.cuh"
#include "matrix.cuh"

constexpr int THREADS = 256, WARPS = 8;
// Columns of p, and those that dt is made of.
constexpr int WIDTH = 96, RANK = 64;
constexpr int STEP = 64;

__device__ __forceinline__ void bring(u32 to, const real* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void committed() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS> __device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// ROWS × COLUMNS of a matrix to shared memory, by all threads; zeroes from the row `end` on.
template <int ROWS, int COLUMNS, int PITCH>
__device__ __forceinline__ void bring_tile(real (&to)[ROWS][PITCH], const real* from, u64 stride, u32 row, u32 end) {
    constexpr int PIECES = COLUMNS / 8;
#pragma unroll
    for (int i = 0; i < ROWS * PIECES / THREADS; i++) {
        u32 piece = i * THREADS + threadIdx.x, down = piece / PIECES, across = piece % PIECES * 8;
        bool is_there = row + down < end;
        bring(shared_address(&to[down][across]), from + (is_there ? (row + down) * stride : 0) + across, is_there);
    }
}

__device__ __forceinline__ uint4 four(const u32 (&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); }

// ---------------------------------------------------------------- forward

constexpr int DEPTH = 128, FORWARD_STAGES = 4;
// Elements from one row of what dt is made of to the next: two rows meet different banks.
constexpr int LOW_PITCH = RANK + 32;

struct ForwardStage {
    // Eight rows begin in different banks.
    alignas(16) real x[STEP][DEPTH + 8];
    alignas(16) real w[WIDTH][DEPTH + 8];
};

// A block to 64 rows; n is a multiple of 256. Its shared memory: the stages, and what of p makes dt.
KERNEL __launch_bounds__(THREADS, 1)
projections(const real* x, const real* w, const real* t, const float* bias, real* p, real* dt, u32 rows, u32 n,
            u32 x_stride) {
    await_earlier();
    extern __shared__ __align__(16) char memory[];
    ForwardStage* stages = (ForwardStage*)memory;
    real* low = (real*)(stages + FORWARD_STAGES);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    u32 first = blockIdx.x * STEP, steps = n / DEPTH;
    auto fetch = [&](u32 step) {
        ForwardStage& stage = stages[step % FORWARD_STAGES];
        bring_tile<STEP, DEPTH>(stage.x, x + step * DEPTH, x_stride, first, rows);
        bring_tile<WIDTH, DEPTH>(stage.w, w + step * DEPTH, n, 0, WIDTH);
    };
#pragma unroll
    for (int i = 0; i < FORWARD_STAGES - 1; i++) {
        if (i < steps) fetch(i);
        committed();
    }
    // A warp has 16 rows and half of the columns of p.
    u32 own_rows = warp % 4 * 16, own_columns = warp / 4 * (WIDTH / 2);
    float sum[WIDTH / 16][4] = {};
    for (u32 step = 0; step < steps; step++) {
        arrived<FORWARD_STAGES - 2>();
        __syncthreads();
        if (step + FORWARD_STAGES - 1 < steps) fetch(step + FORWARD_STAGES - 1);
        committed();
        ForwardStage& stage = stages[step % FORWARD_STAGES];
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            u32 a[4];
            load_matrices(a, shared_address(&stage.x[own_rows + lane % 16][k + lane / 16 * 8]));
#pragma unroll
            for (int j = 0; j < WIDTH / 16; j += 2) {
                u32 b[4];
                load_matrices(b, shared_address(&stage.w[own_columns + j * 8 + lane / 16 * 8 + lane % 8]
                                                        [k + lane / 8 % 2 * 8]));
                multiply(sum[j], a, b[0], b[1]);
                multiply(sum[j + 1], a, b[2], b[3]);
            }
        }
    }
    arrived<0>();
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < WIDTH / 16; j++) {
            u32 word = pack2(sum[j][2 * half], sum[j][2 * half + 1]);
            u32 row = own_rows + half * 8 + g, column = own_columns + j * 8 + 2 * q;
            if (first + row < rows) *(u32*)(p + (u64)(first + row) * WIDTH + column) = word;
            if (column < RANK) *(u32*)(low + row * LOW_PITCH + column) = word;
        }
    __syncthreads();
    // A thread of a row has eight neighbours of each 32 of the inner dimension, four for each product:
    // a sum has no order of its own.
    constexpr int PARTS = RANK / 32;
    uint4 left[4][2][PARTS];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                left[i][half][part] = *(const uint4*)(low + (i * 16 + half * 8 + g) * LOW_PITCH + part * 32 + 8 * q);
    for (u32 column = warp * 32; column < n; column += WARPS * 32) {
        uint4 right[4][PARTS];
        float2 offset[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
#pragma unroll
            for (int part = 0; part < PARTS; part++)
                right[j][part] = *(const uint4*)(t + (u64)(column + j * 8 + g) * RANK + part * 32 + 8 * q);
            offset[j] = *(const float2*)(bias + column + j * 8 + 2 * q);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 words[2][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float d[4] = {offset[j].x, offset[j].y, offset[j].x, offset[j].y};
#pragma unroll
                for (int part = 0; part < PARTS; part++) {
                    uint4 upper = left[i][0][part], lower = left[i][1][part];
                    u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
                    u32 more[4] = {upper.z, lower.z, upper.w, lower.w};
                    multiply(d, a, right[j][part].x, right[j][part].y);
                    multiply(d, more, right[j][part].z, right[j][part].w);
                }
                words[0][j] = pack2(d[0], d[1]);
                words[1][j] = pack2(d[2], d[3]);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                exchange(words[half], q);
                u32 row = first + i * 16 + half * 8 + g;
                if (row < rows) *(uint4*)(dt + (u64)row * n + column + 8 * q) = four(words[half]);
            }
        }
    }
}

// ---------------------------------------------------------------- backward

constexpr int CLUSTER = 4, COLUMNS = 256, N = CLUSTER * COLUMNS, PART = 256, STEPS = PART / STEP, STAGES = 3;
// Floats of a part: dT [n, 64], dbias [n], dW [96, n].
constexpr u32 PART_FLOATS = N * (RANK + 1 + WIDTH);
// Floats from one row of dp's sums to the next: the threads of four rows meet different banks.
constexpr int SUM_PITCH = RANK + 8;

struct LowMemory {
    struct {
        alignas(16) real wide[STEP][COLUMNS + 8];
        alignas(16) real narrow[STEP][RANK + 8];
    } stages[STAGES];
    alignas(16) real t[COLUMNS][RANK + 8];
    // Over this block's columns, of this step and the one before.
    alignas(16) float sums[2][STEP][SUM_PITCH];
};
struct WideMemory {
    alignas(16) real stages[STAGES][STEP][COLUMNS + 8];
    // All of dp's rows.
    alignas(16) real dp[PART][WIDTH + 8];
    alignas(16) real w[WIDTH][COLUMNS + 8];
};

#if defined(REAL_F16)
constexpr u32 ONES = 0x3c003c00u;
#else
constexpr u32 ONES = 0x3f803f80u;
#endif

// dT, dbias and dp. Clusters of four blocks, which have the columns of 256 rows; n is 1024.
KERNEL __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
projections_low_gradients(const real* ddt, const real* p, const real* t, real* dp, float* parts, u32 rows) {
    await_earlier();
    extern __shared__ __align__(16) char memory[];
    LowMemory& own = *(LowMemory*)memory;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    u32 rank = cluster_rank(), first = rank * COLUMNS, begin = blockIdx.x / CLUSTER * PART;
    u32 end = min(begin + PART, rows);
    auto fetch = [&](int step) {
        auto& stage = own.stages[step % STAGES];
        bring_tile<STEP, COLUMNS>(stage.wide, ddt + first, N, begin + step * STEP, end);
        bring_tile<STEP, RANK>(stage.narrow, p, WIDTH, begin + step * STEP, end);
    };
    bring_tile<COLUMNS, RANK>(own.t, t + (u64)first * RANK, RANK, 0, COLUMNS);
    fetch(0);
    committed();
    fetch(1);
    committed();
    // dp of 16 rows and half of the columns to a warp; of dT 32 rows.
    u32 own_rows = warp % 4 * 16, own_columns = warp / 4 * (RANK / 2), wide = warp * 32;
    float to_t[2][RANK / 8][4] = {}, to_bias[2][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        arrived<1>();
        __syncthreads();
        if (step + 2 < STEPS) fetch(step + 2);
        committed();
        auto& stage = own.stages[step % STAGES];
        float sum[RANK / 16][4] = {};
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
            u32 a[4];
            load_matrices(a, shared_address(&stage.wide[own_rows + lane % 16][k * 16 + lane / 16 * 8]));
#pragma unroll
            for (int j = 0; j < RANK / 16; j += 2) {
                u32 b[4];
                load_matrices_transposed(b, shared_address(&own.t[k * 16 + lane / 8 % 2 * 8 + lane % 8]
                                                                 [own_columns + j * 8 + lane / 16 * 8]));
                multiply(sum[j], a, b[0], b[1]);
                multiply(sum[j + 1], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < RANK / 16; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2*)&own.sums[step % 2][own_rows + half * 8 + g][own_columns + j * 8 + 2 * q] =
                    make_float2(sum[j][2 * half], sum[j][2 * half + 1]);
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            u32 b[RANK / 16][4];
#pragma unroll
            for (int j = 0; j < RANK / 16; j++)
                load_matrices_transposed(b[j], shared_address(&stage.narrow[k + lane / 8 % 2 * 8 + lane % 8]
                                                                           [j * 16 + lane / 16 * 8]));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 a[4];
                load_matrices_transposed(a, shared_address(&stage.wide[k + lane / 16 * 8 + lane % 8]
                                                                      [wide + i * 16 + lane / 8 % 2 * 8]));
#pragma unroll
                for (int j = 0; j < RANK / 8; j++)
                    multiply(to_t[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                multiply(to_bias[i], a, ONES, ONES);
            }
        }
        // Each block adds up 16 rows for all. The sums before these are read by nobody any more.
        cluster_meet();
        constexpr u32 PIECES = RANK / 8, OWN = STEP / CLUSTER;
        if (threadIdx.x < OWN * PIECES) {
            u32 down = rank * OWN + threadIdx.x / PIECES, column = threadIdx.x % PIECES * 8;
            u32 from = shared_address(&own.sums[step % 2][down][column]), row = begin + step * STEP + down;
            float total[8] = {};
#pragma unroll
            for (int block = 0; block < CLUSTER; block++) {
                u32 there = address_in(from, block);
                float4 u = load_cluster(there), v = load_cluster(there + 16);
                total[0] += u.x, total[1] += u.y, total[2] += u.z, total[3] += u.w;
                total[4] += v.x, total[5] += v.y, total[6] += v.z, total[7] += v.w;
            }
            if (row < end) {
                uint4* place = (uint4*)(dp + (u64)row * WIDTH + column);
                uint4 old = *place;
                u32 before[4] = {old.x, old.y, old.z, old.w}, words[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    words[i] = pack2(total[2 * i] + low_half(before[i]), total[2 * i + 1] + high_half(before[i]));
                *place = four(words);
            }
        }
        __syncwarp();
    }
    float* part = parts + (u64)(blockIdx.x / CLUSTER) * PART_FLOATS;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = first + wide + i * 16 + half * 8 + g;
#pragma unroll
            for (int j = 0; j < RANK / 8; j++)
                *(float2*)(part + (u64)row * RANK + j * 8 + 2 * q) =
                    make_float2(to_t[i][j][2 * half], to_t[i][j][2 * half + 1]);
            if (q == 0) part[N * RANK + row] = to_bias[i][2 * half];
        }
    // A block must be there as long as others read from it.
    cluster_meet();
}

// dW and dx. Grid: the same parts of rows, each with the four parts of the columns.
KERNEL __launch_bounds__(THREADS, 1)
projections_wide_gradients(const real* x, const real* w, const real* dp, real* dx, float* parts, u32 rows,
                           u32 x_stride) {
    await_earlier();
    extern __shared__ __align__(16) char memory[];
    WideMemory& own = *(WideMemory*)memory;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4, wide = warp * 32;
    u32 first = blockIdx.x % CLUSTER * COLUMNS, begin = blockIdx.x / CLUSTER * PART, end = min(begin + PART, rows);
    // What is there of dx: a thread has eight neighbours of a row.
    uint4 next[4][2];
    auto fetch_dx = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = begin + step * STEP + i * 16 + half * 8 + g;
                next[i][half] = row < end ? *(const uint4*)(dx + (u64)row * x_stride + first + wide + 8 * q)
                                          : make_uint4(0, 0, 0, 0);
            }
    };
    auto fetch = [&](int step) {
        bring_tile<STEP, COLUMNS>(own.stages[step % STAGES], x + first, x_stride, begin + step * STEP, end);
    };
    bring_tile<PART, WIDTH>(own.dp, dp, WIDTH, begin, end);
    bring_tile<WIDTH, COLUMNS>(own.w, w + first, N, 0, WIDTH);
    fetch(0);
    committed();
    fetch(1);
    committed();
    fetch_dx(0);
    float to_w[WIDTH / 16][4][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        arrived<1>();
        __syncthreads();
        if (step + 2 < STEPS) fetch(step + 2);
        committed();
        auto& stage = own.stages[step % STAGES];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float sum[4][4] = {};
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++) {
                u32 a[4], b[2][4];
                load_matrices(a, shared_address(&own.dp[step * STEP + i * 16 + lane % 16][k * 16 + lane / 16 * 8]));
#pragma unroll
                for (int j = 0; j < 2; j++)
                    load_matrices_transposed(b[j], shared_address(&own.w[k * 16 + lane / 8 % 2 * 8 + lane % 8]
                                                                        [wide + j * 16 + lane / 16 * 8]));
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(sum[j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 words[4] = {next[i][half].x, next[i][half].y, next[i][half].z, next[i][half].w};
                exchange(words, q);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    words[j] = pack2(sum[j][2 * half] + low_half(words[j]), sum[j][2 * half + 1] + high_half(words[j]));
                exchange(words, q);
                u32 row = begin + step * STEP + i * 16 + half * 8 + g;
                if (row < end) *(uint4*)(dx + (u64)row * x_stride + first + wide + 8 * q) = four(words);
            }
        }
        if (step + 1 < STEPS) fetch_dx(step + 1);
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            u32 b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrices_transposed(b[j], shared_address(&stage[k + lane / 8 % 2 * 8 + lane % 8]
                                                                    [wide + j * 16 + lane / 16 * 8]));
#pragma unroll
            for (int i = 0; i < WIDTH / 16; i++) {
                u32 a[4];
                load_matrices_transposed(a, shared_address(&own.dp[step * STEP + k + lane / 16 * 8 + lane % 8]
                                                                  [i * 16 + lane / 8 % 2 * 8]));
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(to_w[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
    float* part = parts + (u64)(blockIdx.x / CLUSTER) * PART_FLOATS + N * (RANK + 1);
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float2*)(part + (u64)(i * 16 + half * 8 + g) * N + first + wide + j * 8 + 2 * q) =
                    make_float2(to_w[i][j][2 * half], to_w[i][j][2 * half + 1]);
}

// dt[n·64], dbias[n] and dw[96·n] (+)= Σ parts. Blocks of 32 × 8: four neighbours to a thread, every
// eighth part.
KERNEL __launch_bounds__(256)
projections_sum(const float* parts, float* dt, float* dbias, float* dw, u32 num_parts, u32 n, u32 dt_adds,
                u32 dbias_adds, u32 dw_adds) {
    await_earlier();
    __shared__ float4 sums[8][32];
    u32 count = n * (RANK + 1 + WIDTH), at = (blockIdx.x * 32 + threadIdx.x) * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at < count) {
        u32 own = num_turns(threadIdx.y, num_parts, 8);
#pragma unroll 8
        for (u32 turn = 0; turn < own; turn++) {
            float4 more = *(const float4*)(parts + (u64)(threadIdx.y + turn * 8) * count + at);
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || at >= count) return;
#pragma unroll
    for (int i = 1; i < 8; i++) {
        float4 more = sums[i][threadIdx.x];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    u32 adds = dt_adds;
    float* to = dt;
    if (at >= n * (RANK + 1)) {
        adds = dw_adds, to = dw, at -= n * (RANK + 1);
    } else if (at >= n * RANK) {
        adds = dbias_adds, to = dbias, at -= n * RANK;
    }
    float4* place = (float4*)(to + at);
    if (adds) {
        float4 old = *place;
        sum.x += old.x, sum.y += old.y, sum.z += old.z, sum.w += old.w;
    }
    *place = sum;
}
