//! The depthwise causal convolution over time in front of a selective scan, with SiLU:
//!
//! ```text
//! u_t = b + Σ_j w_j · x_{t−(W−1)+j}        y_t = silu(u_t)
//! ```
//!
//! per channel, x being zero before a sequence starts. Channels are independent: they run
//! side by side in lanes, time in order.

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
pub struct Shape {
    pub batch: usize,
    pub seq: usize,
    pub channels: usize,
    /// W, at most [`MAX_WIDTH`].
    pub width: usize,
}

impl Shape {
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

/// `y` [rows, channels] from x and the parameters `w` [channels, width], `b` [channels].
pub fn forward<F: Real>(shape: Shape, x: Columns<'_, F>, w: &[F], b: &[F], y: &mut [F]) {
    shape.check(&x, w, b, y);
    let y = Shared::new(y);
    let groups = shape.num_groups();
    for_each(shape.batch * groups, |task| {
        for (channel, lanes) in shape.registers(task % groups) {
            forward_register(shape, task / groups, channel, lanes, &x, w, b, y);
        }
    });
}

/// Adds to `dx`, whose other columns stay as they are, and writes or adds to `dw`
/// [channels, width] and `db` [channels].
#[expect(clippy::too_many_arguments, reason = "the operands of one op")]
pub fn backward<F: Real>(
    shape: Shape,
    dy: &[F],
    x: Columns<'_, F>,
    w: &[F],
    b: &[F],
    dx: &ColumnsMut<'_, F>,
    dw: (&mut [F], Accumulate),
    db: (&mut [F], Accumulate),
) {
    shape.check(&x, w, b, dy);
    dx.check("convolution input gradient", shape.rows());
    let dw = (Shared::new(dw.0), dw.1);
    let db = (Shared::new(db.0), db.1);
    // A task has its channels in all sequences, so that its sums run over the batch in order.
    for_each(shape.num_groups(), |group| {
        for (channel, lanes) in shape.registers(group) {
            let sums = backward_register(shape, channel, lanes, dy, &x, w, b, dx);
            // SAFETY: each task takes its own channels.
            let (dw_part, db_part) = unsafe {
                (
                    dw.0.part(channel * shape.width, lanes * shape.width),
                    db.0.part(channel, lanes),
                )
            };
            for lane in 0..lanes {
                for j in 0..shape.width {
                    put(&mut dw_part[lane * shape.width + j], sums.w[j][lane], dw.1);
                }
                put(&mut db_part[lane], sums.b[lane], db.1);
            }
        }
    });
}

fn put<F: Real>(target: &mut F, value: F, mode: Accumulate) {
    match mode {
        Accumulate::Overwrite => *target = value,
        Accumulate::Add => *target += value,
    }
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
        let mut turned = [[F::ZERO; LANES]; MAX_WIDTH];
        for lane in 0..lanes {
            for j in 0..width {
                turned[j][lane] = w[(channel + lane) * width + j];
            }
        }
        Self {
            x: [[F::ZERO; LANES]; MAX_WIDTH],
            w: turned,
            b: load(&b[channel..], lanes),
            width,
        }
    }

