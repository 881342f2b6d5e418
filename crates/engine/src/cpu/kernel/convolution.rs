//! The depthwise causal convolution over time in front of a selective scan, with SiLU:
//!
//! ```text
//! u_t = b + Σ_j w_j · x_{t−(W−1)+j}        y_t = silu(u_t)
//! ```
//!
//! per channel, x being zero before a sequence starts. Channels are independent: they run
//! side by side in lanes, time in order.

#[cfg(test)]
mod tests;

use super::activation::{silu, silu_slope};
use super::columns::{Columns, ColumnsMut};
use super::lanes::{LANES, Lanes, load, store};
use crate::cpu::parallel::{Accumulate, Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// The largest width W of the window.
pub const MAX_WIDTH: usize = 16;

/// Channels of one task.
const GROUP: usize = 64;

/// The sizes of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvolutionShape {
    pub batch: usize,
    pub seq: usize,
    pub channels: usize,
    /// W, at most [`MAX_WIDTH`].
    pub width: usize,
}

impl ConvolutionShape {
    fn rows(&self) -> usize {
        self.batch * self.seq
    }

    fn num_groups(&self) -> usize {
        self.channels.div_ceil(GROUP)
    }

    /// (first channel, lanes) of the registers of a group.
    fn registers(self, group: usize) -> impl Iterator<Item = (usize, usize)> {
        let end = self.channels.min((group + 1) * GROUP);
        (group * GROUP..end)
            .step_by(LANES)
            .map(move |channel| (channel, LANES.min(end - channel)))
    }

    fn check<F>(&self, x: &Columns<'_, F>, w: &[F], b: &[F], outputs: &[F]) {
        assert!(
            (1..=MAX_WIDTH).contains(&self.width),
            "convolution of {self:?}"
        );
        assert_eq!(x.width, self.channels, "convolution input columns");
        x.check("convolution input", self.rows());
        assert_eq!(w.len(), self.channels * self.width, "convolution weight");
        assert_eq!(b.len(), self.channels, "convolution bias");
        assert_eq!(
            outputs.len(),
            self.rows() * self.channels,
            "convolution output"
        );
    }
}

/// `y` [rows, channels] from x and the parameters `w` [channels, width], `b` `[channels]`.
pub fn forward<F: Real>(shape: ConvolutionShape, x: Columns<'_, F>, w: &[F], b: &[F], y: &mut [F]) {
    shape.check(&x, w, b, y);
    run(shape, &x, w, b, Shared::new(y), None);
}

/// As [`forward`], where `past` [batch, width − 1, channels] holds the last x of each sequence,
/// oldest first, and afterwards the last of these. Sequences that have just begun (`begins`) have
/// no past.
pub fn forward_from<F: Real>(
    shape: ConvolutionShape,
    x: Columns<'_, F>,
    (w, b): (&[F], &[F]),
    begins: &[bool],
    past: &mut [F],
    y: &mut [F],
) {
    shape.check(&x, w, b, y);
    assert_eq!(begins.len(), shape.batch, "convolution sequences");
    let per_sequence = (shape.width - 1) * shape.channels;
    assert_eq!(past.len(), shape.batch * per_sequence, "convolution past");
    for (b, &begins) in begins.iter().enumerate() {
        if begins {
            past[b * per_sequence..][..per_sequence].fill(F::ZERO);
        }
    }
    run(shape, &x, w, b, Shared::new(y), Some(Shared::new(past)));
}

fn run<F: Real>(
    shape: ConvolutionShape,
    x: &Columns<'_, F>,
    w: &[F],
    b: &[F],
    y: Shared<'_, F>,
    past: Option<Shared<'_, F>>,
) {
    let groups = shape.num_groups();
    for_each(shape.batch * groups, |task| {
        for (channel, lanes) in shape.registers(task % groups) {
            forward_register(shape, task / groups, channel, lanes, x, w, b, y, past);
        }
    });
}

/// The gradients of the weight [channels, width] and the bias `[channels]`.
pub type ParameterGradients<'a, F> = [(&'a mut [F], Accumulate); 2];

