//! Sums, means and maxima of an expression over columns, groups of columns, rows or everything,
//! without the expression ever being stored.

use super::map::{Domain, Pointwise, Seed, emit_backward};
use super::{Declare, expect, product};
use crate::cost::{Cost, KernelCost};
use crate::cpu::CpuCost;
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::expression::{Broadcast, Expr};
use crate::graph::{Graph, Node, Target, TensorId};
use crate::loss::{Count, LossTerm};
use crate::types::{DType, Shape, TensorType};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceKind {
    Sum,
    /// Without a gradient: what takes it reads it detached.
    Max,
}

/// What is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// A row's columns: `[.., C]` to `[..]`.
    Columns,
    /// So many neighbouring columns: `[.., C]` to `[.., C/n]`.
    Groups(usize),
    /// All rows: `[.., C]` to `[C]`.
    Rows,
    /// The dimension before the last: `[B, T, C]` to `[B, C]`.
    Sequence,
    /// Everything: to `[]`.
    All,
}

/// Inputs: those of the expression, and the random state where it drops. Output: over all places
/// that belong to an element of it, the sum or the maximum of the expression; sums are made in
/// single precision at least.
#[derive(Clone, Debug, PartialEq)]
pub struct Reduce {
    /// Of one result.
    pub pointwise: Pointwise,
    pub kind: ReduceKind,
    /// Which element of the output a place belongs to.
    pub broadcast: Broadcast,
    pub output: TensorType,
    pub meets: Meets,
}

/// Which rows meet in a reduction that the forward pass goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meets {
    /// Nothing that could be cut: columns of a row, or rows of which each micro batch may have its
    /// own sum.
    Cut,
    /// Those of the micro batches that ranks run at the same time. It has no gradient.
    Ranks,
    /// All of the batch.
    Batch,
}

/// How a GPU makes a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaReduction {
    /// Output columns are the domain's: a column to a thread, rows in parts.
    Rows { parts: usize },
    /// Columns are summed: so many threads to an output, its places in parts.
    Lanes { lanes: usize, parts: usize },
    /// Few rows to an output: neighbouring outputs to a thread, which sums them by itself.
    Each,
}

impl CudaReduction {
    pub fn parts(self) -> usize {
        match self {
            Self::Rows { parts } | Self::Lanes { parts, .. } => parts,
            Self::Each => 1,
        }
    }
}

impl Over {
    fn shape(self, domain: &Shape) -> Option<Shape> {
        let dims = domain.dims();
        match self {
            Self::Columns => Some(domain.without_width()),
            Self::Groups(0) => None,
            Self::Groups(group) => domain
                .width()
                .is_multiple_of(group)
                .then(|| domain.with_width(domain.width() / group)),
            Self::Rows => Some(Shape::new(&[domain.width()])),
            Self::Sequence => {
                let (&width, rows) = dims.split_last()?;
                let (_, rows) = rows.split_last()?;
                let dims: Vec<usize> = rows.iter().copied().chain([width]).collect();
                Some(Shape::new(&dims))
            }
            Self::All => Some(Shape::new(&[])),
        }
    }

    fn broadcast(self, domain: &Shape) -> Broadcast {
        let full = Broadcast::full(domain);
        let columns = Broadcast {
            column_group: domain.width(),
            columns: 1,
            ..full
        };
        let rows = |broadcast: Broadcast| Broadcast {
            row_group: domain.rows(),
            rows: 1,
            ..broadcast
        };
        match self {
            Self::Columns => columns,
            Self::Groups(group) => Broadcast {
                column_group: group,
                columns: domain.width() / group.max(1),
                ..full
            },
            Self::Rows => rows(full),
            Self::Sequence => {
                let group = domain.dims()[domain.rank() - 2];
                Broadcast {
                    row_group: group,
                    rows: domain.rows() / group.max(1),
                    ..full
                }
            }
            Self::All => rows(columns),
        }
    }

    /// How many places belong to an element of the result.
    fn count(self, domain: &Shape) -> usize {
        let broadcast = self.broadcast(domain);
        domain.elements() / broadcast.elements().max(1)
    }
}

impl Graph {
    /// The sum of an expression of some tensors, over the shape of the largest of them, in the
    /// precision of sums.
    ///
    /// ```
    /// # use cinch_graph::{DType, Graph};
    /// # use cinch_graph::op::Over;
    /// # let mut graph = Graph::new(DType::Bf16);
    /// # let x = graph.batch("x", [2, 3, 8], DType::Bf16);
    /// let squares = graph.sum("squares", Over::Columns, &[x], |v| v[0].square())?;
    /// let length = graph.map("length", &[squares], |v| v[0].max(1e-16).sqrt())?;
    /// # assert_eq!(graph.ty(length).to_string(), "f32[2,3]");
    /// # Ok::<(), cinch_graph::GraphError>(())
    /// ```
    pub fn sum(
        &mut self,
        name: &str,
        over: Over,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let dtype = self.compute.accumulator();
        self.reduce(name, (ReduceKind::Sum, over, dtype), inputs, write)
    }

