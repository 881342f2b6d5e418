//! The graph itself: tensors, nodes in execution order, parameters and blocks.

use crate::cost::{Cost, Joins, Wire};
use crate::cpu::CpuCost;
use crate::error::GraphError;
use crate::loss::LossTerm;
use crate::op::{Dequantise, Op, Quantisation};
use crate::parameter::{FilePart, Init, Parameter, Storage};
use crate::types::{DType, Shape, TensorType};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl TensorId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl BlockId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a tensor lives and why it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A weight in the precision in which it is updated.
    Parameter,
    /// A frozen weight that lies in host memory; nodes read what is fetched of it.
    Offloaded,
    /// A weight's copy in the precision in which it is multiplied.
    ComputeCopy,
    /// A parameter's gradient: nodes add to it, over a whole step.
    Gradient,
    /// A parameter's optimizer state.
    State,
    /// What the loss is multiplied by in half precision, from step to step.
    LossScale,
    /// What the tokens read so far have left for those that follow: keys and values, states. An
    /// op that has it as an output reads it too.
    Cache,
    /// What a micro batch brings: filled from outside before the micro step.
    Batch,
    /// Scalars of the step: random key, learning rate, number of targets.
    Control,
    /// A small result that outlives the step: loss, gradient norm.
    Result,
    /// An activation's copy in host memory, from the forward to the backward.
    HostActivation,
    /// Produced by one node, read by later ones.
    Activation,
}

impl Role {
    /// Whether the tensor keeps its place over the whole step.
    pub fn is_persistent(self) -> bool {
        self != Self::Activation
    }

    /// Whether several nodes may write it, each adding to what is there.
    pub fn is_accumulator(self) -> bool {
        matches!(self, Self::Gradient | Self::Result)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub ty: TensorType,
    pub role: Role,
}

/// Which part of the step a node belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    Forward,
    /// Work that was done before and is repeated, because its result was not kept.
    Recompute,
    Backward,
    /// Between ranks, once per step: in its last micro batch, where gradients are complete. The
    /// nodes stand among the backward, and earlier micro batches leave them out.
    Exchange,
    /// The optimizer's, once per step: after the last micro batch or, where the step has only
    /// one, among its backward nodes.
    Update,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub op: Op,
    pub name: String,
    pub inputs: Vec<TensorId>,
    pub outputs: Vec<TensorId>,
    pub block: Option<BlockId>,
    pub phase: Phase,
}

/// A repeated part of the model: the unit in which recomputation is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    pub name: String,
}

/// What a graph is planned for. Only workspaces depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Cpu,
    Cuda,
}

/// Dropout in one op: the rate, and which of the step's random streams it reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    pub rate: f64,
    pub stream: u32,
}

impl Dropout {
    /// The random word below which an element is dropped. Rates are in steps of 2⁻¹⁶, so that the
    /// upper half of a word decides and the last step of making it can be left out.
    pub fn threshold(rate: f64) -> u32 {
        ((rate * 65_536.0) as u32) << 16
    }
}

/// The random state of ops that have as many rows in a micro batch: what its row offset counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomState {
    pub id: TensorId,
    /// Rows of a micro batch; None where they are its tokens, sequences × length.
    pub rows: Option<usize>,
}

/// Nodes in execution order over tensors in creation order.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    pub tensors: Vec<Tensor>,
    pub nodes: Vec<Node>,
    pub parameters: Vec<Parameter>,
    pub blocks: Vec<Block>,
    /// What activations are computed in.
    pub compute: DType,
    /// Whether trained weights that products read in a coarser type than that of sums have a
    /// master in the latter; otherwise they are kept as they are read. In single precision there
    /// is no difference.
    pub masters: bool,
    /// The loss is the weighted sum of these.
    pub terms: Vec<LossTerm>,
    /// What a graph without a loss is run for.
    pub result: Option<TensorId>,
    /// The random keys, present as soon as an op drops out.
    pub random: Vec<RandomState>,
    /// The state of dynamic loss scaling; set by differentiation of a graph in half precision.
    pub loss_scale: Option<TensorId>,
    open_block: Option<BlockId>,
    counted_rows: Option<(String, usize)>,
    num_streams: u32,
}

impl Graph {
    /// Words in the random-state input: two of key, one of row offset, one spare.
    pub const RANDOM_WORDS: usize = 4;

