// Softmax attention on the tensor cores, for heads of 32, 64 or 128 columns in bf16 or f16. Other
// widths and float graphs are in attention_any.cu; `attention_delta` here serves both.
//
// All three kernels are built alike. A warp owns rows of the result (16·TILES of them) and walks
// the other side in tiles that the block brings to shared memory, two stages deep. A tile of
// scores is a set of m16n8k16 accumulators, and those, packed to 16 bits, already are the left
// operand of the next product: scores never leave the registers. The backward is split so that
// this holds for it too: one kernel owns keys (dK, dV), one owns queries (dQ). The scores are
// computed twice, but nothing is added across blocks, so the result is always the same.
//
//   forward   S = Q·Kᵀ   P = 2^(c·S − m)   O = P·V / l            c = scale·log2 e
//   dkv       Sᵀ = K·Qᵀ  dPᵀ = V·dOᵀ       dV = (P∘M)ᵀ·dO  dK = scale·dSᵀ·Q
//   dq        S = Q·Kᵀ   dP = dO·Vᵀ        dQ = scale·dS·K
//   with P = 2^(c·S − lse·log2 e), dS = P∘(dP∘M − δ), δ = Σ do∘o, M the dropout factors.
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

#define LOG2_E 1.4426950408889634f
#define MINUS_INFINITY __int_as_float(0xff800000)

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

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

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

// How many positions of a sequence count.
__device__ __forceinline__ int sequence_length(const i32* lengths, int b, int seq) {
    return lengths ? min(max(lengths[b], 0), seq) : seq;
}

// The first key that the query at `row` sees, never one behind its own.
__device__ __forceinline__ int first_key(const i32* starts, int window, int row, int seq) {
    int start = starts ? starts[min(row, seq - 1)] : 0;
    return min(max(max(start, row + 1 - window), 0), row);
}