    /// The sum over all rows of a micro batch, which the forward goes on with although each micro
    /// batch has its own: a term of it is the average of what micro batches come to, and depends
    /// on how the batch is cut.
    pub fn sum_of_micro_batch(
        &mut self,
        name: &str,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        self.sum_of_rows(name, Meets::Cut, inputs, write)
    }

    /// As [`Self::sum_of_micro_batch`], but where several ranks run micro batches at the same time,
    /// the mean of what these come to, on each of them. It has no gradient: read it by
    /// [`Expr::detach`].
    ///
    /// A product of such a mean and a sum of the rank's own micro batch adds up over ranks to the
    /// product of both over all rows, and so does its gradient: nothing else has to be exchanged.
    pub fn mean_of_ranks(
        &mut self,
        name: &str,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        self.sum_of_rows(name, Meets::Ranks, inputs, write)
    }

    fn sum_of_rows(
        &mut self,
        name: &str,
        meets: Meets,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let shape = self.domain(inputs).shape;
        let write = |v: &[Expr]| [write(v)];
        let (pointwise, inputs) = self.pointwise("reduce", name, shape, inputs, write)?;
        let op = Reduce {
            pointwise,
            kind: ReduceKind::Sum,
            broadcast: Over::Rows.broadcast(&shape),
            output: TensorType::new([shape.width()], self.compute.accumulator()),
            meets,
        };
        Ok(self.emit(name, op, inputs)?[0])
    }

    /// As [`Self::sum`], divided by the number of summands.
    pub fn mean(
        &mut self,
        name: &str,
        over: Over,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let count = over.count(&self.domain(inputs).shape);
        self.sum(name, over, inputs, |v| write(v) / count as f64)
    }

    /// The largest value. It has no gradient: read it by [`Expr::detach`], as a softmax may.
    pub fn max(
        &mut self,
        name: &str,
        over: Over,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let dtype = self.compute.accumulator();
        self.reduce(name, (ReduceKind::Max, over, dtype), inputs, write)
    }

    /// Makes the mean of an expression a term of the loss: its sum over everything, divided by what
    /// is counted in the effective batch.
    pub fn loss_term(
        &mut self,
        name: &str,
        count: Count,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let shape = self.domain(inputs).shape;
        let term = self.term_inputs(name);
        let read = [inputs, &[term.inverse_count]].concat();
        let write = |v: &[Expr]| [write(&v[..v.len() - 1]) * &v[v.len() - 1]];
        let (pointwise, inputs) = self.pointwise("reduce", name, shape, &read, write)?;
        let output = TensorType::new([1], self.compute.accumulator());
        let op = Reduce {
            pointwise,
            kind: ReduceKind::Sum,
            broadcast: Over::All.broadcast(&shape),
            output,
            meets: Meets::Cut,
        };
        let value = self.emit(name, op, inputs)?[0];
        self.add_term(LossTerm {
            name: name.to_owned(),
            value,
            inputs: term,
            count,
            weight: 1.0,
        });
        Ok(value)
    }

    /// A reduction whose result is kept as `dtype`.
    pub fn reduce(
        &mut self,
        name: &str,
        (kind, over, dtype): (ReduceKind, Over, DType),
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let Domain { shape, .. } = self.domain(inputs);
        self.reduce_over(name, (kind, over), Domain { shape, dtype }, inputs, write)
    }

    /// As [`Self::reduce`], over a shape of its own, which may be larger than any of the tensors.
    pub fn reduce_over(
        &mut self,
        name: &str,
        (kind, over): (ReduceKind, Over),
        Domain { shape, dtype }: Domain,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let Some(output) = over.shape(&shape) else {
            return Err(GraphError::Op {
                op: "reduce",
                node: name.to_owned(),
                problem: format!("{shape} has no {over:?} to reduce"),
            });
        };
        let write = |v: &[Expr]| [write(v)];
        let (pointwise, inputs) = self.pointwise("reduce", name, shape, inputs, write)?;
        let op = Reduce {
            pointwise,
            kind,
            broadcast: over.broadcast(&shape),
            output: TensorType::new(output, dtype),
            meets: match over {
                Over::Rows | Over::All if shape.rows() > 1 => Meets::Batch,
                _ => Meets::Cut,
            },
        };
        Ok(self.emit(name, op, inputs)?[0])
    }
}

impl Reduce {
    /// Places that belong to one element of the output: rows, and columns of each.
    pub fn span(&self) -> (usize, usize) {
        let shape = &self.pointwise.shape;
        (
            shape.rows() / self.broadcast.rows.max(1),
            shape.width() / self.broadcast.columns.max(1),
        )
    }

    /// Into how many parts the CPU cuts the rows of an output: by the size of the problem, so that
    /// the order of a sum does not depend on threads.
    pub fn cpu_parts(&self) -> usize {
        /// Elements worth a task of their own.
        const TASK: usize = 1 << 16;
        /// Output rows that are tasks enough.
        const ROWS: usize = 16;
        const MOST: usize = 32;
        let (rows, _) = self.span();
        if self.broadcast.rows >= ROWS {
            return 1;
        }
        let parts = self.pointwise.shape.elements().div_ceil(TASK);
        parts.min(MOST).min(rows).max(1)
    }

