//! The alignment of tensors, workspaces and the parts of a workspace.

/// Offsets are multiples of this: what CUDA's allocator guarantees and more than any vector
/// load asks for.
pub const ALIGNMENT: u64 = 256;

/// The next multiple of [`ALIGNMENT`]; the last one there is for a size beyond it. All sums of
/// sizes stop at the largest number too, so that a graph of absurd sizes does not fit, rather
/// than wrap around to one that does.
pub fn aligned(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(ALIGNMENT)
        .unwrap_or(u64::MAX - (ALIGNMENT - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_and_never_around() {
        assert_eq!([0, 1, 256, 257].map(aligned), [0, 256, 256, 512]);
        let last = u64::MAX - 255;
        assert_eq!([last - 1, last, last + 1, u64::MAX].map(aligned), [last; 4]);
    }
}
