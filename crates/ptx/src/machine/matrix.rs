//! The matrix units' operands and products.

use super::lanes::{LANES, Words, from_half};
use crate::program::{Half, Mma};

/// Which element of an operand of mma a lane has: rows of four lanes each, two neighbours a register.
fn group(lane: usize) -> (usize, usize) {
    (lane / 4, lane % 4)
}

/// Both halves of a register.
fn halves(half: Half, bits: u32) -> [f32; 2] {
    [
        from_half(half, bits as u16),
        from_half(half, (bits >> 16) as u16),
    ]
}

/// tf32 has ten bits of a fraction; the units do not look at others.
fn tf32(bits: u32) -> f32 {
    f32::from_bits(bits & !0x1fff)
}

/// The most elements that a row of the left operand has.
pub(crate) const INNER: usize = 16;
/// Rows that a warp multiplies.
pub(crate) const ROWS: usize = 16;
pub(crate) type Left = [[f32; INNER]; ROWS];

/// Rows of halves, as four or two registers of each lane have them.
pub(crate) fn left(half: Half, registers: &[Words]) -> Left {
    let mut matrix = [[0.0; INNER]; ROWS];
    for (index, register) in registers.iter().enumerate() {
        let (row, column) = (index % 2 * 8, index / 2 * 8);
        for (lane, &bits) in register.iter().enumerate() {
            let (g, t) = group(lane);
            let pair = halves(half, bits);
            matrix[row + g][column + 2 * t] = pair[0];
            matrix[row + g][column + 2 * t + 1] = pair[1];
        }
    }
    matrix
}

/// Eight columns of a product, each a sum in the order of the inner index. The right operand lies by
/// inner indices.
pub(crate) fn multiply(
    left: &[f32; INNER],
    right: &[f32],
    stride: usize,
    inner: usize,
) -> [f32; 8] {
    let mut sums = [-0.0; 8];
    for (a, row) in left.iter().zip(right.chunks(stride)).take(inner) {
        for (sum, b) in sums.iter_mut().zip(&row[..8]) {
            *sum += a * b;
        }
    }
    sums
}

/// c + a·b, 16 × 8, by the registers a, b and c in this order.
pub(crate) fn mma(kind: Mma, from: &[Words]) -> [Words; 4] {
    let mut b = [0.0_f32; INNER * 8];
    let (a, num_a, inner) = match kind {
        Mma::Halves { half, inner } => {
            let num_a = inner / 4;
            for (index, register) in from[num_a..num_a + inner / 8].iter().enumerate() {
                for (lane, &bits) in register.iter().enumerate() {
                    let (g, t) = group(lane);
                    let pair = halves(half, bits);
                    b[(index * 8 + 2 * t) * 8 + g] = pair[0];
                    b[(index * 8 + 2 * t + 1) * 8 + g] = pair[1];
                }
            }
            (left(half, &from[..num_a]), num_a, inner)
        }
        Mma::Tf32 => {
            let mut a = [[0.0; INNER]; ROWS];
            for lane in 0..LANES {
                let (g, t) = group(lane);
                for (index, register) in from[..4].iter().enumerate() {
                    a[g + index % 2 * 8][t + index / 2 * 4] = tf32(register[lane]);
                }
                for (index, register) in from[4..6].iter().enumerate() {
                    b[(t + index * 4) * 8 + g] = tf32(register[lane]);
                }
            }
            (a, 4, 8)
        }
    };
    let c = &from[num_a + inner.div_ceil(8).max(usize::from(kind == Mma::Tf32) * 2)..];
    let products = a.map(|row| multiply(&row, &b, 8, inner));
    let mut result = [[0; LANES]; 4];
    for (index, register) in result.iter_mut().enumerate() {
        for (lane, to) in register.iter_mut().enumerate() {
            let (g, t) = group(lane);
            let product = products[g + index / 2 * 8][2 * t + index % 2];
            *to = (f32::from_bits(c[index][lane]) + product).to_bits();
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
    pub fn pieces(
        &self,
        outer: std::ops::Range<usize>,
    ) -> impl Iterator<Item = (usize, usize, usize)> {
        let operand = *self;
        let (steps, side) = match self.by_column {
            true => (INNER, 8),
            false => (INNER / 8, 1),
        };
        let count = outer.len() / side;
        (0..steps * count).map(move |index| {
            // As they lie: rows of eight columns, or columns of eight rows.
            let (outer, inner) = match operand.by_column {
                true => (outer.start + index % count * 8, index / count),
                false => (outer.start + index / steps, index % steps * 8),
            };
            (operand.piece(outer, inner), outer, inner)
        })
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