// The end of the queries that see a key up to `last`.
__device__ __forceinline__ int queries_end(const i32* starts, int window, int last, int length) {
    int end = (int)min((long long)last + window, (long long)length);
    if (starts) {
        int low = min(last + 1, end);
        while (low < end) {
            int middle = (low + end) / 2;
            if (starts[middle] > last)
                end = middle;
            else
                low = middle + 1;
        }
    }
    return end;
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

// ---------------------------------------------------------------- forward

// A block has 16·TILES·WARPS queries of one head and walks its keys, KEYS at a time. Blocks of
// one head follow one another, so that its keys and values are in the cache, the one with the
// most keys to see first.
template <bool SELECTED, int D, int TILES, int WARPS, int KEYS>
__device__ __forceinline__ void forward(const real* q, const real* k, const real* v, real* o,
                                        float* lse, u32 q_stride, u32 kv_stride, int seq, int heads,
                                        int kv_heads, float scale, int causal, const u32* random,
                                        u32 stream, u32 threshold, const i32* lengths, int window,
                                        const i32* starts, const u32* selection) {
    constexpr int ROWS = 16 * TILES * WARPS, THREADS = 32 * WARPS, N = KEYS / 8;
    constexpr u32 STAGE = KEYS * D * 2;
    extern __shared__ __align__(128) u8 shared[];
    u32 queries = shared_address(shared), keys = queries + ROWS * D * 2, values = keys + 2 * STAGE;

    int blocks = (seq + ROWS - 1) / ROWS;
    int head = blockIdx.x / blocks, first = (blocks - 1 - (int)(blockIdx.x % blocks)) * ROWS;
    int b = head / heads, h = head % heads, length = sequence_length(lengths, b, seq);
    u64 kv_start = (u64)b * seq * kv_stride + (u64)(h / (heads / kv_heads)) * D;
    u64 width = (u64)heads * D;
    q += (u64)b * seq * q_stride + (u64)h * D;
    k += kv_start;
    v += kv_start;
    o += (u64)b * seq * width + (u64)h * D;
    lse += (u64)head * seq;
    if (lengths) {
        clear_padding<D, ROWS, THREADS>(o, width, first, length, seq);
        for (int t = max(first, length) + threadIdx.x; t < min(first + ROWS, seq); t += THREADS)
            lse[t] = 0.0f;
        if (first >= length) return;
    }

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int own = warp * 16 * TILES, row0 = first + own;
    Lanes<D> lanes;
    Left<D, TILES, D <= 64> query(queries + own * D * 2);
    ScoreDropout dropout(random, stream, threshold, heads);
    float c = scale * LOG2_E;

    float out[TILES][D / 8][4], largest[TILES][2], sum[TILES][2];
    clear(out);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[i][half] = MINUS_INFINITY;
            sum[i][half] = 0.0f;
        }

    int end = causal ? min(length, first + ROWS) : length;
    bool bounded = window < seq || starts;
    if (starts) starts += (u64)b * seq;
    if (SELECTED) selection += (u64)b * seq * ((seq + 31) / 32);
    int begin = bounded ? first_key(starts, window, first, seq) / KEYS * KEYS : 0;
    // From here on every row of the warp sees the keys before its own.
    int all_see = bounded ? first_key(starts, window, row0 + 16 * TILES - 1, seq) : 0;
    fetch<D, ROWS, THREADS>(queries, q, q_stride, first, length);
    fetch<D, KEYS, THREADS>(keys, k, kv_stride, begin, length);
    fetch<D, KEYS, THREADS>(values, v, kv_stride, begin, length);

    u32 stage = 0;
    for (int k0 = begin; k0 < end; k0 += KEYS, stage ^= STAGE) {
        copies_arrive();
        // After this barrier the tile is complete, and nobody reads the other stage any more.
        __syncthreads();
        if (k0 + KEYS < end) {
            fetch<D, KEYS, THREADS>(keys + (stage ^ STAGE), k, kv_stride, k0 + KEYS, length);
            fetch<D, KEYS, THREADS>(values + (stage ^ STAGE), v, kv_stride, k0 + KEYS, length);
        }
        if (k0 == begin) query.take(lanes);
        if (causal && k0 >= row0 + 16 * TILES) continue;
        u32 chosen[SELECTED ? TILES : 1][2][KEYS / 32];
        if constexpr (SELECTED) {
            u32 any = 0u;
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int word = 0; word < KEYS / 32; word++) {
                        int row = row0 + i * 16 + half * 8 + g;
                        chosen[i][half][word] =
                            selected_keys(selection, row, k0 + word * 32, seq);
                        any |= chosen[i][half][word];
                    }
            if (!__any_sync(0xffffffffu, any)) continue;
        }

        lanes.forget();
        float s[TILES][N][4];
        query.times(s, keys + stage, lanes);

        if constexpr (SELECTED) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        u32 word = chosen[i][e / 2][n / 4];
                        if (!(word >> (n % 4 * 8 + 2 * t + e % 2) & 1u))
                            s[i][n][e] = MINUS_INFINITY;
                    }
        }

        if (k0 + KEYS > length || (causal && k0 + KEYS - 1 > row0)) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int row = row0 + i * 16 + e / 2 * 8 + g;
                    int visible = (causal ? min(length, row + 1) : length) - k0 - 2 * t - e % 2;
#pragma unroll
                    for (int n = 0; n < N; n++)
                        if (n * 8 >= visible) s[i][n][e] = MINUS_INFINITY;
                }
        }
        if (k0 < all_see) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int row = row0 + i * 16 + half * 8 + g;
                    int hidden = first_key(starts, window, row, seq) - k0 - 2 * t;
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (n * 8 + e < hidden) s[i][n][2 * half + e] = MINUS_INFINITY;
                }
        }

#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = largest[i][half];
#pragma unroll
                for (int n = 0; n < N; n++)
                    top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
                // The four lanes of a row.
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                // A row that has seen no key yet has no largest score, and nothing to shrink.
                float offset = top == MINUS_INFINITY ? 0.0f : top * c;
                float shrink = exp2_fast(fmaf(largest[i][half], c, -offset));
                float added = 0.0f;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        s[i][n][e] = exp2_fast(fmaf(s[i][n][e], c, -offset));
                        added += s[i][n][e];
                    }
                // Only this lane's columns: the lanes are added up at the end.
                sum[i][half] = fmaf(sum[i][half], shrink, added);
                largest[i][half] = top;
