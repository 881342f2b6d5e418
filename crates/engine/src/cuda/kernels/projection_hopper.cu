// The two products that lead to a selective scan, and their gradients, where p is 64 columns wide and
// 32 of them are read by the second:
//
//   p[m, 64] = x[m, n]·Wᵀ                      dt[m, n] = p[:, :32]·Tᵀ + bias
//
//   dT = ddtᵀ·p[:, :32]   dbias = Σ_rows ddt   dp[:, :32] += ddt·T   dW = dpᵀ·x   dx += dp·W
//
// W is [64, n], T [n, 32]. All of it is passes over what is n columns wide: forwards a block has 64
// rows, backwards the blocks of a cluster have 256 rows and 256 columns each. What the sums over
// columns come to meets in shared memory; what the sums over rows come to are parts in the workspace,
// which a second launch adds up in their order. Rows begin at multiples of 16 bytes.

#include "common.cuh"
#include "matrix.cuh"

constexpr int THREADS = 256, WARPS = 8;
// Columns of p, and those that dt is made of.
constexpr int WIDTH = 64, RANK = 32;
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

// The four threads of a row exchange what they have of four blocks of eight columns: two neighbours
// in each become all eight in one, and the other way round.
__device__ __forceinline__ void exchange(u32 (&w)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 got = __shfl_xor_sync(~0u, t & 1 ? w[i] : w[i + 1], 1);
        if (t & 1) w[i] = got;
        else w[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 got = __shfl_xor_sync(~0u, t & 2 ? w[i] : w[i + 2], 2);
        if (t & 2) w[i] = got;
        else w[i + 2] = got;
    }
}
__device__ __forceinline__ uint4 four(const u32 (&w)[4]) { return make_uint4(w[0], w[1], w[2], w[3]); }

// ---------------------------------------------------------------- forward

constexpr int DEPTH = 128, FORWARD_STAGES = 4;

struct ForwardStage {
    // Eight rows begin in different banks.
    alignas(16) real x[STEP][DEPTH + 8];
    alignas(16) real w[WIDTH][DEPTH + 8];
};

