//! The scan's gradient, backwards in time.
//!
//! With `g_t = ∂L/∂h_t`, `ds_t = dy_t · silu(z_t)` and `decay_t = exp(Δ_t A)`:
//!
//! ```text
//! g_t   = ds_t C_t + decay_{t+1} ⊙ g_{t+1}
//! dC_t  = Σ_channels ds_t h_t            dB_t = Σ_channels g_t u_t        u = Δ x
//! du_t  = ⟨g_t, B_t⟩                     q_t  = g_t ⊙ decay_t ⊙ h_{t−1}
//! dΔ_t  = ⟨q_t, A⟩ + du_t x_t            ddt  = dΔ · σ(dt)
//! dx_t  = du_t Δ_t + ds_t D              dz_t = dy_t s_t · σ(z)(1 + z(1 − σ(z)))
//! da_log = A ⊙ Σ_t q_t Δ_t               dD   = Σ_t ds_t x_t
//! ```
//!
//! A register keeps the states *before* each step of the chunk it is in; decay and `h_t`
//! follow from them again. That is a second exponential per element instead of a second
//! array, and registers of a group take turns in the same workspace.

use super::forward::{Step, negative_exp};
use super::{AHEAD, Gradients, Inputs, MAX_STATE, Register, ScanShape, row_part};
use crate::cpu::kernel::columns::ColumnsMut;
use crate::cpu::kernel::lanes::{LANES, Lanes, add_totals, load, prefetch, store};
use crate::cpu::parallel::{Accumulate, Shared, for_each};
use crate::cpu::real::Real;
use crate::cpu::simd::simd;

/// Rows per task when the groups' shares of dB and dC are added up.
const ROWS_PER_TASK: usize = 32;

/// Elements of workspace: per group, the states of one register over one chunk and the
/// group's share of dB and dC over one sequence.
pub fn backward_workspace(shape: ScanShape) -> usize {
    shape.num_groups() * (chunk_states(&shape) + shape.seq * 2 * shape.state)
}

/// Elements of the states of one register over one chunk, [chunk, state, lanes].
fn chunk_states(shape: &ScanShape) -> usize {
    shape.chunk.min(shape.seq) * shape.state * LANES
}

/// Writes all gradients; `states` are those of the forward pass, `dy` is [rows, inner].
pub fn backward<F: Real>(
    shape: ScanShape,
    inputs: &Inputs<'_, F>,
    states: &[F],
    dy: &[F],
    workspace: &mut [F],
    gradients: Gradients<'_, F>,
) {
    shape.check(inputs);
    assert_eq!(states.len(), shape.states_len(), "scan states");
    assert_eq!(dy.len(), shape.rows() * shape.inner, "scan output gradient");
    assert_eq!(
        gradients.gate.is_some(),
        inputs.gate.is_some(),
        "scan gate gradient"
    );
    for columns in [Some(&gradients.x), gradients.gate.as_ref()]
        .into_iter()
        .flatten()
    {
        columns.check("scan input gradient", shape.rows());
    }
    let groups = shape.num_groups();
    let (chunks, partials) =
        workspace[..backward_workspace(shape)].split_at_mut(groups * chunk_states(&shape));
    let chunks = Shared::new(chunks);
    let dt = Shared::new(gradients.dt);
    let a_log = Shared::new(gradients.a_log.0);
    let skip = Shared::new(gradients.skip.0);
    for batch in 0..shape.batch {
        // The first batch element decides whether a parameter's gradient is overwritten.
        let later = |mode| if batch == 0 { mode } else { Accumulate::Add };
        let shared_partials = Shared::new(&mut *partials);
        for_each(groups, |group| {
            let len = shape.seq * 2 * shape.state;
            // SAFETY: each task takes the part of its group.
            let partial = unsafe { shared_partials.part(group * len, len) };
            // SAFETY: as above.
            let chunk = unsafe { chunks.part(group * chunk_states(&shape), chunk_states(&shape)) };
            partial.fill(F::ZERO);
            for register in shape.registers(batch, group) {
                let output = Output {
                    dx: &gradients.x,
                    dz: gradients.gate.as_ref(),
                    dt,
                    a_log,
                    a_log_mode: later(gradients.a_log.1),
                    skip,
                    skip_mode: later(gradients.skip.1),
                };
                let run = match shape.state {
                    16 => backward_register_of_16,
                    _ => backward_register,
                };
                run(shape, inputs, states, dy, register, chunk, partial, &output);
            }
        });
        let rows =
            batch * shape.seq * shape.projection()..(batch + 1) * shape.seq * shape.projection();
        add_groups(&shape, partials, &mut gradients.projection[rows]);
    }
}

