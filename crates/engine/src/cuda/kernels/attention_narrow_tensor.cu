// Softmax attention for heads of 2, 4 or 8 columns on the tensor cores, in 16 bits, of sequences of
// up to 512 positions, where a query sees all keys or those up to itself. The equations are those
// of attention_narrow.cu, whose kernels take what these do not:
//
//   p_ts = exp(scale·⟨q_t, k_s⟩ − lse_t),   o_t = Σ_s m_ts·p_ts·v_s
//   δ_t = ⟨do_t, o_t⟩,   ds_ts = p_ts·(m_ts·⟨do_t, v_s⟩ − δ_t)
//   dq_t = scale·Σ_s ds_ts·k_s,   dk_s = scale·Σ_t ds_ts·q_t,   dv_s = Σ_t m_ts·p_ts·do_t
//
// Of so narrow a head nearly all time is exponentials and random numbers, one each for every pair of
// positions; products come for next to nothing. So forward and backward both meet every pair once,
// and a block has a whole head: all its sums stay inside. Scores are products of 16 bits;
// probabilities and their gradients stay floats (`multiply_floats`).
//
// q [B, T, heads·W] with rows q_stride elements apart, k and v [B, T, kv_heads·W] with rows
// kv_stride apart, o and do [B, T, heads·W], lse [B, heads, T]; gradients as what they belong to.
// Grid: forward heads × B, backward kv_heads × B. The scale is positive.
#include "common.cuh"
#include "matrix.cuh"

constexpr int LONGEST = 512;
constexpr int WARPS = 8;
// Queries that are worked on between two barriers of the backward, and that a warp of the forward
// has at a time.
constexpr int GROUP = 32;
// Keys of a tile of the backward, and such tiles of a warp; every so many tiles one is its own.
constexpr int TILE = 16;
constexpr int TILES = LONGEST / TILE / WARPS;

#define PARAMETERS                                                                                 \
    u32 q_stride, u32 kv_stride, int seq, int heads, int kv_heads, float scale, int causal,        \
        const u32 *random, u32 stream, u32 threshold
#define ARGUMENTS                                                                                  \
    q_stride, kv_stride, seq, heads, kv_heads, scale, causal, random, stream, threshold

// Two neighbouring columns of a row, `word` of them from its first; zeroes where it is outside.
__device__ __forceinline__ u32 read_word(const real* matrix, u64 at, int word, bool inside) {
    return inside ? reinterpret_cast<const u32*>(matrix + at)[word] : 0u;
}

__device__ __forceinline__ u16 read_bits(const real* matrix, u64 at, bool inside) {
    return inside ? reinterpret_cast<const u16*>(matrix)[at] : (u16)0;
}

__device__ __forceinline__ void store_pair(real* to, float low, float high) {
    *reinterpret_cast<u32*>(to) = pack2(low, high);
}

// ---------------------------------------------------------------- forward

// Keys as rows of words, and values with those of two neighbouring keys side by side: what a lane
// needs of both is one read. From one pair of keys to the next, floats such that a warp's reads are
// of different banks.
template <int W> struct Head {
    static constexpr int WORDS = W / 2;
    static constexpr int PAIR = 2 * W + (W == 8 ? 8 : 0);
    u32 keys[LONGEST * WORDS];
    alignas(16) float values[LONGEST / 2 * PAIR];
};

