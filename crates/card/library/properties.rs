//! The struct of device properties, whose layout CUDA 13 changed: a description of both, field by field.

use super::card::{Card, card};

/// Attributes by number: those of `cudaDeviceAttr`, which are the driver's `CUdevice_attribute` too.
pub fn attribute(number: i32) -> Option<i32> {
    let card = card();
    let limits = card.limits();
    Some(match number {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 => 64 << 10,
        13 => card.clock,
        14 => 512,
        16 => card.multiprocessors,
        36 => card.memory_clock,
        37 => card.bus_width,
        38 => card.l2_cache,
        39 => limits.threads_per_multiprocessor,
        40 => 3,
        51 => 32,
        75 => card.major,
        76 => card.minor,
        81 => limits.shared_per_multiprocessor,
        82 => 64 << 10,
        87 => match (card.major, card.minor) {
            (7, 0) | (8, 0) | (9, _) | (10, _) => 2,
            _ => 64,
        },
        97 => limits.shared_per_block_opt_in,
        106 => limits.blocks_per_multiprocessor,
        108 => card.l2_cache / 2,
        109 => 128 << 20,
        111 => 1 << 10,
        // Concurrent kernels, host memory and managed memory that the card can reach, cooperative launches, virtual
        // memory management (102, 103), memory pools.
        15 | 19 | 31 | 32 | 41 | 78 | 79 | 80 | 83 | 90 | 95 | 99 | 102 | 103 | 115 => 1,
        120 => i32::from(card.major >= 9),
        known if known <= 150 && known > 0 => 0,
        _ => return None,
    })
}

enum Field {
    Bytes(usize),
    Name,
    Int(i32),
    Ints(usize),
    Size(u64),
}

/// The struct's bytes as a program compiled with CUDA of that major version expects them.
pub fn bytes(cuda_major: i32) -> Vec<u8> {
    let card = card();
    let is_old = cuda_major < 13;
    let attribute = |number| Field::Int(attribute(number).unwrap_or_default());
    let limits = card.limits();
    let mut fields = vec![
        Field::Name,
        Field::Bytes(16 + 8),
        Field::Int(0),
        Field::Size(card.memory),
        Field::Size(48 << 10),
        Field::Int(64 << 10),
        Field::Int(32),
        Field::Size(i32::MAX as u64),
    ];
    fields.extend([1, 2, 3, 4, 5, 6, 7].map(attribute));
    if is_old {
        fields.push(attribute(13));
    }
    fields.extend([
        Field::Size(64 << 10),
        Field::Int(card.major),
        Field::Int(card.minor),
        Field::Size(512),
        Field::Size(32),
    ]);
    if is_old {
        fields.push(Field::Int(1));
    }
    fields.push(Field::Int(card.multiprocessors));
    if is_old {
        fields.push(Field::Int(0));
    }
    fields.extend([Field::Int(0), Field::Int(1)]);
    // Textures and surfaces, which no tensor uses: zeros. CUDA 12 has the compute mode before them and one more.
    fields.push(Field::Ints(if is_old { 39 + 2 } else { 39 }));
    fields.push(Field::Size(512));
    fields.extend([
        Field::Int(1),
        Field::Int(1),
        Field::Int(1),
        Field::Int(0),
        Field::Int(0),
        Field::Int(0),
        Field::Int(3),
        Field::Int(1),
    ]);
    if is_old {
        fields.push(attribute(36));
    }
    fields.extend([37, 38, 108, 39, 78, 79, 80].map(attribute));
    fields.extend([
        Field::Size(limits.shared_per_multiprocessor as u64),
        Field::Int(64 << 10),
        Field::Int(1),
        Field::Int(0),
        Field::Int(0),
        Field::Int(0),
    ]);
    if is_old {
        fields.push(attribute(87));
    }
    fields.extend([
        Field::Int(0),
        Field::Int(1),
        Field::Int(1),
        Field::Int(1),
        Field::Int(1),
    ]);
    if is_old {
        fields.push(Field::Int(1));
    }
    fields.extend([
        Field::Size(limits.shared_per_block_opt_in as u64),
        Field::Int(0),
        Field::Int(0),
        attribute(106),
        attribute(109),
        Field::Size(1 << 10),
        Field::Int(1),
        Field::Int(1),
        Field::Int(1),
        Field::Int(1),
        Field::Int(1),
    ]);
    // Direct access by other devices, handles of pools, inter-process events: none; then launches of clusters.
    fields.extend([
        Field::Ints(4),
        Field::Int(1),
        Field::Int(1),
        attribute(120),
        Field::Int(1),
        // What is left and reserved.
        Field::Ints(63),
    ]);
    lay_out(card, &fields)
}

fn lay_out(card: &Card, fields: &[Field]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(1100);
    for field in fields {
        match field {
            Field::Name => {
                let name = card.name.as_bytes();
                let length = name.len().min(255);
                bytes.extend_from_slice(&name[..length]);
                bytes.resize(256, 0);
            }
            Field::Bytes(length) => bytes.resize(bytes.len() + length, 0),
            Field::Int(value) => bytes.extend_from_slice(&value.to_ne_bytes()),
            Field::Ints(count) => bytes.resize(bytes.len() + 4 * count, 0),
            Field::Size(value) => {
                bytes.resize(bytes.len().next_multiple_of(8), 0);
                bytes.extend_from_slice(&value.to_ne_bytes());
            }
        }
    }
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes
}
