// What kernels of products share whose blocks work in clusters: barriers and copies over both blocks
// of two, sums over several, the operands of wide wgmmas, and how rows of a tile are read and written.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the barrier in the same place of one of the cluster's blocks.
__device__ __forceinline__ void arrive_in(u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}
__device__ __forceinline__ void copy_matrix(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}
// To the same place in each of the cluster's first blocks.
template <int BLOCKS>
__device__ __forceinline__ void copy_matrix_to_all(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)((1 << BLOCKS) - 1))
                 : "memory");
}
__device__ __forceinline__ void copy_matrix_to_both(u32 to, const TensorMap* map, u32 barrier, int column, int row) {
    copy_matrix_to_all<2>(to, map, barrier, column, row);
}

// ---------------------------------------------------------------- ends of tiles

__device__ __forceinline__ void store_matrices(u32 address, const u32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
// Shared memory to a matrix, by the copy engine.
__device__ __forceinline__ void write_matrix(const TensorMap* map, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until what this thread writes so has left shared memory.
__device__ __forceinline__ void writes_have_left() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// The same, but for the last of them.
__device__ __forceinline__ void one_write_is_left() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
__device__ __forceinline__ void writes_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ float2 shared_pair(u32 address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// ---------------------------------------------------------------- sums over a cluster

// Of a tile of 128 rows and columns that the blocks of a cluster have a part of the sum of each.

// Numbers from one row of a part to the next: eight threads of a column meet different banks.
constexpr int PART_STRIDE = 128 + 8;

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

// A warpgroup leaves 64 rows of what its block has summed.
__device__ __forceinline__ void leave_part(u32 part, int first_row, const float (&d)[64]) {
    int lane = threadIdx.x % 32, row = first_row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    u32 at = part + (row * PART_STRIDE + 2 * (lane % 4)) * 4;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
        for (int low = 0; low < 2; low++)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + (low * 8 * PART_STRIDE + 8 * j) * 4),
                         "f"(d[4 * j + 2 * low]), "f"(d[4 * j + 2 * low + 1])
                         : "memory");
}
// Eight neighbours of a row over all blocks, always in the same order.
template <int PARTS>
__device__ __forceinline__ void add_parts(u32 part, int row, int column, float (&sum)[8]) {
    u32 at = part + (row * PART_STRIDE + column) * 4;
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] = 0.0f;
#pragma unroll
    for (int rank = 0; rank < PARTS; rank++) {
        u32 there = address_in(at, rank);
        float4 u = load_cluster(there), v = load_cluster(there + 16);
        sum[0] += u.x, sum[1] += u.y, sum[2] += u.z, sum[3] += u.w;
        sum[4] += v.x, sum[5] += v.y, sum[6] += v.z, sum[7] += v.w;
    }
}

// ---------------------------------------------------------------- wide operands

#define OPERANDS10(ten) "%" ten "0, %" ten "1, %" ten "2, %" ten "3, %" ten "4, %" ten "5, %" ten "6, %" ten "7, %" ten "8, %" ten "9, "
#define RESULTS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RESULTS16(i) RESULTS4(i), RESULTS4(i + 4), RESULTS4(i + 8), RESULTS4(i + 12)
#define RESULTS32(i) RESULTS16(i), RESULTS16(i + 16)

// d[64×192] = a[64×16]·b[16×192], or added to it, as `multiply` has it.
#define WIDE_PRODUCT "wgmma.mma_async.sync.aligned.m64n192k16.f32." ELEMENTS " {"                   \
                OPERANDS10("") OPERANDS10("1") OPERANDS10("2") OPERANDS10("3") OPERANDS10("4")     \
                OPERANDS10("5") OPERANDS10("6") OPERANDS10("7") OPERANDS10("8")                    \
                "%90, %91, %92, %93, %94, %95}, %96, %97, "
#define FIRST4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define FIRST16(i) FIRST4(i), FIRST4(i + 4), FIRST4(i + 8), FIRST4(i + 12)
#define FIRST32(i) FIRST16(i), FIRST16(i + 16)

template <int TB> __device__ __forceinline__ void multiply_first(float (&d)[96], u64 a, u64 b) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, 0, 0; " WIDE_PRODUCT "adds, 1, 1, 0, %98; }"
                 : FIRST32(0), FIRST32(32), FIRST32(64)
                 : "l"(a), "l"(b), "n"(TB));
}
template <int TB> __device__ __forceinline__ void multiply_more(float (&d)[96], u64 a, u64 b) {
    asm volatile(WIDE_PRODUCT "1, 1, 1, 0, %98;"
                 : RESULTS32(0), RESULTS32(32), RESULTS32(64)
                 : "l"(a), "l"(b), "n"(TB));
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

// The elements of a pair.
__device__ __forceinline__ real element(u32 bits) {
    real x;
    x.bits = (u16)bits;
    return x;
}
__device__ __forceinline__ float low_half(u32 pair) { return to_float(element(pair)); }
__device__ __forceinline__ float high_half(u32 pair) { return to_float(element(pair >> 16)); }