template <int W, bool DROPS>
__device__ __forceinline__ void forward(Head<W>& head, const real* q, const real* k, const real* v,
                                        real* o, float* lse, PARAMETERS) {
    constexpr int WORDS = Head<W>::WORDS, PAIR = Head<W>::PAIR;
    // Keys of a step: four tiles of eight.
    constexpr int STEP = 32;
    ScoreDropout dropout(random, stream, threshold, heads, false);
    int b = blockIdx.x / heads, h = blockIdx.x % heads, group = heads / kv_heads;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u64 kv_start = (u64)b * seq * kv_stride + (u64)(h / group) * W;
    u64 q_start = (u64)b * seq * q_stride + (u64)h * W, o_stride = (u64)heads * W;
    u64 o_start = (u64)b * seq * o_stride + (u64)h * W;

    // Zeroes up to the end of the last step.
    int padded = (seq + STEP - 1) / STEP * STEP;
    for (int s = threadIdx.x; s < padded; s += blockDim.x) {
        float value[W] = {};
        bool inside = s < seq;
        u64 at = kv_start + (u64)s * kv_stride;
#pragma unroll
        for (int word = 0; word < WORDS; word++)
            head.keys[s * WORDS + word] = read_word(k, at, word, inside);
        if (inside) load(v + at, value);
#pragma unroll
        for (int d = 0; d < W; d++) head.values[s / 2 * PAIR + d * 2 + s % 2] = value[d];
    }
    __syncthreads();

    // Each warp has a long group of queries and a short one, so that all take as long.
    int groups = (seq + GROUP - 1) / GROUP, warps = blockDim.x / 32, warp = threadIdx.x / 32;
    float factor = scale * LOG2_E;
    for (int turn = 0; turn * warps < groups; turn++) {
        int place = turn * warps + (turn % 2 ? warps - 1 - warp : warp);
        if (place >= groups) continue;
        int first = (groups - 1 - place) * GROUP;
        // Rows of this lane: 16·m + 8·i + g.
        u32 query[2][2], base[2][2];
        float out[2][4] = {}, top[2][2], sum[2][2] = {};
        int last[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = first + 16 * m + 8 * i + g;
                u64 at = q_start + (u64)row * q_stride;
                query[m][i] = read_word(q, at, t, row < seq && t < WORDS);
                base[m][i] = DROPS ? dropout.row((b * heads + h) * seq + row) : 0u;
                top[m][i] = MINUS_INFINITY;
                last[m][i] = causal ? min(row, seq - 1) : seq - 1;
            }
        }
        int end = causal ? min(first + GROUP, seq) : seq;
        // The first key that some query of the group does not see.
        int common = causal ? min(first + 1, seq) : seq;
        for (int s0 = 0; s0 < end; s0 += STEP) {
            float score[2][4][4] = {};
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 key = 0u;
                if (t < WORDS) key = head.keys[(s0 + 8 * n + g) * WORDS + t];
#pragma unroll
                for (int m = 0; m < 2; m++) multiply_short(score[m][n], query[m], key);
            }
            if (s0 + STEP > common) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
#pragma unroll
                    for (int m = 0; m < 2; m++) {
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (s0 + 8 * n + 2 * t + e % 2 > last[m][e / 2])
                                score[m][n][e] = MINUS_INFINITY;
                    }
                }
            }
            // The largest score so far is needed only to keep exponentials small: it is looked for
            // again where one is larger. Every query sees the first key, so there is one.
            float largest[2][2];
            bool grows = false;
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float most = fmaxf(score[m][0][2 * i], score[m][0][2 * i + 1]);
#pragma unroll
                    for (int n = 1; n < 4; n++)
                        most = fmaxf(most, fmaxf(score[m][n][2 * i], score[m][n][2 * i + 1]));
                    largest[m][i] = most;
                    grows = grows || most > top[m][i];
                }
            }
            if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
                for (int m = 0; m < 2; m++) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float most = fmaxf(largest[m][i], top[m][i]);
                        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                        float shrink = exp2_fast((top[m][i] - most) * factor);
                        top[m][i] = most;
                        sum[m][i] *= shrink;
                        out[m][2 * i] *= shrink;
                        out[m][2 * i + 1] *= shrink;
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                float2 value = make_float2(0.0f, 0.0f);
                int s = s0 + 8 * n + 2 * t;
                if (g < W)
                    value = *reinterpret_cast<const float2*>(head.values + s / 2 * PAIR + 2 * g);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    float kept[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float offset = top[m][e / 2] * factor;
                        float p = exp2_fast(fmaf(score[m][n][e], factor, -offset));
                        sum[m][e / 2] += p;
                        bool keeps = !DROPS || dropout.keeps(base[m][e / 2], s + e % 2);
                        kept[e] = keeps ? p : 0.0f;
                    }
                    multiply_floats(out[m], kept, value.x, value.y);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = first + 16 * m + 8 * i + g;
                float total = sum[m][i];
                total += __shfl_xor_sync(0xffffffffu, total, 1);
                total += __shfl_xor_sync(0xffffffffu, total, 2);
                float share = (DROPS ? dropout.scale : 1.0f) * CUT / total;
                if (row < seq && t < WORDS)
                    store_pair(o + o_start + (u64)row * o_stride + 2 * t, out[m][2 * i] * share,
                               out[m][2 * i + 1] * share);
                if (row < seq && t == 0)
                    lse[(u64)(b * heads + h) * seq + row] =
                        fmaf(top[m][i], scale, logf(total));
            }
        }
    }
}

