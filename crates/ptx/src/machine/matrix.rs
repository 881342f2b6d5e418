//! The matrix units' operands and products.

use super::lanes::{LANES, Lanes, bits_of, f32_of, from_half};
use crate::program::{Half, Mma};

/// Which element of an operand of mma a lane has: rows of four lanes each, two neighbours a register.
fn group(lane: usize) -> (usize, usize) {
    (lane / 4, lane % 4)
}

/// Both halves of a register.
fn halves(half: Half, bits: u64) -> [f32; 2] {
    [
        from_half(half, bits as u16),
        from_half(half, (bits >> 16) as u16),
    ]
}

/// tf32 has ten bits of a fraction; the units do not look at others.
fn tf32(bits: u64) -> f32 {
    f32_of(bits & !0x1fff)
}

/// 16 rows of `INNER` elements, as four or two registers of each lane have them.
pub(crate) fn left(half: Half, inner: usize, registers: &[Lanes]) -> [[f32; 16]; 16] {
    let mut matrix = [[0.0; 16]; 16];
    for (index, register) in registers.iter().enumerate() {
        let (row, column) = (index % 2 * 8, index / 2 * 8);
        debug_assert!(column < inner);
        for (lane, &bits) in register.iter().enumerate() {
            let (g, t) = group(lane);
            let pair = halves(half, bits);
            matrix[row + g][column + 2 * t] = pair[0];
            matrix[row + g][column + 2 * t + 1] = pair[1];
        }
    }
    matrix
}

/// c + a·b, 16 × 8, by the registers a, b and c in this order.
pub(crate) fn mma(kind: Mma, from: &[Lanes]) -> [Lanes; 4] {
    let mut a = [[0.0_f32; 16]; 16];
    let mut b = [[0.0_f32; 8]; 16];
    let (num_a, inner) = match kind {
        Mma::Halves { half, inner } => {
            let num_a = inner / 4;
            a = left(half, inner, &from[..num_a]);
            for (index, register) in from[num_a..num_a + inner / 8].iter().enumerate() {
                for (lane, &bits) in register.iter().enumerate() {
                    let (g, t) = group(lane);
                    let pair = halves(half, bits);
                    b[index * 8 + 2 * t][g] = pair[0];
                    b[index * 8 + 2 * t + 1][g] = pair[1];
                }
            }
            (num_a, inner)
        }
        Mma::Tf32 => {
            for lane in 0..LANES {
                let (g, t) = group(lane);
                for (index, register) in from[..4].iter().enumerate() {
                    a[g + index % 2 * 8][t + index / 2 * 4] = tf32(register[lane]);
                }
                for (index, register) in from[4..6].iter().enumerate() {
                    b[t + index * 4][g] = tf32(register[lane]);
                }
            }
            (4, 8)
        }
    };
    let c = &from[num_a + inner.div_ceil(8).max(usize::from(kind == Mma::Tf32) * 2)..];
    let mut result = [[0; LANES]; 4];
    for lane in 0..LANES {
        let (g, t) = group(lane);
        for (index, register) in result.iter_mut().enumerate() {
            let (row, column) = (g + index / 2 * 8, 2 * t + index % 2);
            let product: f32 = (0..inner).map(|k| a[row][k] * b[k][column]).sum();
            register[lane] = bits_of(f32_of(c[index][lane]) + product);
        }
    }
    result
}

/// An operand in shared memory: where its elements are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    start: usize,
    leading: usize,
    stride: usize,
    /// Bytes of a row of eight that lie together.
    row: usize,
    by_column: bool,
}

impl Operand {
    /// None where the descriptor says something else than how our tiles lie.
    pub fn new(descriptor: u64, by_column: bool) -> Option<Self> {
        let field = |shift: u32| ((descriptor >> shift) as usize & 0x3fff) * 16;
        let row = match descriptor >> 62 {
            1 => 128,
            2 => 64,
            3 => 32,
            _ => return None,
        };
        let rest = !(0x3fff | 0x3fff << 16 | 0x3fff << 32 | 3_u64 << 62);
        (descriptor & rest == 0).then_some(Self {
            start: field(0),
            leading: field(16),
            stride: field(32),
            row,
            by_column,
        })
    }

    /// Where eight elements begin: of one of the outer indices, eight inner ones; or the other way
    /// round where the operand lies by columns.
    pub fn piece(&self, outer: usize, inner: usize) -> usize {
        let address = if self.by_column {
            let columns = self.row / 2;
            self.start
                + outer / columns * self.leading
                + inner / 8 * self.stride
                + inner % 8 * self.row
                + outer % columns * 2
        } else {
            self.start + outer / 8 * self.stride + outer % 8 * self.row + inner * 2
        };
        swizzled(address, self.row)
    }

    /// Each piece of `outer` × 16 elements: where it is, its first indices, and whether its eight
    /// elements are of eight outer ones.
    pub fn pieces(&self, outer: std::ops::Range<usize>) -> Vec<(usize, usize, usize)> {
        let mut pieces = Vec::new();
        if self.by_column {
            for inner in 0..16 {
                for outer in outer.clone().step_by(8) {
                    pieces.push((self.piece(outer, inner), outer, inner));
                }
            }
        } else {
            for outer in outer {
                for inner in [0, 8] {
                    pieces.push((self.piece(outer, inner), outer, inner));
                }
            }
        }
        pieces
    }

    pub fn is_by_column(&self) -> bool {
        self.by_column
    }
}

/// Where a 16-byte piece of a tile lies whose rows have so many bytes: permuted within eight rows.
pub(crate) fn swizzled(address: usize, row: usize) -> usize {
    let pieces = row / 16;
    address ^ ((address >> 7) & (pieces - 1)) << 4
}
