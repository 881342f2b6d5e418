// Who sees whom in a sequence: its length, the first key of a query and the last query of a key.

// How many positions of a sequence count.
__device__ __forceinline__ int sequence_length(const i32* lengths, int b, int seq) {
    return lengths ? min(max(lengths[b], 0), seq) : seq;
}

// The first key that the query at `row` sees, never one behind its own; for causal order.
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
