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
__device__ __forceinline__ void copy_matrix_to_both(u32 to, const TensorMap* map, u32 barrier, int column,
                                                    int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(row), "h"((unsigned short)3)
                 : "memory");
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