#pragma unroll
                for (int d = 0; d < D / 8; d++) {
                    out[i][d][2 * half] *= shrink;
                    out[i][d][2 * half + 1] *= shrink;
                }
            }

        // The factor of what is kept is applied to the output as a whole.
        if (dropout.threshold) {
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 base = dropout.row((u32)head * seq + row0 + i * 16 + half * 8 + g);
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            if (dropout.factor(base, k0 + n * 8 + 2 * t + e) == 0.0f)
                                s[i][n][2 * half + e] = 0.0f;
                }
        }
        accumulate<D>(out, s, values + stage, lanes);
    }

    float inverse[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[i][half];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            inverse[i][half] = dropout.scale / total;
            int row = row0 + i * 16 + half * 8 + g;
            if (t == 0 && row < length) lse[row] = largest[i][half] * scale + logf(total);
        }
    write_rows<D, TILES>(out, inverse, shared + own * D * 2, o, width, row0, length);
}

// ---------------------------------------------------------------- backward: keys and values

// A block has 16·TILES·WARPS keys of one key head and walks the queries that see them, of every
// head of its group, QUERIES at a time; a warp takes STEP of those at once. With `parts`
// [2][B, heads][T][D], where the blocks of key heads are too few for a card, it has one head of
// the group, whose share of dK and dV goes there.
template <bool SELECTED, int D, int TILES, int WARPS, int QUERIES, int STEP>
__device__ __forceinline__ void backward_keys(const real* d_o, const real* q, const real* k,
                                              const real* v, const float* lse, const float* delta,
                                              real* dk, real* dv, u32 q_stride, u32 kv_stride,
                                              int seq, int heads, int kv_heads, float scale,
                                              int causal, const u32* random, u32 stream,
                                              u32 threshold, const i32* lengths, int window,
                                              const i32* starts, const u32* selection,
                                              float* parts) {
    constexpr int ROWS = 16 * TILES * WARPS, THREADS = 32 * WARPS, N = STEP / 8;
    // A stage: queries, gradients of the output, then lse and delta of the queries.
    constexpr u32 TILE = QUERIES * D * 2, STATISTICS = 2 * TILE, STAGE = 2 * TILE + QUERIES * 8;
    static_assert(THREADS >= QUERIES, "a thread fetches the statistics of one query");
    extern __shared__ __align__(128) u8 shared[];
    u32 keys = shared_address(shared), values = keys + ROWS * D * 2;
    u32 stages = values + ROWS * D * 2;

    int blocks = (seq + ROWS - 1) / ROWS, group = heads / kv_heads, members = parts ? 1 : group;
    int own_head = blockIdx.x / blocks * members, first = (int)(blockIdx.x % blocks) * ROWS;
    int b = own_head / heads, h0 = own_head % heads, kv_head = own_head / group;
    int length = sequence_length(lengths, b, seq);
    u64 kv_start = (u64)b * seq * kv_stride + (u64)(kv_head % kv_heads) * D;
    u64 width = (u64)heads * D;
    q += (u64)b * seq * q_stride + (u64)h0 * D;
    d_o += (u64)b * seq * width + (u64)h0 * D;
    u64 statistics = ((u64)b * heads + h0) * seq;
    if (lengths) {
        clear_padding<D, ROWS, THREADS>(dk + kv_start, kv_stride, first, length, seq);
        clear_padding<D, ROWS, THREADS>(dv + kv_start, kv_stride, first, length, seq);
        if (first >= length) return;
    }

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int own = warp * 16 * TILES, row0 = first + own;
    Lanes<D> lanes;
    Left<D, TILES, false> key(keys + own * D * 2), value(values + own * D * 2);
    ScoreDropout dropout(random, stream, threshold, heads);
    float c = scale * LOG2_E;

    float grad_key[TILES][D / 8][4], grad_value[TILES][D / 8][4];
    clear(grad_key);
    clear(grad_value);

    bool bounded = window < seq || starts;
    // Queries before the first key see none of them.
    int begin = causal ? first / QUERIES * QUERIES : 0;
    if (starts) starts += (u64)b * seq;
    if (SELECTED) selection += (u64)b * seq * ((seq + 31) / 32);
    int end = causal ? queries_end(starts, window, min(first + ROWS, seq) - 1, length) : length;
    int per_head = (end - begin + QUERIES - 1) / QUERIES, total = per_head * members;
    auto fetch_queries = [&](int index) {
        int member = index / per_head, q0 = begin + index % per_head * QUERIES;
        u32 stage = stages + (index & 1) * STAGE;
        fetch<D, QUERIES, THREADS>(stage, q + (u64)member * D, q_stride, q0, length);
        fetch<D, QUERIES, THREADS>(stage + TILE, d_o + (u64)member * D, width, q0, length);
        if (threadIdx.x < QUERIES) {
            bool inside = q0 + (int)threadIdx.x < length;
            u64 at = statistics + (u64)member * seq + (inside ? q0 + threadIdx.x : 0);
            u32 to = stage + STATISTICS + threadIdx.x * 4;
            copy_4(to, lse + at, inside);
            copy_4(to + QUERIES * 4, delta + at, inside);
        }
    };
    fetch<D, ROWS, THREADS>(keys, k + kv_start, kv_stride, first, length);
    fetch<D, ROWS, THREADS>(values, v + kv_start, kv_stride, first, length);
    fetch_queries(0);

    for (int index = 0; index < total; index++) {
        copies_arrive();
        __syncthreads();
        if (index + 1 < total) fetch_queries(index + 1);
        int q0 = begin + index % per_head * QUERIES;
        u32 head = b * heads + h0 + index / per_head;
        u32 stage = stages + (index & 1) * STAGE;
        const float* numbers = reinterpret_cast<const float*>(
            shared + 2 * ROWS * D * 2 + (index & 1) * STAGE + STATISTICS);

#pragma unroll 1
        for (int part = 0; part < QUERIES; part += STEP) {
            int column0 = q0 + part;
            if (causal && column0 + STEP <= row0) continue;
            u32 rows = stage + part * D * 2;
            // Of each query, the bits of this warp's keys, which are in one word.
            static_assert(16 * TILES <= 32, "a warp's keys are in one word");
            u32 chosen[SELECTED ? N : 1][2];
            if constexpr (SELECTED) {
                u32 any = 0u, mask = 16 * TILES == 32 ? 0xffffffffu : (1u << 16 * TILES % 32) - 1u;
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int query = column0 + n * 8 + 2 * t + e;
                        u32 word = selected_keys(selection, query, row0 / 32 * 32, seq);
                        chosen[n][e] = word >> (row0 % 32) & mask;
                        any |= chosen[n][e];
                    }
                if (!__any_sync(0xffffffffu, any)) continue;
            }
            lanes.forget();
            float p[TILES][N][4], ds[TILES][N][4];
            key.times(p, rows, lanes);
            value.times(ds, rows + TILE, lanes);

            if constexpr (SELECTED) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(chosen[n][e % 2] >> (i * 16 + e / 2 * 8 + g) & 1u))
                                p[i][n][e] = MINUS_INFINITY;
            }

            if (causal && column0 < row0 + 16 * TILES - 1) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        // The first query that sees the key, counted from this lane's column.
                        int seen = row0 + i * 16 + e / 2 * 8 + g - column0 - 2 * t - e % 2;
