//! A fused pointwise expression over tensors: one loop, one kernel. Its backward is another one,
//! for what is read element by element, and a sum ([`Reduce`]) for what is broadcast.

use super::{
    Declare, Meets, Op, Operand, Recipe, Reduce, ReduceKind, expect, expect_dropout, product,
};
use crate::cpu::CpuCost;
use crate::differentiate::Backward;
use crate::error::GraphError;
use crate::expression::{Broadcast, Builder, Expr, Expression, Scalar, adjoints};
use crate::graph::{Dropout, Graph, Node, TensorId};
use crate::types::{DType, Shape, TensorType};

/// An input of an expression: its type, and which element belongs to a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Read {
    pub broadcast: Broadcast,
    pub dtype: DType,
}

/// An expression over the places of `shape`, all dimensions but the last taken together as rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Pointwise {
    pub expression: Expression,
    pub shape: Shape,
    pub reads: Vec<Read>,
}

impl Pointwise {
    /// Types and sizes of the inputs; the last one is the random state where something is dropped.
    pub(super) fn check(&self, inputs: &[TensorType]) -> Result<(), String> {
        let random = usize::from(self.expression.drops());
        super::expect_inputs(inputs, self.reads.len() + random)?;
        expect(self.expression.num_inputs() <= self.reads.len(), || {
            "the expression reads an input that is not there".to_owned()
        })?;
        let sizes = (
            self.expression.scalars().len() <= Expression::MOST_SCALARS,
            self.expression.num_slots() <= Expression::MOST_SLOTS,
        );
        expect(sizes == (true, true), || {
            "the expression is too long for one kernel: make two of it".to_owned()
        })?;
        for (index, (read, input)) in self.reads.iter().zip(inputs).enumerate() {
            let is_number = input.dtype.is_float() || input.dtype == DType::I32;
            expect(is_number && input.dtype == read.dtype, || {
                format!("input {index} is {}, expected {}", input.dtype, read.dtype)
            })?;
            // Of a list of scalars the first may be read everywhere.
            let elements = (read.broadcast.elements(), input.shape.elements());
            let fits = read.broadcast.divides(&self.shape)
                && (elements.0 == elements.1 || (read.broadcast.is_single() && elements.1 > 0));
            expect(fits, || {
                format!(
                    "input {index} {} cannot be read over {}",
                    input.shape, self.shape
                )
            })?;
        }
        for scalar in self.expression.scalars() {
            if let Scalar::Kept { stream, rate } = *scalar {
                let rate = rate.value();
                expect_dropout(Dropout { rate, stream }, &inputs[self.reads.len()])?;
            }
        }
        Ok(())
    }

    pub fn elements(&self) -> u64 {
        self.shape.elements() as u64
    }

    pub(super) fn flops(&self) -> u64 {
        product([self.elements(), self.expression.flops().max(1)])
    }

    /// What a CPU does to bring broadcast inputs to their places, and results from there to what
    /// they are reduced to, in sigmoids.
    pub(super) fn cpu_sigmoids<'a>(
        &'a self,
        reduced: impl IntoIterator<Item = &'a Broadcast>,
    ) -> f64 {
        /// Of the part of a row that is copied or summed, and of each of its places.
        const ROW: f64 = 30.0;
        const PLACE: f64 = 0.65;
        let reads = self.reads.iter().map(|read| &read.broadcast);
        let moved = reads.filter(|read| !read.is_full(&self.shape) && !read.is_single());
        let moved = moved.chain(reduced).count() as f64;
        let rows = self.shape.rows() as f64;
        moved * rows * (ROW + PLACE * self.shape.width() as f64)
    }

    fn is_full(&self, input: usize) -> bool {
        self.reads[input].broadcast.is_full(&self.shape)
    }
}

/// Inputs: those of the expression, and the random state where it drops. Outputs: its results, at
/// every place; the last `accumulated` of them are added to.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    pub pointwise: Pointwise,
    pub outputs: Vec<DType>,
    pub accumulated: usize,
    in_place: Vec<(usize, usize)>,
}