    pub fn new(compute: DType) -> Self {
        Self {
            tensors: Vec::new(),
            nodes: Vec::new(),
            parameters: Vec::new(),
            blocks: Vec::new(),
            compute,
            masters: true,
            terms: Vec::new(),
            result: None,
            random: Vec::new(),
            loss_scale: None,
            open_block: None,
            counted_rows: None,
            num_streams: 0,
        }
    }

    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    pub fn ty(&self, id: TensorId) -> TensorType {
        self.tensors[id.index()].ty
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The tensor of that name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        let index = self.tensors.iter().position(|tensor| tensor.name == name)?;
        Some(TensorId(index as u32))
    }

    pub fn types(&self, ids: &[TensorId]) -> Vec<TensorType> {
        ids.iter().map(|&id| self.ty(id)).collect()
    }

    pub fn add_tensor(&mut self, name: impl Into<String>, ty: TensorType, role: Role) -> TensorId {
        let id = TensorId(self.tensors.len() as u32);
        self.tensors.push(Tensor {
            name: name.into(),
            ty,
            role,
        });
        id
    }

    /// An input that is filled before each micro batch.
    pub fn batch(&mut self, name: &str, shape: impl Into<Shape>, dtype: DType) -> TensorId {
        self.add_tensor(name, TensorType::new(shape, dtype), Role::Batch)
    }

