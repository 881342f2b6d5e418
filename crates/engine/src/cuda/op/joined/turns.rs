//! Sums of products and what follows them, by a kernel whose two warpgroups take turns: while one
//! multiplies, the other ends its tile, so that a tail costs no time of its own.

#[cfg(test)]
mod tests;

use cinch_graph::op::ActivationKind;

use super::sum::{self, Shared, Tile};
use crate::cuda::command::{Argument, Command, Kernel, LaunchShape, Product, Tail, TailKind};
use crate::cuda::lowering::Card;

/// The part of C that a warpgroup has at a time.
const TILE: Tile = Tile::new(128, 192, Shared::Columns);
const STAGES: usize = 5;
const THREADS: u32 = 384;
/// Of each stage, and of the two warpgroups.
const BARRIERS: usize = 2 * STAGES + 2;

/// The kernel for a sum and its tail, and what it is given besides the sum: where C is written, if
/// it is; what the tail reads; and what it writes.
struct Ends {
    function: &'static str,
    c: Option<u64>,
    x: Option<u64>,
    up: Option<u64>,
    value: Option<u64>,
    to_up: Option<u64>,
}

impl Ends {
    /// None where there is no such kernel.
    fn new(first: &Product, tails: &[Tail]) -> Option<Self> {
        let c = first.c.address;
        let is_by_rows = first.b.transposed;
        let plain = Self {
            function: if is_by_rows {
                "turns_rows"
            } else {
                "turns_columns"
            },
            c: Some(c),
            x: None,
            up: None,
            value: None,
            to_up: None,
        };
        let ends = match tails {
            [] => plain,
            [tail] => plain.with(&tail.kind, is_by_rows)?,
            _ => return None,
        };
        let mut all = [ends.c, ends.x, ends.up, ends.value, ends.to_up].into_iter();
        let is_aligned = all.all(|address| address.is_none_or(|at| at.is_multiple_of(16)));
        is_aligned.then_some(ends)
    }

    fn with(self, kind: &TailKind, is_by_rows: bool) -> Option<Self> {
        use ActivationKind::{Gelu, GeluTanh, Silu};
        let c = self.c;
        let unless_over = |to: u64| c.filter(|&c| c != to);
        Some(match (*kind, is_by_rows) {
            (TailKind::Activation { function, to, .. }, true) => Self {
                function: match function {
                    Gelu => "turns_rows_gelu",
                    GeluTanh => "turns_rows_gelu_tanh",
                    _ => return None,
                },
                c: unless_over(to),
                value: Some(to),
                ..self
            },
            (
                TailKind::Derivative {
                    function,
                    x,
                    to,
                    value,
                    ..
                },
                false,
            ) => Self {
                function: match function {
                    Gelu => "turns_columns_gelu",
                    GeluTanh => "turns_columns_gelu_tanh",
                    _ => return None,
                },
                c: Some(to),
                x: Some(x),
                value,
                ..self
            },
            (
                TailKind::Gate {
                    function: Silu,
                    gate,
                    to,
                    ..
                },
                true,
            ) => Self {
                function: "turns_rows_swiglu",
                c: unless_over(to),
                x: Some(gate),
                value: Some(to),
                ..self
            },
            (
                TailKind::GateGradients {
                    function: Silu,
                    gate,
                    up,
                    to_gate,
                    to_up,
                    value,
                    ..
                },
                false,
            ) => Self {
                function: "turns_columns_swiglu",
                c: Some(to_gate),
                x: Some(gate),
                up: Some(up),
                value,
                to_up: Some(to_up),
            },
            _ => return None,
        })
    }

    fn arguments(&self) -> [Argument; 5] {
        let all = [self.c, self.x, self.up, self.value, self.to_up];
        all.map(|address| address.map_or(Argument::Null, Argument::Address))
    }
}

/// Whether the kernel takes a sum and its tails.
pub(super) fn takes(products: &[Product], tails: &[Tail]) -> bool {
    sum::fits(products) && Ends::new(&products[0], tails).is_some()
}

/// The launch that computes all of it, where the kernel takes it.
pub(super) fn launch(products: &[Product], tails: &[Tail], card: Card) -> Option<Command> {
    if !card.is_hopper || !sum::fits(products) {
        return None;
    }
    let first = &products[0];
    let ends = Ends::new(first, tails)?;
    let mut arguments = sum::operands(products, TILE);
    arguments.extend(ends.arguments());
    arguments.push(sum::bias(first));
    Some(Command::LaunchTable {
        kernel: Kernel {
            file: "product_turns_hopper",
            function: ends.function,
        },
        shape: LaunchShape {
            grid: [TILE.blocks(first, card) as u32, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: sum::shared_bytes(products, TILE, STAGES, BARRIERS),
        },
        table: sum::table(products, TILE).into(),
        arguments,
    })
}
