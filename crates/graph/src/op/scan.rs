//! The selective scan of Mamba, gated:
//! `h_t = exp(Δ_t A) ⊙ h_{t−1} + Δ_t x_t B_t`, `y_t = (⟨h_t, C_t⟩ + D x_t)·silu(z_t)`, with
//! `Δ = softplus(dt)` and `A = −exp(A_log)`.
//!
//! The states [T, inner, N] are what a plain implementation keeps and what fills the memory.
//! Here only the state before each chunk of time is kept; the backward runs a chunk forward
//! again before it runs it backward.

use super::{
    Declare, Op, aligned, expect, expect_columns, expect_float, expect_inputs, expect_same,
    expect_small, product, sum,
};
use crate::cost::{Arithmetic, Cost, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Graph, Node, Target, TensorId};
use crate::types::{DType, TensorType};

/// Inputs: x [B, T, inner or more], z likewise unless `packed` (then both are columns of the
/// first input), p [B, T, rank + 2N] whose last columns are B and C, dt [B, T, inner],
/// A_log [inner, N], D `[inner]`. Outputs: y [B, T, inner], and with `keep_states` the states
/// [B, chunks, inner, N].
#[derive(Clone, Debug, PartialEq)]
pub struct Scan {
    pub inner: usize,
    /// N.
    pub state: usize,
    /// Columns of p before B.
    pub rank: usize,
    /// Steps between kept states.
    pub chunk: usize,
    pub packed: bool,
    pub x_column: usize,
    pub z_column: usize,
    pub keep_states: bool,
}

/// Inputs: dy, then the inputs of the forward, then the states. Outputs: dx (and dz unless
/// packed), each as wide as what it is the gradient of; dp with zeros in the columns before
/// B; ddt; added to: dA_log and dD.
#[derive(Clone, Debug, PartialEq)]
pub struct ScanBackward(pub Scan);

/// What a scan reads besides its numbers.
#[derive(Clone, Copy, Debug)]
pub struct ScanInputs {
    pub x: TensorId,
    pub x_column: usize,
    pub z: TensorId,
    pub z_column: usize,
    pub p: TensorId,
    pub dt: TensorId,
    pub a_log: TensorId,
    pub d: TensorId,
}

impl Graph {
    pub fn scan(
        &mut self,
        name: &str,
        inputs: ScanInputs,
        rank: usize,
        chunk: usize,
    ) -> Result<TensorId, GraphError> {
        let (op, operands) = self.scan_operands(inputs, rank, chunk);
        Ok(self.emit(name, op, operands)?[0])
    }

    /// The op over `inputs`, and these in its order.
    pub(super) fn scan_operands(
        &self,
        inputs: ScanInputs,
        rank: usize,
        chunk: usize,
    ) -> (Scan, Vec<TensorId>) {
        let a_log = self.ty(inputs.a_log).shape;
        let packed = inputs.x == inputs.z;
        let op = Scan {
            inner: a_log.rows(),
            state: a_log.width(),
            rank,
            chunk,
            packed,
            x_column: inputs.x_column,
            z_column: inputs.z_column,
            keep_states: false,
        };
        let operands = [inputs.x]
            .into_iter()
            .chain((!packed).then_some(inputs.z))
            .chain([inputs.p, inputs.dt, inputs.a_log, inputs.d])
            .collect();
        (op, operands)
    }
}

impl Scan {
    /// The most states in a channel that the kernels have registers for.
    pub const MAX_STATE: usize = 64;
    /// Channels that one task handles.
    pub const GROUP: usize = 64;
    /// Channels that a task runs through time at once.
    pub const LANES: usize = 16;

    /// How many tensors hold x and z.
    pub fn num_sources(&self) -> usize {
        if self.packed { 1 } else { 2 }
    }

