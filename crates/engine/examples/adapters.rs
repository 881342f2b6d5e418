//! How fast the passes of an embedder's adapters run on the GPU at hand, in fp16 and by themselves: what
//! their first matrices read, and what both matrices have in the backward, by every way that there is.
//! Between CUDA events around a recording, whose launches have memory of their own, so that nothing is
//! found in the cache; in a step some of it is.
//!
//! ```text
//! cargo run --release -p cinch-engine --example adapters [-- rows]
//! ```
#![expect(clippy::print_stdout, reason = "a table is what this is for")]

use std::error::Error;

use cinch_engine::cuda::CudaExecutor;
use cinch_engine::cuda::command::{Command, Joined, Product, Tail};
use cinch_engine::cuda::op::{Lowered, joined, lower_all};
use cinch_engine::{EngineOptions, MicroBatch};
use cinch_graph::op::{LinearGradInput, LinearGradWeight};
use cinch_graph::{DType, Graph, GraphError, Init, Target, TensorType};
use cinch_plan::{Options, Plan};

/// Rows of a chunk of the embedder.
const ROWS: usize = 46_080;
const RANK: usize = 8;
const DROPOUT: f64 = 0.1;
/// Layers that do the same, each with memory of its own, and how often each is run.
const COPIES: usize = 4;
const TURNS: usize = 4;

/// Adapters beside each other on a layer: how many, columns of each, and columns of what they read.
struct Site {
    name: &'static str,
    adapters: usize,
    columns: usize,
    inputs: usize,
}

const SITES: [Site; 4] = [
    Site {
        name: "q, k, v",
        adapters: 3,
        columns: 384,
        inputs: 384,
    },
    Site {
        name: "o",
        adapters: 1,
        columns: 384,
        inputs: 384,
    },
    Site {
        name: "widening",
        adapters: 1,
        columns: 1536,
        inputs: 384,
    },
    Site {
        name: "narrowing",
        adapters: 1,
        columns: 384,
        inputs: 1536,
    },
];

/// Numbers of the passes: of what is wide, and of what is narrow.
struct Numbers {
    dy: usize,
    x: usize,
    low: usize,
}

impl Site {
    fn numbers(&self, rows: usize) -> Numbers {
        Numbers {
            dy: rows * self.adapters * self.columns,
            x: rows * self.inputs,
            low: rows * self.adapters * RANK,
        }
    }

    /// Of each copy what is read, and then the backward in the order of a step's.
    fn graph(&self, rows: usize) -> Result<Graph, GraphError> {
        let (adapters, columns, inputs) = (self.adapters, self.columns, self.inputs);
        let mut g = Graph::new(DType::F16);
        let mut batch = |name: String, width: usize| g.batch(&name, [1, rows, width], DType::F16);
        let copies: Vec<_> = (0..COPIES)
            .map(|copy| {
                let x = batch(format!("x.{copy}"), inputs);
                let dy = batch(format!("dy.{copy}"), adapters * columns);
                (x, dy, batch(format!("t.{copy}"), adapters * RANK))
            })
            .collect();
        let init = Init::Normal { std: 0.05 };
        let down = g.weight("down", [adapters * RANK, inputs], init);
        let up: Vec<_> = (0..adapters)
            .map(|index| g.weight(&format!("up.{index}"), [columns, RANK], init))
            .collect();
        let dropout = g.dropout(DROPOUT);
        let random = g.random_state();
        // Places that stay, as those of gradients do over a step.
        let mut place = |name: String, rows, columns| {
            g.cache(&name, TensorType::new([rows, columns], DType::F32))
        };
        let of_down = place("down.gradient".to_owned(), adapters * RANK, inputs);
        let of_up: Vec<_> = (0..adapters)
            .map(|index| place(format!("up.{index}.gradient"), columns, RANK))
            .collect();
        for (x, dy, t) in copies {
            g.linear_of_dropped("reads", x, down, dropout)?;
            let mut dt = None;
            // The backward comes to the last adapter first.
            for (index, &up) in up.iter().enumerate().rev() {
                let op = LinearGradInput {
                    dy_column: index * columns,
                    scale: 1.5,
                    first_column: index * RANK,
                    width: adapters * RANK,
                    accumulate: dt.is_some(),
                    dropout: None,
                };
                let inputs = [dy, up].into_iter().chain(dt).collect();
                dt = Some(g.emit("dt", op, inputs)?[0]);
            }
            let gradient = |outputs, dy_column, first_column, inputs, scale| LinearGradWeight {
                dy_column,
                outputs,
                scale,
                first_column,
                inputs,
                gradient: DType::F32,
                bias: false,
                dropout: None,
            };
            let first = LinearGradWeight {
                dropout,
                ..gradient(adapters * RANK, 0, 0, inputs, 1.0)
            };
            let inputs = dt.into_iter().chain([x, random]).collect();
            g.emit_into("first", first, inputs, &[of_down])?;
            for (index, &of_up) in of_up.iter().enumerate().rev() {
                let op = gradient(columns, index * columns, index * RANK, RANK, 1.5);
                g.emit_into("second", op, vec![dy, t], &[of_up])?;
            }
        }
        Ok(g)
    }