#pragma unroll
                        for (int n = 0; n < N; n++)
                            if (n * 8 < seen) p[i][n][e] = MINUS_INFINITY;
                    }
            }

            // Whether the last of these queries does not see all keys of the warp.
            if (bounded && first_key(starts, window, column0 + STEP - 1, seq) > row0) {
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int query = column0 + n * 8 + 2 * t + e;
                        int seen = first_key(starts, window, query, seq) - row0 - g;
#pragma unroll
                        for (int i = 0; i < TILES; i++)
#pragma unroll
                            for (int half = 0; half < 2; half++)
                                if (i * 16 + half * 8 < seen)
                                    p[i][n][2 * half + e] = MINUS_INFINITY;
                    }
            }

            // Queries after the end have zeroes for do, lse and delta, and so add nothing. What
            // comes out for keys after the end stays in their rows, which are not written.
#pragma unroll
            for (int n = 0; n < N; n++) {
                float2 offset = *reinterpret_cast<const float2*>(numbers + part + n * 8 + 2 * t);
                float2 mean =
                    *reinterpret_cast<const float2*>(numbers + QUERIES + part + n * 8 + 2 * t);
                float offsets[2] = {offset.x * LOG2_E, offset.y * LOG2_E};
                float means[2] = {mean.x, mean.y};
                if (dropout.threshold) {
                    u32 query = head * seq + column0 + n * 8 + 2 * t;
                    u32 base[2] = {dropout.row(query), dropout.row(query + 1)};
#pragma unroll
                    for (int i = 0; i < TILES; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            u32 column = row0 + i * 16 + e / 2 * 8 + g;
                            float factor = dropout.factor(base[e % 2], column);
                            float x = exp2_fast(fmaf(p[i][n][e], c, -offsets[e % 2]));
                            ds[i][n][e] = x * fmaf(ds[i][n][e], factor, -means[e % 2]);
                            p[i][n][e] = x * factor;
                        }
                } else {
#pragma unroll
                    for (int i = 0; i < TILES; i++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            float x = exp2_fast(fmaf(p[i][n][e], c, -offsets[e % 2]));
                            ds[i][n][e] = x * (ds[i][n][e] - means[e % 2]);
                            p[i][n][e] = x;
                        }
                }
            }
            accumulate<D>(grad_value, p, rows + TILE, lanes);
            accumulate<D>(grad_key, ds, rows, lanes);
        }
    }

    if (parts) {
        u64 at = (u64)own_head * seq, apart = (u64)gridDim.x / blocks * seq * D;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = row0 + i * 16 + half * 8 + g;
                if (row >= length) continue;
                float* to = parts + (at + row) * D + 2 * t;
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    float2 of_key = {grad_key[i][n][2 * half] * scale,
                                     grad_key[i][n][2 * half + 1] * scale};
                    float2 of_value = {grad_value[i][n][2 * half], grad_value[i][n][2 * half + 1]};
                    *reinterpret_cast<float2*>(to + n * 8) = of_key;
                    *reinterpret_cast<float2*>(to + apart + n * 8) = of_value;
                }
            }
        return;
    }
    float ones[TILES][2], scales[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            ones[i][half] = 1.0f;
            scales[i][half] = scale;
        }
    write_rows<D, TILES>(grad_key, scales, shared + own * D * 2, dk + kv_start, kv_stride, row0,
                         length);
    write_rows<D, TILES>(grad_value, ones, shared + (ROWS + own) * D * 2, dv + kv_start, kv_stride,
                         row0, length);
}