// ---------------------------------------------------------------- backward
//
// A warp has every so many tiles of 16 keys, with the gradients of keys and values as its sums, and
// all warps go through the queries together, a group at a time. A tile's scores stand as (key,
// query); for dq they are turned around, which sums over the tile's keys, and what the warps have
// of it is added in their order after the next barrier, when all have come so far.
//
// A query's do may be of any size, and the gradients of its scores are as large: they are computed
// from do·r with the power of two r that makes the largest number of do one of [1, 2), so that
// 16 bits hold them; q/r takes it out of dk, and dq is divided by it at the end.

template <int W> struct Group {
    static constexpr int WORDS = W / 2;
    // q and do·r, a row of each query; a row's length keeps a warp's reads in different banks.
    static constexpr int ROW = W == 8 ? 12 : W;
    // Columns of do, then of q/r, with those of two neighbouring queries side by side.
    static constexpr int PAIR = 4 * W + (W == 2 ? 0 : 8);
    u32 rows[GROUP * ROW];
    alignas(16) float columns[GROUP / 2 * PAIR];
    // The log-sum-exp in units of ln 2, δ·r, the row's random number.
    alignas(16) float offset[GROUP];
    alignas(16) float delta[GROUP];
    alignas(16) u32 base[GROUP];
};

template <int W> struct Backward {
    Group<W> groups[2];
    // Parts of dq: of each warp, query and column.
    alignas(16) float parts[2][WARPS][GROUP * W];
    // 1/r, until dq is written: there are two groups by then.
    float inverse[4][GROUP];
};

// A warp reads a group of queries, one to a lane.
template <int W, bool DROPS>
__device__ __forceinline__ void read_group(Group<W>& group, float* inverse, const ScoreDropout& dropout,
                                           const real* d_o, const real* q, const real* o,
                                           const float* lse, u64 q_at, u64 o_at, u32 row,
                                           bool inside) {
    constexpr int WORDS = Group<W>::WORDS, ROW = Group<W>::ROW, PAIR = Group<W>::PAIR;
    int lane = threadIdx.x % 32;
    float query[W] = {}, gradient[W] = {}, output[W] = {};
    // Behind the end nothing is seen, by an offset that leaves no probability.
    float offset = 1e30f;
    if (inside) {
        load(q + q_at, query);
        load(d_o + o_at, gradient);
        load(o + o_at, output);
        // Probabilities are larger by what is cut off of them.
        offset = (lse[row] - (CUT - 1.0f)) * LOG2_E;
    }
    float delta = 0.0f, most = 0.0f;
#pragma unroll
    for (int d = 0; d < W; d++) {
        delta = fmaf(gradient[d], output[d], delta);
        most = fmaxf(most, fabsf(gradient[d]));
    }
    u32 exponent = __float_as_uint(most) & 0x7f800000u;
    float r = __uint_as_float(0x7f000000u - exponent);
    float one_over = __uint_as_float(exponent);
    float* columns = group.columns + lane / 2 * PAIR + lane % 2;
#pragma unroll
    for (int word = 0; word < WORDS; word++) {
        group.rows[lane * ROW + word] = pack2(query[2 * word], query[2 * word + 1]);
        group.rows[lane * ROW + WORDS + word] =
            pack2(gradient[2 * word] * r, gradient[2 * word + 1] * r);
    }
#pragma unroll
    for (int d = 0; d < W; d++) {
        columns[2 * d] = gradient[d];
        columns[2 * (W + d)] = query[d] * one_over;
    }
    group.offset[lane] = offset;
    group.delta[lane] = delta * r / (DROPS ? dropout.scale : 1.0f);
    group.base[lane] = DROPS ? dropout.row(row) : 0u;
    inverse[lane] = one_over;
}

