//! Differentiation as a pass: walks the forward nodes backwards, lets each op emit its
//! backward nodes, and appends the optimizer's update.

use std::ops::Deref;

use crate::error::GraphError;
use crate::graph::{Graph, Node, Phase, Role, TensorId};
use crate::op::{AdamW, Add, GradientFormat, GradientNorm, LossScale, MomentFormat, Op};
use crate::parameter::{Parameter, Storage};
use crate::types::{DType, TensorType};

/// How weights are updated.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
    /// Clip the norm of all gradients to this.
    pub max_norm: Option<f64>,
    /// How the moments of all but the smallest parameters are kept.
    pub moments: MomentFormat,
    /// How the gradients of weights without a master are kept.
    pub gradients: GradientFormat,
}

/// A graph with its backward and update: one training step.
///
/// Nodes come in the order forward, backward (with recomputation in between), update. All but
/// the update run once per micro batch; [`TrainingGraph::update_in_backward`] makes a step of one
/// micro batch whose updates stand among the backward nodes.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingGraph {
    pub(crate) graph: Graph,
    /// [norm, factor] of the gradients.
    pub gradient_norm: TensorId,
    /// [learning rate, bias corrections], filled before each update.
    pub step_scalars: TensorId,
    /// Blocks whose activations are recomputed.
    pub num_recomputed: usize,
    /// Of these, how many have activations in host memory instead.
    pub num_offloaded: usize,
    /// How often the backward runs, where weights are updated inside it.
    pub backward_passes: Option<usize>,
}

impl Deref for TrainingGraph {
    type Target = Graph;

    fn deref(&self) -> &Graph {
        &self.graph
    }
}

impl TrainingGraph {
    /// Operations of one micro step that the gradient needs, recomputation not counted.
    pub fn useful_flops(&self) -> u128 {
        self.phase_flops(|phase| matches!(phase, Phase::Forward | Phase::Backward))
    }

    /// Operations of one micro step as it is run.
    pub fn micro_flops(&self) -> u128 {
        self.phase_flops(|phase| !matches!(phase, Phase::Exchange | Phase::Update))
    }

    /// Operations that a step has once, whatever the number of its micro batches.
    pub fn update_flops(&self) -> u128 {
        self.phase_flops(|phase| matches!(phase, Phase::Exchange | Phase::Update))
    }

    /// A step may have more operations than 64 bits count where none of its nodes has.
    fn phase_flops(&self, which: impl Fn(Phase) -> bool) -> u128 {
        self.nodes
            .iter()
            .filter(|node| which(node.phase))
            .map(|node| u128::from(self.flops(node)))
            .sum()
    }
}

/// Differentiates `graph` with respect to its trainable parameters.
pub fn differentiate(graph: Graph, optimizer: &Optimizer) -> Result<TrainingGraph, GraphError> {
    if graph.terms.is_empty() {
        return Err(GraphError::NoLoss);
    }
    let mut graph = graph;
    let reached = reaches_loss(&graph);
    add_gradients(&mut graph, &reached, optimizer);
    add_loss_scale(&mut graph);
    let forward = graph.nodes.len();
    let mut backward = Backward::new(&mut graph);
    for index in (0..forward).rev() {
        backward.current = index;
        let node = backward.graph.nodes[index].clone();
        if backward.is_needed(&node) {
            node.op.declaration().backward(&mut backward, &node)?;
        }
        backward.release(|id| node.outputs.contains(&id));
    }
    backward.release(|_| true);
    let nodes = backward.nodes;
    graph.nodes.extend(nodes);
    let (gradient_norm, step_scalars) = add_update(&mut graph, optimizer)?;
    Ok(TrainingGraph {
        graph,
        gradient_norm,
        step_scalars,
        num_recomputed: 0,
        num_offloaded: 0,
        backward_passes: None,
    })
}

/// Whether each tensor takes part in the loss.
fn reaches_loss(graph: &Graph) -> Vec<bool> {
    let mut reaches = vec![false; graph.tensors.len()];
    for term in &graph.terms {
        reaches[term.value.index()] = true;
    }
    for node in graph.nodes.iter().rev() {
        let passes = node.op.declaration().passes_gradient();
        if passes && node.outputs.iter().any(|id| reaches[id.index()]) {
            for id in &node.inputs {
                reaches[id.index()] = true;
            }
        }
    }
    reaches
}