// ---------------------------------------------------------------- backward: queries

// Laid out as the forward; a warp takes STEP of the KEYS of a tile at once.
template <bool SELECTED, int D, int TILES, int WARPS, int KEYS, int STEP>
__device__ __forceinline__ void backward_queries(const real* d_o, const real* q, const real* k,
                                                 const real* v, const float* lse,
                                                 const float* delta, real* dq, u32 q_stride,
                                                 u32 kv_stride, int seq, int heads, int kv_heads,
                                                 float scale, int causal, const u32* random,
                                                 u32 stream, u32 threshold, const i32* lengths,
                                                 int window, const i32* starts,
                                                 const u32* selection) {
    constexpr int ROWS = 16 * TILES * WARPS, THREADS = 32 * WARPS, N = STEP / 8;
    constexpr u32 STAGE = KEYS * D * 2;
    extern __shared__ __align__(128) u8 shared[];
    u32 queries = shared_address(shared), gradients = queries + ROWS * D * 2;
    u32 keys = gradients + ROWS * D * 2, values = keys + 2 * STAGE;

    int blocks = (seq + ROWS - 1) / ROWS;
    int head = blockIdx.x / blocks, first = (blocks - 1 - (int)(blockIdx.x % blocks)) * ROWS;
    int b = head / heads, h = head % heads, length = sequence_length(lengths, b, seq);
    u64 kv_start = (u64)b * seq * kv_stride + (u64)(h / (heads / kv_heads)) * D;
    u64 q_start = (u64)b * seq * q_stride + (u64)h * D, width = (u64)heads * D;
    k += kv_start;
    v += kv_start;
    if (lengths) {
        clear_padding<D, ROWS, THREADS>(dq + q_start, q_stride, first, length, seq);
        if (first >= length) return;
    }

    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int own = warp * 16 * TILES, row0 = first + own;
    Lanes<D> lanes;
    Left<D, TILES, D <= 64> query(queries + own * D * 2), gradient(gradients + own * D * 2);
    ScoreDropout dropout(random, stream, threshold, heads);
    float c = scale * LOG2_E;

    float out[TILES][D / 8][4], offset[TILES][2], mean[TILES][2];
    clear(out);
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = row0 + i * 16 + half * 8 + g;
            u64 at = (u64)head * seq + row;
            offset[i][half] = row < length ? lse[at] * LOG2_E : 0.0f;
            mean[i][half] = row < length ? delta[at] : 0.0f;
        }

    int end = causal ? min(length, first + ROWS) : length;
    bool bounded = window < seq || starts;
    if (starts) starts += (u64)b * seq;
    if (SELECTED) selection += (u64)b * seq * ((seq + 31) / 32);
    int begin = bounded ? first_key(starts, window, first, seq) / KEYS * KEYS : 0;
    int all_see = bounded ? first_key(starts, window, row0 + 16 * TILES - 1, seq) : 0;
    d_o += (u64)b * seq * width + (u64)h * D;
    fetch<D, ROWS, THREADS>(queries, q + q_start, q_stride, first, length);
    fetch<D, ROWS, THREADS>(gradients, d_o, width, first, length);
    fetch<D, KEYS, THREADS>(keys, k, kv_stride, begin, length);
    fetch<D, KEYS, THREADS>(values, v, kv_stride, begin, length);

    u32 stage = 0;
    for (int k0 = begin; k0 < end; k0 += KEYS, stage ^= STAGE) {
        copies_arrive();
        __syncthreads();
        if (k0 + KEYS < end) {
            fetch<D, KEYS, THREADS>(keys + (stage ^ STAGE), k, kv_stride, k0 + KEYS, length);
            fetch<D, KEYS, THREADS>(values + (stage ^ STAGE), v, kv_stride, k0 + KEYS, length);
        }
        if (k0 == begin) {
            query.take(lanes);
            gradient.take(lanes);
        }

#pragma unroll 1
        for (int part = 0; part < KEYS; part += STEP) {
            int column0 = k0 + part;
            if (column0 >= length || (causal && column0 >= row0 + 16 * TILES)) break;
            u32 rows = keys + stage + part * D * 2;
            static_assert(STEP == 32, "the keys of a step are one word");
            u32 chosen[SELECTED ? TILES : 1][2];
            if constexpr (SELECTED) {
                u32 any = 0u;
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int row = row0 + i * 16 + half * 8 + g;
                        chosen[i][half] = selected_keys(selection, row, column0, seq);
                        any |= chosen[i][half];
                    }
                if (!__any_sync(0xffffffffu, any)) continue;
            }
            lanes.forget();
            float p[TILES][N][4], ds[TILES][N][4];
            query.times(p, rows, lanes);
            gradient.times(ds, rows + 2 * STAGE, lanes);

            if constexpr (SELECTED) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (!(chosen[i][e / 2] >> (n * 8 + 2 * t + e % 2) & 1u))
                                p[i][n][e] = MINUS_INFINITY;
            }

            if (column0 + STEP > length || (causal && column0 + STEP - 1 > row0)) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int row = row0 + i * 16 + e / 2 * 8 + g;
                        int visible =
                            (causal ? min(length, row + 1) : length) - column0 - 2 * t - e % 2;
