//! Layer norm and RMS norm, fused with the residual addition (and the dropout of the branch)
//! that comes before them in every pre-norm model.
//!
//! With a branch: `s = x + dropout(branch)`, `y = norm(s)`. Kept for the backward: s and the
//! statistics of its rows. y is not kept: [`NormApply`] computes it again from those.

use super::{
    Declare, Op, Operand, Recipe, ValueAgain, expect, expect_dropout, expect_inputs, expect_rows,
    expect_same, expect_small, product, sum,
};
use crate::cost::{Cost, JoinKind, Joins, KernelCost};
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::graph::{Dropout, Graph, Node, Target, TensorId};
use crate::types::TensorType;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Mean and variance; scale and shift.
    Layer,
    /// Root mean square; scale only.
    Rms,
}

impl NormKind {
    fn has_shift(self) -> bool {
        self == Self::Layer
    }
}

/// Inputs: x, branch when `residual`, gamma, beta for layer norm, random state with dropout.
/// Outputs: s when `residual`, y, mean for layer norm, rstd.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    pub kind: NormKind,
    pub epsilon: f64,
    pub residual: bool,
    pub dropout: Option<Dropout>,
}

/// Inputs: s, mean for layer norm, rstd, gamma, beta for layer norm. Output: y.
#[derive(Clone, Debug, PartialEq)]
pub struct NormApply {
    pub kind: NormKind,
}

/// Inputs: dy, ds when `residual_gradient` (what reaches s on the residual path), s, mean for
/// layer norm, rstd, gamma, random state with dropout, beta when a layer norm has a `value`.
/// Outputs: dx (also the branch's gradient, unless there is dropout), dbranch with dropout, y again
/// when `value`; added to: dgamma and dbeta when `parameters`.
#[derive(Clone, Debug, PartialEq)]
pub struct NormBackward {
    pub kind: NormKind,
    pub residual_gradient: bool,
    pub dropout: Option<Dropout>,
    pub parameters: bool,
    pub value: bool,
}

impl NormBackward {
    /// Whether a GPU may give a row to a warp, by its width.
    pub fn is_by_warps(&self) -> bool {
        !self.residual_gradient && !self.parameters
    }
}

/// What [`Graph::residual_norm`] gives.
#[derive(Clone, Copy, Debug)]
pub struct Normed {
    /// The residual stream after the addition.
    pub stream: TensorId,
    /// Its norm.
    pub normed: TensorId,
}

impl Graph {
    /// `norm(x)`.
    pub fn norm(
        &mut self,
        name: &str,
        x: TensorId,
        (kind, epsilon): (NormKind, f64),
        gamma: TensorId,
        beta: Option<TensorId>,
    ) -> Result<TensorId, GraphError> {
        let op = Norm {
            kind,
            epsilon,
            residual: false,
            dropout: None,
        };
        let inputs = [x, gamma].into_iter().chain(beta).collect();
        Ok(self.emit(name, op, inputs)?[0])
    }

    /// `s = x + dropout(branch)` and `norm(s)`.
    pub fn residual_norm(
        &mut self,
        name: &str,
        (x, branch): (TensorId, TensorId),
        dropout: Option<Dropout>,
        (kind, epsilon): (NormKind, f64),
        gamma: TensorId,
        beta: Option<TensorId>,
    ) -> Result<Normed, GraphError> {
        let random = dropout.map(|_| self.random_state());
        let op = Norm {
            kind,
            epsilon,
            residual: true,
            dropout,
        };
        let inputs = [x, branch, gamma]
            .into_iter()
            .chain(beta)
            .chain(random)
            .collect();
        let outputs = self.emit(name, op, inputs)?;
        Ok(Normed {
            stream: outputs[0],
            normed: outputs[1],
        })
    }
}

/// The positions of a [`Norm`]'s tensors.
#[derive(Clone, Copy, Debug)]
pub struct NormLayout {
    pub gamma: usize,
    pub beta: Option<usize>,
    pub random: Option<usize>,
    pub y: usize,
    pub mean: Option<usize>,
    pub rstd: usize,
}

impl Norm {
    /// Columns of a row that a Hopper card norms in the kernel of the product that makes its branch.
    pub const WIDTH_BEHIND_PRODUCT: usize = 384;

    pub fn layout(&self) -> NormLayout {
        let shift = usize::from(self.kind.has_shift());
        let gamma = 1 + usize::from(self.residual);
        let y = usize::from(self.residual);
        NormLayout {
            gamma,
            beta: self.kind.has_shift().then_some(gamma + 1),
            random: self.dropout.map(|_| gamma + 1 + shift),
            y,
            mean: self.kind.has_shift().then_some(y + 1),
            rstd: y + 1 + shift,
        }
    }