    pub fn cuda_reduction(&self) -> CudaReduction {
        /// Blocks that fill a large card.
        const BLOCKS: usize = 528;
        /// Threads of a block, to all of which one output belongs.
        const BLOCK: usize = 256;
        /// Rows of an output that are not worth a second thread.
        const FEW: usize = 16;
        let (rows, columns) = self.span();
        let outputs = self.broadcast.elements().max(1);
        if columns == 1 && rows <= FEW {
            return CudaReduction::Each;
        }
        if columns == 1 {
            // A block has the columns of a warp, or of as long vectors as divide them.
            let width = self.broadcast.columns;
            let sides = [8 * 32, 4 * 32, 2 * 32];
            let side = sides.into_iter().find(|side| width.is_multiple_of(*side));
            let columns = width.div_ceil(side.unwrap_or(32));
            let blocks = columns.saturating_mul(self.broadcast.rows);
            let parts = BLOCKS.div_ceil(blocks.max(1)).min(rows.div_ceil(32));
            return CudaReduction::Rows {
                parts: parts.max(1),
            };
        }
        let places = rows.saturating_mul(columns);
        if places >= 4 * BLOCK {
            let parts = BLOCKS.div_ceil(outputs).min(places.div_ceil(16 * BLOCK));
            CudaReduction::Lanes {
                lanes: BLOCK,
                parts: parts.max(1),
            }
        } else {
            let lanes = places.div_ceil(4).next_power_of_two().min(32);
            CudaReduction::Lanes { lanes, parts: 1 }
        }
    }

    /// The parts of all outputs, where there are several.
    fn partials(&self, parts: usize) -> u64 {
        match parts {
            1 => 0,
            _ => product([
                parts as u64,
                self.broadcast.elements() as u64,
                self.output.dtype.accumulator().size(),
            ]),
        }
    }
}

/// The share of the copy bandwidth that a reduction reaches on a GPU: it waits for its sums.
const BANDWIDTH_SHARE: f64 = 0.6;

impl Declare for Reduce {
    fn name(&self) -> &'static str {
        match self.kind {
            ReduceKind::Sum => "reduce_sum",
            ReduceKind::Max => "reduce_max",
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        self.pointwise.check(inputs)?;
        let results = self.pointwise.expression.outputs().len();
        expect(results == 1, || {
            format!("an expression of {results} results")
        })?;
        let domain = self.pointwise.shape;
        let fits = self.broadcast.divides(&domain)
            && self.broadcast.elements() == self.output.shape.elements();
        expect(fits, || {
            format!("{} is no reduction of {domain}", self.output.shape)
        })?;
        expect(self.output.dtype.is_float(), || {
            format!(
                "the result is {}, expected a floating-point type",
                self.output.dtype
            )
        })?;
        Ok(vec![self.output])
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let graph = backward.graph();
        let seed = if let Some(term) = graph.term_of(node.outputs[0]) {
            Seed::Term(term.inputs.weight, graph.loss_scale)
        } else {
            let gradient = backward.gradient_of(node.outputs[0]);
            gradient.map_or(Seed::None, Seed::Tensor)
        };
        match (self.kind, self.meets) {
            (ReduceKind::Sum, Meets::Cut | Meets::Batch) => {
                let broadcast = self.broadcast;
                emit_backward(&self.pointwise, backward, node, &[seed], broadcast, &[])
            }
            (ReduceKind::Max, _) | (_, Meets::Ranks) => Err(GraphError::NotDifferentiable {
                op: self.name(),
                node: node.name.clone(),
            }),
        }
    }

    fn whole_batch(&self) -> Option<&'static str> {
        let reason = "a sum over all rows of the batch enters the result of each";
        (self.meets == Meets::Batch).then_some(reason)
    }

    fn is_mean_of_ranks(&self) -> bool {
        self.meets == Meets::Ranks
    }

    fn workspace(&self, _: &[TensorType], _: &[TensorType], target: Target) -> u64 {
        let parts = match target {
            Target::Cpu => self.cpu_parts(),
            Target::Cuda => self.cuda_reduction().parts(),
        };
        self.partials(parts)
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        product([
            self.pointwise.elements(),
            self.pointwise.expression.flops().saturating_add(1),
        ])
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        // Few outputs are cut into parts, many are dealt out.
        let elements = self.pointwise.shape.elements();
        let parts = self.cpu_parts().saturating_mul(self.broadcast.rows);
        let tasks = parts.min(elements.div_ceil(CpuCost::TASK));
        let reduced = self.pointwise.cpu_sigmoids([&self.broadcast]);
        CpuCost {
            sigmoids: reduced + self.cpu_sigmoids() * self.flops(inputs, outputs) as f64,
            tasks,
            bytes: self.bytes(inputs, outputs),
            ..CpuCost::default()
        }
    }

    fn cuda_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let launches = if self.cuda_reduction().parts() > 1 {
            2
        } else {
            1
        };
        let bytes = self.bytes(inputs, outputs);
        Cost::of([KernelCost::waiting(launches, bytes, BANDWIDTH_SHARE)])
    }
}