#pragma unroll
                        for (int n = 0; n < N; n++)
                            if (n * 8 >= visible) p[i][n][e] = MINUS_INFINITY;
                    }
            }
            if (column0 < all_see) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int row = row0 + i * 16 + half * 8 + g;
                        int hidden = first_key(starts, window, row, seq) - column0 - 2 * t;
#pragma unroll
                        for (int n = 0; n < N; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (n * 8 + e < hidden) p[i][n][2 * half + e] = MINUS_INFINITY;
                    }
            }

            if (dropout.threshold) {
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 base = dropout.row((u32)head * seq + row0 + i * 16 + half * 8 + g);
#pragma unroll
                        for (int n = 0; n < N; n++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                ds[i][n][2 * half + e] *=
                                    dropout.factor(base, column0 + n * 8 + 2 * t + e);
                    }
            }
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        ds[i][n][e] = exp2_fast(fmaf(p[i][n][e], c, -offset[i][e / 2])) *
                                      (ds[i][n][e] - mean[i][e / 2]);
            accumulate<D>(out, ds, rows, lanes);
        }
    }

    float scales[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; i++) scales[i][0] = scales[i][1] = scale;
    write_rows<D, TILES>(out, scales, shared + own * D * 2, dq + q_start, q_stride, row0, length);
}