impl Map {
    pub fn new(pointwise: Pointwise, outputs: Vec<DType>, accumulated: usize) -> Self {
        // An output may take over what is read at its own place only.
        let transient = outputs.len().saturating_sub(accumulated);
        let pairs = outputs[..transient].iter().enumerate();
        let in_place = pairs.flat_map(|(output, dtype)| {
            let reads = pointwise.reads.iter().enumerate();
            let full = reads.filter(|(input, read)| {
                pointwise.is_full(*input) && read.dtype.is_float() && read.dtype == *dtype
            });
            full.map(move |(input, _)| (input, output))
        });
        Self {
            in_place: in_place.collect(),
            pointwise,
            outputs,
            accumulated,
        }
    }
}

/// What an expression is computed over, and what its results are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Domain {
    pub shape: Shape,
    pub dtype: DType,
}

impl Graph {
    /// An expression of some tensors, over the shape of the largest of them. How the others are
    /// read over it follows from their shapes: see [`Broadcast::infer`]. The result has the
    /// element type of the largest.
    ///
    /// ```
    /// # use cinch_graph::{DType, Graph};
    /// # let mut graph = Graph::new(DType::F32);
    /// # let x = graph.batch("x", [2, 3, 8], DType::F32);
    /// # let gate = graph.batch("gate", [2, 3, 2], DType::F32);
    /// let y = graph.map("gated", &[x, gate], |v| &v[0] * v[1].sigmoid())?;
    /// # assert_eq!(graph.ty(y), graph.ty(x));
    /// # Ok::<(), cinch_graph::GraphError>(())
    /// ```
    pub fn map(
        &mut self,
        name: &str,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        let domain = self.domain(inputs);
        self.map_over(name, domain, inputs, write)
    }

    /// As [`Self::map`], over a shape of its own.
    pub fn map_over(
        &mut self,
        name: &str,
        domain: Domain,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> Expr,
    ) -> Result<TensorId, GraphError> {
        Ok(self.map_all(name, domain, inputs, |v| [write(v)])?[0])
    }

    /// As [`Self::map_over`], with several results of one pass.
    pub fn map_all<const N: usize>(
        &mut self,
        name: &str,
        domain: Domain,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> [Expr; N],
    ) -> Result<Vec<TensorId>, GraphError> {
        let (pointwise, inputs) = self.pointwise("map", name, domain.shape, inputs, write)?;
        let op = Map::new(pointwise, vec![domain.dtype; N], 0);
        self.emit(name, op, inputs)
    }

    /// The shape and type of the largest tensor, the first of several.
    pub(super) fn domain(&self, inputs: &[TensorId]) -> Domain {
        let mut types = inputs.iter().map(|&id| self.ty(id));
        let first = types.next();
        let first = first.unwrap_or(TensorType::new([], self.compute));
        let largest = types.fold(first, |largest, ty| {
            let more = ty.shape.elements() > largest.shape.elements();
            if more { ty } else { largest }
        });
        Domain {
            shape: largest.shape,
            dtype: if largest.dtype.is_float() {
                largest.dtype
            } else {
                self.compute.accumulator()
            },
        }
    }

    /// The expression over a shape, and the tensors that it does read.
    pub(super) fn pointwise<const N: usize>(
        &mut self,
        op: &'static str,
        name: &str,
        shape: Shape,
        inputs: &[TensorId],
        write: impl FnOnce(&[Expr]) -> [Expr; N],
    ) -> Result<(Pointwise, Vec<TensorId>), GraphError> {
        // A tensor that is given twice is one input: its gradient is one sum.
        let first = |id: &TensorId| inputs.iter().position(|other| other == id);
        let numbers = inputs.iter().filter_map(first);
        let (expression, used) = Expr::build(numbers, write);
        let mut reads = Vec::with_capacity(used.len());
        let mut tensors = Vec::with_capacity(used.len() + 1);
        for &input in &used {
            let (id, ty) = (inputs[input], self.ty(inputs[input]));
            let Some(broadcast) = Broadcast::infer(&ty.shape, &shape) else {
                let tensor = &self.tensor(id).name;
                return Err(GraphError::Op {
                    op,
                    node: name.to_owned(),
                    problem: format!("`{tensor}` {} cannot be read over {shape}", ty.shape),
                });
            };
            reads.push(Read {
                broadcast,
                dtype: ty.dtype,
            });
            tensors.push(id);
        }
        if expression.drops() {
            tensors.push(self.random_state());
        }
        let pointwise = Pointwise {
            expression,
            shape,
            reads,
        };
        Ok((pointwise, tensors))
    }
}

