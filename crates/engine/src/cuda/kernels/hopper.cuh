// What kernels for sm_90a share: the matrix units' asynchronous products (wgmma), barriers in
// shared memory, and the copy engine (TMA).
//
// Tiles in shared memory are panels of 64 columns of 16 bits: [rows][64], 128 bytes a row, whose
// 16-byte pieces the copy engine permutes within eight rows (the swizzle of 128 bytes). A panel
// begins at a multiple of 1024 bytes. A head of 128 columns is two panels, one after the other; one
// of 32 columns is half a panel: rows of 64 bytes, permuted within eight rows by the swizzle of 64.

#include "common.cuh"

#define PLUS_INFINITY __int_as_float(0x7f800000)

#if defined(REAL_F16)
#define ELEMENTS "f16.f16"
#else
#define ELEMENTS "bf16.bf16"
#endif

// A tensor as the copy engine takes it, encoded by the driver.
struct alignas(64) TensorMap { u64 words[16]; };

// ---------------------------------------------------------------- barriers

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void barriers_are_there() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Lets the barrier wait for that many bytes of the copy engine.
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}
// Arrives, and lets the barrier wait for that many bytes of the copy engine as well.
__device__ __forceinline__ void arrive_with_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Waits until the barrier's phase of this parity is over.
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
        "@!done bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// A barrier of some of a block's threads.
__device__ __forceinline__ void meet(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// What this thread wrote to shared memory is what matrix units and copy engine read from here on.
__device__ __forceinline__ void publish_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A place in a ring of STAGES, and the parity of its barriers there.
template <int STAGES> struct Ring {
    u32 stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---------------------------------------------------------------- copy engine

// What a row of a tile of D columns takes in a panel, and how many panels there are.
template <int D> constexpr u32 ROW_BYTES = D < 64 ? D * 2 : 128;
template <int D> constexpr int PANELS = D < 64 ? 1 : D / 64;

// Copies 64 columns, or all of fewer, × 64 rows of one head of [batch, rows, heads, columns]; zeroes beyond the rows.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int column,
                                         int head, int row, int b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row), "r"(b)
                 : "memory");
}
// Copies bytes that lie one after the other; everything a multiple of 16.
__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The rows of a tile of D columns from `row` on, by one thread. Rows between the end of a sequence
// and that of the tensor hold anything: a tile that has some is filled by `fill_cut` instead.
template <int D, int ROWS>
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, u32 barrier, int head,
                                          int row, int b) {
#pragma unroll
    for (int panel = 0; panel < PANELS<D>; panel++)
#pragma unroll
        for (int part = 0; part < ROWS / 64; part++)
            copy_box(to + (panel * ROWS + part * 64) * ROW_BYTES<D>, map, barrier, panel * 64, head,
                     row + part * 64, b);
}

// Zeroes the rows of a tile from `first` on, by a whole warp.
template <int D, int ROWS> __device__ __forceinline__ void clear_rows(u32 tile, int first) {
    constexpr int PIECES = ROW_BYTES<D> / 16;
    for (int i = first * PIECES + threadIdx.x % 32; i < ROWS * PIECES; i += 32)
#pragma unroll
        for (int panel = 0; panel < PANELS<D>; panel++)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                             tile + panel * ROWS * ROW_BYTES<D> + i * 16),
                         "r"(0)
                         : "memory");
}

// Fills a tile whose rows end inside it, by a whole warp: copies, waits on a barrier of its own,
// zeroes what lies beyond the end.
template <int D, int ROWS>
__device__ __forceinline__ void fill_cut(u32 to, const TensorMap* map, u32 own_barrier,
                                         u32& own_parity, int head, int row, int b, int limit) {
    int lane = threadIdx.x % 32;
    if (lane == 0) {
        arrive_with_bytes(own_barrier, ROWS * D * 2);
        copy_tile<D, ROWS>(to, map, own_barrier, head, row, b);
    }
    __syncwarp();
    wait(own_barrier, own_parity);
    own_parity ^= 1;
    clear_rows<D, ROWS>(to, max(limit - row, 0));
    publish_shared();
    __syncwarp();
}

// ---------------------------------------------------------------- turns

