//! Which way is fastest: the library's algorithms of a product, and kernels for several joined ones.

use std::mem::{Discriminant, discriminant};

use cinch_graph::DType;
use cinch_graph::op::ActivationKind;

use super::CudaExecutor;
use crate::cuda::blas;
use crate::cuda::command::{Argument, Command, Joined, Kernel, Product, Tail, TailKind};
use crate::cuda::driver::Stream;
use crate::cuda::noise;
use crate::cuda::op::joined;
use crate::cuda::timing::{Trials, fastest};
use crate::error::EngineError;

/// What decides how joined products are best computed: the products, what follows them, and how they
/// belong together.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct JoinedKey {
    joined: Joined,
    products: Vec<(blas::Key, Column)>,
    tails: Vec<TailKey>,
}

/// Where a term of a sum adds to C, from the beginning of C in bytes. Others have a C of their own,
/// whose place decides nothing.
type Column = Option<i64>;

/// What is known of a tail but its addresses.
#[derive(PartialEq, Eq, Hash)]
pub(super) enum TailKey {
    Dropped(blas::Key, Column),
    Activation(Function, Written),
    Derivative(Function, Written),
    Gate(Function, Written),
    GateGradients(Function, Written),
    /// By columns.
    Narrow(usize),
    /// Whether something is dropped before it.
    Norm(bool, Written),
    /// By the sides of the matrix.
    FirstGradient([usize; 2]),
}

type Function = Discriminant<ActivationKind>;

/// Whether a tail writes all that it can: C or a sum beside what it makes of it, or a value again.
type Written = bool;

pub(super) fn joined_key(joined: Joined, products: &[Product], tails: &[Tail]) -> JoinedKey {
    let column = |product: &Product| {
        let first = products.first().filter(|_| joined == Joined::Sum)?;
        Some(
            product
                .c
                .address
                .wrapping_sub(first.c.address)
                .cast_signed(),
        )
    };
    let tail = |tail: &Tail| match &tail.kind {
        TailKind::Dropped { product, .. } => TailKey::Dropped(blas::key(product), column(product)),
        TailKind::Activation {
            function, from, to, ..
        } => TailKey::Activation(discriminant(function), from != to),
        TailKind::Derivative {
            function, value, ..
        } => TailKey::Derivative(discriminant(function), value.is_some()),
        TailKind::Gate {
            function, up, to, ..
        } => TailKey::Gate(discriminant(function), up != to),
        TailKind::GateGradients {
            function, value, ..
        } => TailKey::GateGradients(discriminant(function), value.is_some()),
        TailKind::Narrow { columns, .. } => TailKey::Narrow(*columns),
        TailKind::Norm(norm) => TailKey::Norm(norm.dropout.is_some(), norm.sum.is_some()),
        TailKind::FirstGradient(gradient) => {
            TailKey::FirstGradient([gradient.outputs, gradient.inputs])
        }
    };
    let product = |product: &Product| (blas::key(product), column(product));
    JoinedKey {
        joined,
        products: products.iter().map(product).collect(),
        tails: tails.iter().map(tail).collect(),
    }
}

/// What decides which way is best: of each command all but its addresses, and the streams of its
/// dropout, of which each layer has its own.
#[derive(PartialEq, Eq, Hash)]
pub(super) enum WayKey {
    Launch(Kernel, [u32; 3], Vec<u32>),
    Products(Vec<blas::Key>),
    Other,
}

pub(super) fn ways_key(ways: &[Vec<Command>]) -> Vec<WayKey> {
    let number = |argument: &Argument| match argument {
        Argument::U32(number) => Some(*number),
        _ => None,
    };
    let key = |command: &Command| match command {
        Command::Launch {
            kernel,
            shape,
            arguments,
        }
        | Command::LaunchTable {
            kernel,
            shape,
            arguments,
            ..
        } => {
            let numbers = arguments.iter().filter_map(number).collect();
            WayKey::Launch(*kernel, shape.grid, numbers)
        }
        Command::Product(product) => WayKey::Products(vec![blas::key(product)]),
        Command::Products { products, .. } => {
            WayKey::Products(products.iter().map(blas::key).collect())
        }
        _ => WayKey::Other,
    };
    ways.iter().flatten().map(key).collect()
}

/// The products among some commands.
fn products(commands: &[Command]) -> Vec<Product> {
    let of = |command: &Command| match command {
        Command::Product(product) => vec![*product],
        Command::Products { products, .. } => products.clone(),
        _ => Vec::new(),
    };
    commands.iter().flat_map(of).collect()
}

impl CudaExecutor {
    /// Finds out by which algorithm the library computes each of some products fastest.
    pub(super) fn choose_algorithms(
        &mut self,
        products: &[Product],
        dtype: DType,
    ) -> Result<(), EngineError> {
        for product in products {
            if self.blas.is_ready(product) {
                continue;
            }
            let is_timed = self.blas.is_timed();
            let product = std::slice::from_ref(product);
            if is_timed {
                self.fill(product, dtype)?;
            }
            let base = self.arena.address;
            self.blas.prepare(&product[0], base, &self.stream)?;
            if is_timed {
                self.issue_all(&noise::clear(product), dtype, &self.stream)?;
            }
        }
        Ok(())
    }

    /// Puts numbers into what products read.
    fn fill(&mut self, products: &[Product], dtype: DType) -> Result<(), EngineError> {
        let fill = noise::fill(products);
        for command in &fill {
            self.make_ready(command, dtype)?;
        }
        self.issue_all(&fill, dtype, &self.stream)
    }