    pub(super) fn check(&self, inputs: &[TensorType]) -> Result<(), String> {
        let sources = self.num_sources();
        expect_inputs(inputs, sources + 4)?;
        let x = &inputs[0];
        expect(x.shape.rank() == 3, || {
            format!("x is {}, expected [batch,length,width]", x.shape)
        })?;
        expect(self.chunk > 0, || "a chunk of zero steps".to_owned())?;
        expect(self.state <= Self::MAX_STATE, || {
            let most = Self::MAX_STATE;
            format!("{} states in a channel, at most {most}", self.state)
        })?;
        expect_float("x", x)?;
        let z = &inputs[sources - 1];
        let wide = |width| TensorType::new(x.shape.with_width(width), x.dtype);
        expect_same("z", z, &wide(z.width()))?;
        expect_columns("x", x, self.x_column, self.inner)?;
        expect_columns("z", z, self.z_column, self.inner)?;
        // Their gradients are columns of one tensor too.
        expect(
            !self.packed || self.x_column.abs_diff(self.z_column) >= self.inner,
            || {
                format!(
                    "x from column {} on and z from {} on share some of their {} columns",
                    self.x_column, self.z_column, self.inner
                )
            },
        )?;
        let [p, dt, a_log, d] = [0, 1, 2, 3].map(|i| &inputs[sources + i]);
        let projected = self.rank.saturating_add(self.state.saturating_mul(2));
        expect_same("p", p, &wide(projected))?;
        expect_same("dt", dt, &wide(self.inner))?;
        expect_small("A_log", a_log, &[self.inner, self.state], x)?;
        expect_small("D", d, &[self.inner], x)
    }

    /// The states before each chunk [B, chunks, inner, N].
    fn states(&self, x: &TensorType) -> TensorType {
        let (batch, length) = (x.shape.dims()[0], x.shape.dims()[1]);
        let chunks = length.div_ceil(self.chunk);
        let shape = [batch, chunks, self.inner, self.state];
        TensorType::new(shape, x.dtype.accumulator())
    }

    pub(super) fn elements(&self, x: &TensorType) -> u64 {
        product([x.rows() as u64, self.inner as u64, self.state as u64])
    }

    /// How a GPU cuts up the scan of an x.
    pub fn cuda_partition(&self, x: &TensorType) -> ScanPartition {
        let (batch, length) = (x.shape.dims()[0].max(1), x.shape.dims()[1].max(1));
        let states_per_lane = match self.state {
            0..=16 => 2,
            17..=32 => 4,
            _ => 8,
        };
        let tile = ScanPartition::tile(states_per_lane);
        let chunk = self.chunk.clamp(1, length);
        let span = if chunk < tile {
            tile / chunk * chunk
        } else {
            chunk
        };
        let blocks = self.inner.div_ceil(ScanPartition::CHANNELS).max(1);
        let spans = length.div_ceil(span);
        // Steps of a segment, and how many there are, for so many blocks on a multiprocessor. Fewer
        // segments than `least` are not worth another launch.
        let cut = |resident: usize, least: usize| {
            let room = ScanPartition::MULTIPROCESSORS * resident / blocks.saturating_mul(batch);
            let wanted = if room < least { 1 } else { room };
            let segment = spans.div_ceil(wanted.clamp(1, spans)).saturating_mul(span);
            (segment, length.div_ceil(segment))
        };
        let (segment, segments) = cut(ScanPartition::RESIDENT, 4);
        let (backward_segment, backward_segments) = cut(ScanPartition::BACKWARD_RESIDENT, 2);
        ScanPartition {
            states_per_lane,
            blocks,
            chunk,
            span,
            boundaries: span.min(length).div_ceil(tile) - 1,
            segment,
            segments,
            backward_segment,
            backward_segments,
        }
    }

    /// The parts of the GPU's workspace forwards: the segments' ends and sums of Δ.
    pub fn cuda_parts(&self, x: &TensorType) -> [u64; 2] {
        self.segment_parts(x, self.cuda_partition(x).segments)
    }

    fn segment_parts(&self, x: &TensorType, segments: usize) -> [u64; 2] {
        let segments = if segments > 1 { segments as u64 } else { 0 };
        let channels = product([x.shape.dims()[0] as u64, segments, self.inner as u64]);
        [product([channels, self.state as u64]), channels].map(cuda_part)
    }

    /// The steps of a GPU's kernels, each multiprocessor running its share of the blocks of
    /// channels times segments of time.
    fn cuda_arithmetic(&self, x: &TensorType, cut: TimeCut, times: StepTimes) -> Arithmetic {
        let partition = self.cuda_partition(x);
        let blocks = [partition.blocks, cut.segments, x.shape.dims()[0]];
        let repeated = if cut.segments > 1 { times.local } else { 0.0 };
        Arithmetic::Recurrence {
            blocks: blocks.into_iter().fold(1, usize::saturating_mul),
            steps: cut.segment,
            step: partition.states_per_lane as f64 / 2.0 * times.step,
            latency: times.latency,
            passes: 1.0 + repeated,
        }
    }
}

