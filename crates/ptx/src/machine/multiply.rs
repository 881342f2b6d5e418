//! Products of the matrix units, and how their operands come to registers.

use super::Context;
use super::cluster::Cluster;
use super::lanes::{LANES, Lanes, bits_of, f32_of, from_half};
use super::matrix::{self, Operand};
use super::memory::Memory;
use super::order::Access;
use super::warp::{Next, Now, UNKNOWN, Wait, Warp, lanes_of};
use crate::program::{Instruction, Op, Space, Wgmma};

impl Warp {
    /// What all lanes of a warp, or four warps, multiply.
    pub(super) fn multiply(
        &mut self,
        now: &Now<'_>,
        cluster: &mut Cluster,
        memory: &mut Memory<'_>,
    ) -> Result<Next, String> {
        match now.instruction.op {
            Op::Mma(kind) => {
                let sources = now.instruction.from.iter();
                let sources: Vec<Lanes> = sources
                    .map(|&source| self.read(now.context, cluster, source))
                    .collect();
                let results = matrix::mma(kind, &sources);
                for (&to, values) in now.instruction.to.iter().zip(&results) {
                    self.write(to, values, now.lanes);
                }
            }
            Op::LoadMatrix { transposed, offset } => {
                let base = self.operand(now, cluster, 0);
                let mut rows = Vec::with_capacity(LANES);
                for (lane, base) in base.iter().enumerate() {
                    let address = base.wrapping_add_signed(offset);
                    let mut row = [0; 16];
                    let access = self.access(now, cluster, lane);
                    self.load(
                        now.context,
                        cluster,
                        memory,
                        (Space::Shared, address),
                        &mut row,
                        &access,
                        lane,
                    )?;
                    rows.push(row);
                }
                let half = |row: &[u8; 16], at: usize| {
                    u64::from(u16::from_le_bytes([row[2 * at], row[2 * at + 1]]))
                };
                for (matrix, &to) in now.instruction.to.iter().enumerate() {
                    let rows = &rows[8 * matrix..8 * matrix + 8];
                    let values = std::array::from_fn(|lane| {
                        let (g, t) = (lane / 4, lane % 4 * 2);
                        match transposed {
                            false => half(&rows[g], t) | half(&rows[g], t + 1) << 16,
                            true => half(&rows[t], g) | half(&rows[t + 1], g) << 16,
                        }
                    });
                    self.write(to, &values, now.lanes);
                }
            }
            Op::StoreMatrix { offset } => {
                let base = self.operand(now, cluster, 0);
                let values: Vec<Lanes> = (1..5)
                    .map(|source| self.operand(now, cluster, source))
                    .collect();
                for lane in 0..LANES {
                    // The lane says where row lane % 8 of matrix lane / 8 is.
                    let address = base[lane].wrapping_add_signed(offset);
                    let mut row = [0; 16];
                    for (t, pair) in row.chunks_exact_mut(4).enumerate() {
                        let bits = values[lane / 8][lane % 8 * 4 + t] as u32;
                        pair.copy_from_slice(&bits.to_le_bytes());
                    }
                    let access = self.access(now, cluster, lane);
                    self.store(
                        cluster,
                        memory,
                        (Space::Shared, address),
                        &row,
                        &access,
                        lane,
                    )?;
                }
            }
            Op::TransposeMatrix => {
                let value = self.operand(now, cluster, 0);
                let element = |row: usize, column: usize| {
                    value[row * 4 + column / 2] >> (16 * (column % 2)) & 0xffff
                };
                let result = std::array::from_fn(|lane| {
                    let (g, t) = (lane / 4, lane % 4 * 2);
                    element(t, g) | element(t + 1, g) << 16
                });
                self.write(now.instruction.to[0], &result, now.lanes);
            }
            Op::Wgmma(shape) => self.wgmma(now.context, cluster, now.instruction, shape, now.at)?,
            Op::WgmmaCommit => {
                cluster.products[self.number] = self.products;
                self.products += 1;
            }
            Op::WgmmaWait(left) => {
                let ended = (self.products - 1).saturating_sub(left);
                // They are over for four warps at once, which have to begin them first.
                if !cluster.have_closed(self.number, ended) {
                    return Ok(Next::Wait(Wait::Products { groups: ended }));
                }
                let unit = cluster.products_of(self.number);
                for lane in lanes_of(now.lanes) {
                    cluster.order.learn_end(self.thread(lane), unit, ended);
                }
            }
            _ => return Err(UNKNOWN.to_owned()),
        }
        Ok(Next::Go)
    }

    /// This warp's 16 of the 64 rows.
    fn wgmma(
        &mut self,
        context: &Context<'_>,
        cluster: &mut Cluster,
        instruction: &Instruction,
        shape: Wgmma,
        at: usize,
    ) -> Result<(), String> {
        const UNKNOWN: &str = "has an operand that lies as none of our tiles do";
        let [adds, right, left @ ..] = &*instruction.from else {
            return Err("has too few operands".to_owned());
        };
        let adds = self.read(context, cluster, *adds)[0] & 1 == 1;
        let thread = self.thread(0);
        let access = Access {
            thread,
            unit: cluster.products_of(self.number),
            clock: self.products,
            instruction: at as u32,
        };
        let right = self.read(context, cluster, *right)[0];
        let right = Operand::new(right, shape.right_by_column).ok_or(UNKNOWN)?;
        let elements = |cluster: &mut Cluster, operand: &Operand, outer: std::ops::Range<usize>| {
            let first = outer.start;
            let mut matrix = vec![[0.0_f32; 16]; outer.len()];
            for (place, outer, inner) in operand.pieces(outer) {
                let mut bytes = [0; 16];
                self.get(cluster, place as u64, &mut bytes, &access)?;
                for (i, element) in bytes.chunks_exact(2).enumerate() {
                    let bits = u16::from_le_bytes([element[0], element[1]]);
                    let x = from_half(shape.half, bits);
                    match operand.is_by_column() {
                        true => matrix[outer + i - first][inner] = x,
                        false => matrix[outer - first][inner + i] = x,
                    }
                }
            }
            Ok::<_, String>(matrix)
        };
        let right = elements(cluster, &right, 0..shape.columns)?;
        let rows = self.index % 4 * 16;
        let left: Vec<[f32; 16]> = if shape.left_in_registers {
            let registers: Vec<Lanes> = left
                .iter()
                .map(|&source| self.read(context, cluster, source))
                .collect();
            matrix::left(shape.half, 16, &registers).into()
        } else {
            let descriptor = self.read(context, cluster, left[0])[0];
            let operand = Operand::new(descriptor, shape.left_by_column).ok_or(UNKNOWN)?;
            // Pieces of a column are eight rows, of which this warp's begin at a multiple of 16.
            elements(cluster, &operand, rows..rows + 16)?
        };
        for (index, &to) in instruction.to.iter().enumerate() {
            let mut values = self.registers[to as usize];
            for (lane, value) in values.iter_mut().enumerate() {
                let (g, t) = (lane / 4, lane % 4);
                let (row, column) = (g + index % 4 / 2 * 8, index / 4 * 8 + 2 * t + index % 2);
                let pairs = left[row].iter().zip(&right[column]);
                let product: f32 = pairs.map(|(a, b)| a * b).sum();
                let before = if adds { f32_of(*value) } else { 0.0 };
                *value = bits_of(before + product);
            }
            self.write(to, &values, u32::MAX);
        }
        Ok(())
    }
}