    fn measure(&self, rows: usize) -> Result<(), Box<dyn Error>> {
        let graph = self.graph(rows)?;
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let mut executor = CudaExecutor::new(plan.arena_bytes, EngineOptions::default())?;
        let card = executor.card();
        let micro = MicroBatch::of_one(true);
        let lowered = lower_all(&graph, &plan, 0..graph.nodes.len(), micro, card);
        for tensor in &graph.tensors {
            let id = graph.find(&tensor.name).ok_or("a tensor of the graph")?;
            let Some(place) = plan.placement(id) else {
                continue;
            };
            if tensor.name == "random" {
                let words = [0x1234_5678_u32, 0x9abc_def0, 3, 0].map(u32::to_le_bytes);
                executor.write(place, words.as_flattened())?;
            } else if graph.ty(id).dtype == DType::F16 {
                executor.write(place, &noise(place.bytes as usize))?;
            }
        }
        let Numbers { dy, x, low } = self.numbers(rows);
        let mut tell = |what: &str, lists: Vec<Vec<Command>>, numbers: usize| {
            let times = lists.len() * TURNS;
            let lists: Vec<_> = lists.into_iter().cycle().take(times).collect();
            let seconds = executor.time_of_each(&lists, DType::F16)?.as_secs_f64();
            let rate = 2.0 * numbers as f64 / seconds / 1e12;
            let microseconds = seconds * 1e6;
            println!(
                "{:10} {what:34} {microseconds:7.1} µs {rate:6.2} TB/s",
                self.name
            );
            Ok::<(), Box<dyn Error>>(())
        };
        let reads = lowered.iter().filter(|node| node.op == "linear");
        let reads = reads.map(|node| node.commands.clone()).collect();
        tell("reads", reads, x + low)?;
        let passes: Vec<_> = lowered.iter().filter_map(pass).collect();
        if passes.len() != COPIES {
            return Err(format!("{} of {COPIES} backwards are one pass", passes.len()).into());
        }
        // Each way's launches, of all copies; then of the last ways, which have the gradient of the
        // first matrix after those of the second, each part by itself.
        let first = &passes[0];
        for way in 0..joined::ways(Joined::Back, first.0, first.1, card).len() {
            let of = |(products, tails): &Pass<'_>| {
                joined::ways(Joined::Back, products, tails, card).swap_remove(way)
            };
            let lists: Vec<_> = passes.iter().map(of).collect();
            let what = name(&lists[0]);
            tell(&what, lists, dy + x + 2 * low)?;
        }
        for way in 0..joined::ways(Joined::Back, first.0, &[], card).len() {
            let of = |(products, _): &Pass<'_>| {
                joined::ways(Joined::Back, products, &[], card).swap_remove(way)
            };
            let lists: Vec<_> = passes.iter().map(of).collect();
            let what = format!("{} alone", name(&lists[0]));
            tell(&what, lists, dy + 2 * low)?;
        }
        let alone = passes
            .iter()
            .map(|(_, tails)| vec![tails[0].command.clone()]);
        tell("adapter_gradient alone", alone.collect(), x + low)
    }
}

type Pass<'a> = (&'a [Product], &'a [Tail]);

/// What a node's adapters have in the backward, where it is one pass.
fn pass(node: &Lowered) -> Option<Pass<'_>> {
    match node.commands.last()? {
        Command::Products {
            joined: Joined::Back,
            products,
            tails,
            ..
        } if !tails.is_empty() => Some((products, tails)),
        _ => None,
    }
}

/// The first kernel of some commands, and how many launches there are.
fn name(commands: &[Command]) -> String {
    match commands.first() {
        Some(Command::Launch { kernel, .. }) if commands.len() > 2 => {
            format!("{} and gradient", kernel.function)
        }
        Some(Command::Launch { kernel, .. }) => kernel.function.to_owned(),
        _ => String::new(),
    }
}

/// Numbers in fp16 between −2 and 2: what is read of zeroes is read faster.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let elements = (0..bytes / 2).flat_map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Any sign and mantissa, and one of four exponents.
        let bits = (state >> 16) as u16;
        ((bits & 0x8fff) | 0x3000).to_le_bytes()
    });
    elements.collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let rows = match std::env::args().nth(1) {
        Some(rows) => rows.parse()?,
        None => ROWS,
    };
    for site in SITES {
        site.measure(rows)?;
    }
    Ok(())
}