/// Gives every trainable parameter a gradient and two moments, all gradients first, so that
/// tensors of one kind are neighbours. A parameter that the loss does not depend on gets none:
/// no node would ever write its gradient.
fn add_gradients(graph: &mut Graph, reached: &[bool], optimizer: &Optimizer) {
    let format = optimizer.moments;
    let trained: Vec<usize> = (0..graph.parameters.len())
        .filter(|&index| {
            let parameter = &graph.parameters[index];
            parameter.is_trained() && reached[parameter.compute.index()]
        })
        .collect();
    for &index in &trained {
        let ty = gradient_type(graph, &graph.parameters[index], optimizer.gradients);
        let gradient = add_beside(graph, index, "gradient", ty, Role::Gradient);
        graph.parameters[index].gradient = Some(gradient);
    }
    let mut moments = Vec::with_capacity(2 * trained.len());
    for kind in ["m", "v"] {
        for &index in &trained {
            let ty = graph.ty(graph.parameters[index].master);
            let ty = format.of(&ty).moment(&ty);
            moments.push(add_beside(graph, index, kind, ty, Role::State));
        }
    }
    let (first, second) = moments.split_at(trained.len());
    for (&index, (&m, &v)) in trained.iter().zip(first.iter().zip(second)) {
        graph.parameters[index].moments = Some([m, v]);
        let ty = graph.ty(graph.parameters[index].master);
        graph.parameters[index].scales = format.of(&ty).scales(&ty).map(|ty| {
            ["m.scales", "v.scales"].map(|kind| add_beside(graph, index, kind, ty, Role::State))
        });
    }
}

/// Gradients are in the precision of sums, which is also what their op computes them in. That of
/// a weight without a master may be rounded to the weight's type, where one node makes it in one
/// piece: several would add up what was rounded.
fn gradient_type(graph: &Graph, parameter: &Parameter, format: GradientFormat) -> TensorType {
    let kept = graph.ty(parameter.master);
    let full = TensorType {
        dtype: kept.dtype.accumulator(),
        ..kept
    };
    if parameter.storage != Storage::TrainedAsRead || format == GradientFormat::Full {
        return full;
    }
    let mut reads = graph.nodes.iter().flat_map(|node| {
        let inputs = node.inputs.iter().enumerate();
        let own = inputs.filter(|(_, id)| **id == parameter.compute);
        own.map(|(input, _)| node.op.declaration().rounds_gradient(input))
    });
    match (reads.next(), reads.next()) {
        (Some(true), None) => kept,
        _ => full,
    }
}

/// A tensor that belongs to a parameter and is named after it.
fn add_beside(
    graph: &mut Graph,
    parameter: usize,
    kind: &str,
    ty: TensorType,
    role: Role,
) -> TensorId {
    let master = graph.tensor(graph.parameters[parameter].master);
    let name = format!("{}.{kind}", master.name);
    graph.add_tensor(name, ty, role)
}

/// Half precision loses gradients below 6e-8, so there they are computed at a larger scale.
fn add_loss_scale(graph: &mut Graph) {
    graph.loss_scale = (graph.compute == DType::F16)
        .then(|| graph.add_tensor("loss_scale", LossScale::tensor_type(), Role::LossScale));
}