    /// The tensor whose norm is taken.
    fn normed(&self) -> Operand {
        if self.residual {
            Operand::Output(0)
        } else {
            Operand::Input(0)
        }
    }
}

const FLOPS_PER_ELEMENT: u64 = 8;
const BACKWARD_FLOPS_PER_ELEMENT: u64 = 14;

/// The share of the copy bandwidth that a GPU's kernel reaches: it reads a row and waits for its
/// statistics before it writes it. The second is where it draws random numbers besides.
const FORWARD_SHARES: [f64; 2] = [0.88, 0.55];
/// The norm from known statistics, and the backward.
const APPLY_SHARE: f64 = 0.72;
/// Both where a row is a warp's, which waits for no other.
const WARP_SHARE: f64 = 0.88;

/// Elements that a lane has of a row, in fours, where a GPU's kernels give a row to a warp: rows of
/// 128, 256, 384 or 512 elements of two bytes.
pub fn cuda_quads_of_row(x: &TensorType) -> Option<usize> {
    const LANES: usize = 32;
    const MOST: usize = 4;
    let quads = x.width() / (4 * LANES);
    let is_whole = x.width().is_multiple_of(4 * LANES) && x.dtype.size() == 2;
    (is_whole && (1..=MOST).contains(&quads)).then_some(quads)
}

