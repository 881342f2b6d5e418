// The selection of keys for tokens that follow others, whose indexer keys are in a cache.
//
//   I[t,s] = Σ_j w[t,j]·σ(q[t,j]·k[s]/√width + b_j)      w = σ(c + b_w)      s ≤ p_t
//
// A query selects what it would as the last of a text that ends with it: with n = p_t + 1 columns,
// μ_i, M_i and n_i of each row i up to it (mean, squares around it, columns that it sees),
//
//   v = M_t/(n − 1)        mean = (Σ_i M_i + n_i·μ_i² − Σ_i (n_i·μ_i)²/n) / ((n − 1)·n)
//
// queries [B, T, heads·width], keys [B, T, width], weights [B, T, heads] (c), biases [heads];
// positions [B, T], whose first of each row is p_0, p_t = p_0 + t; cache [B, slots, width] and, of
// the two sums over rows, [B, slots, 2]. scores [B·T, slots] in the workspace. Launches do not
// depend on how many tokens the cache holds.

#define THREADS 128

#include "common.cuh"
#include "selection.cuh"

__device__ __forceinline__ float exact_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The position of a row of all sequences.
__device__ __forceinline__ int position_of(const i32* positions, u32 row, u32 seq) {
    return max(positions[row / seq * seq], 0) + (int)(row % seq);
}

// Puts the keys of the new tokens into their slots. A thread has an element.
KERNEL __launch_bounds__(256) cached_selection_append(const real* keys, const i32* positions,
                                                      real* cache, u32 rows, u32 seq, u32 width,
                                                      u32 slots) {
    await_earlier();
    u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= (u64)rows * width) return;
    u32 row = (u32)(index / width), column = (u32)(index % width);
    u32 slot = (u32)position_of(positions, row, seq);
    if (slot < slots) cache[((u64)(row / seq) * slots + slot) * width + column] = keys[index];
}

// Grid (rows, ⌈slots/128⌉): a block has 128 keys of a row, a thread one. Dynamic shared memory: the
// row's queries [heads·width] and weights [heads] as floats.
KERNEL __launch_bounds__(THREADS) cached_selection_scores(
    const real* queries, const real* cache, const real* weights, const float* weight_bias,
    const float* score_bias, const i32* positions, float* scores, u32 seq, u32 heads, u32 width,
    u32 slots) {
    await_earlier();
    extern __shared__ float query[];
    u32 row = blockIdx.x, first = blockIdx.y * THREADS;
    u32 visible = min((u32)position_of(positions, row, seq) + 1, slots);
    if (first >= visible) return;
    float* weight = query + heads * width;
    for (u32 i = threadIdx.x; i < heads * width; i += THREADS)
        query[i] = to_float(queries[(u64)row * heads * width + i]);
    for (u32 j = threadIdx.x; j < heads; j += THREADS)
        weight[j] = exact_sigmoid(to_float(weights[(u64)row * heads + j]) + weight_bias[j]);
    __syncthreads();
    u32 s = first + threadIdx.x;
    if (s >= visible) return;
    const real* key = cache + ((u64)(row / seq) * slots + s) * width;
    float scale = rsqrtf((float)width), score = 0.0f;
    for (u32 j = 0; j < heads; j++) {
        float product = 0.0f;
        for (u32 d = 0; d < width; d++)
            product = fmaf(query[j * width + d], to_float(key[d]), product);
        score = fmaf(weight[j], exact_sigmoid(fmaf(product, scale, score_bias[j])), score);
    }
    scores[(u64)row * slots + s] = score;
}

