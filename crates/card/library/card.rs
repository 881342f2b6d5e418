//! Which card is emulated: read once from the environment, where `cinch rehearse` put it.

use std::sync::OnceLock;

/// The variable that describes the card: `key=value` pairs with `;` between them.
pub const VARIABLE: &str = "CINCH_CARD";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    pub name: String,
    /// Bytes that a program sees of it.
    pub memory: u64,
    pub major: i32,
    pub minor: i32,
    pub multiprocessors: i32,
    /// How many of them the process sees.
    pub devices: i32,
    /// Bytes that the context takes, and what each library adds when its first handle is made.
    pub context: u64,
    pub blas: u64,
    pub dnn: u64,
    pub nccl: u64,
    /// Kilohertz, and bits of the memory's bus.
    pub clock: i32,
    pub memory_clock: i32,
    pub bus_width: i32,
    pub l2_cache: i32,
}

impl Default for Card {
    /// What a process sees that was started without a description: a card of four gigabytes.
    fn default() -> Self {
        Self {
            name: "cinch card".to_owned(),
            memory: 4 << 30,
            major: 8,
            minor: 0,
            multiprocessors: 108,
            devices: 1,
            context: 0,
            blas: 0,
            dnn: 0,
            nccl: 0,
            clock: 1_400_000,
            memory_clock: 1_200_000,
            bus_width: 5120,
            l2_cache: 40 << 20,
        }
    }
}

/// Limits that follow from the compute capability, as NVIDIA's programming guide tabulates them.
pub struct Limits {
    pub threads_per_multiprocessor: i32,
    pub blocks_per_multiprocessor: i32,
    pub shared_per_multiprocessor: i32,
    pub shared_per_block_opt_in: i32,
}

impl Card {
    pub fn parse(text: &str) -> Self {
        let mut card = Self::default();
        for (key, value) in text.split(';').filter_map(|pair| pair.split_once('=')) {
            let number = value.parse::<u64>();
            let small = value.parse::<i32>();
            match (key, number, small) {
                ("name", ..) => card.name = value.to_owned(),
                ("memory", Ok(bytes), _) => card.memory = bytes,
                ("context", Ok(bytes), _) => card.context = bytes,
                ("blas", Ok(bytes), _) => card.blas = bytes,
                ("dnn", Ok(bytes), _) => card.dnn = bytes,
                ("nccl", Ok(bytes), _) => card.nccl = bytes,
                ("major", _, Ok(number)) => card.major = number,
                ("minor", _, Ok(number)) => card.minor = number,
                ("multiprocessors", _, Ok(number)) => card.multiprocessors = number,
                ("devices", _, Ok(number)) => card.devices = number.clamp(1, 64),
                ("clock", _, Ok(number)) => card.clock = number,
                ("memory_clock", _, Ok(number)) => card.memory_clock = number,
                ("bus_width", _, Ok(number)) => card.bus_width = number,
                ("l2_cache", _, Ok(number)) => card.l2_cache = number,
                _ => {}
            }
        }
        card
    }

    pub fn limits(&self) -> Limits {
        const KIB: i32 = 1 << 10;
        let (threads, blocks, shared, opt_in) = match (self.major, self.minor) {
            (7, 5) => (1024, 16, 64, 64),
            (7, _) => (2048, 32, 96, 96),
            (8, 0) => (2048, 32, 164, 163),
            (8, 9) => (1536, 24, 100, 99),
            (8, _) => (1536, 16, 100, 99),
            (12, _) => (1536, 24, 100, 99),
            _ => (2048, 32, 228, 227),
        };
        Limits {
            threads_per_multiprocessor: threads,
            blocks_per_multiprocessor: blocks,
            shared_per_multiprocessor: shared * KIB,
            shared_per_block_opt_in: opt_in * KIB,
        }
    }
}

/// The card of this process.
pub fn card() -> &'static Card {
    static CARD: OnceLock<Card> = OnceLock::new();
    CARD.get_or_init(|| Card::parse(&std::env::var(VARIABLE).unwrap_or_default()))
}