impl Declare for Norm {
    fn name(&self) -> &'static str {
        match self.kind {
            NormKind::Layer => "layer_norm",
            NormKind::Rms => "rms_norm",
        }
    }

    fn outputs(&self) -> &'static [&'static str] {
        match (self.residual, self.kind) {
            (true, NormKind::Layer) => &["stream", "", "mean", "rstd"],
            (true, NormKind::Rms) => &["stream", "", "rstd"],
            (false, NormKind::Layer) => &["", "mean", "rstd"],
            (false, NormKind::Rms) => &["", "rstd"],
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let layout = self.layout();
        let expected = layout.gamma
            + 1
            + usize::from(layout.beta.is_some())
            + usize::from(layout.random.is_some());
        expect_inputs(inputs, expected)?;
        let x = inputs[0];
        expect_rows("x", &x)?;
        expect(self.residual || self.dropout.is_none(), || {
            "dropout without a branch".to_owned()
        })?;
        if self.residual {
            expect_same("the branch", &inputs[1], &x)?;
        }
        expect_small("gamma", &inputs[layout.gamma], &[x.width()], &x)?;
        if let Some(beta) = layout.beta {
            expect_small("beta", &inputs[beta], &[x.width()], &x)?;
        }
        if let (Some(dropout), Some(random)) = (self.dropout, layout.random) {
            expect_dropout(dropout, &inputs[random])?;
        }
        let statistic = TensorType::new(x.shape.without_width(), x.dtype.accumulator());
        let mut outputs = vec![x];
        if self.residual {
            outputs.push(x);
        }
        if self.kind.has_shift() {
            outputs.push(statistic);
        }
        outputs.push(statistic);
        Ok(outputs)
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let layout = self.layout();
        let Some(dy) = backward.gradient_of(node.outputs[layout.y]) else {
            return match backward.gradient_of(node.outputs[0]) {
                None => Ok(()),
                Some(_) => Err(GraphError::Op {
                    op: self.name(),
                    node: node.name.clone(),
                    problem: "its sum is used but not its norm, and the addition alone has no \
                              backward"
                        .to_owned(),
                }),
            };
        };
        let stream = match self.normed() {
            Operand::Input(i) => node.inputs[i],
            Operand::Output(i) => node.outputs[i],
        };
        // What a norm of x alone finds there came from x's other readers, and has it in its sum.
        let residual_gradient = if self.residual {
            backward.gradient_of(stream)
        } else {
            backward.take_partial(stream)
        };
        let gamma = node.inputs[layout.gamma];
        let dgamma = backward.parameter_gradient(node, gamma)?;
        let dbeta = match layout.beta {
            Some(beta) => backward.parameter_gradient(node, node.inputs[beta])?,
            None => None,
        };
        let parameters = dgamma.is_some() || dbeta.is_some();
        let op = NormBackward {
            kind: self.kind,
            residual_gradient: residual_gradient.is_some(),
            dropout: self.dropout,
            parameters,
            value: false,
        };
        let inputs = [dy]
            .into_iter()
            .chain(residual_gradient)
            .chain([stream])
            .chain(layout.mean.map(|i| node.outputs[i]))
            .chain([node.outputs[layout.rstd], gamma])
            .chain(layout.random.map(|i| node.inputs[i]))
            .collect();
        let into = match (parameters, layout.beta) {
            (false, _) => Vec::new(),
            (true, None) => vec![dgamma],
            (true, Some(_)) => vec![dgamma, dbeta],
        };
        let outputs = backward.accumulate(node, "input", op, inputs, into)?;
        backward.contribute(node, node.inputs[0], outputs[0])?;
        if self.residual {
            let dbranch = outputs[usize::from(self.dropout.is_some())];
            backward.contribute(node, node.inputs[1], dbranch)?;
        }
        Ok(())
    }

    /// y from s and its statistics: one pass, no reduction.
    fn recipe(&self, output: usize) -> Option<Recipe> {
        let layout = self.layout();
        (output == layout.y).then(|| Recipe {
            op: Op::from(NormApply { kind: self.kind }),
            inputs: [self.normed()]
                .into_iter()
                .chain(layout.mean.map(Operand::Output))
                .chain([Operand::Output(layout.rstd), Operand::Input(layout.gamma)])
                .chain(layout.beta.map(Operand::Input))
                .collect(),
            output: 0,
        })
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        // s over x or, where nothing is dropped from it, over the branch.
        match (self.residual, self.dropout) {
            (true, None) => &[(0, 0), (1, 0)],
            (true, Some(_)) => &[(0, 0)],
            (false, _) => &[],
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([inputs[0].shape.elements() as u64, FLOPS_PER_ELEMENT])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.33
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let bytes = self.bytes(inputs, outputs);
        let drops = usize::from(self.dropout.is_some());
        let share = cuda_quads_of_row(&inputs[0]).map_or(FORWARD_SHARES[drops], |_| WARP_SHARE);
        Cost::of([KernelCost::waiting(1, bytes, share)])
    }

    /// To the product that makes the branch, whose kernel has whole rows of so many columns.
    fn joins(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Option<Joins> {
        let y = self.layout().y;
        let joins = self.residual
            && self.kind == NormKind::Layer
            && inputs[0].width() == Self::WIDTH_BEHIND_PRODUCT;
        joins.then(|| Joins {
            input: 1,
            bytes: sum([inputs[0].bytes(), outputs[0].bytes(), outputs[y].bytes()]),
            kind: JoinKind::Tail { over: true },
        })
    }
}

impl Declare for NormApply {
    fn name(&self) -> &'static str {
        "norm_apply"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        expect_inputs(inputs, if self.kind.has_shift() { 5 } else { 3 })?;
        let s = inputs[0];
        expect_rows("s", &s)?;
        let (rows, width) = (s.shape.without_width(), [s.width()]);
        let parts: &[(&str, &[usize])] = match self.kind {
            NormKind::Layer => &[
                ("mean", rows.dims()),
                ("rstd", rows.dims()),
                ("gamma", &width),
                ("beta", &width),
            ],
            NormKind::Rms => &[("rstd", rows.dims()), ("gamma", &width)],
        };
        for (input, (what, dims)) in inputs[1..].iter().zip(parts) {
            expect_small(what, input, dims, &s)?;
        }
        Ok(vec![s])
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([inputs[0].shape.elements() as u64, 4])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.36
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::waiting(1, bytes, APPLY_SHARE)])
    }
}

/// The positions of a [`NormBackward`]'s tensors.
#[derive(Clone, Copy, Debug)]
pub struct NormBackwardLayout {
    pub residual_gradient: Option<usize>,
    pub stream: usize,
    pub mean: Option<usize>,
    pub rstd: usize,
    pub gamma: usize,
    pub random: Option<usize>,
    pub beta: Option<usize>,
    pub dbranch: Option<usize>,
    pub value: Option<usize>,
    pub dgamma: Option<usize>,
    pub dbeta: Option<usize>,
}

impl NormBackward {
    /// Blocks that a GPU makes the sums over rows in, at most: two for each multiprocessor of a
    /// large card.
    pub const CUDA_BLOCKS: usize = 264;

    pub fn layout(&self) -> NormBackwardLayout {
        let stream = 1 + usize::from(self.residual_gradient);
        let shift = usize::from(self.kind.has_shift());
        let gamma = stream + shift + 2;
        let dropout = usize::from(self.dropout.is_some());
        let value = 1 + dropout;
        let dgamma = value + usize::from(self.value);
        NormBackwardLayout {
            residual_gradient: self.residual_gradient.then_some(1),
            stream,
            mean: self.kind.has_shift().then_some(stream + 1),
            rstd: stream + shift + 1,
            gamma,
            random: self.dropout.map(|_| gamma + 1),
            beta: (self.value && self.kind.has_shift()).then_some(gamma + 1 + dropout),
            dbranch: self.dropout.map(|_| 1),
            value: self.value.then_some(value),
            dgamma: self.parameters.then_some(dgamma),
            dbeta: (self.parameters && self.kind.has_shift()).then_some(dgamma + 1),
        }
    }
}