// Blocks that add to one sum in global memory one after the other, by a counter that says whose
// turn it is.
__device__ __forceinline__ void wait_for_turn(const u32* turns, u32 turn) {
    u32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
    } while (now != turn);
}
__device__ __forceinline__ void set_turn(u32* turns, u32 turn) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turns), "r"(turn) : "memory");
}
// Orders the copy engine's accesses with those of this thread, in both directions.
__device__ __forceinline__ void with_copy_engine() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// ---------------------------------------------------------------- products

// Operands in shared memory. Rows of a panel go along one side of the product, its 64 columns along
// the other. `by_row`: the columns are summed over, and the tile has as many panels as the sum is
// long. `by_column`: the rows are summed over; beyond 64 columns the next panel follows after
// `panel_bytes`. ROW is 128, 64 in half a panel or 32 in a quarter: eight rows lie together, and the
// last two bits name the swizzle.
template <u32 ROW = 128> __device__ __forceinline__ u64 by_column(u32 address, u32 panel_bytes) {
    static_assert(ROW == 128 || ROW == 64 || ROW == 32, "the swizzles of 128, 64 and 32 bytes");
    return (u64)((address & 0x3ffffu) >> 4) | ((u64)(panel_bytes >> 4) << 16) |
           ((u64)(8 * ROW >> 4) << 32) | ((ROW == 128 ? 1ull : ROW == 64 ? 2ull : 3ull) << 62);
}
template <u32 ROW = 128> __device__ __forceinline__ u64 by_row(u32 address) {
    return by_column<ROW>(address, 16);
}

// To be called before products whose registers were written by others, and after the last of some.
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_end() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until no more than this many groups of products are under way.
template <int GROUPS> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
// Keeps the compiler from moving what reads or writes these registers over a wait.
template <int N> __device__ __forceinline__ void settle(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// d[64×N] (+)= a[64×16]·b[16×N] for the four warps of a warpgroup; TA and TB say that an operand is
// `by_column`. With g = lane/4 and t = lane%4 warp w has of d in d[4j + e] the row 16w + g + e/2·8
// and the column 8j + 2t + e%2. The left operand may be in registers: two neighbouring blocks of
// eight columns of such a result, packed.
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[16], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %18, 0; "
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." ELEMENTS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, %16, %17, adds, 1, 1, %19, %20; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
template <int TB, bool ADDS = true>
__device__ __forceinline__ void multiply_registers(float (&d)[16], const u32 (&a)[4], u64 b) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %22, 0; "
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." ELEMENTS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, {%16, %17, %18, %19}, %20, adds, 1, 1, %21; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TB), "n"(ADDS));
}
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %34, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENTS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, adds, 1, 1, %35, %36; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
template <int TB>
__device__ __forceinline__ void multiply_registers(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENTS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TB));
}
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred adds; setp.ne.b32 adds, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENTS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, adds, 1, 1, %67, %68; }"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));
}
template <int TB>
__device__ __forceinline__ void multiply_registers(float (&d)[64], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENTS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
                   "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
                   "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
                   "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                   "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
                   "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
                   "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
                   "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TB));
}

// d[64×N] = a·bᵀ over D columns: 64 rows of a tile of A_ROWS, and all N rows of another.
template <int D, int A_ROWS, int B_ROWS, int N>
__device__ __forceinline__ void multiply_rows(float (&d)[N], u32 a, u32 b) {
    constexpr u32 ROW = ROW_BYTES<D>;
    // Further on in an operand: its address, in units of 16 bytes, is what comes first in it.
    u64 left = by_row<ROW>(a), right = by_row<ROW>(b);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 panel = k / 4, column = k % 4 * 32;
        multiply<0, 0>(d, left + (panel * A_ROWS * ROW + column) / 16,
                       right + (panel * B_ROWS * ROW + column) / 16, k > 0);
    }
}

// A result as left operand.
template <int N> __device__ __forceinline__ void pack(u32 (&p)[N / 2], const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = pack2(x[2 * i], x[2 * i + 1]);
}

// d[64×D] += p[64×ROWS]·b, where p is in registers and b a tile of ROWS rows.
template <int ROWS, int N>
__device__ __forceinline__ void add_product(float (&d)[N], const u32 (&p)[ROWS / 4], u32 b) {
    constexpr u32 ROW = ROW_BYTES<2 * N>;
    u64 right = by_column<ROW>(b, ROWS * ROW);
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++) {
        u32 a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
        multiply_registers<1>(d, a, right + k * ROW);
    }
}