template <int W, bool DROPS>
__device__ __forceinline__ void backward(Backward<W>& shared, const real* d_o, const real* q,
                                         const real* k, const real* v, const real* o,
                                         const float* lse, real* dq, real* dk, real* dv,
                                         PARAMETERS) {
    constexpr int WORDS = W / 2, ROW = Group<W>::ROW, PAIR = Group<W>::PAIR;
    // Where a key and its value fit into one row of the product, they are one operand.
    constexpr bool JOINED = W <= 4;
    constexpr int SUMS = JOINED ? 1 : 2;
    ScoreDropout dropout(random, stream, threshold, heads, false);
    int b = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads, group = heads / kv_heads;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u64 kv_start = (u64)b * seq * kv_stride + (u64)kv_head * W, o_stride = (u64)heads * W;
    float factor = scale * LOG2_E, kept_scale = DROPS ? dropout.scale : 1.0f;

    // Of each tile: keys and values by rows, keys by columns, sums of dv and dk.
    u32 keys[TILES][2], values[JOINED ? 1 : TILES][2], turned[TILES][2];
    float sums[TILES][SUMS][4] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        int s0 = (warp + i * warps) * TILE;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int s = s0 + 8 * half + g;
            u64 at = kv_start + (u64)s * kv_stride;
            if (JOINED) {
                u32 key = read_word(k, at, t, s < seq && t < WORDS);
                u32 value = read_word(v, at, t - WORDS, s < seq && t >= WORDS && t < W);
                keys[i][half] = key | value;
            } else {
                keys[i][half] = read_word(k, at, t, s < seq);
                values[JOINED ? 0 : i][half] = read_word(v, at, t, s < seq);
            }
            int pair = s0 + 8 * half + 2 * t;
            u64 low = kv_start + (u64)pair * kv_stride + g;
            u32 first = read_bits(k, low, pair < seq && g < W);
            u32 second = read_bits(k, low + kv_stride, pair + 1 < seq && g < W);
            turned[i][half] = first | second << 16;
        }
    }

    int tiles = (seq + TILE - 1) / TILE, groups = (seq + GROUP - 1) / GROUP;
    int turns = groups * group;
    // Tiles with a key that one of eight queries sees.
    auto seen = [&](int first) { return causal ? min(tiles, (first + 7) / TILE + 1) : tiles; };
    auto read = [&](int turn) {
        int h = kv_head * group + turn / groups, at = turn % groups * GROUP + lane;
        read_group<W, DROPS>(shared.groups[turn % 2], shared.inverse[turn % 4], dropout, d_o, q, o,
                             lse, ((u64)b * seq + at) * q_stride + (u64)h * W,
                             ((u64)b * seq + at) * o_stride + (u64)h * W,
                             (b * heads + h) * seq + at, at < seq);
    };
    auto write = [&](int turn) {
        int h = kv_head * group + turn / groups, first = turn % groups * GROUP;
        for (int i = threadIdx.x; i < GROUP * WORDS; i += blockDim.x) {
            int row = i / WORDS, at = first + row;
            if (at >= seq) continue;
            int parts = min(warps, seen(at / 8 * 8));
            float2 total = make_float2(0.0f, 0.0f);
            for (int w = 0; w < parts; w++) {
                const float* part = shared.parts[turn % 2][w] + 2 * i;
                float2 more = *reinterpret_cast<const float2*>(part);
                total.x += more.x;
                total.y += more.y;
            }
            float whole = scale * kept_scale / CUT * shared.inverse[turn % 4][row];
            store_pair(dq + ((u64)b * seq + at) * q_stride + (u64)h * W + i % WORDS * 2,
                       total.x * whole, total.y * whole);
        }
    };

    if (warp == 0) read(0);
    for (int turn = 0; turn < turns; turn++) {
        __syncthreads();
        if (turn > 0) write(turn - 1);
        if (turn + 1 < turns && warp == (turn + 1) % warps) read(turn + 1);
        const Group<W>& now = shared.groups[turn % 2];
        int start = turn % groups * GROUP;
#pragma unroll 1
        for (int n = 0; n < GROUP / 8; n++) {
            int first = start + 8 * n, count = seen(first);
            if (first >= seq || warp >= count) continue;
            const u32* row = now.rows + (8 * n + g) * ROW;
            const float* columns = now.columns + (4 * n + t) * PAIR + 2 * g;
            u32 query, gradient;
            float2 of_value = make_float2(0.0f, 0.0f), of_key = of_value;
            if (JOINED) {
                u32 word = t < W ? row[t] : 0u;
                query = t < WORDS ? word : 0u;
                gradient = t < WORDS ? 0u : word;
                float2 pair = of_value;
                if (g < 2 * W) pair = *reinterpret_cast<const float2*>(columns);
                if (g < W) of_value = pair;
                else of_key = pair;
            } else {
                query = row[t];
                gradient = row[WORDS + t];
                of_value = *reinterpret_cast<const float2*>(columns);
                of_key = *reinterpret_cast<const float2*>(columns + 2 * W);
            }
            float2 offset = *reinterpret_cast<const float2*>(now.offset + 8 * n + 2 * t);
            float2 delta = *reinterpret_cast<const float2*>(now.delta + 8 * n + 2 * t);
            uint2 base = *reinterpret_cast<const uint2*>(now.base + 8 * n + 2 * t);
            float part[4] = {};
            // One tile, of which everything is seen or not.
            auto meet = [&](int i, int s0, bool hides) {
                float p[4] = {}, ds[4] = {}, kept[4];
                bool keeps[4];
                multiply_short(p, keys[i], query);
                multiply_short(ds, JOINED ? keys[i] : values[JOINED ? 0 : i], gradient);
                // Before what depends on the products: they take their time.
#pragma unroll
                for (int e = 0; e < 4; e++)
                    keeps[e] =
                        !DROPS || dropout.keeps(e % 2 ? base.y : base.x, s0 + e / 2 * 8 + g);
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    p[e] = exp2_fast(fmaf(p[e], factor, e % 2 ? -offset.y : -offset.x));
                    int last = causal ? first + 2 * t + e % 2 : seq - 1;
                    if (hides && s0 + e / 2 * 8 + g > last) p[e] = 0.0f;
                    kept[e] = keeps[e] ? p[e] : 0.0f;
                    ds[e] = fmaf(kept[e], ds[e], -p[e] * (e % 2 ? delta.y : delta.x));
                }
                multiply_floats(sums[i][0], kept, of_value.x, of_value.y);
                multiply_floats(sums[i][SUMS - 1], ds, of_key.x, of_key.y);
                u32 columns[4] = {turned[i][0], 0u, turned[i][1], 0u};
                multiply(part, columns, transpose(pack2(ds[0], ds[1])),
                         transpose(pack2(ds[2], ds[3])));
            };
            int whole = causal ? first + 1 : seq;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                int tile = warp + i * warps, s0 = tile * TILE;
                if (tile >= count) break;
                if (s0 + TILE > whole) meet(i, s0, true);
                else meet(i, s0, false);
            }
            if (g < W) {
                float* to = shared.parts[turn % 2][warp] + (8 * n + 2 * t) * W + g;
                to[0] = part[0];
                to[W] = part[1];
            }
        }
    }
    __syncthreads();
    write(turns - 1);

