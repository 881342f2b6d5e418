//! A program of its own, because it starts itself again; see `nvml/linux.rs`.

#[cfg(target_os = "linux")]
#[path = "nvml/linux.rs"]
mod linux;

fn main() {
    #[cfg(target_os = "linux")]
    linux::main();
}
