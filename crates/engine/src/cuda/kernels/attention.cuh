// What the kernels of softmax attention on the tensor cores share: tiles in shared memory, products of
// what a warp owns with them, and the parameters that all of them take.
//
// A warp owns rows of the result (16·TILES of them) and walks the other side in tiles that the block
// brings to shared memory, two stages deep. A tile of scores is a set of m16n8k16 accumulators, and
// those, packed to 16 bits, already are the left operand of the next product: scores never leave the
// registers.
//
// q, k and v point at their first column; `q_stride` and `kv_stride` are elements from one
// position to the next, for the gradients as well. o and do are [B, T, heads·D], lse and delta
// [B, heads, T]. With `lengths` [B] a sequence ends before T: its other positions are nobody's
// keys, and what belongs to them in o, lse and the gradients is zero. In a causal order a query
// sees at most `window` keys up to its own, and with `starts` [B, T] none before its start; where
// there is no window it is T. Starts never fall along a sequence, so that the first query of a
// block says where its keys begin. The kernels `attention_selected_…` take a `selection`
// [B, T, ⌈T/32⌉] besides: a query sees key s only where bit s % 32 of its word s / 32 is set. Tiles
// of which a warp has selected nothing are left out.

#include "common.cuh"
#include "matrix.cuh"
#include "sequence.cuh"

#if !defined(REAL_F32)

// ---------------------------------------------------------------- instructions

// Copies 16 (or 4) bytes to shared memory in the background; zeroes where `inside` is false.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_4(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void copies_arrive() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---------------------------------------------------------------- tiles in shared memory

// A tile is [rows][D], its 16-byte pieces permuted within each row so that the eight rows of a
// matrix, which ldmatrix reads at one column, lie in different banks.
template <int D> __device__ __forceinline__ int swizzle(int row) {
    return D == 32 ? (row >> 1) & 3 : row & 7;
}
template <int D> __device__ __forceinline__ u32 place(int row, int piece) {
    return (u32)(row * D * 2 + ((piece ^ swizzle<D>(row)) << 4));
}

// Starts copying the rows from `first` on of a matrix with `limit` rows; zeroes after its end,
// where nothing is read. A thread's rows are a multiple of eight apart, so their swizzle is one.
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void fetch(u32 tile, const real* matrix, u32 stride, int first,
                                      int limit) {
    constexpr int PIECES = D / 8, APART = THREADS / PIECES;
    static_assert(ROWS % APART == 0 && APART % 8 == 0, "every thread copies as much");
    int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    const real* from = matrix + (u64)(first + row) * stride + piece * 8;
    tile += place<D>(row, piece);
#pragma unroll
    for (int i = 0; i < ROWS / APART; i++) {
        copy_16(tile + i * APART * D * 2, from, first + row + i * APART < limit);
        from += (u64)APART * stride;
    }
}

// Where a lane's row of the four matrices starts, for the two operands of a product; the piece is
// folded in by exclusive or. `left` serves left operands stored [m][k], and right ones stored
// [k][n], which are transposed on the way; `right` serves right operands stored [n][k].
template <int D> struct Lanes {
    u32 left, right;

    __device__ __forceinline__ Lanes() {
        int lane = threadIdx.x % 32;
        left = place<D>(lane & 15, lane >> 4);
        right = place<D>((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
    }

    // Keeps the compiler from holding on to every address made from these over the whole loop.
    __device__ __forceinline__ void forget() { asm volatile("" : "+r"(left), "+r"(right)); }

    // Of a tile: the 16×16 block at row 16·i and column 16·j.
    __device__ __forceinline__ void left_block(u32 (&x)[4], u32 tile, int i, int j) const {
        load_matrices(x, tile + i * 16 * D * 2 + (left ^ (j * 32)));
    }
    __device__ __forceinline__ void right_block(u32 (&x)[4], u32 tile, int i, int j) const {
        load_matrices(x, tile + i * 16 * D * 2 + (right ^ (j * 32)));
    }
    __device__ __forceinline__ void transposed_block(u32 (&x)[4], u32 tile, int i, int j) const {
        load_matrices_transposed(x, tile + i * 16 * D * 2 + (left ^ (j * 32)));
    }
};

template <int TILES, int N> __device__ __forceinline__ void clear(float (&x)[TILES][N][4]) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[i][n][e] = 0.0f;
}

// A warp's rows of a matrix that stays on the left of a product: in registers where they have
// room, otherwise read from shared memory each time.
template <int D, int TILES, bool RESIDENT> struct Left {
    u32 x[RESIDENT ? TILES : 1][RESIDENT ? D / 16 : 1][4];
    u32 tile;

    __device__ __forceinline__ Left(u32 rows) : tile(rows) {}

    // To be called once the rows are in shared memory.
    __device__ __forceinline__ void take(const Lanes<D>& lanes) {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int j = 0; j < D / 16; j++) lanes.left_block(x[i][j], tile, i, j);
        }
    }

    // s[16·TILES × 8·N] = rows · rightᵀ, where `right` holds 8·N rows of D.
    template <int N>
    __device__ __forceinline__ void times(float (&s)[TILES][N][4], u32 right,
                                          const Lanes<D>& lanes) const {
        clear(s);
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            u32 a[TILES][4];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                if constexpr (RESIDENT) {
#pragma unroll
                    for (int e = 0; e < 4; e++) a[i][e] = x[i][j][e];
                } else {
                    lanes.left_block(a[i], tile, i, j);
                }
            }
