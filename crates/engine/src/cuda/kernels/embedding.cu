// Rows of a table looked up by token, and the gradient of that:
//
//   y[r] = mask ⊙ (table[token_r] + positions[r mod length])
//   dtable[v] += Σ_{r: token_r = v} mask ⊙ dy[r]      dpositions[t] += Σ_b mask ⊙ dy[b, t]
//
// The sums are the same in every run: rows are sorted by token, those of a token by their
// number, and added in that order. Sorting is by counting: integer atomics make the counts and
// an order that may differ from run to run, and each row's rank among the rows of its token
// puts that right.
#include "common.cuh"

constexpr int VECTOR = 16 / sizeof(real);

// A quiet NaN: what a token outside the vocabulary gives, so that the loss shows it.
__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

// ---------------------------------------------------------------- forward

// A row to each group of threads (threadIdx.y), N elements to a thread at a time.
template <int N>
__device__ __forceinline__ void lookup(const i32* tokens, const real* table,
                                       const real* positions, real* y, const u32* random,
                                       u32 number, u32 threshold, u32 rows, u32 length,
                                       u32 vocabulary, u32 width) {
    u32 row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    Dropout dropout(random, number, threshold);
    u32 token = (u32)tokens[row];
    u32 base = dropout.row(row);
    bool known = token < vocabulary;
    const real* entry = table + (u64)(known ? token : 0u) * width;
    const real* position = positions ? positions + (u64)(row % length) * width : nullptr;
    for (u32 column = threadIdx.x * N; column < width; column += blockDim.x * N) {
        float v[N];
        load(entry + column, v);
        if (position) {
            float added[N];
            load(position + column, added);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] += added[i];
        }
        float factors[N];
        dropout.factors(factors, base, column);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = known ? v[i] * factors[i] : not_a_number();
        store(y + (u64)row * width + column, v);
    }
}

KERNEL __launch_bounds__(256)
embedding(const i32* tokens, const real* table, const real* positions, real* y, const u32* random,
          u32 number, u32 threshold, u32 rows, u32 length, u32 vocabulary, u32 width) {
    await_earlier();
    lookup<VECTOR>(tokens, table, positions, y, random, number, threshold, rows, length, vocabulary,
                   width);
}

KERNEL __launch_bounds__(256)
embedding_any(const i32* tokens, const real* table, const real* positions, real* y,
              const u32* random, u32 number, u32 threshold, u32 rows, u32 length, u32 vocabulary,
              u32 width) {
    await_earlier();
    lookup<1>(tokens, table, positions, y, random, number, threshold, rows, length, vocabulary,
              width);
}

// ---------------------------------------------------------------- rows by token

// counts[vocabulary], zero before: how many rows have the token.
KERNEL embedding_count(const i32* tokens, u32* counts, u32 rows, u32 vocabulary) {
    await_earlier();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && (u32)tokens[row] < vocabulary) atomicAdd(counts + tokens[row], 1u);
}

// next[v]: where the rows of token v begin in the order. Which token comes first does not
// matter, so a running total serves: a block takes room for its 256 tokens at once. `total` is zero
// before.
KERNEL __launch_bounds__(256)
embedding_starts(const u32* counts, u32* next, u32* total, u32 vocabulary) {
    await_earlier();
    __shared__ u32 sums[8], room;
    u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 count = token < vocabulary ? counts[token] : 0u;
    u32 through = count;
#pragma unroll
    for (u32 offset = 1; offset < 32; offset *= 2) {
        u32 before = __shfl_up_sync(0xffffffffu, through, offset);
        if (lane >= offset) through += before;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    u32 all = 0, start = 0;
#pragma unroll
    for (u32 other = 0; other < 8; other++) {
        if (other == warp) start = all;
        all += sums[other];
    }
    if (threadIdx.x == 0 && all != 0) room = atomicAdd(total, all);
    __syncthreads();
    if (token < vocabulary) next[token] = room + start + through - count;
}

// Rows to their tokens' places; next[v] ends up where the rows of token v end.
KERNEL embedding_scatter(const i32* tokens, u32* next, u32* order, u32 rows, u32 vocabulary) {
    await_earlier();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows && (u32)tokens[row] < vocabulary) order[atomicAdd(next + tokens[row], 1u)] = row;
}

