//! The scan forwards in time.

use super::{AHEAD, Inputs, MAX_STATE, Register, ScanShape, row_part};
use crate::cpu::kernel::lanes::{LANES, Lanes, load, store};
use crate::cpu::parallel::{Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Writes `y` [rows, inner] and, where a gradient will be wanted, `states` (of
/// [`ScanShape::states_len`]): the state before each chunk's first step.
pub fn forward<F: Real>(
    shape: ScanShape,
    inputs: &Inputs<'_, F>,
    y: &mut [F],
    states: Option<&mut [F]>,
) {
    shape.check(inputs);
    assert_eq!(y.len(), shape.rows() * shape.inner, "scan output");
    if let Some(states) = &states {
        assert_eq!(states.len(), shape.states_len(), "scan states");
    }
    let states = states.map(Shared::new);
    run(
        shape,
        inputs,
        Shared::new(y),
        Kept {
            states,
            carried: None,
        },
    );
}

/// Writes `y` [rows, inner] from the state [batch, inner, state] on and leaves the state after the
/// last step. Sequences that have just begun (`begins`) start from zero instead.
pub fn forward_from<F: Real>(
    shape: ScanShape,
    inputs: &Inputs<'_, F>,
    begins: &[bool],
    state: &mut [F],
    y: &mut [F],
) {
    shape.check(inputs);
    assert_eq!(y.len(), shape.rows() * shape.inner, "scan output");
    assert_eq!(begins.len(), shape.batch, "scan sequences");
    let per_sequence = shape.inner * shape.state;
    assert_eq!(state.len(), shape.batch * per_sequence, "scan state");
    for (state, _) in state
        .chunks_exact_mut(per_sequence)
        .zip(begins)
        .filter(|(_, b)| **b)
    {
        state.fill(F::ZERO);
    }
    let carried = Some(Shared::new(state));
    run(
        shape,
        inputs,
        Shared::new(y),
        Kept {
            states: None,
            carried,
        },
    );
}

/// What outlives the scan besides y.
#[derive(Clone, Copy)]
struct Kept<'a, F> {
    /// The states before chunks.
    states: Option<Shared<'a, F>>,
    /// The state before the first step, and after the last.
    carried: Option<Shared<'a, F>>,
}

fn run<F: Real>(shape: ScanShape, inputs: &Inputs<'_, F>, y: Shared<'_, F>, kept: Kept<'_, F>) {
    let groups = shape.num_groups();
    for_each(shape.batch * groups, |task| {
        for register in shape.registers(task / groups, task % groups) {
            match shape.state {
                16 => forward_register_of_16(shape, inputs, register, y, kept),
                _ => forward_register(shape, inputs, register, y, kept),
            }
        }
    });
}

simd! {
    /// One register with 16 states, the usual number: a constant makes the arrays small.
    fn forward_register_of_16<F: Real>(
        shape: ScanShape,
        inputs: &Inputs<'_, F>,
        register: Register,
        y: Shared<'_, F>,
        kept: Kept<'_, F>,
    ) {
        scan::<F, 16>(16, shape, inputs, register, y, kept);
    }
}

simd! {
    /// One register with any number of states.
    fn forward_register<F: Real>(
        shape: ScanShape,
        inputs: &Inputs<'_, F>,
        register: Register,
        y: Shared<'_, F>,
        kept: Kept<'_, F>,
    ) {
        scan::<F, MAX_STATE>(shape.state, shape, inputs, register, y, kept);
    }
}

/// All time steps of one register. Writes only that register's channels.
#[inline(always)]
fn scan<F: Real, const MAX: usize>(
    state: usize,
    shape: ScanShape,
    inputs: &Inputs<'_, F>,
    register: Register,
    y: Shared<'_, F>,
    kept: Kept<'_, F>,
) {
    let Register {
        batch,
        channel,
        width,
    } = register;
    let a = negative_exp::<F, MAX>(inputs.a_log, state, register);
    let skip = load(&inputs.skip[channel..], width);
    let mut h = [Lanes::ZERO; MAX];
    // SAFETY: the channels of this register in this batch element are this call's.
    let mut carried = kept.carried.map(|carried| unsafe {
        carried.part((batch * shape.inner + channel) * state, width * state)
    });
    if let Some(carried) = &carried {
        for (lane, carried) in carried.chunks_exact(state).enumerate() {
            for n in 0..state {
                h[n][lane] = carried[n];
            }
        }
    }
    for time in 0..shape.seq {
        if let Some(states) = kept.states
            && time % shape.chunk == 0
        {
            let offset = shape.state_offset(batch, time / shape.chunk, channel);
            // SAFETY: as above.
            put(&h, state, unsafe { states.part(offset, width * state) });
        }
        let row = batch * shape.seq + time;
        inputs.prefetch(&shape, register, row + AHEAD);
        let step = Step::read(&shape, inputs, register, row);
        let mut s = Lanes::ZERO;
        for n in 0..state {
            let (b, c) = (step.b[n], step.c[n]);
            step.advance(&a[n], b, &mut h[n]);
            for lane in 0..LANES {
                s[lane] = h[n][lane].fma(c, s[lane]);
            }
        }
        for lane in 0..LANES {
            s[lane] = skip[lane].fma(step.x[lane], s[lane]);
        }
        if let Some(gate) = &inputs.gate {
            let z = load(row_part(gate, row, register), width);
            for lane in 0..LANES {
                s[lane] *= z[lane] * z[lane].sigmoid();
            }
        }
        // SAFETY: as above.
        store(&s, unsafe { y.part(row * shape.inner + channel, width) });
    }
    if let Some(carried) = &mut carried {
        put(&h, state, carried);
    }
}

/// Turns a register's states to [lane][state].
#[inline(always)]
fn put<F: Real>(h: &[Lanes<F>], state: usize, to: &mut [F]) {
    for (lane, to) in to.chunks_exact_mut(state).enumerate() {
        for n in 0..state {
            to[n] = h[n][lane];
        }
    }
}

/// `A = −exp(a_log)`, turned to [state][lane]; −1 in the lanes above the register's width.
#[inline(always)]
pub(super) fn negative_exp<F: Real, const MAX: usize>(
    a_log: &[F],
    state: usize,
    register: Register,
) -> [Lanes<F>; MAX] {
    let mut a = [Lanes::ZERO; MAX];
    for lane in 0..register.width {
        let source = &a_log[(register.channel + lane) * state..][..state];
        for n in 0..state {
            a[n][lane] = source[n];
        }
    }
    for a in &mut a[..state] {
        for value in a.iter_mut() {
            *value = -value.exp();
        }
    }
    a
}

/// What one time step of a register needs besides A and the state.
pub(super) struct Step<'a, F> {
    pub x: Lanes<F>,
    /// dt before softplus.
    pub dt: Lanes<F>,
    /// Δ = softplus(dt).
    pub delta: Lanes<F>,
    /// Δ·x.
    pub u: Lanes<F>,
    /// B and C of the row.
    pub b: &'a [F],
    pub c: &'a [F],
}