/// Segments of time, and the steps of each.
struct TimeCut {
    segment: usize,
    segments: usize,
}

/// What a GPU's kernels take: their time is that of instructions, exponentials and what stands around
/// them.
struct StepTimes {
    /// Seconds of one block of 32 channels, each with up to 16 states, on a multiprocessor that it
    /// shares with others.
    step: f64,
    /// A step cannot be shorter, because it waits for the one before it.
    latency: f64,
    /// The share of a pass that finding the ends of segments adds, where time is cut.
    local: f64,
}

const FORWARD_TIMES: StepTimes = StepTimes {
    step: 34e-9,
    latency: 58e-9,
    local: 0.9,
};
/// Each tile forward again, then the adjoint.
const BACKWARD_TIMES: StepTimes = StepTimes {
    step: 101e-9,
    latency: 132e-9,
    local: 0.29,
};
/// What a tile adds to the backward that runs forward once more, because others of its span come
/// first, as a share of its time.
const TILE_AGAIN: f64 = 0.24;
pub(super) const CPU_SIGMOIDS: f64 = 0.18;
const CPU_BACKWARD_SIGMOIDS: f64 = 0.24;

/// How a GPU cuts up a scan. A block has 32 channels of a sequence, eight lanes for each two, and a
/// segment of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanPartition {
    /// States of a channel that one lane holds.
    pub states_per_lane: usize,
    /// Blocks for the channels.
    pub blocks: usize,
    /// Steps between kept states, at most the length.
    pub chunk: usize,
    /// Whole chunks that the backward takes in one go.
    pub span: usize,
    /// States that the backward keeps inside a span, one before each tile but the first.
    pub boundaries: usize,
    /// Steps of a segment, whole spans.
    pub segment: usize,
    pub segments: usize,
    /// The same for the backward.
    pub backward_segment: usize,
    pub backward_segments: usize,
}

impl ScanPartition {
    pub const CHANNELS: usize = 32;
    /// Channels that a lane holds at once.
    pub const SLOTS: usize = 2;
    /// Lanes that share a channel's states.
    pub const LANES: usize = 8;
    pub const THREADS: usize = Self::LANES * Self::CHANNELS / Self::SLOTS;
    /// Multiprocessors of a large card.
    const MULTIPROCESSORS: usize = 132;
    /// Blocks that one of them has registers for. Cutting time costs the forward nearly another pass
    /// and the backward a sixth of one: so the backward is cut wherever there is room for two
    /// segments, the forward where there is for four.
    const RESIDENT: usize = 4;
    pub const BACKWARD_RESIDENT: usize = 2;

    /// Steps that are in shared memory at once.
    pub const fn tile(states_per_lane: usize) -> usize {
        64 / states_per_lane
    }
}

/// The bytes of so many floats, as a part of a workspace.
fn cuda_part(floats: u64) -> u64 {
    aligned(product([floats, DType::F32.size()]))
}

impl Declare for Scan {
    fn name(&self) -> &'static str {
        "scan"
    }

    fn outputs(&self) -> &'static [&'static str] {
        &["", "states"]
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        self.check(inputs)?;
        let x = &inputs[0];
        let mut outputs = vec![TensorType::new(x.shape.with_width(self.inner), x.dtype)];
        if self.keep_states {
            outputs.push(self.states(x));
        }
        Ok(outputs)
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let Some(dy) = backward.gradient_of(node.outputs[0]) else {
            return Ok(());
        };
        let keeping = Self {
            keep_states: true,
            ..self.clone()
        };
        let outputs = backward.upgrade(Op::from(keeping.clone()))?;
        let sources = self.num_sources();
        let into = node.inputs[sources + 2..]
            .iter()
            .map(|&parameter| backward.parameter_gradient(node, parameter))
            .collect::<Result<Vec<_>, _>>()?;
        let inputs = [dy]
            .into_iter()
            .chain(node.inputs.iter().copied())
            .chain([outputs[1]])
            .collect();
        let gradients = backward.accumulate(node, "input", ScanBackward(keeping), inputs, into)?;
        // dx (and dz), dp, ddt: in the order of the forward's inputs.
        for (&input, &gradient) in node.inputs[..sources + 2].iter().zip(&gradients) {
            backward.contribute(node, input, gradient)?;
        }
        Ok(())
    }

    /// Without its backward nearby, a scan keeps no states.
    fn without_unread(&self, read: &[bool]) -> Option<Op> {
        (self.keep_states && !read[1]).then(|| {
            Op::from(Self {
                keep_states: false,
                ..self.clone()
            })
        })
    }

    /// The CPU needs none.
    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        match target {
            Target::Cpu => 0,
            Target::Cuda => sum(self.cuda_parts(&inputs[0])),
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // Per state: Δ·A, its exponential (counted as one), two products and two additions.
        product([8, self.elements(&inputs[0])])
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_SIGMOIDS
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let partition = self.cuda_partition(&inputs[0]);
        let cut = TimeCut {
            segment: partition.segment,
            segments: partition.segments,
        };
        let arithmetic = self.cuda_arithmetic(&inputs[0], cut, FORWARD_TIMES);
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::computing(1, bytes, arithmetic)])
    }
}

