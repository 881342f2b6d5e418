//! Products of the matrix units, and how their operands come to registers.

use super::Context;
use super::cluster::Cluster;
use super::lanes::{LANES, Lanes, from_half};
use super::matrix::{self, INNER, Left, Operand, ROWS};
use super::memory::Memory;
use super::shadow::Access;
use super::warp::{Next, Now, UNKNOWN, Wait, Warp};
use crate::program::{Half, Instruction, Op, Source, Space, Wgmma};

/// Registers that mma reads.
const MAX_SOURCES: usize = 10;

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
                let mut sources = [[0; LANES]; MAX_SOURCES];
                let sources = sources.get_mut(..now.instruction.from.len());
                let sources = sources.ok_or(UNKNOWN)?;
                for (number, to) in sources.iter_mut().enumerate() {
                    let mut room = [0; LANES];
                    *to = *self.narrow(now, cluster, number, &mut room);
                }
                let results = matrix::mma(kind, sources);
                for (&to, values) in now.instruction.to.iter().zip(&results) {
                    self.write_words(to, values, now.lanes);
                }
            }
            Op::LoadMatrix { transposed, offset } => {
                let base = self.operand(now, cluster, 0);
                let mut rows = [[0; 16]; LANES];
                for (lane, (base, row)) in base.iter().zip(&mut rows).enumerate() {
                    let address = base.wrapping_add_signed(offset);
                    let access = self.access(now, cluster, lane);
                    self.load(
                        now.context,
                        cluster,
                        memory,
                        (Space::Shared, address),
                        row,
                        &access,
                        lane,
                    )?;
                }
                let half = |row: &[u8; 16], at: usize| {
                    u32::from(u16::from_le_bytes([row[2 * at], row[2 * at + 1]]))
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
                    self.write_words(to, &values, now.lanes);
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
                let order = &mut cluster.order;
                order.learn_end(self.number, now.lanes, unit, ended);
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
            lanes: 1,
            unit: cluster.products_of(self.number),
            clock: self.products,
            instruction: at as u32,
        };
        let operand = |source: Source, by_column: bool| {
            let descriptor = self.read(context, cluster, source)[0];
            Operand::new(descriptor, by_column).ok_or(UNKNOWN)
        };
        let operands = (
            operand(*right, shape.right_by_column)?,
            match shape.left_in_registers {
                true => None,
                false => Some(operand(left[0], shape.left_by_column)?),
            },
        );
        // By inner indices.
        let columns = shape.columns;
        let mut right = vec![0.0; INNER * columns];
        let half = shape.half;
        self.elements(
            cluster,
            (operands.0, half),
            0..columns,
            &access,
            |outer, inner, x| {
                right[inner * columns + outer] = x;
            },
        )?;
        let mut rows: Left = [[0.0; INNER]; ROWS];
        if let Some(operand) = operands.1 {
            // Pieces of a column are eight rows, of which this warp's begin at a multiple of 16.
            let first = self.index % 4 * ROWS;
            let mine = first..first + ROWS;
            self.elements(
                cluster,
                (operand, half),
                mine,
                &access,
                |outer, inner, x| {
                    rows[outer - first][inner] = x;
                },
            )?;
        } else {
            let mut registers = [[0; LANES]; 4];
            for (to, &source) in registers.iter_mut().zip(left) {
                let mut room = [0; LANES];
                *to = *self.words(context, cluster, source, &mut room);
            }
            rows = matrix::left(half, &registers);
        }
        // Four registers of each lane have eight columns.
        for (eight, to) in instruction.to.chunks(4).enumerate() {
            let right = &right[eight * 8..];
            let products = rows.map(|row| matrix::multiply(&row, right, columns, INNER));
            for (index, to) in to.iter().enumerate() {
                let values = &mut self.registers[to.at as usize];
                for (lane, value) in values.iter_mut().enumerate() {
                    let (g, t) = (lane / 4, lane % 4);
                    let product = products[g + index / 2 * 8][2 * t + index % 2];
                    let before = if adds { f32::from_bits(*value) } else { 0.0 };
                    *value = (before + product).to_bits();
                }
            }
        }
        Ok(())
    }

    /// Reads what an operand has of some outer indices, and gives each element with both of its own.
    fn elements(
        &self,
        cluster: &mut Cluster,
        (operand, half): (Operand, Half),
        outer: std::ops::Range<usize>,
        access: &Access,
        mut give: impl FnMut(usize, usize, f32),
    ) -> Result<(), String> {
        let (outer_step, inner_step) = match operand.is_by_column() {
            true => (1, 0),
            false => (0, 1),
        };
        for (place, outer, inner) in operand.pieces(outer) {
            let mut bytes = [0; 16];
            self.get(cluster, place as u64, &mut bytes, access)?;
            for (i, element) in bytes.as_chunks::<2>().0.iter().enumerate() {
                let x = from_half(half, u16::from_le_bytes(*element));
                give(outer + i * outer_step, inner + i * inner_step, x);
            }
        }
        Ok(())
    }
}