impl<'a, F: Real> Step<'a, F> {
    #[inline(always)]
    pub fn read(shape: &ScanShape, inputs: &Inputs<'a, F>, register: Register, row: usize) -> Self {
        let Register { channel, width, .. } = register;
        let x = load(row_part(&inputs.x, row, register), width);
        let dt = load(&inputs.dt[row * shape.inner + channel..], width);
        let mut delta = Lanes::ZERO;
        for lane in 0..LANES {
            delta[lane] = dt[lane].softplus();
        }
        let mut u = Lanes::ZERO;
        for lane in 0..LANES {
            u[lane] = delta[lane] * x[lane];
        }
        let projection = &inputs.projection[row * shape.projection() + shape.rank..];
        let (b, rest) = projection.split_at(shape.state);
        Self {
            x,
            dt,
            delta,
            u,
            b,
            c: &rest[..shape.state],
        }
    }

    /// `h ← exp(Δ A) h + u B` for one state; returns the decay `exp(Δ A)`.
    #[inline(always)]
    pub fn advance(&self, a: &Lanes<F>, b: F, h: &mut Lanes<F>) -> Lanes<F> {
        let mut decay = Lanes::ZERO;
        for lane in 0..LANES {
            decay[lane] = (self.delta[lane] * a[lane]).exp();
        }
        for lane in 0..LANES {
            h[lane] = decay[lane].fma(h[lane], self.u[lane] * b);
        }
        decay
    }
}