// ---------------------------------------------------------------- instances

// TILES, WARPS, the tile of the other side, and how much of that a warp takes at once, for each
// head width; op/attention.rs repeats what a launch needs of them. The second launch bound is how
// many blocks a multiprocessor holds, by registers and by shared memory.
#define SCALARS                                                                                    \
    u32 q_stride, u32 kv_stride, int seq, int heads, int kv_heads, float scale, int causal,        \
        const u32 *random, u32 stream, u32 threshold, const i32 *lengths, int window,              \
        const i32 *starts
#define SCALAR_NAMES                                                                               \
    q_stride, kv_stride, seq, heads, kv_heads, scale, causal, random, stream, threshold, lengths,  \
        window, starts
#define INSTANCES(D, FORWARD, FORWARD_BLOCKS, KEYS, KEYS_THREADS, KEYS_BLOCKS, QUERIES)            \
    KERNEL __launch_bounds__(128, FORWARD_BLOCKS) attention_forward_##D(                           \
        const real* q, const real* k, const real* v, real* o, float* lse, SCALARS) {               \
        forward<false, D, FORWARD>(q, k, v, o, lse, SCALAR_NAMES, nullptr);                        \
    }                                                                                              \
    KERNEL __launch_bounds__(KEYS_THREADS, KEYS_BLOCKS) attention_backward_keys_##D(               \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dk, real* dv, SCALARS) {                                         \
        backward_keys<false, D, KEYS>(d_o, q, k, v, lse, delta, dk, dv, SCALAR_NAMES, nullptr,     \
                                       nullptr);                                                   \
    }                                                                                              \
    KERNEL __launch_bounds__(128, 2) attention_backward_queries_##D(                               \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dq, SCALARS) {                                                   \
        backward_queries<false, D, QUERIES>(d_o, q, k, v, lse, delta, dq, SCALAR_NAMES, nullptr);  \
    }                                                                                              \
    KERNEL __launch_bounds__(128, FORWARD_BLOCKS) attention_selected_forward_##D(                  \
        const real* q, const real* k, const real* v, real* o, float* lse, SCALARS,                 \
        const u32* selection) {                                                                    \
        forward<true, D, FORWARD>(q, k, v, o, lse, SCALAR_NAMES, selection);                       \
    }                                                                                              \
    KERNEL __launch_bounds__(KEYS_THREADS, KEYS_BLOCKS) attention_selected_backward_keys_##D(      \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dk, real* dv, float* parts, SCALARS, const u32* selection) {     \
        backward_keys<true, D, KEYS>(d_o, q, k, v, lse, delta, dk, dv, SCALAR_NAMES, selection,    \
                                     parts);                                                       \
    }                                                                                              \
    KERNEL __launch_bounds__(128, 2) attention_selected_backward_queries_##D(                      \
        const real* d_o, const real* q, const real* k, const real* v, const float* lse,            \
        const float* delta, real* dq, SCALARS, const u32* selection) {                             \
        backward_queries<true, D, QUERIES>(d_o, q, k, v, lse, delta, dq, SCALAR_NAMES, selection); \
    }