    /// Forgets the past, at the start of a sequence.
    #[inline(always)]
    fn clear(&mut self) {
        self.x = [[F::ZERO; LANES]; MAX_WIDTH];
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
        shape: Shape,
        batch: usize,
        channel: usize,
        lanes: usize,
        x: &Columns<'_, F>,
        w: &[F],
        b: &[F],
        y: Shared<'_, F>,
    ) {
        // The usual width as a constant: the window then stays in registers.
        if shape.width == 4 {
            convolve(4, shape, batch, channel, lanes, x, w, b, y);
        } else {
            convolve(shape.width, shape, batch, channel, lanes, x, w, b, y);
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
    shape: Shape,
    batch: usize,
    channel: usize,
    lanes: usize,
    x: &Columns<'_, F>,
    w: &[F],
    b: &[F],
    y: Shared<'_, F>,
) {
    let mut window = Window::new(width, channel, lanes, w, b);
    for row in batch * shape.seq..(batch + 1) * shape.seq {
        let mut u = window.advance(read(x, row, channel, lanes));
        for value in &mut u {
            *value = silu(*value);
        }
        // SAFETY: these channels of this sequence are this call's.
        store(&u, unsafe { y.part(row * shape.channels + channel, lanes) });
    }
}

/// The sums over rows that are the parameters' gradients.
struct Sums<F> {
    w: [Lanes<F>; MAX_WIDTH],
    b: Lanes<F>,
}

simd! {
    fn backward_register<F: Real>(
        shape: Shape,
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
    shape: Shape,
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
        w: [[F::ZERO; LANES]; MAX_WIDTH],
        b: [F::ZERO; LANES],
    };
    for batch in 0..shape.batch {
        window.clear();
        let mut slopes = [[F::ZERO; LANES]; MAX_WIDTH];
        for time in 0..shape.seq + width - 1 {
            let row = batch * shape.seq + time;
            let mut du = [F::ZERO; LANES];
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernel::check::*;

    /// x is a column block of [rows, channels + 4], from column 3.
    #[derive(Clone)]
    struct Case {
        shape: Shape,
        packed: Vec<f64>,
        w: Vec<f64>,
        b: Vec<f64>,
        dy: Vec<f64>,
    }

    fn case(batch: usize, seq: usize, channels: usize, width: usize) -> Case {
        Case {
            shape: Shape {
                batch,
                seq,
                channels,
                width,
            },
            packed: random(batch * seq * (channels + 4), 1),
            w: random(channels * width, 2),
            b: random(channels, 3),
            dy: random(batch * seq * channels, 4),
        }
    }

    fn cases() -> [Case; 6] {
        [
            case(1, 1, 1, 4),
            case(2, 7, 5, 4),
            case(1, 37, 70, 4),
            case(2, 3, 17, 4),
            case(2, 7, 3, 1),
            case(1, 9, 16, 16),
        ]
    }

    fn columns<F>(shape: Shape, packed: &[F]) -> Columns<'_, F> {
        Columns {
            data: packed,
            row_stride: shape.channels + 4,
            offset: 3,
            width: shape.channels,
        }
    }

    impl Case {
        fn reference(&self) -> Vec<f64> {
            let Shape {
                batch,
                seq,
                channels,
                width,
            } = self.shape;
            let mut y = Vec::new();
            for b in 0..batch {
                for t in 0..seq {
                    for c in 0..channels {
                        let mut u = self.b[c];
                        for j in 0..width {
                            if t + j + 1 >= width {
                                let row = b * seq + t + j + 1 - width;
                                let x = self.packed[row * (channels + 4) + 3 + c];
                                u += self.w[c * width + j] * x;
                            }
                        }
                        y.push(u / (1.0 + (-u).exp()));
                    }
                }
            }
            y
        }

        /// (gradient of the packed buffer on top of ones, dw, db), both on top of twos.
        fn gradients<F: Real>(&self, mode: Accumulate) -> (Vec<F>, Vec<F>, Vec<F>) {
            let cast = |x: &[f64]| x.iter().map(|v| F::from_f64(*v)).collect::<Vec<F>>();
            let (packed, w, b, dy) = (
                cast(&self.packed),
                cast(&self.w),
                cast(&self.b),
                cast(&self.dy),
            );
            let mut dpacked = vec![F::ONE; packed.len()];
            let mut dw = vec![F::from_f64(2.0); w.len()];
            let mut db = vec![F::from_f64(2.0); b.len()];
            let channels = self.shape.channels;
            let [dx] = ColumnsMut::split(&mut dpacked, channels + 4, [(3, channels)]);
            let x = columns(self.shape, &packed);
            let (dw_out, db_out) = ((&mut dw[..], mode), (&mut db[..], mode));
            backward(self.shape, &dy, x, &w, &b, &dx, dw_out, db_out);
            (dpacked, dw, db)
        }
    }

    #[test]
    fn forward_is_the_definition() {
        for case in cases() {
            let expected = case.reference();
            let mut y = vec![0.0; expected.len()];
            let x = columns(case.shape, &case.packed);
            forward(case.shape, x, &case.w, &case.b, &mut y);
            assert_close("y", &y, &expected, 1e-14);
            let (packed, w, b) = (single(&case.packed), single(&case.w), single(&case.b));
            let mut y = vec![0.0; expected.len()];
            forward(case.shape, columns(case.shape, &packed), &w, &b, &mut y);
            assert_single_close("y in f32", &y, &expected, 1e-5);
        }
    }

    #[test]
    fn gradients_are_those_of_the_definition() {
        for case in cases() {
            let (dpacked, dw, db) = case.gradients::<f64>(Accumulate::Overwrite);
            let with = |change: &dyn Fn(&mut Case)| {
                let mut moved = case.clone();
                change(&mut moved);
                inner_product(&moved.reference(), &case.dy)
            };
            // The ones that were there stay, in the columns beside x too.
            let added: Vec<f64> = dpacked.iter().map(|v| v - 1.0).collect();
            assert_gradient("x", &case.packed, &added, |v| {
                with(&|c| c.packed = v.to_vec())
            });
            assert_gradient("w", &case.w, &dw, |v| with(&|c| c.w = v.to_vec()));
            assert_gradient("b", &case.b, &db, |v| with(&|c| c.b = v.to_vec()));

            let (_, more_w, more_b) = case.gradients::<f64>(Accumulate::Add);
            let plus_two = |x: &[f64]| x.iter().map(|v| v + 2.0).collect::<Vec<_>>();
            assert_eq!((more_w, more_b), (plus_two(&dw), plus_two(&db)));
            let (_, dw32, db32) = case.gradients::<f32>(Accumulate::Overwrite);
            assert_single_close("dw in f32", &dw32, &dw, 1e-5);
            assert_single_close("db in f32", &db32, &db, 1e-5);
        }
    }

    #[test]
    fn threads_do_not_change_a_bit() {
        let case = case(3, 37, 200, 4);
        let run = |threads| {
            with_threads(threads, || {
                let x = single(&case.packed);
                let mut y = vec![0.0; case.dy.len()];
                let (w, b) = (single(&case.w), single(&case.b));
                forward(case.shape, columns(case.shape, &x), &w, &b, &mut y);
                (y, case.gradients::<f32>(Accumulate::Overwrite))
            })
        };
        assert_eq!(run(1), run(2));
    }
}
