//! What the process and the machine say about memory. A reading that is not to be had is
//! `None`, never a failure.

/// Memory that a new program could use without swapping.
pub fn available_host_bytes() -> Option<u64> {
    field(
        &std::fs::read_to_string("/proc/meminfo").ok()?,
        "MemAvailable:",
    )
}

/// What the process has in memory now.
pub fn resident_bytes() -> Option<u64> {
    field(
        &std::fs::read_to_string("/proc/self/status").ok()?,
        "VmRSS:",
    )
}

/// The most that the process ever had in memory.
pub fn peak_resident_bytes() -> Option<u64> {
    field(
        &std::fs::read_to_string("/proc/self/status").ok()?,
        "VmHWM:",
    )
}

/// A line `name   123 kB`.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::field;

    #[test]
    fn reads_the_kernels_tables() {
        let text = "VmPeak:\t    9 kB\nVmRSS:\t  1234 kB\n";
        assert_eq!(field(text, "VmRSS:"), Some(1234 * 1024));
        assert_eq!(field(text, "VmHWM:"), None);
    }
}
