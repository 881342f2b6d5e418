// The highest scores of a row, found by a block of THREADS threads; the row may be as long as it
// likes. A source defines THREADS, a multiple of 32, and includes it after common.cuh.

// Unsigned numbers in the order of the floats.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(u32 x) {
    return __uint_as_float(x >> 31 ? x & 0x7fffffffu : ~x);
}

// The last of the selected keys of a row: its score, as an ordered number, and its position. Higher
// scores come first, of equal ones those at lower positions.
struct Last {
    u32 score;
    int position;

    __device__ __forceinline__ bool includes(u32 other, int at) const {
        return other > score || (other == score && at <= position);
    }
};

// A row's lowest and highest score, as ordered numbers.
struct Range {
    u32 low, high;
};
__device__ __forceinline__ Range range(const float* row, int visible) {
    __shared__ u32 lows[THREADS / 32], highs[THREADS / 32];
    u32 low = 0xffffffffu, high = 0u;
    for (int s = threadIdx.x; s < visible; s += THREADS) {
        u32 x = ordered(row[s]);
        low = min(low, x);
        high = max(high, x);
    }
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    if (threadIdx.x % 32 == 0) {
        lows[threadIdx.x / 32] = low;
        highs[threadIdx.x / 32] = high;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) {
        low = min(low, lows[warp]);
        high = max(high, highs[warp]);
    }
    return Range{low, high};
}

// The `count`-th of the scores that a row sees. The bits that all of them share are skipped, so that the
// counts of a histogram of the next eight are spread; then come the next eight of those that share
// the bits found, until they are no more than the block has threads, which find their ranks.
__device__ __forceinline__ Last last_of(const float* row, int visible, Range range,
                                        int count) {
    __shared__ int histogram[256];
    __shared__ int found[3];
    __shared__ u32 scores[THREADS];
    __shared__ int positions[THREADS], candidates;
    int bits = 32 - __clz(range.low ^ range.high), lane = threadIdx.x % 32;
    u32 mask = bits < 32 ? ~0u << bits : 0u, key = range.high & mask;
    int sharing = visible;
    while (bits > 0 && sharing > THREADS) {
        int shift = max(bits - 8, 0);
        for (int i = threadIdx.x; i < 256; i += THREADS) histogram[i] = 0;
        __syncthreads();
        for (int s = threadIdx.x; s < visible; s += THREADS) {
            u32 x = ordered(row[s]);
            if ((x & mask) == key) atomicAdd(&histogram[(x & ~mask) >> shift], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            // A lane has eight bins; `above` counts what is in the bins of higher lanes.
            int own = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) own += histogram[lane * 8 + i];
            int above = own;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                int other = __shfl_down_sync(0xffffffffu, above, offset);
                if (lane + offset < 32) above += other;
            }
            above -= own;
            for (int i = 7; i >= 0; i--) {
                int here = histogram[lane * 8 + i];
                if (above < count && above + here >= count) {
                    found[0] = lane * 8 + i;
                    found[1] = count - above;
                    found[2] = here;
                }
                above += here;
            }
        }
        __syncthreads();
        key |= (u32)found[0] << shift;
        mask = ~0u << shift;
        bits = shift;
        count = found[1];
        sharing = found[2];
    }
    if (threadIdx.x == 0) candidates = 0;
    __syncthreads();
    if (sharing <= THREADS) {
        for (int s = threadIdx.x; s < visible; s += THREADS) {
            u32 x = ordered(row[s]);
            if ((x & mask) == key) {
                // In any order: ranks do not depend on it.
                int i = atomicAdd(&candidates, 1);
                scores[i] = x;
                positions[i] = s;
            }
        }
        __syncthreads();
        if ((int)threadIdx.x < sharing) {
            Last own = {scores[threadIdx.x], positions[threadIdx.x]};
            int rank = 0;
            for (int i = 0; i < sharing; i++) rank += own.includes(scores[i], positions[i]);
            if (rank == count) {
                found[0] = (int)own.score;
                found[1] = own.position;
            }
        }
    } else if (threadIdx.x < 32) {
        // More scores are equal than the block has threads: one warp counts them.
        int taken = 0;
        for (int first = 0; taken < count; first += 32) {
            int s = first + lane;
            u32 equal = __ballot_sync(0xffffffffu, s < visible && ordered(row[s]) == key);
            if (taken + __popc(equal) >= count && equal >> lane & 1u &&
                taken + __popc(equal & ((1u << lane) - 1u)) == count - 1) {
                found[0] = (int)key;
                found[1] = s;
            }
            taken += __popc(equal);
        }
    }
    __syncthreads();
    return Last{(u32)found[0], found[1]};
}