#pragma unroll
            for (int n = 0; n < N / 2; n++) {
                u32 b[4];
                lanes.right_block(b, right, n, j);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    multiply(s[i][2 * n], a[i], b[0], b[1]);
                    multiply(s[i][2 * n + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
};

// out[16·TILES × D] += s[16·TILES × 8·N] · right, where `right` holds 8·N rows of D. Two
// neighbouring accumulators side by side are one left operand.
template <int D, int TILES, int N>
__device__ __forceinline__ void accumulate(float (&out)[TILES][D / 8][4],
                                           const float (&s)[TILES][N][4], u32 right,
                                           const Lanes<D>& lanes) {
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
        u32 a[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            a[i][0] = pack2(s[i][2 * n][0], s[i][2 * n][1]);
            a[i][1] = pack2(s[i][2 * n][2], s[i][2 * n][3]);
            a[i][2] = pack2(s[i][2 * n + 1][0], s[i][2 * n + 1][1]);
            a[i][3] = pack2(s[i][2 * n + 1][2], s[i][2 * n + 1][3]);
        }
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            u32 b[4];
            lanes.transposed_block(b, right, n, d);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                multiply(out[i][2 * d], a[i], b[0], b[1]);
                multiply(out[i][2 * d + 1], a[i], b[2], b[3]);
            }
        }
    }
}

// Writes a warp's rows, each multiplied by its factor, in 16-byte pieces by way of the warp's own
// rows of a tile in shared memory. `first` is the position of the warp's first row.
template <int D, int TILES>
__device__ __forceinline__ void write_rows(const float (&x)[TILES][D / 8][4],
                                           const float (&factor)[TILES][2], u8* rows, real* matrix,
                                           u64 stride, int first, int limit) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int d = 0; d < D / 8; d++) {
                u32 pair = pack2(x[i][d][2 * half] * factor[i][half],
                                 x[i][d][2 * half + 1] * factor[i][half]);
                u32 at = place<D>(i * 16 + half * 8 + g, d) + t * 4;
                *reinterpret_cast<u32*>(rows + at) = pair;
            }
    __syncwarp();
    constexpr int PIECES = D / 8;
#pragma unroll
    for (int i = 0; i < TILES * 16 * PIECES / 32; i++) {
        int index = i * 32 + lane, row = index / PIECES, piece = index % PIECES;
        if (first + row < limit) {
            uint4 value = *reinterpret_cast<const uint4*>(rows + place<D>(row, piece));
            *reinterpret_cast<uint4*>(matrix + (u64)(first + row) * stride + piece * 8) = value;
        }
    }
}

// The selected ones of the 32 keys from `key` on, which is a multiple of 32; none of a query after the
// end.
__device__ __forceinline__ u32 selected_keys(const u32* selection, int query, int key, int seq) {
    int words = (seq + 31) / 32;
    bool inside = query < seq && key / 32 < words;
    return inside ? selection[(u64)query * words + key / 32] : 0u;
}

// Zeroes what a block that has the ROWS positions from `first` on owns beyond `length`.
template <int D, int ROWS, int THREADS>
__device__ __forceinline__ void clear_padding(real* matrix, u64 stride, int first, int length,
                                              int seq) {
    constexpr int PIECES = D / 8;
    int begin = max(first, length), end = min(first + ROWS, seq);
    for (int i = threadIdx.x; i < (end - begin) * PIECES; i += THREADS) {
        real* to = matrix + (u64)(begin + i / PIECES) * stride + i % PIECES * 8;
        *reinterpret_cast<uint4*>(to) = uint4{};
    }
}

// ---------------------------------------------------------------- parameters

#define SCALARS                                                                                    \
    u32 q_stride, u32 kv_stride, int seq, int heads, int kv_heads, float scale, int causal,        \
        const u32 *random, u32 stream, u32 threshold, const i32 *lengths, int window,              \
        const i32 *starts
#define SCALAR_NAMES                                                                               \
    q_stride, kv_stride, seq, heads, kv_heads, scale, causal, random, stream, threshold, lengths,  \
        window, starts
#define SHAPE(...) __VA_ARGS__

#endif  // !REAL_F32