impl ScanBackward {
    /// The parts of the GPU's workspace: the blocks' shares of dB and dC; dA and dD of each
    /// sequence and segment; the states before tiles; the segments' ends and sums of Δ.
    pub fn cuda_parts(&self, x: &TensorType) -> [u64; 6] {
        let scan = &self.0;
        let partition = scan.cuda_partition(x);
        let (state, blocks) = (scan.state as u64, partition.blocks as u64);
        let parts = product([x.shape.dims()[0] as u64, partition.backward_segments as u64]);
        let channels = product([parts, scan.inner as u64]);
        let thread_states = product([
            parts,
            blocks,
            partition.boundaries as u64,
            (ScanPartition::THREADS * ScanPartition::SLOTS * partition.states_per_lane) as u64,
        ]);
        let [ends, totals] = scan.segment_parts(x, partition.backward_segments);
        [
            cuda_part(product([blocks, x.rows() as u64, 2, state])),
            cuda_part(product([channels, state])),
            cuda_part(channels),
            cuda_part(thread_states),
            ends,
            totals,
        ]
    }
}

impl Declare for ScanBackward {
    fn name(&self) -> &'static str {
        "scan_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        if self.0.packed {
            &["", "p", "dt", "A_log", "D"]
        } else {
            &["x", "z", "p", "dt", "A_log", "D"]
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let sources = self.0.num_sources();
        expect_inputs(inputs, sources + 6)?;
        self.0.check(&inputs[1..sources + 5])?;
        let dt = &inputs[sources + 2];
        expect_same("dy", &inputs[0], dt)?;
        let states = self.0.states(&inputs[1]);
        expect_same("the states", &inputs[sources + 5], &states)?;
        let dtype = dt.dtype.accumulator();
        Ok(inputs[1..sources + 3]
            .iter()
            .copied()
            .chain([
                TensorType::new([self.0.inner, self.0.state], dtype),
                TensorType::new([self.0.inner], dtype),
            ])
            .collect())
    }

    /// On the CPU, per group of channels: a chunk's states of the channels in one vector
    /// register, and the group's share of dB and dC over one sequence.
    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        if target == Target::Cuda {
            return sum(self.cuda_parts(&inputs[1]));
        }
        let scan = &self.0;
        let length = inputs[1].shape.dims()[1] as u64;
        let (chunk, state) = (length.min(scan.chunk as u64), scan.state as u64);
        let groups = scan.inner.div_ceil(Scan::GROUP) as u64;
        let states = product([chunk, state, Scan::LANES as u64]);
        let shares = product([length, 2, state]);
        let size = inputs[0].dtype.accumulator().size();
        product([groups, sum([states, shares]), size])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        // The chunk again, then about twice the forward's work.
        product([24, self.0.elements(&inputs[1])])
    }

    fn cpu_sigmoids(&self) -> f64 {
        CPU_BACKWARD_SIGMOIDS
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let partition = self.0.cuda_partition(&inputs[1]);
        let cut = TimeCut {
            segment: partition.backward_segment,
            segments: partition.backward_segments,
        };
        let boundaries = partition.boundaries as f64;
        let again = TILE_AGAIN * boundaries / (boundaries + 1.0);
        let times = StepTimes {
            step: BACKWARD_TIMES.step * (1.0 + again),
            ..BACKWARD_TIMES
        };
        let arithmetic = self.0.cuda_arithmetic(&inputs[1], cut, times);
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::computing(2, bytes, arithmetic)])
    }
}