fn add_update(
    graph: &mut Graph,
    optimizer: &Optimizer,
) -> Result<(TensorId, TensorId), GraphError> {
    let gradients: Vec<TensorId> = graph.parameters.iter().filter_map(|p| p.gradient).collect();
    let norm = Op::from(GradientNorm {
        max_norm: optimizer.max_norm,
        scaled: graph.loss_scale.is_some(),
        from_squares: false,
    });
    let mut node =
        graph.build_node(norm, "gradient_norm".into(), gradients, None, Phase::Update)?;
    let gradient_norm = node.outputs[0];
    redirect(&mut node, graph.loss_scale.map(Some));
    graph.tensors[gradient_norm.index()].role = Role::Result;
    graph.nodes.push(node);
    let step_scalars = graph.add_tensor(
        "step_scalars",
        TensorType::new([AdamW::NUM_SCALARS], DType::F32),
        Role::Control,
    );
    for parameter in graph.parameters.clone() {
        let (Some(gradient), Some([m, v])) = (parameter.gradient, parameter.moments) else {
            continue;
        };
        let copy = (parameter.compute != parameter.master).then_some(parameter.compute);
        let op = AdamW {
            beta1: optimizer.beta1,
            beta2: optimizer.beta2,
            epsilon: optimizer.epsilon,
            weight_decay: if parameter.decay {
                optimizer.weight_decay
            } else {
                0.0
            },
            learning_rate_scale: parameter.learning_rate_scale,
            parameter: graph.ty(parameter.master).dtype,
            copy: copy.map(|id| graph.ty(id).dtype),
            moments: optimizer.moments.of(&graph.ty(parameter.master)),
            factor: true,
        };
        let scales = parameter.scales.into_iter().flatten();
        graph.nodes.push(Node {
            op: op.into(),
            name: format!("{}.update", graph.tensor(parameter.master).name),
            inputs: vec![gradient, step_scalars, gradient_norm],
            outputs: [parameter.master, m, v]
                .into_iter()
                .chain(scales)
                .chain(copy)
                .collect(),
            block: None,
            phase: Phase::Update,
        });
    }
    Ok((gradient_norm, step_scalars))
}

/// What an op's backward sees and emits into.
pub struct Backward<'g> {
    graph: &'g mut Graph,
    nodes: Vec<Node>,
    /// The gradient so far of each forward tensor.
    gradients: Vec<Option<TensorId>>,
    /// Whether a trainable parameter reaches the tensor.
    requires: Vec<bool>,
    /// The accumulator of each parameter, by the tensor that ops read.
    accumulators: Vec<Option<TensorId>>,
    /// Nodes that wait for the backward of what made a tensor.
    held_back: Vec<(TensorId, Vec<Node>)>,
    current: usize,
}

impl<'g> Backward<'g> {
    fn new(graph: &'g mut Graph) -> Self {
        let num_tensors = graph.tensors.len();
        let mut requires = vec![false; num_tensors];
        let mut accumulators = vec![None; num_tensors];
        for parameter in &graph.parameters {
            requires[parameter.compute.index()] = parameter.gradient.is_some();
            accumulators[parameter.compute.index()] = parameter.gradient;
        }
        for node in &graph.nodes {
            let passes = node.op.declaration().passes_gradient();
            if passes && node.inputs.iter().any(|id| requires[id.index()]) {
                for id in &node.outputs {
                    requires[id.index()] = true;
                }
            }
        }
        Self {
            graph,
            nodes: Vec::new(),
            gradients: vec![None; num_tensors],
            requires,
            accumulators,
            held_back: Vec::new(),
            current: 0,
        }
    }

    /// Keeps what `emit` adds until the node is differentiated that made `tensor`: right after
    /// that, gradients of weights can be computed together.
    pub(crate) fn hold_back(
        &mut self,
        tensor: TensorId,
        emit: impl FnOnce(&mut Self) -> Result<(), GraphError>,
    ) -> Result<(), GraphError> {
        let before = self.nodes.len();
        emit(self)?;
        let nodes = self.nodes.split_off(before);
        self.held_back.push((tensor, nodes));
        Ok(())
    }

    fn release(&mut self, now: impl Fn(TensorId) -> bool) {
        for (tensor, nodes) in std::mem::take(&mut self.held_back) {
            match now(tensor) {
                true => self.nodes.extend(nodes),
                false => self.held_back.push((tensor, nodes)),
            }
        }
    }

    /// Whether a gradient has to pass through `node`: it makes the loss, or a gradient
    /// reaches one of its outputs.
    fn is_needed(&self, node: &Node) -> bool {
        node.outputs.iter().any(|&id| {
            self.graph.term_of(id).is_some()
                || (self.wants(id) && self.gradients[id.index()].is_some())
        })
    }

    pub fn graph(&self) -> &Graph {
        self.graph
    }

    /// The gradient that has reached a forward tensor.
    pub fn gradient_of(&self, tensor: TensorId) -> Option<TensorId> {
        self.gradients[tensor.index()]
    }

    /// Whether anything needs this tensor's gradient.
    pub fn wants(&self, tensor: TensorId) -> bool {
        self.requires[tensor.index()]
    }

