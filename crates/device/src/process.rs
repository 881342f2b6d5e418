//! What this process has in host memory, by the kernel's table.

use crate::host::field;
use crate::machine::detect_host;

/// Host memory that can be used now without swapping and inside a container's limit.
pub fn available_host_bytes() -> Option<u64> {
    detect_host().available_bytes
}

/// What the process has in memory now.
pub fn resident_bytes() -> Option<u64> {
    own("VmRSS:")
}

/// The most that the process ever had in memory.
pub fn peak_resident_bytes() -> Option<u64> {
    own("VmHWM:")
}

fn own(name: &str) -> Option<u64> {
    let table = std::fs::read_to_string("/proc/self/status").ok()?;
    field(&table, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_that_is_touched_is_resident() {
        const SIZE: usize = 64 << 20;
        let before = resident_bytes().unwrap();
        let block = vec![1_u8; SIZE];
        let after = resident_bytes().unwrap();
        assert!(block.iter().all(|&byte| byte == 1));
        // Other tests of this process come and go meanwhile, with far less.
        assert!(after >= before + SIZE as u64 / 2, "{before} {after}");
        assert!(peak_resident_bytes().unwrap() >= after);
        assert!(available_host_bytes().unwrap() > 0);
    }
}
