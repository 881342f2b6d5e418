//! The selective scan of Mamba, gated. Per channel c with N states, time running forwards:
//!
//! ```text
//! Δ_t = softplus(dt_t)            A = −exp(a_log)
//! h_t = exp(Δ_t A) ⊙ h_{t−1} + (Δ_t x_t) B_t          h_{−1} = 0
//! s_t = ⟨h_t, C_t⟩ + D x_t        y_t = s_t · silu(z_t)
//! ```
//!
//! Only the states at chunk boundaries are kept for the gradient; those inside a chunk are
//! computed again, with the same operations in the same order and hence the same bits. No
//! sum's order depends on the chunk length, so it is a choice of memory alone.
//!
//! Channels are independent except in the gradients of B and C. Work is cut into groups of
//! `GROUP` channels, and inside a group it runs register by register: [`LANES`] channels
//! side by side, all time steps, all states.

mod backward;
mod forward;
#[cfg(test)]
mod tests;

use super::columns::{Columns, ColumnsMut};
use super::lanes::{LANES, prefetch};
use crate::cpu::parallel::Accumulate;
pub use backward::{backward, backward_workspace};
pub use forward::{forward, forward_from};

/// Channels of one task, a whole number of registers.
const GROUP: usize = 64;

/// Time steps between asking for a row and reading it: the latency of main memory.
const AHEAD: usize = 4;

/// The largest number of states per channel.
pub const MAX_STATE: usize = 64;

/// The sizes of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanShape {
    pub batch: usize,
    pub seq: usize,
    /// Channels.
    pub inner: usize,
    /// States per channel, N, at most [`MAX_STATE`].
    pub state: usize,
    /// Columns of the projection in front of B and C.
    pub rank: usize,
    /// Time steps between two kept states.
    pub chunk: usize,
}

impl ScanShape {
    pub fn rows(&self) -> usize {
        self.batch * self.seq
    }

    /// Columns of the projection: [δ | B | C].
    pub fn projection(&self) -> usize {
        self.rank + 2 * self.state
    }

    pub fn num_chunks(&self) -> usize {
        self.seq.div_ceil(self.chunk)
    }

    /// Elements of the states kept at chunk boundaries, [batch, num_chunks, inner, state].
    pub fn states_len(&self) -> usize {
        self.batch * self.num_chunks() * self.inner * self.state
    }

    fn num_groups(&self) -> usize {
        self.inner.div_ceil(GROUP)
    }

    /// The registers of one group in one batch element.
    fn registers(self, batch: usize, group: usize) -> impl Iterator<Item = Register> {
        let end = self.inner.min((group + 1) * GROUP);
        (group * GROUP..end)
            .step_by(LANES)
            .map(move |channel| Register {
                batch,
                channel,
                width: LANES.min(end - channel),
            })
    }

    /// Where the kept state of (batch, chunk, channel) starts.
    #[inline(always)]
    fn state_offset(&self, batch: usize, chunk: usize, channel: usize) -> usize {
        ((batch * self.num_chunks() + chunk) * self.inner + channel) * self.state
    }

    /// What the executor owes the kernels.
    fn check<F>(&self, inputs: &Inputs<'_, F>) {
        assert!(
            (1..=MAX_STATE).contains(&self.state) && self.chunk > 0,
            "scan shape {self:?}"
        );
        for columns in [Some(&inputs.x), inputs.gate.as_ref()]
            .into_iter()
            .flatten()
        {
            assert_eq!(columns.width, self.inner, "scan input columns");
            columns.check("scan input", self.rows());
        }
        assert_eq!(inputs.dt.len(), self.rows() * self.inner, "scan dt");
        assert_eq!(
            inputs.projection.len(),
            self.rows() * self.projection(),
            "scan projection"
        );
        assert_eq!(inputs.a_log.len(), self.inner * self.state, "scan a_log");
        assert_eq!(inputs.skip.len(), self.inner, "scan skip");
    }
}

/// Channels `channel..channel + width` of one batch element, one lane each.
#[derive(Clone, Copy)]
struct Register {
    batch: usize,
    channel: usize,
    width: usize,
}

/// Elements of a column block in one row, from `channel` on.
#[inline(always)]
fn row_part<'a, F>(columns: &Columns<'a, F>, row: usize, register: Register) -> &'a [F] {
    let start = row * columns.row_stride + columns.offset + register.channel;
    &columns.data[start..start + register.width]
}

/// What the scan reads.
#[derive(Clone, Copy)]
pub struct Inputs<'a, F> {
    /// x, [rows, inner].
    pub x: Columns<'a, F>,
    /// z, [rows, inner].
    pub gate: Option<Columns<'a, F>>,
    /// dt before softplus, bias included, [rows, inner].
    pub dt: &'a [F],
    /// [δ | B | C], [rows, rank + 2·state]; δ is not read.
    pub projection: &'a [F],
    /// [inner, state].
    pub a_log: &'a [F],
    /// D, `[inner]`.
    pub skip: &'a [F],
}

impl<F> Inputs<'_, F> {
    /// Asks for a row that will be read [`AHEAD`] steps later; it may lie outside.
    #[inline(always)]
    fn prefetch(&self, shape: &ScanShape, register: Register, row: usize) {
        let index = |stride: usize, offset: usize| {
            row.wrapping_mul(stride)
                .wrapping_add(offset + register.channel)
        };
        for columns in [Some(&self.x), self.gate.as_ref()].into_iter().flatten() {
            prefetch(columns.data, index(columns.row_stride, columns.offset));
        }
        prefetch(self.dt, index(shape.inner, 0));
    }
}

/// What the backward pass writes.
pub struct Gradients<'a, F> {
    /// [rows, inner].
    pub x: ColumnsMut<'a, F>,
    /// [rows, inner], where there is a gate.
    pub gate: Option<ColumnsMut<'a, F>>,
    /// Of dt before softplus, [rows, inner].
    pub dt: &'a mut [F],
    /// [rows, rank + 2·state]; the columns of δ are set to zero.
    pub projection: &'a mut [F],
    /// [inner, state].
    pub a_log: (&'a mut [F], Accumulate),
    /// `[inner]`.
    pub skip: (&'a mut [F], Accumulate),
}