/// Where a register's gradients go.
struct Output<'a, F> {
    dx: &'a ColumnsMut<'a, F>,
    dz: Option<&'a ColumnsMut<'a, F>>,
    dt: Shared<'a, F>,
    a_log: Shared<'a, F>,
    a_log_mode: Accumulate,
    skip: Shared<'a, F>,
    skip_mode: Accumulate,
}

simd! {
    /// One register with 16 states, the usual number: a constant makes the arrays small.
    fn backward_register_of_16<F: Real>(
        shape: ScanShape,
        inputs: &Inputs<'_, F>,
        states: &[F],
        dy: &[F],
        register: Register,
        chunk: &mut [F],
        partial: &mut [F],
        output: &Output<'_, F>,
    ) {
        reverse::<F, 16>(16, shape, inputs, states, dy, register, chunk, partial, output);
    }
}

simd! {
    /// One register with any number of states.
    fn backward_register<F: Real>(
        shape: ScanShape,
        inputs: &Inputs<'_, F>,
        states: &[F],
        dy: &[F],
        register: Register,
        chunk: &mut [F],
        partial: &mut [F],
        output: &Output<'_, F>,
    ) {
        let state = shape.state;
        reverse::<F, MAX_STATE>(
            state, shape, inputs, states, dy, register, chunk, partial, output,
        );
    }
}

/// One register, from the last chunk to the first. `chunk` is [chunk, state, lanes];
/// `partial` [seq, 2·state] is added to.
#[expect(
    clippy::too_many_arguments,
    reason = "one call, from the functions above"
)]
#[inline(always)]
fn reverse<F: Real, const MAX: usize>(
    state: usize,
    shape: ScanShape,
    inputs: &Inputs<'_, F>,
    states: &[F],
    dy: &[F],
    register: Register,
    chunk: &mut [F],
    partial: &mut [F],
    output: &Output<'_, F>,
) {
    let Register {
        batch,
        channel,
        width,
    } = register;
    let a = negative_exp::<F, MAX>(inputs.a_log, state, register);
    let skip = load(&inputs.skip[channel..], width);
    // decay_{t+1} ⊙ g_{t+1}, and the sums over time.
    let mut carry = [Lanes::ZERO; MAX];
    let mut da = [Lanes::ZERO; MAX];
    let mut dskip = Lanes::ZERO;
    // The channels' shares of dB and dC in one step.
    let mut to_b = [Lanes::ZERO; MAX];
    let mut to_c = [Lanes::ZERO; MAX];
    for index in (0..shape.num_chunks()).rev() {
        let start = index * shape.chunk;
        let len = shape.chunk.min(shape.seq - start);
        let offset = shape.state_offset(batch, index, channel);
        let kept = &states[offset..offset + width * state];
        let slots = &mut chunk[..len * state * LANES];
        states_of_chunk::<F, MAX>(state, &shape, inputs, register, start, &a, kept, slots);
        for step_index in (0..len).rev() {
            let time = start + step_index;
            let row = batch * shape.seq + time;
            inputs.prefetch(&shape, register, row.wrapping_sub(AHEAD));
            prefetch(
                dy,
                row.wrapping_sub(AHEAD)
                    .wrapping_mul(shape.inner)
                    .wrapping_add(channel),
            );
            let before = &slots[step_index * state * LANES..][..state * LANES];
            let step = Step::read(&shape, inputs, register, row);
            let mut ds = load(&dy[row * shape.inner + channel..], width);
            // dz without its factor s, which is known only after the loop over states.
            let mut dz = Lanes::ZERO;
            if let Some(gate) = &inputs.gate {
                let z = load(row_part(gate, row, register), width);
                for lane in 0..LANES {
                    let sigmoid = z[lane].sigmoid();
                    let slope = sigmoid * (F::ONE + z[lane] * (F::ONE - sigmoid));
                    dz[lane] = ds[lane] * slope;
                    ds[lane] *= z[lane] * sigmoid;
                }
            }
            let mut s = Lanes::ZERO;
            let mut du = Lanes::ZERO;
            let mut ddelta = Lanes::ZERO;
            let sums = &mut partial[time * 2 * state..][..2 * state];
            let (db, dc) = sums.split_at_mut(state);
            for n in 0..state {
                let previous = load(&before[n * LANES..], LANES);
                let mut h = previous;
                let (b, c) = (step.b[n], step.c[n]);
                let decay = step.advance(&a[n], b, &mut h);
                for lane in 0..LANES {
                    s[lane] = h[lane].fma(c, s[lane]);
                    let g = ds[lane].fma(c, carry[n][lane]);
                    du[lane] = g.fma(b, du[lane]);
                    to_b[n][lane] = g * step.u[lane];
                    to_c[n][lane] = ds[lane] * h[lane];
                    let flow = g * decay[lane];
                    carry[n][lane] = flow;
                    let q = flow * previous[lane];
                    ddelta[lane] = q.fma(a[n][lane], ddelta[lane]);
                    da[n][lane] = q.fma(step.delta[lane], da[n][lane]);
                }
            }
            add_totals(&to_b, db);
            add_totals(&to_c, dc);
            let mut dx = Lanes::ZERO;
            let mut ddt = Lanes::ZERO;
            for lane in 0..LANES {
                s[lane] = skip[lane].fma(step.x[lane], s[lane]);
                dz[lane] *= s[lane];
                dx[lane] = du[lane].fma(step.delta[lane], ds[lane] * skip[lane]);
                dskip[lane] = ds[lane].fma(step.x[lane], dskip[lane]);
                ddt[lane] = du[lane].fma(step.x[lane], ddelta[lane]) * step.dt[lane].sigmoid();
            }
            // SAFETY: the channels of this register in this batch element are this call's;
            // dx and dz are different columns.
            unsafe {
                store(&dx, output.dx.part(row, channel, width));
                if let Some(target) = output.dz {
                    store(&dz, target.part(row, channel, width));
                }
                store(&ddt, output.dt.part(row * shape.inner + channel, width));
            }
        }
    }
    // SAFETY: the parameters of this register's channels are this call's.
    let (a_log, dskip_out) = unsafe {
        (
            output.a_log.part(channel * state, width * state),
            output.skip.part(channel, width),
        )
    };
    for (lane, a_log) in a_log.chunks_exact_mut(state).enumerate() {
        for n in 0..state {
            let value = da[n][lane] * a[n][lane];
            output.a_log_mode.put(&mut a_log[n], value);
        }
    }
    for (lane, target) in dskip_out.iter_mut().enumerate() {
        output.skip_mode.put(target, dskip[lane]);
    }
}