// numbers[row] = variance over the columns that the row sees, then its shares of the two sums. A
// block has a row.
KERNEL __launch_bounds__(THREADS) cached_selection_rows(const float* scores, const i32* positions,
                                                        float* numbers, u32 seq, u32 slots) {
    await_earlier();
    __shared__ float scratch[32];
    u32 row = blockIdx.x;
    int visible = min(position_of(positions, row, seq) + 1, (int)slots);
    scores += (u64)row * slots;
    float sum = 0.0f;
    for (int s = threadIdx.x; s < visible; s += THREADS) sum += scores[s];
    sum = block_sum(sum, scratch);
    float mean = sum / (float)visible, squares = 0.0f;
    for (int s = threadIdx.x; s < visible; s += THREADS) {
        float x = scores[s] - mean;
        squares = fmaf(x, x, squares);
    }
    squares = block_sum(squares, scratch);
    if (threadIdx.x == 0) {
        float* to = numbers + (u64)row * 3;
        to[0] = visible < 2 ? 0.0f : squares / (float)(visible - 1);
        to[1] = squares + sum * mean;
        to[2] = sum * sum;
    }
}

// counts[row], and the sums over all rows up to each, added in their order. A block of one warp has
// a sequence, whose rows follow one another: a lane loads one of 32.
KERNEL __launch_bounds__(32) cached_selection_counts(const float* numbers, const i32* positions,
                                                     float* sums, i32* counts, u32 seq, u32 slots,
                                                     int base, int least, int most,
                                                     float temperature) {
    await_earlier();
    u32 b = blockIdx.x, lane = threadIdx.x;
    sums += (u64)b * slots * 2;
    int first = position_of(positions, b * seq, seq);
    float of_squares = 0.0f, of_sums = 0.0f;
    if (first > 0 && first < (int)slots) {
        of_squares = sums[2 * first - 2];
        of_sums = sums[2 * first - 1];
    }
    for (u32 start = 0; start < seq; start += 32) {
        u32 t = start + lane, row = b * seq + t;
        float own[3] = {};
        if (t < seq)
            for (int i = 0; i < 3; i++) own[i] = numbers[(u64)row * 3 + i];
        float squares = 0.0f, squared = 0.0f;
        for (int other = 0; other < 32; other++) {
            of_squares += __shfl_sync(0xffffffffu, own[1], other);
            of_sums += __shfl_sync(0xffffffffu, own[2], other);
            if ((int)lane == other) {
                squares = of_squares;
                squared = of_sums;
            }
        }
        int slot = first + (int)t;
        if (t >= seq || slot >= (int)slots) continue;
        sums[2 * slot] = squares;
        sums[2 * slot + 1] = squared;
        float columns = (float)(slot + 1);
        float total = squares - squared / columns;
        float mean = slot == 0 ? 0.0f : total / ((columns - 1.0f) * columns);
        float ratio = own[0] / (mean + 1e-8f);
        float share = 0.5f + 1.0f / (1.0f + ratio * temperature);
        float wanted = fminf(fmaxf((float)base * share, (float)least), (float)most);
        counts[row] = max((int)fminf(wanted, columns), 1);
    }
}

// bits[row][⌈slots/32⌉] of the `counts[row]` highest scores that a row sees; `base` of them where
// there are no counts. A block has a row.
KERNEL __launch_bounds__(THREADS) cached_selection_select(const float* scores, const i32* positions,
                                                          const i32* counts, u32* bits, u32 seq,
                                                          u32 slots, int base) {
    await_earlier();
    u32 row = blockIdx.x;
    int visible = min(position_of(positions, row, seq) + 1, (int)slots);
    int count = min(counts ? counts[row] : base, visible);
    scores += (u64)row * slots;
    Last last = {0u, 0};
    if (count < visible) last = last_of(scores, visible, range(scores, visible), count);
    int lane = threadIdx.x % 32, words = ((int)slots + 31) / 32;
    for (int word = threadIdx.x / 32; word < words; word += THREADS / 32) {
        int s = word * 32 + lane;
        bool chosen =
            s < visible && (count == visible || last.includes(ordered(scores[s]), s));
        u32 ones = __ballot_sync(0xffffffffu, chosen);
        if (lane == 0) bits[(u64)row * words + word] = ones;
    }
}
