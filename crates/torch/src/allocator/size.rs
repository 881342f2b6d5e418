//! From a tensor's bytes to a block's bytes and a segment's bytes.

use super::AllocatorConfig;

const MIB: u64 = 1 << 20;

/// Every block is a multiple of this.
pub const MIN_BLOCK: u64 = 512;
/// Requests up to this size live in the small pool.
pub const SMALL_REQUEST: u64 = MIB;
/// What the driver is asked for on behalf of the small pool.
pub const SMALL_SEGMENT: u64 = 2 * MIB;
/// Requests of the large pool below this share segments of [`LARGE_SEGMENT`].
pub const OWN_SEGMENT: u64 = 10 * MIB;
/// The shared segment of the large pool, unless `large_segment_size_mb` says otherwise.
pub const LARGE_SEGMENT: u64 = 20 * MIB;
/// Segments of one request are multiples of this.
pub const SEGMENT_MULTIPLE: u64 = 2 * MIB;
/// A request above this is an error of the caller, whatever the device. PyTorch says the same.
pub const LARGEST_REQUEST: u64 = 1 << 60;

/// The block that a request of `bytes` gets at least.
pub fn block_bytes(config: &AllocatorConfig, bytes: u64) -> u64 {
    if bytes < MIN_BLOCK {
        return MIN_BLOCK;
    }
    let divisions = config.roundup_divisions(bytes);
    if divisions > 1 && bytes > MIN_BLOCK * divisions {
        next_power_of_two_division(bytes, divisions)
    } else {
        bytes.next_multiple_of(MIN_BLOCK)
    }
}

/// With 4 divisions, 1200 lies between 1024 and 2048, which are cut at 1280, 1536 and 1792:
/// it becomes 1280. `divisions` is a power of two of at least 2.
fn next_power_of_two_division(bytes: u64, divisions: u64) -> u64 {
    let floor = 1 << bytes.ilog2();
    if bytes == floor {
        return bytes;
    }
    match floor >> divisions.ilog2() {
        0 => floor << 1,
        step => bytes.next_multiple_of(step),
    }
}

/// Whether a block of this size belongs to the small pool.
pub fn is_small(block: u64) -> bool {
    block <= SMALL_REQUEST
}

/// What is asked of the driver when no free block holds `block` bytes.
pub fn segment_bytes(config: &AllocatorConfig, block: u64) -> u64 {
    if is_small(block) {
        SMALL_SEGMENT
    } else if block < OWN_SEGMENT {
        config.large_segment
    } else {
        block.next_multiple_of(SEGMENT_MULTIPLE)
    }
}

/// The page of an expandable segment.
pub fn page_bytes(config: &AllocatorConfig, small: bool) -> u64 {
    if small {
        SMALL_SEGMENT
    } else {
        config.large_segment
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_to_512_without_divisions() {
        let config = AllocatorConfig::default();
        let cases = [(0, 512), (1, 512), (512, 512), (513, 1024), (8208, 8704)];
        for (bytes, block) in cases {
            assert_eq!(block_bytes(&config, bytes), block, "{bytes}");
        }
    }

    #[test]
    fn rounds_to_the_next_division_of_a_power_of_two() {
        let config = AllocatorConfig::parse("roundup_power2_divisions:4").unwrap();
        // At most 512 × divisions: plain rounding.
        assert_eq!(block_bytes(&config, 1200), 1536);
        // [4096, 8192) is cut at 5120, 6144 and 7168.
        let cases = [(4096, 4096), (4097, 5120), (5120, 5120), (7169, 8192)];
        for (bytes, block) in cases {
            assert_eq!(block_bytes(&config, bytes), block, "{bytes}");
        }
        assert_eq!(block_bytes(&config, 9 * MIB), 10 * MIB);
    }

    #[test]
    fn segments_follow_the_request() {
        let config = AllocatorConfig::default();
        let cases = [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (393 * MIB, 394 * MIB),
        ];
        for (block, segment) in cases {
            assert_eq!(segment_bytes(&config, block), segment, "{block}");
        }
    }
}