    /// A trained weight read by matrix products, in the compute precision.
    pub fn weight(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> TensorId {
        self.parameter(name, shape.into(), init, true, self.compute)
    }

    /// A trained weight that is always read in the accumulator's precision and never
    /// decays: biases, norms, and what enters an exponential.
    pub fn small_weight(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> TensorId {
        self.parameter(name, shape.into(), init, false, self.compute.accumulator())
    }

    /// A weight that is read as [`Self::weight`] and never updated.
    pub fn frozen_weight(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> TensorId {
        self.frozen(name, shape.into(), init, self.compute)
    }

    /// A weight that is read as [`Self::small_weight`] and never updated.
    pub fn frozen_small_weight(
        &mut self,
        name: &str,
        shape: impl Into<Shape>,
        init: Init,
    ) -> TensorId {
        self.frozen(name, shape.into(), init, self.compute.accumulator())
    }

    /// A matrix that is kept as codes and never updated. What is returned is a transient matrix
    /// of numbers: it exists while it is read, and is made again for the backward.
    pub fn quantised_weight(
        &mut self,
        name: &str,
        shape: impl Into<Shape>,
        init: Init,
        quantisation: Quantisation,
    ) -> Result<TensorId, GraphError> {
        let shape = shape.into();
        let tensors = quantisation.tensors(&shape);
        let master = self.add_tensor(name, tensors.codes, Role::Parameter);
        let code_scales: Vec<TensorId> = tensors
            .scales
            .into_iter()
            .map(|(kind, ty)| self.add_tensor(format!("{name}.{kind}"), ty, Role::Parameter))
            .collect();
        let op = Dequantise {
            quantisation,
            shape,
            dtype: self.compute,
        };
        let inputs = [master].into_iter().chain(code_scales.clone()).collect();
        let compute = self.emit(format!("{name}.numbers"), op, inputs)?[0];
        self.parameters.push(Parameter {
            code_scales,
            storage: Storage::Quantised(quantisation),
            ..new_parameter(name, (master, compute), shape, init)
        });
        Ok(compute)
    }

    fn frozen(&mut self, name: &str, shape: Shape, init: Init, dtype: DType) -> TensorId {
        let id = self.add_tensor(name, TensorType::new(shape, dtype), Role::Parameter);
        self.parameters.push(Parameter {
            storage: Storage::Frozen,
            ..new_parameter(name, (id, id), shape, init)
        });
        id
    }

    fn parameter(
        &mut self,
        name: &str,
        shape: Shape,
        init: Init,
        decay: bool,
        compute: DType,
    ) -> TensorId {
        let accumulator = self.compute.accumulator();
        let as_read = !self.masters && compute != accumulator;
        let kept = if as_read { compute } else { accumulator };
        let master = self.add_tensor(name, TensorType::new(shape, kept), Role::Parameter);
        let copy = if compute == kept {
            master
        } else {
            let name = format!("{name}.{compute}");
            self.add_tensor(name, TensorType::new(shape, compute), Role::ComputeCopy)
        };
        self.parameters.push(Parameter {
            storage: match as_read {
                true => Storage::TrainedAsRead,
                false => Storage::Trained,
            },
            decay,
            ..new_parameter(name, (master, copy), shape, init)
        });
        copy
    }

    /// Multiplies the learning rate of the parameter that was added last.
    pub fn scale_learning_rate(&mut self, scale: f64) {
        if let Some(parameter) = self.parameters.last_mut() {
            parameter.learning_rate_scale = scale;
        }
    }

    /// Says under which names files keep the rows of the parameter that was added last.
    pub fn name_parts(&mut self, parts: impl IntoIterator<Item = (String, usize)>) {
        if let Some(parameter) = self.parameters.last_mut() {
            let part = |(name, rows)| FilePart { name, rows };
            parameter.parts = parts.into_iter().map(part).collect();
        }
    }

    /// Everything emitted until [`Self::leave_block`] belongs to one block.
    pub fn enter_block(&mut self, name: impl Into<String>) {
        self.open_block = Some(BlockId(self.blocks.len() as u32));
        self.blocks.push(Block { name: name.into() });
    }

    pub fn leave_block(&mut self) {
        self.open_block = None;
    }

    /// A dropout of its own stream, or none where the rate is zero.
    pub fn dropout(&mut self, rate: f64) -> Option<Dropout> {
        (rate > 0.0).then(|| {
            let stream = self.num_streams;
            self.num_streams += 1;
            Dropout { rate, stream }
        })
    }

    /// Says how many rows of a micro batch the ops from here on have, where they are not those of
    /// its tokens. Masks follow from a row's place in the effective batch, so ops that count rows
    /// differently read random states of their own; `name` tells them apart.
    pub fn count_rows(&mut self, name: &str, rows: usize) {
        self.counted_rows = Some((format!("random.{name}"), rows));
    }

    /// The random-state input of the rows that are counted, created at its first use.
    pub fn random_state(&mut self) -> TensorId {
        let (name, rows) = match &self.counted_rows {
            None => ("random", None),
            Some((name, rows)) => (name.as_str(), Some(*rows)),
        };
        let mut known = self.random.iter();
        if let Some(known) = known.find(|known| self.tensor(known.id).name == name) {
            return known.id;
        }
        let ty = TensorType::new([Self::RANDOM_WORDS], DType::I32);
        let id = self.add_tensor(name.to_owned(), ty, Role::Control);
        self.random.push(RandomState { id, rows });
        id
    }

    /// What a run of the graph leaves for the next one.
    pub fn cache(&mut self, name: &str, ty: TensorType) -> TensorId {
        self.add_tensor(name, ty, Role::Cache)
    }

    /// As [`Self::emit`], where the node's last outputs are `caches`; returns the others.
    pub fn emit_into(
        &mut self,
        name: impl Into<String>,
        op: impl Into<Op>,
        inputs: Vec<TensorId>,
        caches: &[TensorId],
    ) -> Result<Vec<TensorId>, GraphError> {
        let (op, name) = (op.into(), name.into());
        let problem = |problem: String| GraphError::Op {
            op: op.name(),
            node: name.clone(),
            problem,
        };
        let types = op
            .declaration()
            .infer(&self.types(&inputs))
            .map_err(problem)?;
        let fresh = types.len().checked_sub(caches.len());
        let fresh = fresh.ok_or_else(|| problem(format!("has no {} caches", caches.len())))?;
        for (expected, &cache) in types[fresh..].iter().zip(caches) {
            let tensor = self.tensor(cache);
            if tensor.ty != *expected {
                let found = format!("`{}` is {}, expected {expected}", tensor.name, tensor.ty);
                return Err(problem(found));
            }
        }
        let outputs: Vec<TensorId> = types[..fresh]
            .iter()
            .map(|&ty| self.add_tensor(name.clone(), ty, Role::Activation))
            .collect();
        self.nodes.push(Node {
            op,
            name,
            inputs,
            outputs: outputs.iter().chain(caches).copied().collect(),
            block: self.open_block,
            phase: Phase::Forward,
        });
        Ok(outputs)
    }

    /// Appends a forward node in the open block; returns its outputs.
    pub fn emit(
        &mut self,
        name: impl Into<String>,
        op: impl Into<Op>,
        inputs: Vec<TensorId>,
    ) -> Result<Vec<TensorId>, GraphError> {
        let (op, name) = (op.into(), name.into());
        let node = self.build_node(op, name, inputs, self.open_block, Phase::Forward)?;
        let outputs = node.outputs.clone();
        self.nodes.push(node);
        Ok(outputs)
    }

    /// A node with fresh activations as outputs, not yet part of the order.
    pub(crate) fn build_node(
        &mut self,
        op: Op,
        name: String,
        inputs: Vec<TensorId>,
        block: Option<BlockId>,
        phase: Phase,
    ) -> Result<Node, GraphError> {
        let types = op
            .declaration()
            .infer(&self.types(&inputs))
            .map_err(|problem| GraphError::Op {
                op: op.name(),
                node: name.clone(),
                problem,
            })?;
        let labels = op.declaration().outputs();
        let outputs = types
            .into_iter()
            .enumerate()
            .map(|(i, ty)| {
                let label = labels.get(i).copied().unwrap_or("");
                let full = if label.is_empty() {
                    name.clone()
                } else {
                    format!("{name}.{label}")
                };
                self.add_tensor(full, ty, Role::Activation)
            })
            .collect();
        Ok(Node {
            op,
            name,
            inputs,
            outputs,
            block,
            phase,
        })
    }

    pub fn num_parameters(&self) -> u64 {
        self.count_parameters(|_| true)
    }

    pub fn num_trainable(&self) -> u64 {
        self.count_parameters(Parameter::is_trained)
    }

    fn count_parameters(&self, which: impl Fn(&Parameter) -> bool) -> u64 {
        self.parameters
            .iter()
            .filter(|p| which(p))
            .map(|p| p.shape.elements() as u64)
            .fold(0, u64::saturating_add)
    }

    /// The floating-point operations of one node.
    pub fn flops(&self, node: &Node) -> u64 {
        node.op
            .declaration()
            .flops(&self.types(&node.inputs), &self.types(&node.outputs))
    }

    /// Bytes that one node must move at the least: what it reads and what it writes.
    pub fn bytes(&self, node: &Node) -> u64 {
        node.op
            .declaration()
            .bytes(&self.types(&node.inputs), &self.types(&node.outputs))
    }

    /// Refuses a tensor or a node whose bytes or operations 64 bits do not count. Figures stop at
    /// the largest number, so what reaches it is not the figure any more.
    pub fn check_sizes(&self) -> Result<(), GraphError> {
        let counted = |figure: u64, unit, what: &dyn Fn() -> String| match figure {
            u64::MAX => Err(GraphError::TooLarge { what: what(), unit }),
            _ => Ok(()),
        };
        for tensor in &self.tensors {
            let what = || format!("the tensor `{}` {} has", tensor.name, tensor.ty);
            counted(tensor.ty.bytes(), "bytes", &what)?;
        }
        for node in &self.nodes {
            let what = |verb| format!("{} `{}` {verb}", node.op.name(), node.name);
            counted(self.flops(node), "operations", &|| what("takes"))?;
            counted(self.bytes(node), "bytes", &|| what("moves"))?;
        }
        counted(self.num_parameters(), "parameters", &|| {
            "the model has".to_owned()
        })
    }

    /// What one node sends to other ranks, if anything.
    pub fn wire(&self, node: &Node) -> Option<Wire> {
        node.op
            .declaration()
            .wire(&self.types(&node.inputs), &self.types(&node.outputs))
    }

    /// What one node moves between host memory and the arena, beside what is computed.
    pub fn bus_bytes(&self, node: &Node) -> u64 {
        node.op
            .declaration()
            .bus_bytes(&self.types(&node.inputs), &self.types(&node.outputs))
    }

    /// The kernels that a GPU runs for one node.
    pub fn cuda_cost(&self, node: &Node) -> Cost {
        node.op
            .declaration()
            .cuda_cost(&self.types(&node.inputs), &self.types(&node.outputs))
    }

    /// What a CPU does for one node.
    pub fn cpu_cost(&self, node: &Node) -> CpuCost {
        node.op
            .declaration()
            .cpu_cost(&self.types(&node.inputs), &self.types(&node.outputs))
    }

    /// What a node is to a product before it.
    pub fn joins(&self, node: &Node) -> Option<Joins> {
        node.op
            .declaration()
            .joins(&self.types(&node.inputs), &self.types(&node.outputs))
    }
}

/// A trained parameter without decay, gradient and states, named as itself in files.
fn new_parameter(
    name: &str,
    (master, compute): (TensorId, TensorId),
    shape: Shape,
    init: Init,
) -> Parameter {
    Parameter {
        master,
        compute,
        shape,
        storage: Storage::Trained,
        decay: false,
        learning_rate_scale: 1.0,
        init,
        parts: vec![FilePart {
            name: name.to_owned(),
            rows: shape.dims().first().copied().unwrap_or(1),
        }],
        code_scales: Vec::new(),
        gradient: None,
        moments: None,
        scales: None,
        shard: None,
    }
}