impl Declare for Map {
    fn name(&self) -> &'static str {
        "map"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, String> {
        self.pointwise.check(inputs)?;
        let results = self.pointwise.expression.outputs().len();
        expect(
            results == self.outputs.len() && self.accumulated <= results,
            || format!("{} outputs of {results} results", self.outputs.len()),
        )?;
        let outputs = self.outputs.iter();
        for dtype in outputs.clone() {
            expect(dtype.is_float(), || {
                format!("the result is {dtype}, expected a floating-point type")
            })?;
        }
        let shape = self.pointwise.shape;
        Ok(outputs
            .map(|&dtype| TensorType::new(shape, dtype))
            .collect())
    }

    fn backward(&self, backward: &mut Backward<'_>, node: &Node) -> Result<(), GraphError> {
        let gradients = node.outputs.iter().map(|&id| backward.gradient_of(id));
        let seeds: Vec<Seed> = gradients
            .map(|gradient| gradient.map_or(Seed::None, Seed::Tensor))
            .collect();
        let full = Broadcast::full(&self.pointwise.shape);
        let values = node.outputs.iter().map(|&id| (id, full));
        emit_backward(
            &self.pointwise,
            backward,
            node,
            &seeds,
            full,
            &values.collect::<Vec<_>>(),
        )
    }

    /// The expression of that output again: what it reads is mostly kept for its derivative.
    fn recipe(&self, output: usize) -> Option<Recipe> {
        let mut builder = Builder::default();
        let numbers = builder.import(&self.pointwise.expression);
        let result = *self.pointwise.expression.outputs().get(output)?;
        let (expression, used) = builder.extract(&[numbers[result as usize]], &[]);
        let random = expression.drops().then_some(self.pointwise.reads.len());
        let inputs = used.iter().copied().chain(random).map(Operand::Input);
        let inputs = inputs.collect();
        let pointwise = Pointwise {
            expression,
            shape: self.pointwise.shape,
            reads: used.iter().map(|&i| self.pointwise.reads[i]).collect(),
        };
        Some(Recipe {
            op: Op::from(Self::new(pointwise, vec![self.outputs[output]], 0)),
            inputs,
            output: 0,
        })
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &self.in_place
    }

    fn flops(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> u64 {
        self.pointwise.flops()
    }

    fn cpu_cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> CpuCost {
        let moved = self.pointwise.cpu_sigmoids([]);
        let computed = self.cpu_sigmoids() * self.flops(inputs, outputs) as f64;
        let (elements, bytes) = (self.pointwise.shape.elements(), self.bytes(inputs, outputs));
        CpuCost::vector(moved + computed, elements, bytes)
    }
}

/// What reaches a result of an expression.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Seed {
    None,
    Tensor(TensorId),
    /// The result is a term of the loss: the gradient is its weight, in half precision times the
    /// loss scale.
    Term(TensorId, Option<TensorId>),
}

/// The backward of an expression over its domain: sums for what is broadcast, then one map for
/// all that is read element by element. `seed` is how the gradients of the results are read.
/// `values` are the results themselves, which are read where that spares an input.
pub(super) fn emit_backward(
    forward: &Pointwise,
    backward: &mut Backward<'_>,
    node: &Node,
    seeds: &[Seed],
    seed: Broadcast,
    values: &[(TensorId, Broadcast)],
) -> Result<(), GraphError> {
    let mut derived = Derived::new(forward, node, seeds, seed, values);
    let mut whole = Vec::new();
    for input in 0..forward.reads.len() {
        let id = node.inputs[input];
        let Some(gradient) = derived.gradients[input] else {
            continue;
        };
        if !backward.wants(id) {
            continue;
        }
        if forward.is_full(input) {
            whole.push((id, gradient));
            continue;
        }
        let accumulator = backward.accumulator_of(id);
        let ty = backward.graph().ty(id);
        let (pointwise, inputs) = derived.extract(backward, &[gradient]);
        let op = Reduce {
            pointwise,
            kind: ReduceKind::Sum,
            broadcast: forward.reads[input].broadcast,
            output: TensorType::new(ty.shape, gradient_type(ty.dtype, accumulator)),
            meets: Meets::Cut,
        };
        let name = backward.graph().tensor(id).name.clone();
        match accumulator {
            Some(into) => {
                backward.accumulate(node, &name, op, inputs, vec![Some(into)])?;
            }
            None => {
                let sum = backward.emit(node, &name, op, inputs)?[0];
                backward.contribute(node, id, sum)?;
            }
        }
    }
    if whole.is_empty() {
        return Ok(());
    }
    // Accumulators are the last outputs.
    whole.sort_by_key(|(id, _)| backward.accumulator_of(*id).is_some());
    let numbers: Vec<u32> = whole.iter().map(|(_, number)| *number).collect();
    let (pointwise, inputs) = derived.extract(backward, &numbers);
    let into: Vec<_> = whole
        .iter()
        .filter_map(|(id, _)| backward.accumulator_of(*id))
        .map(Some)
        .collect();
    let outputs = whole.iter().map(|(id, _)| {
        let accumulator = backward.accumulator_of(*id);
        gradient_type(backward.graph().ty(*id).dtype, accumulator)
    });
    let op = Map::new(pointwise, outputs.collect(), into.len());
    let gradients = backward.accumulate(node, "input", op, inputs, into)?;
    for ((id, _), gradient) in whole.into_iter().zip(gradients) {
        if backward.accumulator_of(id).is_none() {
            backward.contribute(node, id, gradient)?;
        }
    }
    Ok(())
}