    /// The accumulator of the gradient of a weight of `node`, if it is trained. A weight that
    /// is computed from parameters is refused: its gradient would have nowhere to go.
    pub fn parameter_gradient(
        &self,
        node: &Node,
        weight: TensorId,
    ) -> Result<Option<TensorId>, GraphError> {
        let accumulator = self.accumulators[weight.index()];
        if accumulator.is_none() && self.wants(weight) {
            let name = &self.graph.tensor(weight).name;
            return Err(GraphError::Op {
                op: node.op.name(),
                node: node.name.clone(),
                problem: format!("`{name}` is read as a weight but is not a parameter"),
            });
        }
        Ok(accumulator)
    }

    /// The accumulator of a tensor's gradient, where it is a trained parameter.
    pub fn accumulator_of(&self, tensor: TensorId) -> Option<TensorId> {
        self.accumulators[tensor.index()]
    }

    /// Takes what has reached `tensor` so far, for an op that adds to it in place of a
    /// separate addition.
    pub fn take_partial(&mut self, tensor: TensorId) -> Option<TensorId> {
        self.gradients[tensor.index()].take()
    }

    /// Adds `gradient` to what has reached `tensor`.
    pub fn contribute(
        &mut self,
        node: &Node,
        tensor: TensorId,
        gradient: TensorId,
    ) -> Result<(), GraphError> {
        if !self.wants(tensor) {
            return Ok(());
        }
        if self.accumulators[tensor.index()].is_some() {
            let name = &self.graph.tensor(tensor).name;
            return Err(GraphError::Op {
                op: node.op.name(),
                node: node.name.clone(),
                problem: format!("reads the parameter `{name}` where activations belong"),
            });
        }
        let sum = match self.gradients[tensor.index()] {
            None => gradient,
            Some(partial) => self.emit(node, "sum", Add, vec![partial, gradient])?[0],
        };
        self.gradients[tensor.index()] = Some(sum);
        Ok(())
    }

    /// Appends a backward node of `node` with fresh outputs.
    pub fn emit(
        &mut self,
        node: &Node,
        suffix: &str,
        op: impl Into<Op>,
        inputs: Vec<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        self.accumulate(node, suffix, op, inputs, Vec::new())
    }

    /// As [`Self::emit`], the last outputs being the accumulators `into`; where there is none,
    /// the op computes something that nobody reads.
    pub fn accumulate(
        &mut self,
        node: &Node,
        suffix: &str,
        op: impl Into<Op>,
        inputs: Vec<TensorId>,
        into: Vec<Option<TensorId>>,
    ) -> Result<Vec<TensorId>, GraphError> {
        let name = format!("d.{}.{suffix}", node.name);
        let mut new =
            self.graph
                .build_node(op.into(), name, inputs, node.block, Phase::Backward)?;
        redirect(&mut new, into);
        let outputs = new.outputs.clone();
        self.nodes.push(new);
        Ok(outputs)
    }

    /// Replaces the forward node by one whose op has more outputs; returns all of them.
    pub fn upgrade(&mut self, op: Op) -> Result<Vec<TensorId>, GraphError> {
        self.upgrade_into(op, None, Vec::new())
    }

    /// As [`Self::upgrade`], with one more input, the last outputs being the accumulators `into`.
    pub fn upgrade_into(
        &mut self,
        op: Op,
        more: Option<TensorId>,
        into: Vec<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        let old = self.graph.nodes[self.current].clone();
        let inputs = old.inputs.into_iter().chain(more).collect();
        let mut new = self
            .graph
            .build_node(op, old.name, inputs, old.block, old.phase)?;
        new.outputs[..old.outputs.len()].copy_from_slice(&old.outputs);
        redirect(&mut new, into.into_iter().map(Some));
        let outputs = new.outputs.clone();
        self.graph.nodes[self.current] = new;
        Ok(outputs)
    }
}

/// Makes `into` the last outputs of a node.
fn redirect<I>(node: &mut Node, into: I)
where
    I: IntoIterator<Item = Option<TensorId>, IntoIter: DoubleEndedIterator>,
{
    let last = node.outputs.iter_mut().rev();
    for (output, accumulator) in last.zip(into.into_iter().rev()) {
        *output = accumulator.unwrap_or(*output);
    }
}