impl Declare for NormBackward {
    fn name(&self) -> &'static str {
        "norm_backward"
    }

    fn outputs(&self) -> &'static [&'static str] {
        match (self.dropout.is_some(), self.value) {
            (true, true) => &["", "branch", "value", "gamma", "beta"],
            (true, false) => &["", "branch", "gamma", "beta"],
            (false, true) => &["", "value", "gamma", "beta"],
            (false, false) => &["", "gamma", "beta"],
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        let layout = self.layout();
        let last = layout.beta.or(layout.random).unwrap_or(layout.gamma);
        expect_inputs(inputs, last + 1)?;
        let dy = inputs[0];
        expect_rows("dy", &dy)?;
        expect_same("the stream", &inputs[layout.stream], &dy)?;
        if let Some(i) = layout.residual_gradient {
            expect_same("the residual gradient", &inputs[i], &dy)?;
        }
        let rows = dy.shape.without_width();
        if let Some(mean) = layout.mean {
            expect_small("mean", &inputs[mean], rows.dims(), &dy)?;
        }
        expect_small("rstd", &inputs[layout.rstd], rows.dims(), &dy)?;
        expect_small("gamma", &inputs[layout.gamma], &[dy.width()], &dy)?;
        if let (Some(dropout), Some(random)) = (self.dropout, layout.random) {
            expect_dropout(dropout, &inputs[random])?;
        }
        if let Some(beta) = layout.beta {
            expect_small("beta", &inputs[beta], &[dy.width()], &dy)?;
        }
        let mut outputs = vec![dy];
        outputs.extend(
            [layout.dbranch, layout.value]
                .into_iter()
                .flatten()
                .map(|_| dy),
        );
        if self.parameters {
            let gradient = TensorType::new([dy.width()], dy.dtype.accumulator());
            outputs.push(gradient);
            if self.kind.has_shift() {
                outputs.push(gradient);
            }
        }
        Ok(outputs)
    }

    /// y from x̂, which the gradient is made of as well.
    fn value_again(&self) -> Option<ValueAgain> {
        let layout = self.layout();
        (!self.value).then(|| ValueAgain {
            op: Op::from(Self {
                value: true,
                ..self.clone()
            }),
            output: 1 + usize::from(layout.dbranch.is_some()),
            recipe: Op::from(NormApply { kind: self.kind }),
            inputs: [layout.stream]
                .into_iter()
                .chain(layout.mean)
                .chain([layout.rstd, layout.gamma])
                .map(Some)
                .chain(self.kind.has_shift().then_some(None))
                .collect(),
        })
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        // dx over what came down the residual path, else over dy, where y is not again. y over dy, and
        // dbranch beside it over s, which y is made of first.
        match (self.residual_gradient, self.value, self.dropout) {
            (true, false, _) => &[(1, 0), (0, 0)],
            (false, false, _) => &[(0, 0)],
            (true, true, None) => &[(1, 0), (0, 1)],
            (true, true, Some(_)) => &[(1, 0), (0, 2), (2, 1)],
            (false, true, None) => &[(0, 1)],
            (false, true, Some(_)) => &[(0, 2)],
        }
    }

    fn workspace(&self, inputs: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        let sums = u64::from(self.parameters) * (1 + u64::from(self.kind.has_shift()));
        match target {
            Target::Cpu => 0,
            // Each block's part of dgamma and dbeta.
            Target::Cuda => product([
                sums,
                inputs[0].rows().min(Self::CUDA_BLOCKS) as u64,
                inputs[0].width() as u64,
                inputs[0].dtype.accumulator().size(),
            ]),
        }
    }

    fn flops(&self, inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([
            inputs[0].shape.elements() as u64,
            BACKWARD_FLOPS_PER_ELEMENT,
        ])
    }

    fn cpu_sigmoids(&self) -> f64 {
        0.19
    }

    /// The second launch adds up the blocks' parts of dgamma and dbeta.
    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let bytes = self.bytes(inputs, outputs);
        let by_warps = cuda_quads_of_row(&inputs[0]).filter(|_| self.is_by_warps());
        match by_warps {
            Some(_) => Cost::of([KernelCost::waiting(1, bytes, WARP_SHARE)]),
            None => Cost::of([KernelCost::waiting(2, bytes, APPLY_SHARE)]),
        }
    }
}