/// The states before each step of a chunk, [len, state, lanes], from the one kept.
#[expect(clippy::too_many_arguments, reason = "one call, inlined")]
#[inline(always)]
fn states_of_chunk<F: Real, const MAX: usize>(
    state: usize,
    shape: &ScanShape,
    inputs: &Inputs<'_, F>,
    register: Register,
    start: usize,
    a: &[Lanes<F>; MAX],
    kept: &[F],
    slots: &mut [F],
) {
    let mut h = [Lanes::ZERO; MAX];
    for (lane, kept) in kept.chunks_exact(state).enumerate() {
        for n in 0..state {
            h[n][lane] = kept[n];
        }
    }
    let len = slots.len() / (state * LANES);
    for (index, slot) in slots.chunks_exact_mut(state * LANES).enumerate() {
        for n in 0..state {
            store(&h[n], &mut slot[n * LANES..(n + 1) * LANES]);
        }
        if index + 1 < len {
            let row = register.batch * shape.seq + start + index;
            inputs.prefetch(shape, register, row + AHEAD);
            let step = Step::read(shape, inputs, register, row);
            for n in 0..state {
                step.advance(&a[n], step.b[n], &mut h[n]);
            }
        }
    }
}

/// dB and dC of one batch element: the groups' shares added in order, zero in front.
fn add_groups<F: Real>(shape: &ScanShape, partials: &[F], projection: &mut [F]) {
    let columns = 2 * shape.state;
    let groups = shape.num_groups();
    let target = Shared::new(projection);
    for_each(shape.seq.div_ceil(ROWS_PER_TASK), |task| {
        let end = shape.seq.min((task + 1) * ROWS_PER_TASK);
        for row in task * ROWS_PER_TASK..end {
            // SAFETY: each task takes its own rows.
            let out = unsafe { target.part(row * shape.projection(), shape.projection()) };
            out.fill(F::ZERO);
            let out = &mut out[shape.rank..];
            for group in 0..groups {
                let share = &partials[(group * shape.seq + row) * columns..][..columns];
                for (out, share) in out.iter_mut().zip(share) {
                    *out += *share;
                }
            }
        }
    });
}