/// Adds to `dx`, whose other columns stay as they are, and writes or adds to the parameters'
/// gradients where they are trained.
pub fn backward<F: Real>(
    shape: ConvolutionShape,
    dy: &[F],
    x: Columns<'_, F>,
    w: &[F],
    b: &[F],
    dx: &ColumnsMut<'_, F>,
    parameters: Option<ParameterGradients<'_, F>>,
) {
    shape.check(&x, w, b, dy);
    dx.check("convolution input gradient", shape.rows());
    let parameters = parameters.map(|both| both.map(|(slice, mode)| (Shared::new(slice), mode)));
    // A task has its channels in all sequences, so that its sums run over the batch in order.
    for_each(shape.num_groups(), |group| {
        for (channel, lanes) in shape.registers(group) {
            let sums = backward_register(shape, channel, lanes, dy, &x, w, b, dx);
            let Some([dw, db]) = &parameters else {
                continue;
            };
            // SAFETY: each task takes its own channels.
            let (dw_part, db_part) = unsafe {
                (
                    dw.0.part(channel * shape.width, lanes * shape.width),
                    db.0.part(channel, lanes),
                )
            };
            for lane in 0..lanes {
                for j in 0..shape.width {
                    dw.1.put(&mut dw_part[lane * shape.width + j], sums.w[j][lane]);
                }
                db.1.put(&mut db_part[lane], sums.b[lane]);
            }
        }
    });
}

/// The last W values of x of one register, oldest first, and its parameters.
struct Window<F> {
    x: [Lanes<F>; MAX_WIDTH],
    w: [Lanes<F>; MAX_WIDTH],
    b: Lanes<F>,
    width: usize,
}

impl<F: Real> Window<F> {
    #[inline(always)]
    fn new(width: usize, channel: usize, lanes: usize, w: &[F], b: &[F]) -> Self {
        let mut turned = [Lanes::ZERO; MAX_WIDTH];
        for lane in 0..lanes {
            for j in 0..width {
                turned[j][lane] = w[(channel + lane) * width + j];
            }
        }
        Self {
            x: [Lanes::ZERO; MAX_WIDTH],
            w: turned,
            b: load(&b[channel..], lanes),
            width,
        }
    }

    /// Forgets the past, at the start of a sequence.
    #[inline(always)]
    fn clear(&mut self) {
        self.x = [Lanes::ZERO; MAX_WIDTH];
    }

    /// Takes in the next x and returns u.
    #[inline(always)]
    fn advance(&mut self, x: Lanes<F>) -> Lanes<F> {
        shift(&mut self.x, self.width, x);
        let mut u = self.b;
        for (w, x) in self.w.iter().zip(&self.x).take(self.width) {
            for lane in 0..LANES {
                u[lane] = w[lane].fma(x[lane], u[lane]);
            }
        }
        u
    }
}

/// Drops the oldest of `width` values and appends one.
#[inline(always)]
fn shift<F: Real>(values: &mut [Lanes<F>; MAX_WIDTH], width: usize, newest: Lanes<F>) {
    for j in 1..width {
        values[j - 1] = values[j];
    }
    values[width - 1] = newest;
}

/// x of one register in one row.
#[inline(always)]
fn read<F: Real>(x: &Columns<'_, F>, row: usize, channel: usize, lanes: usize) -> Lanes<F> {
    load(&x.data[row * x.row_stride + x.offset + channel..], lanes)
}

simd! {
    fn forward_register<F: Real>(
        shape: ConvolutionShape,
        batch: usize,
        channel: usize,
        lanes: usize,
        x: &Columns<'_, F>,
        w: &[F],
        b: &[F],
        y: Shared<'_, F>,
        past: Option<Shared<'_, F>>,
    ) {
        // The usual width as a constant: the window then stays in registers.
        if shape.width == 4 {
            convolve(4, shape, batch, channel, lanes, x, w, b, y, past);
        } else {
            convolve(shape.width, shape, batch, channel, lanes, x, w, b, y, past);
        }
    }
}

