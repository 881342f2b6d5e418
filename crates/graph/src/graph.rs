//! The graph itself: tensors, nodes in execution order, parameters and blocks.

use crate::cost::Cost;
use crate::error::GraphError;
use crate::op::Op;
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
    /// A weight's copy in the precision in which it is multiplied.
    ComputeCopy,
    /// A parameter's gradient: nodes add to it, over a whole step.
    Gradient,
    /// A parameter's optimizer state.
    State,
    /// What the loss is multiplied by in half precision, from step to step.
    LossScale,
    /// What a micro batch brings: filled from outside before the micro step.
    Batch,
    /// Scalars of the step: random key, learning rate, number of targets.
    Control,
    /// A small result that outlives the step: loss, gradient norm.
    Result,
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

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    Normal {
        std: f64,
    },
    Uniform {
        bound: f64,
    },
    /// `ln 1, ln 2, … ln N` along the last dimension: Mamba's `A_log`.
    LogRange,
    /// The inverse softplus of values spread log-uniformly over `low..high`: Mamba's time step
    /// bias.
    InverseSoftplus {
        low: f64,
        high: f64,
    },
}

/// A weight and all that belongs to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// What the optimizer updates.
    pub master: TensorId,
    /// What the forward and backward pass read; the same tensor unless the precisions differ.
    pub compute: TensorId,
    pub trainable: bool,
    /// Whether weight decay applies (not to biases, norms and the like).
    pub decay: bool,
    pub init: Init,
    /// Set by differentiation, for a trainable parameter; none where the gradient is gone
    /// before the backward is over.
    pub gradient: Option<TensorId>,
    /// First and second moment, or their codes; set by differentiation.
    pub moments: Option<[TensorId; 2]>,
    /// The scales of the codes, where moments are kept in eight bits.
    pub scales: Option<[TensorId; 2]>,
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

/// Nodes in execution order over tensors in creation order.
#[derive(Clone, Debug, PartialEq)]
pub struct Graph {
    pub tensors: Vec<Tensor>,
    pub nodes: Vec<Node>,
    pub parameters: Vec<Parameter>,
    pub blocks: Vec<Block>,
    /// What activations are computed in.
    pub compute: DType,
    pub loss: Option<TensorId>,
    /// What a graph without a loss is run for.
    pub result: Option<TensorId>,
    /// The random key, present as soon as an op drops out.
    pub random: Option<TensorId>,
    /// The inverse of the number of targets in the effective batch, present with a loss.
    pub inverse_count: Option<TensorId>,
    /// The state of dynamic loss scaling; set by differentiation of a graph in half precision.
    pub loss_scale: Option<TensorId>,
    open_block: Option<BlockId>,
    num_streams: u32,
}

impl Parameter {
    /// All that the optimizer remembers of it.
    pub fn states(&self) -> impl Iterator<Item = TensorId> + use<> {
        let moments = self.moments.into_iter().flatten();
        moments.chain(self.scales.into_iter().flatten())
    }
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
            loss: None,
            result: None,
            random: None,
            inverse_count: None,
            loss_scale: None,
            open_block: None,
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

    /// A trainable weight read by matrix products, in the compute precision.
    pub fn weight(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> TensorId {
        self.parameter(name, shape.into(), init, true, self.compute)
    }

    /// A trainable weight that is always read in the accumulator's precision and never
    /// decays: biases, norms, and what enters an exponential.
    pub fn small_weight(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> TensorId {
        self.parameter(name, shape.into(), init, false, self.compute.accumulator())
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
        let master = self.add_tensor(name, TensorType::new(shape, accumulator), Role::Parameter);
        let copy = if compute == accumulator {
            master
        } else {
            let name = format!("{name}.{compute}");
            self.add_tensor(name, TensorType::new(shape, compute), Role::ComputeCopy)
        };
        self.parameters.push(Parameter {
            master,
            compute: copy,
            trainable: true,
            decay,
            init,
            gradient: None,
            moments: None,
            scales: None,
        });
        copy
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

    /// The random-state input, created at its first use.
    pub fn random_state(&mut self) -> TensorId {
        if let Some(id) = self.random {
            return id;
        }
        let ty = TensorType::new([Self::RANDOM_WORDS], DType::I32);
        let id = self.add_tensor("random", ty, Role::Control);
        self.random = Some(id);
        id
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
        self.count_parameters(|p| p.trainable)
    }

    fn count_parameters(&self, which: impl Fn(&Parameter) -> bool) -> u64 {
        self.parameters
            .iter()
            .filter(|p| which(p))
            .map(|p| self.ty(p.master).shape.elements() as u64)
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

    /// The kernels that a GPU runs for one node.
    pub fn cuda_cost(&self, node: &Node) -> Cost {
        node.op
            .declaration()
            .cuda_cost(&self.types(&node.inputs), &self.types(&node.outputs))
    }
}