/// A gradient has its tensor's type; a parameter's is summed over a step.
fn gradient_type(dtype: DType, accumulator: Option<TensorId>) -> DType {
    match accumulator {
        Some(_) => dtype.accumulator(),
        None => dtype,
    }
}

/// The derivative of an expression, before it is cut into ops.
struct Derived {
    builder: Builder,
    shape: Shape,
    /// Of each input.
    gradients: Vec<Option<u32>>,
    /// What the derivative may read: the inputs, the results, their gradients.
    sources: Vec<(TensorId, Broadcast)>,
    /// Scalars that are results, and their sources.
    results: Vec<(u32, u32)>,
    random: Option<TensorId>,
}

impl Derived {
    fn new(
        forward: &Pointwise,
        node: &Node,
        seeds: &[Seed],
        seed: Broadcast,
        values: &[(TensorId, Broadcast)],
    ) -> Self {
        let mut builder = Builder::default();
        let numbers = builder.import(&forward.expression);
        let inputs = node.inputs.iter().zip(&forward.reads);
        let mut sources: Vec<_> = inputs.map(|(&id, read)| (id, read.broadcast)).collect();
        let outputs = forward.expression.outputs();
        let results = outputs.iter().zip(values).filter_map(|(&output, &value)| {
            let number = numbers[output as usize];
            let is_leaf = builder.scalar(number).operands().next().is_none();
            (!is_leaf).then(|| {
                sources.push(value);
                (number, sources.len() as u32 - 1)
            })
        });
        let results = results.collect();
        let seeds: Vec<Option<u32>> = seeds
            .iter()
            .map(|gradient| match *gradient {
                Seed::None => None,
                Seed::Term(weight, scale) => {
                    let mut product = builder.constant(1.0);
                    for id in [Some(weight), scale].into_iter().flatten() {
                        sources.push((id, seed));
                        let factor = builder.input(sources.len() - 1);
                        product = builder.multiply(product, factor);
                    }
                    Some(product)
                }
                Seed::Tensor(id) => {
                    sources.push((id, seed));
                    Some(builder.input(sources.len() - 1))
                }
            })
            .collect();
        let gradients = adjoints(&mut builder, &forward.expression, &numbers, &seeds);
        Self {
            builder,
            shape: forward.shape,
            gradients,
            sources,
            results,
            random: node
                .inputs
                .last()
                .copied()
                .filter(|_| forward.expression.drops()),
        }
    }

    /// Some gradients as an expression of their own, with the tensors that it reads. A result is
    /// read instead of computed where that takes no more tensors.
    fn extract(&mut self, backward: &Backward<'_>, numbers: &[u32]) -> (Pointwise, Vec<TensorId>) {
        let plain = self.builder.extract(numbers, &[]);
        let read = self.builder.extract(numbers, &self.results);
        let (expression, used) = if read.1.len() <= plain.1.len() {
            read
        } else {
            plain
        };
        let graph = backward.graph();
        let reads = used.iter().map(|&source| {
            let (id, broadcast) = self.sources[source];
            Read {
                broadcast,
                dtype: graph.ty(id).dtype,
            }
        });
        let random = self.random.filter(|_| expression.drops());
        let tensors = used.iter().map(|&source| self.sources[source].0);
        let pointwise = Pointwise {
            shape: self.shape,
            reads: reads.collect(),
            expression,
        };
        (pointwise, tensors.chain(random).collect())
    }
}