#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int s = (warp + i * warps) * TILE + 8 * half + g;
            if (s >= seq) continue;
            u64 at = kv_start + (u64)s * kv_stride;
            float low = sums[i][0][2 * half], high = sums[i][0][2 * half + 1];
            if (t < WORDS) store_pair(dv + at + 2 * t, low * kept_scale, high * kept_scale);
            float whole = scale * kept_scale;
            if (JOINED) {
                if (t >= WORDS && t < W)
                    store_pair(dk + at + 2 * (t - WORDS), low * whole, high * whole);
            } else {
                low = sums[i][SUMS - 1][2 * half];
                high = sums[i][SUMS - 1][2 * half + 1];
                store_pair(dk + at + 2 * t, low * whole, high * whole);
            }
        }
    }
}

#define INSTANCES(D)                                                                               \
    KERNEL __launch_bounds__(32 * WARPS, 2) attention_forward_tensor_##D(                          \
        const real* q, const real* k, const real* v, real* o, float* lse, PARAMETERS) {            \
        await_earlier();                                                                           \
        __shared__ Head<D> head;                                                                   \
        if (random && threshold)                                                                   \
            forward<D, true>(head, q, k, v, o, lse, ARGUMENTS);                                    \
        else                                                                                       \
            forward<D, false>(head, q, k, v, o, lse, ARGUMENTS);                                   \
    }                                                                                              \
    KERNEL __launch_bounds__(32 * WARPS, 2) attention_backward_tensor_##D(                         \
        const real* d_o, const real* q, const real* k, const real* v, const real* o,               \
        const float* lse, real* dq, real* dk, real* dv, PARAMETERS) {                              \
        await_earlier();                                                                           \
        __shared__ Backward<D> shared;                                                             \
        if (random && threshold)                                                                   \
            backward<D, true>(shared, d_o, q, k, v, o, lse, dq, dk, dv, ARGUMENTS);                \
        else                                                                                       \
            backward<D, false>(shared, d_o, q, k, v, o, lse, dq, dk, dv, ARGUMENTS);               \
    }

INSTANCES(2)
INSTANCES(4)
INSTANCES(8)
