//! What the machine has: GPUs by the catalogue and by what the driver says, and the host.
//!
//! The catalogue and the search by name are pure. Only [`detect`] and [`detect_host`] look at
//! the machine, and through a [`Probe`] [`detect_by`] can be shown any machine.
//!
//! ```
//! use cinch_device::find;
//!
//! let card = find("rtx4090")?;
//! assert_eq!(card.name, "RTX 4090");
//! assert!(card.memory.usable_bytes() < 24 << 30);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod architecture;
mod card;
mod catalogue;
mod error;
mod fabric;
mod find;
mod host;
mod machine;
mod nvml;
mod probe;
mod process;
mod smi;
mod visible;
mod watch;

pub use architecture::{ComputeCapability, Generation};
pub use card::Card;
pub use catalogue::{CATALOGUE, CardMemory, Gpu, Link, Peaks, Provenance, Training};
pub use error::DeviceError;
pub use fabric::{Fabric, INTERCONNECTS, Interconnect};
pub use find::{find, find_boards, find_detected};
pub use host::Host;
pub use machine::{
    Chosen, DetectedGpu, Instance, Machine, Process, ProcessKind, ReadBy, Readings, detect,
    detect_by, detect_host,
};
pub use probe::{Probe, Silence, ThisMachine};
pub use process::{available_host_bytes, peak_resident_bytes, resident_bytes};
pub use visible::Visible;
pub use watch::{GpuReading, Look, Watch};