// The rows of each token in ascending order.
KERNEL embedding_rank(const i32* tokens, const u32* counts, const u32* next, const u32* order,
                      u32* sorted, u32 rows, u32 vocabulary) {
    await_earlier();
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || (u32)tokens[row] >= vocabulary) return;
    u32 token = (u32)tokens[row], end = next[token], start = end - counts[token];
    u32 rank = 0;
    for (u32 i = start; i < end; i++) rank += order[i] < row;
    sorted[start + rank] = row;
}

// ---------------------------------------------------------------- sums

// Adds up those of a token's rows that are `first`, first + step, …, N columns of them.
template <int N>
__device__ __forceinline__ void sum_rows(const real* dy, const u32* of_token, u32 first, u32 step,
                                         u32 count, const Dropout& dropout, u32 column, u32 width,
                                         float (&sum)[N]) {
    u32 own = num_turns(first, count, step);
#pragma unroll 4
    for (u32 turn = 0; turn < own; turn++) {
        u32 row = of_token[first + turn * step];
        float d[N], factors[N];
        load(dy + (u64)row * width + column, d);
        dropout.factors(factors, dropout.row(row), column);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = fmaf(d[i], factors[i], sum[i]);
    }
}

// A token with more rows than this is worth a block.
constexpr u32 FEW_ROWS = 8;
constexpr u32 MOST_GROUPS = 8;

// A group of threads (threadIdx.y) to a row: if that is the first of its token, the group adds up all
// of the token's, in order. Where they are many, the groups of the block take every blockDim.y-th
// one, and their sums meet in shared memory: blockDim.y · blockDim.x · N floats.
template <int N>
__device__ __forceinline__ void sum_table(const real* dy, const i32* tokens, const u32* counts,
                                          const u32* next, const u32* sorted, float* dtable,
                                          const u32* random, u32 number, u32 threshold, u32 rows,
                                          u32 vocabulary, u32 width) {
    extern __shared__ __align__(16) float sums[];
    __shared__ u32 many_tokens[MOST_GROUPS], many_starts[MOST_GROUPS], many_counts[MOST_GROUPS];
    u32 own_row = blockIdx.x * blockDim.y + threadIdx.y;
    u32 token = own_row < rows ? (u32)tokens[own_row] : vocabulary, start = 0, count = 0;
    if (token < vocabulary) {
        count = counts[token];
        start = next[token] - count;
        if (sorted[start] != own_row) count = 0;
    }
    Dropout dropout(random, number, threshold);
    if (count != 0 && count <= FEW_ROWS) {
        for (u32 column = threadIdx.x * N; column < width; column += blockDim.x * N) {
            float* entry = dtable + (u64)token * width + column;
            float sum[N] = {}, total[N];
            load(entry, total);
            sum_rows(dy, sorted + start, 0, 1, count, dropout, column, width, sum);
#pragma unroll
            for (int i = 0; i < N; i++) total[i] += sum[i];
            store(entry, total);
        }
    }
    if (threadIdx.x == 0) {
        many_tokens[threadIdx.y] = token;
        many_starts[threadIdx.y] = start;
        many_counts[threadIdx.y] = count > FEW_ROWS ? count : 0;
    }
    __syncthreads();
    // Few blocks have any.
    float* mine = sums + (threadIdx.y * blockDim.x + threadIdx.x) * N;
    for (u32 many = 0; many < blockDim.y; many++) {
        if (many_counts[many] == 0) continue;
        // All threads of the block make the same number of turns.
        for (u32 first = 0; first < width; first += blockDim.x * N) {
            u32 column = first + threadIdx.x * N;
            float sum[N] = {};
            if (column < width)
                sum_rows(dy, sorted + many_starts[many], threadIdx.y, blockDim.y, many_counts[many],
                         dropout, column, width, sum);
            store(mine, sum);
            __syncthreads();
            if (threadIdx.y == 0 && column < width) {
                float* entry = dtable + (u64)many_tokens[many] * width + column;
                float total[N];
                load(entry, total);
                for (u32 y = 1; y < blockDim.y; y++) {
                    float more[N];
                    load(mine + y * blockDim.x * N, more);
#pragma unroll
                    for (int i = 0; i < N; i++) sum[i] += more[i];
                }
#pragma unroll
                for (int i = 0; i < N; i++) total[i] += sum[i];
                store(entry, total);
            }
            __syncthreads();
        }
    }
}