#[expect(
    clippy::too_many_arguments,
    reason = "two calls, from the dispatcher above"
)]
#[inline(always)]
fn convolve<F: Real>(
    width: usize,
    shape: ConvolutionShape,
    batch: usize,
    channel: usize,
    lanes: usize,
    x: &Columns<'_, F>,
    w: &[F],
    b: &[F],
    y: Shared<'_, F>,
    past: Option<Shared<'_, F>>,
) {
    let mut window = Window::new(width, channel, lanes, w, b);
    let past_place = |j: usize| (batch * (width - 1) + j - 1) * shape.channels + channel;
    if let Some(past) = past {
        for j in 1..width {
            // SAFETY: these channels of this sequence are this call's.
            window.x[j] = load(unsafe { past.part(past_place(j), lanes) }, lanes);
        }
    }
    for row in batch * shape.seq..(batch + 1) * shape.seq {
        let mut u = window.advance(read(x, row, channel, lanes));
        for value in u.iter_mut() {
            *value = silu(*value);
        }
        // SAFETY: these channels of this sequence are this call's.
        store(&u, unsafe { y.part(row * shape.channels + channel, lanes) });
    }
    if let Some(past) = past {
        for j in 1..width {
            // SAFETY: as above.
            store(&window.x[j], unsafe { past.part(past_place(j), lanes) });
        }
    }
}

/// The sums over rows that are the parameters' gradients.
struct Sums<F> {
    w: [Lanes<F>; MAX_WIDTH],
    b: Lanes<F>,
}

simd! {
    fn backward_register<F: Real>(
        shape: ConvolutionShape,
        channel: usize,
        lanes: usize,
        dy: &[F],
        x: &Columns<'_, F>,
        w: &[F],
        b: &[F],
        dx: &ColumnsMut<'_, F>,
    ) -> Sums<F> {
        if shape.width == 4 {
            reverse(4, shape, channel, lanes, dy, x, w, b, dx)
        } else {
            reverse(shape.width, shape, channel, lanes, dy, x, w, b, dx)
        }
    }
}

/// `du_t = dy_t · silu′(u_t)`, `dw_j = Σ_t du_t x_{t−(W−1)+j}`, `db = Σ_t du_t`, and
/// `dx_{t−(W−1)} = Σ_j w_j du_{t−j}`: complete when time has reached t, so one pass forwards
/// in time with a window of du does it. The pass runs W − 1 steps past the end.
#[expect(
    clippy::too_many_arguments,
    reason = "two calls, from the dispatcher above"
)]
#[inline(always)]
fn reverse<F: Real>(
    width: usize,
    shape: ConvolutionShape,
    channel: usize,
    lanes: usize,
    dy: &[F],
    x: &Columns<'_, F>,
    w: &[F],
    b: &[F],
    dx: &ColumnsMut<'_, F>,
) -> Sums<F> {
    let mut window = Window::new(width, channel, lanes, w, b);
    let mut sums = Sums {
        w: [Lanes::ZERO; MAX_WIDTH],
        b: Lanes::ZERO,
    };
    for batch in 0..shape.batch {
        window.clear();
        let mut slopes = [Lanes::ZERO; MAX_WIDTH];
        for time in 0..shape.seq + width - 1 {
            let row = batch * shape.seq + time;
            let mut du = Lanes::ZERO;
            if time < shape.seq {
                let u = window.advance(read(x, row, channel, lanes));
                du = load(&dy[row * shape.channels + channel..], lanes);
                for lane in 0..LANES {
                    du[lane] *= silu_slope(u[lane]);
                    sums.b[lane] += du[lane];
                }
                for (sum, x) in sums.w.iter_mut().zip(&window.x).take(width) {
                    for lane in 0..LANES {
                        sum[lane] = du[lane].fma(x[lane], sum[lane]);
                    }
                }
            }
            shift(&mut slopes, width, du);
            if time + 1 >= width {
                let row = row + 1 - width;
                // SAFETY: these channels are this call's.
                let target = unsafe { dx.part(row, channel, lanes) };
                let mut total = load(target, lanes);
                for (w, slope) in window.w[..width].iter().zip(slopes[..width].iter().rev()) {
                    for lane in 0..LANES {
                        total[lane] = w[lane].fma(slope[lane], total[lane]);
                    }
                }
                store(&total, target);
            }
        }
    }
    sums
}