#define SHAPE(...) __VA_ARGS__
INSTANCES(32, SHAPE(2, 4, 64), 3, SHAPE(2, 4, 64, 32), 128, 2, SHAPE(2, 4, 64, 32))
INSTANCES(64, SHAPE(2, 4, 64), 2, SHAPE(2, 4, 64, 32), 128, 2, SHAPE(2, 4, 64, 32))
INSTANCES(128, SHAPE(2, 4, 64), 2, SHAPE(1, 8, 32, 32), 256, 1, SHAPE(2, 4, 32, 32))

#endif  // !REAL_F32

// ---------------------------------------------------------------- parts

// dk and dv from the parts of the heads of each group, added in their order. A thread has four
// columns; `quads` is B·T·kv_heads·width/4.
KERNEL __launch_bounds__(256) attention_sum_heads(const float* parts, real* dk, real* dv,
                                                  u32 kv_stride, int seq, int heads, int kv_heads,
                                                  int width, u64 quads) {
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= 2 * quads) return;
    real* to = index < quads ? dk : dv;
    const float* from = parts + (index < quads ? 0 : quads * 4 * (heads / kv_heads));
    index = index < quads ? index : index - quads;
    int group = heads / kv_heads, columns = width / 4, column = (int)(index % columns) * 4;
    int kv_head = (int)(index / columns % kv_heads);
    u64 row = index / columns / kv_heads, b = row / seq, t = row % seq;
    from += ((b * heads + kv_head * group) * seq + t) * width + column;
    float sum[4] = {};
    for (int member = 0; member < group; member++) {
        float4 part = *reinterpret_cast<const float4*>(from + (u64)member * seq * width);
        sum[0] += part.x;
        sum[1] += part.y;
        sum[2] += part.z;
        sum[3] += part.w;
    }
    store(to + row * kv_stride + (u64)kv_head * width + column, sum);
}

// ---------------------------------------------------------------- δ

// delta[b, h, t] = Σ_d do[b, t, h, d]·o[b, t, h, d]: eight lanes per row and head. `vector` says
// that the head's width is a multiple of eight, so that eight elements can be read at once.
KERNEL __launch_bounds__(256) attention_delta(const real* d_o, const real* o, float* delta, u64 rows,
                                              int seq, int heads, int width, int vector) {
    u64 index = ((u64)blockIdx.x * 256 + threadIdx.x) / 8;
    int part = threadIdx.x % 8;
    float sum = 0.0f;
    if (index < rows * heads) {
        const real* x = d_o + index * width;
        const real* y = o + index * width;
        if (vector) {
            for (int d = part * 8; d < width; d += 64) {
                float a[8], b[8];
                load(x + d, a);
                load(y + d, b);
#pragma unroll
                for (int e = 0; e < 8; e++) sum = fmaf(a[e], b[e], sum);
            }
        } else {
            for (int d = part; d < width; d += 8) sum = fmaf(to_float(x[d]), to_float(y[d]), sum);
        }
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (index < rows * heads && part == 0) {
        u64 row = index / heads, h = index % heads;
        delta[(row / seq * heads + h) * seq + row % seq] = sum;
    }
}