    /// Finds out what is fastest for joined products: a kernel for all of them, or one by one.
    pub(super) fn choose(
        &mut self,
        joined: Joined,
        (heads, products, tails): (&[Command], &[Product], &[Tail]),
        dtype: DType,
    ) -> Result<(), EngineError> {
        self.choose_algorithms(products, dtype)?;
        // Whatever is known of their like: these have kernels of their own, those after them too.
        let ways = joined::ways(joined, products, tails, self.context.info.card());
        let apart = heads.iter().chain(tails.iter().map(|tail| &tail.command));
        for command in ways.iter().flatten().chain(apart) {
            self.make_ready(command, dtype)?;
        }
        let key = joined_key(joined, products, tails);
        if self.joined.contains_key(&key) {
            return Ok(());
        }
        let chosen = if ways.is_empty() || !self.blas.is_timed() {
            // The same every time.
            ways.len().min(1)
        } else {
            self.fill(products, dtype)?;
            let mut trials = Trials::new(&self.stream)?;
            let chosen = fastest(1 + ways.len(), |candidate, runs| {
                trials.time(candidate, runs, || match candidate.checked_sub(1) {
                    Some(way) => self.issue_all(&ways[way], dtype, &self.stream),
                    None => self.issue_apart((heads, products, tails), dtype, &self.stream),
                })
            })?;
            self.issue_all(&noise::clear(products), dtype, &self.stream)?;
            chosen
        };
        self.joined.insert(key, chosen.checked_sub(1));
        Ok(())
    }

    /// Finds out which of several ways is fastest.
    pub(super) fn choose_way(
        &mut self,
        ways: &[Vec<Command>],
        dtype: DType,
    ) -> Result<(), EngineError> {
        for command in ways.iter().flatten() {
            self.make_ready(command, dtype)?;
        }
        let key = ways_key(ways);
        if self.ways.contains_key(&key) {
            return Ok(());
        }
        let chosen = if self.blas.is_timed() {
            let products = ways.first().map_or_else(Vec::new, |way| products(way));
            self.fill(&products, dtype)?;
            let mut trials = Trials::new(&self.stream)?;
            let chosen = fastest(ways.len(), |candidate, runs| {
                let issue = || self.issue_all(&ways[candidate], dtype, &self.stream);
                trials.time(candidate, runs, issue)
            })?;
            self.issue_all(&noise::clear(&products), dtype, &self.stream)?;
            chosen
        } else {
            // The same every time.
            ways.len().saturating_sub(1).min(1)
        };
        self.ways.insert(key, chosen);
        Ok(())
    }

    /// Heads, products by the library, and tails, one after the other.
    pub(super) fn issue_apart(
        &self,
        (heads, products, tails): (&[Command], &[Product], &[Tail]),
        dtype: DType,
        stream: &Stream,
    ) -> Result<(), EngineError> {
        self.issue_all(heads, dtype, stream)?;
        let run = |product| self.blas.run(product, self.arena.address, stream);
        products.iter().try_for_each(run)?;
        let mut tails = tails.iter();
        tails.try_for_each(|tail| self.issue(&tail.command, dtype, stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::command::{DropoutAt, LaunchShape, MatrixAt};

    /// Eight columns of C, 16 wide, from one of them on.
    fn term(first: u64, column: u64) -> Product {
        let matrix = |address, row_stride| MatrixAt {
            address,
            row_stride,
            dtype: DType::Bf16,
            transposed: false,
        };
        Product {
            m: 4,
            n: 8,
            k: 8,
            a: matrix(0, 8),
            b: matrix(0, 8),
            c: matrix(first + 2 * column, 16),
            scale: 1.0,
            accumulate: column > 0,
            bias: None,
            workspace: 0,
            workspace_bytes: 0,
        }
    }

    fn dropped(product: Product, stream: u32) -> Tail {
        Tail {
            kind: TailKind::Dropped {
                product,
                dropout: DropoutAt {
                    random: 0,
                    stream,
                    threshold: 1,
                },
            },
            command: Command::Product(product),
        }
    }

    #[test]
    fn where_a_term_of_a_sum_adds_is_part_of_its_key() {
        let sum = |first: u64, column: u64| {
            let products = [term(first, 0), term(first, column)];
            joined_key(Joined::Sum, &products, &[])
        };
        assert!(sum(4096, 8) == sum(8192, 8), "the place of C says nothing");
        assert!(sum(4096, 8) != sum(4096, 16));
        let tail = |column| {
            joined_key(
                Joined::Sum,
                &[term(4096, 0)],
                &[dropped(term(4096, column), 1)],
            )
        };
        assert!(tail(8) != tail(16));
        assert!(tail(8) == joined_key(Joined::Sum, &[term(0, 0)], &[dropped(term(0, 8), 2)]));
        // Of products that belong together in another way, each has a C of its own.
        let apart = |first: u64| {
            let products = [term(4096, 0), term(first, 8)];
            joined_key(Joined::Gradients, &products, &[])
        };
        assert!(apart(4096) == apart(8192));
        let alone = |joined| joined_key(joined, &[term(0, 0)], &[]);
        assert!(alone(Joined::Sum) != alone(Joined::Narrow));
    }

    #[test]
    fn the_stream_of_dropout_makes_no_other_way() {
        let key = |stream, rows| {
            let launch = Command::Launch {
                kernel: Kernel {
                    file: "norm",
                    function: "norm_backward_sums",
                },
                shape: LaunchShape::linear(1, 32),
                arguments: vec![Argument::Stream(stream), Argument::U32(rows)],
            };
            ways_key(&[vec![launch]])
        };
        assert!(key(1, 8) == key(2, 8));
        assert!(key(1, 8) != key(1, 16));
    }
}