KERNEL __launch_bounds__(1024)
embedding_table(const real* dy, const i32* tokens, const u32* counts, const u32* next,
                const u32* sorted, float* dtable, const u32* random, u32 number, u32 threshold,
                u32 rows, u32 vocabulary, u32 width) {
    await_earlier();
    sum_table<VECTOR>(dy, tokens, counts, next, sorted, dtable, random, number, threshold, rows,
                      vocabulary, width);
}

KERNEL __launch_bounds__(1024)
embedding_table_any(const real* dy, const i32* tokens, const u32* counts, const u32* next,
                    const u32* sorted, float* dtable, const u32* random, u32 number,
                    u32 threshold, u32 rows, u32 vocabulary, u32 width) {
    await_earlier();
    sum_table<1>(dy, tokens, counts, next, sorted, dtable, random, number, threshold, rows,
                 vocabulary, width);
}

// A block to a position: its rows in the order of the batch.
template <int N>
__device__ __forceinline__ void sum_positions(const real* dy, float* dpositions,
                                              const u32* random, u32 number, u32 threshold,
                                              u32 batch, u32 width, u32 adds) {
    Dropout dropout(random, number, threshold);
    u32 length = gridDim.x, time = blockIdx.x;
    for (u32 column = threadIdx.x * N; column < width; column += blockDim.x * N) {
        float sum[N] = {};
#pragma unroll 8
        for (u32 b = 0; b < batch; b++) {
            u32 row = b * length + time;
            u32 base = dropout.row(row);
            float d[N], factors[N];
            load(dy + (u64)row * width + column, d);
            dropout.factors(factors, base, column);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = fmaf(d[i], factors[i], sum[i]);
        }
        float* out = dpositions + (u64)time * width + column;
        if (adds) {
            float total[N];
            load(out, total);
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] += total[i];
        }
        store(out, sum);
    }
}

KERNEL embedding_positions(const real* dy, float* dpositions, const u32* random, u32 number,
                           u32 threshold, u32 batch, u32 width, u32 adds) {
    await_earlier();
    sum_positions<VECTOR>(dy, dpositions, random, number, threshold, batch, width, adds);
}

KERNEL embedding_positions_any(const real* dy, float* dpositions, const u32* random, u32 number,
                               u32 threshold, u32 batch, u32 width, u32 adds) {
    await_earlier();
    sum_positions<1>(dy, dpositions, random, number, threshold, batch, width, adds);
}

// ---------------------------------------------------------------- one row of each sequence

// out[b] = h[b, positions[b]], for the logits of one position; a block to a sequence.
KERNEL gather_rows(const real* h, const i32* positions, real* out, u32 length, u32 width) {
    await_earlier();
    u32 position = (u32)positions[blockIdx.x];
    bool known = position < length;
    const real* row = h + ((u64)blockIdx.x * length + (known ? position : 0u)) * width;
    for (u32 column = threadIdx.x; column < width; column += blockDim.x)
        out[(u64)blockIdx.x * width + column] = known ? row[column] : from_float<real>(not_a_number());
}