// A block to 64 rows; n is a multiple of 256. Its shared memory: the stages, T, what of p makes dt.
KERNEL __launch_bounds__(THREADS, 1)
projections(const real* x, const real* w, const real* t, const float* bias, real* p, real* dt, u32 rows, u32 n,
            u32 x_stride) {
    extern __shared__ __align__(16) char memory[];
    ForwardStage* stages = (ForwardStage*)memory;
    real* all_t = (real*)(stages + FORWARD_STAGES);
    real* low = all_t + (u64)n * RANK;
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
        if (i == FORWARD_STAGES - 2)
            for (u32 at = threadIdx.x * 8; at < n * RANK; at += THREADS * 8) bring(shared_address(all_t + at), t + at, true);
        committed();
    }
    // A warp has 16 rows and half of the columns of p.
    u32 own_rows = warp % 4 * 16, own_columns = warp / 4 * 32;
    float sum[4][4] = {};
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
            for (int j = 0; j < 4; j += 2) {
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
    for (int half = 0; half < 2; half++) {
        u32 words[4], row = own_rows + half * 8 + g;
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = pack2(sum[j][2 * half], sum[j][2 * half + 1]);
        exchange(words, q);
        if (first + row < rows) *(uint4*)(p + (u64)(first + row) * WIDTH + own_columns + 8 * q) = four(words);
        if (own_columns == 0) *(uint4*)(low + row * RANK + 8 * q) = four(words);
    }
    __syncthreads();
    // A thread of a row has eight neighbours of the inner dimension, four for each product: a sum has
    // no order of its own.
    uint4 left[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            left[i][half] = *(const uint4*)(low + (i * 16 + half * 8 + g) * RANK + 8 * q);
    for (u32 column = warp * 32; column < n; column += WARPS * 32) {
        uint4 right[4];
        float2 offset[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            right[j] = *(const uint4*)(all_t + (column + j * 8 + g) * RANK + 8 * q);
            offset[j] = *(const float2*)(bias + column + j * 8 + 2 * q);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 a[4] = {left[i][0].x, left[i][1].x, left[i][0].y, left[i][1].y};
            u32 more[4] = {left[i][0].z, left[i][1].z, left[i][0].w, left[i][1].w};
            u32 words[2][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float d[4] = {offset[j].x, offset[j].y, offset[j].x, offset[j].y};
                multiply(d, a, right[j].x, right[j].y);
                multiply(d, more, right[j].z, right[j].w);
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

constexpr int CLUSTER = 4, COLUMNS = 256, PART = 256, STEPS = PART / STEP, STAGES = 3;
// Floats from one row of dp's sums to the next: the threads of four rows meet different banks.
constexpr int SUM_PITCH = RANK + 8;

struct Stage {
    alignas(16) real wide[STEP][COLUMNS + 8];
    alignas(16) real narrow[STEP][RANK + 8];
};
struct Memory {
    Stage stages[STAGES];
    // All of dp's rows.
    alignas(16) real dp[PART][WIDTH + 8];
    alignas(16) real w[WIDTH][COLUMNS + 8];
    // T until the first step is over, then the sums over this block's columns.
    union {
        alignas(16) real t[COLUMNS][RANK + 8];
        alignas(16) float sums[PART][SUM_PITCH];
    };
};

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address of the same place in another block of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ float4 load_cluster(u32 address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ void store_cluster(u32 address, uint4 x) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
                 "r"(x.w)
                 : "memory");
}

__device__ __forceinline__ float low_half(u32 word) {
    real x;
    x.bits = (u16)word;
    return to_float(x);
}
__device__ __forceinline__ float high_half(u32 word) {
    real x;
    x.bits = (u16)(word >> 16);
    return to_float(x);
}

#if defined(REAL_F16)
constexpr u32 ONES = 0x3c003c00u;
#else
constexpr u32 ONES = 0x3f803f80u;
#endif

// Clusters of four blocks, which have the columns of 256 rows; n is 1024. `parts` of a cluster: dT
// [n, 32], dbias [n], dW [64, n].
KERNEL __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
projections_backward(const real* ddt, const real* p, const real* x, const real* t, const real* w, real* dp, real* dx,
                     float* parts, u32 rows, u32 x_stride, u32 dx_stride) {
    extern __shared__ __align__(16) char memory[];
    Memory& own = *(Memory*)memory;
    constexpr u32 N = CLUSTER * COLUMNS;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    u32 rank = cluster_rank(), first = rank * COLUMNS, begin = blockIdx.x / CLUSTER * PART;
    u32 end = min(begin + PART, rows);
    auto fetch = [&](int step) {
        Stage& stage = own.stages[step % STAGES];
        u32 row = begin + step % STEPS * STEP;
        if (step < STEPS) {
            bring_tile<STEP, COLUMNS>(stage.wide, ddt + first, N, row, end);
            bring_tile<STEP, RANK>(stage.narrow, p, WIDTH, row, end);
        } else {
            bring_tile<STEP, COLUMNS>(stage.wide, x + first, x_stride, row, end);
        }
    };
    bring_tile<COLUMNS, RANK>(own.t, t + (u64)first * RANK, RANK, 0, COLUMNS);
    committed();
    fetch(0);
    committed();
    fetch(1);
    bring_tile<WIDTH, COLUMNS>(own.w, w + first, N, 0, WIDTH);
    // The columns of dp that the scan itself has made.
#pragma unroll
    for (int i = 0; i < PART * (WIDTH - RANK) / 8 / THREADS; i++) {
        u32 piece = i * THREADS + threadIdx.x, row = piece / 4, at = RANK + piece % 4 * 8;
        bool is_there = begin + row < end;
        bring(shared_address(&own.dp[row][at]), dp + (is_there ? (u64)(begin + row) * WIDTH : 0) + at, is_there);
    }
    committed();

    // dp of 16 rows and half of the columns to a warp; of dT 32 rows.
    u32 own_rows = warp % 4 * 16, own_columns = warp / 4 * 16;
    u32 wide = warp * 32;
    u32 right[COLUMNS / 16][4];
    arrived<2>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        load_matrices_transposed(right[k], shared_address(&own.t[k * 16 + lane / 8 % 2 * 8 + lane % 8]
                                                                [own_columns + lane / 16 * 8]));
    float to_t[2][4][4] = {}, to_bias[2][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        arrived<1>();
        __syncthreads();
        fetch(step + 2);
        committed();
        Stage& stage = own.stages[step % STAGES];
        float sum[2][4] = {};
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; k++) {
            u32 a[4];
            load_matrices(a, shared_address(&stage.wide[own_rows + lane % 16][k * 16 + lane / 16 * 8]));
            multiply(sum[0], a, right[k][0], right[k][1]);
            multiply(sum[1], a, right[k][2], right[k][3]);
        }
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            u32 b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrices_transposed(b[j], shared_address(&stage.narrow[k + lane / 8 % 2 * 8 + lane % 8]
                                                                           [j * 16 + lane / 16 * 8]));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 a[4];
                load_matrices_transposed(a, shared_address(&stage.wide[k + lane / 16 * 8 + lane % 8]
                                                                      [wide + i * 16 + lane / 8 % 2 * 8]));
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(to_t[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                multiply(to_bias[i], a, ONES, ONES);
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                *(float2*)&own.sums[step * STEP + own_rows + half * 8 + g][own_columns + j * 8 + 2 * q] =
                    make_float2(sum[j][2 * half], sum[j][2 * half + 1]);
    }
    float* part = parts + (u64)(blockIdx.x / CLUSTER) * N * (RANK + 1 + WIDTH);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = first + wide + i * 16 + half * 8 + g;
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float2*)(part + (u64)row * RANK + j * 8 + 2 * q) =
                    make_float2(to_t[i][j][2 * half], to_t[i][j][2 * half + 1]);
            if (q == 0) part[N * RANK + row] = to_bias[i][2 * half];
        }
    part += N * (RANK + 1);

    // What is there of dx: a thread has eight neighbours of a row.
    uint4 next[4][2];
    auto fetch_dx = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 row = begin + step * STEP + i * 16 + half * 8 + g;
                next[i][half] = row < end ? *(const uint4*)(dx + (u64)row * dx_stride + first + wide + 8 * q)
                                          : make_uint4(0, 0, 0, 0);
            }
    };
    fetch_dx(0);
    cluster_meet();
    // Each block adds up 64 rows for all.
    {
        u32 row = rank * STEP + threadIdx.x / 4, column = threadIdx.x % 4 * 8;
        u32 from = shared_address(&own.sums[row][column]), to = shared_address(&own.dp[row][column]);
        real* place = dp + (u64)(begin + row) * WIDTH + column;
        bool is_there = begin + row < end;
        uint4 old = is_there ? *(const uint4*)place : make_uint4(0, 0, 0, 0);
        float sum[8] = {};
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) {
            u32 there = address_in(from, block);
            float4 u = load_cluster(there), v = load_cluster(there + 16);
            sum[0] += u.x, sum[1] += u.y, sum[2] += u.z, sum[3] += u.w;
            sum[4] += v.x, sum[5] += v.y, sum[6] += v.z, sum[7] += v.w;
        }
        u32 before[4] = {old.x, old.y, old.z, old.w}, words[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = pack2(sum[2 * i] + low_half(before[i]), sum[2 * i + 1] + high_half(before[i]));
        if (is_there) *(uint4*)place = four(words);
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) store_cluster(address_in(to, block), four(words));
    }
    cluster_meet();

    u32 across[WIDTH / 16][2][4];
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            load_matrices_transposed(across[k][j], shared_address(&own.w[k * 16 + lane / 8 % 2 * 8 + lane % 8]
                                                                        [wide + j * 16 + lane / 16 * 8]));
    float to_w[4][4][4] = {};
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        arrived<1>();
        __syncthreads();
        if (step + 2 < STEPS) fetch(STEPS + step + 2);
        committed();
        Stage& stage = own.stages[(STEPS + step) % STAGES];
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            u32 b[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++)
                load_matrices_transposed(b[j], shared_address(&stage.wide[k + lane / 8 % 2 * 8 + lane % 8]
                                                                         [wide + j * 16 + lane / 16 * 8]));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 a[4];
                load_matrices_transposed(a, shared_address(&own.dp[step * STEP + k + lane / 16 * 8 + lane % 8]
                                                                  [i * 16 + lane / 8 % 2 * 8]));
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(to_w[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float sum[4][4] = {};
#pragma unroll
            for (int k = 0; k < WIDTH / 16; k++) {
                u32 a[4];
                load_matrices(a, shared_address(&own.dp[step * STEP + i * 16 + lane % 16][k * 16 + lane / 16 * 8]));
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply(sum[j], a, across[k][j / 2][j % 2 * 2], across[k][j / 2][j % 2 * 2 + 1]);
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
                if (row < end) *(uint4*)(dx + (u64)row * dx_stride + first + wide + 8 * q) = four(words);
            }
        }
        if (step + 1 < STEPS) fetch_dx(step + 1);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(float2*)(part + (u64)(i * 16 + half * 8 + g) * N + first + wide + j * 8 + 2 * q) =
                    make_float2(to_w[i][j][2 * half], to_w[i][j][2 * half + 1]);
}

// dt[n·32], dbias[n] and dw[64·n] (+)= Σ parts. Blocks of 32 × 8: four neighbours to a thread, every
// eighth part.
KERNEL __launch_bounds__(256)
projections_sum(const float* parts, float* dt, float* dbias, float* dw, u32 num_parts, u32 n, u32 dt_adds,
                u32 dbias_adds, u32 dw_adds) {
    __shared__ float4 sums[8][32];
    u32 count = n * (RANK + 1 + WIDTH), at = (blockIdx.x * 32 + threadIdx.x) * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (at < count) {
#pragma unroll 4
        for (u32 part = threadIdx.y; part < num_parts; part += 8) {
            float4 more = *(const float4*)(parts + (u64)part * count + at);
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
