//! Text from a model, token by token, with a cache: keys and values of attention, states of scans
//! and convolutions. A token costs the same however many came before, attention's own part aside.
//!
//! A prompt is read in a few runs of many tokens, whose graphs share one arena
//! ([`GenerationPlan`]). Results depend on the text alone, not on how it was cut into runs, but for
//! rounding.
//!
//! A text that outgrows the context loses its oldest half, and what is left is read again from
//! position 0: learned positions end there, and so does the cache. From then on the model sees
//! between half of the context and all of it.

mod choose;
mod source;

use cinch_architecture::Architecture;
use cinch_engine::{Engine, EngineOptions, Part};
use cinch_graph::op::Op;
use cinch_graph::{DType, Graph, Parameter, Role, Storage, Target};
use cinch_model::{AdapterShape, input};
use cinch_plan::{Placement, Plan};
use cinch_step::GenerationPlan;
use cinch_weights::PIECE_BYTES;

use crate::error::TrainError;
use crate::session::placement;

pub use choose::Sampling;
pub use source::{TunedWeights, WeightPart, WeightSource};

/// How a model is made ready to generate.
#[derive(Clone, Debug)]
pub struct GeneratorOptions {
    /// The most tokens in sight; no more than the model has positions for.
    pub context: usize,
    /// What weights and activations are in: F32, and on a GPU Bf16.
    pub compute: DType,
    /// Adapters beside the weights, or weights as codes.
    pub adapters: Option<AdapterShape>,
    pub target: Target,
    pub engine: EngineOptions,
}

/// Bytes of the arena by what they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeneratorMemory {
    pub weights: u64,
    /// For the whole context.
    pub cache: u64,
    /// Activations and workspaces of the longest run, and its tokens.
    pub transient: u64,
}

/// The model for one number of tokens at once.
struct Program {
    length: usize,
    graph: Graph,
    plan: Plan,
    part: Part,
}

pub struct Generator {
    engine: Engine,
    /// Longest first; the last reads one token.
    programs: Vec<Program>,
    context: usize,
    memory: GeneratorMemory,
    /// Whether the cache can go back to any earlier token: that of attention can, unless a window
    /// has let go of it; states cannot.
    goes_back: bool,
    /// Where in the text the cache begins, and the tokens whose traces it holds.
    start: usize,
    read: Vec<u32>,
    /// Of the last token that was read.
    logits: Vec<f32>,
}

impl Generator {
    /// Plans the runs, loads the weights and, on a GPU, compiles and records.
    pub fn new(
        model: &Architecture,
        weights: &mut dyn WeightSource,
        options: &GeneratorOptions,
    ) -> Result<Self, TrainError> {
        let planned = GenerationPlan::new(
            model,
            options.context,
            options.compute,
            options.adapters.as_ref(),
            options.target,
        )?;
        let (context, arena) = (planned.context, planned.arena_bytes());
        let mut engine = Engine::new(options.target, arena, options.engine)?;
        let mut programs = Vec::with_capacity(planned.runs.len());
        for run in planned.runs {
            let (length, graph, plan) = (run.length, run.graph, run.plan);
            let part = engine.prepare(&graph, &plan, 0..graph.nodes.len(), true)?;
            programs.push(Program {
                length,
                graph,
                plan,
                part,
            });
        }
        let mut generator = Self {
            engine,
            programs,
            context,
            memory: GeneratorMemory {
                weights: 0,
                cache: 0,
                transient: 0,
            },
            goes_back: false,
            start: 0,
            read: Vec::with_capacity(context),
            logits: Vec::new(),
        };
        if let Some(Program { graph, plan, .. }) = generator.programs.first() {
            generator.memory = memory(graph, plan, arena);
            generator.goes_back = goes_back(graph, context);
            load(&mut generator.engine, graph, plan, weights)?;
        }
        Ok(generator)
    }

    /// The most tokens in sight.
    pub fn context(&self) -> usize {
        self.context
    }

    pub fn memory(&self) -> GeneratorMemory {
        self.memory
    }

    /// What it runs on, for people.
    pub fn describe(&self) -> String {
        self.engine.describe()
    }

    /// The token after `text`, which is not empty; `index` tells the draws of one text apart. What
    /// the text has in common with that of the last call is not read again.
    pub fn next(
        &mut self,
        text: &[u32],
        sampling: &Sampling,
        index: u64,
    ) -> Result<u32, TrainError> {
        let start = first_in_sight(text.len(), self.context);
        self.read(start, &text[start..])?;
        let visible = &text[start..];
        // The logits stay as they are: the same text may be asked about again.
        let mut logits = self.logits.clone();
        Ok(choose::next_token(&mut logits, visible, sampling, index))
    }

    /// The logits after `text`, which is not empty.
    pub fn logits(&mut self, text: &[u32]) -> Result<&[f32], TrainError> {
        let start = first_in_sight(text.len(), self.context);
        self.read(start, &text[start..])?;
        Ok(&self.logits)
    }

    /// Brings cache and logits to the state after `visible`, which begins at `start` of the text.
    fn read(&mut self, start: usize, visible: &[u32]) -> Result<(), TrainError> {
        let pairs = self.read.iter().zip(visible);
        let common = match start == self.start {
            true => pairs.take_while(|(a, b)| a == b).count(),
            false => 0,
        };
        if common == self.read.len() && common == visible.len() {
            return Ok(());
        }
        // Logits are those of a token that is read, so at least the last one is.
        let kept = common.min(visible.len().saturating_sub(1));
        match kept == self.read.len() || self.goes_back {
            true => self.read.truncate(kept),
            false => self.read.clear(),
        }
        self.start = start;
        while let Some(rest) = visible
            .get(self.read.len()..)
            .filter(|rest| !rest.is_empty())
        {
            self.run(rest)?;
        }
        Ok(())
    }

    /// Reads as many of `rest` as one run takes.
    fn run(&mut self, rest: &[u32]) -> Result<(), TrainError> {
        let fits = |program: &&Program| program.length <= rest.len();
        let Some(program) = self.programs.iter().find(fits) else {
            return Ok(());
        };
        let (graph, plan, length) = (&program.graph, &program.plan, program.length);
        let first = self.read.len();
        let tokens: Vec<i32> = rest[..length]
            .iter()
            .map(|token| token.cast_signed())
            .collect();
        let positions: Vec<i32> = (first..first + length).map(|p| p as i32).collect();
        let last = [length as i32 - 1];
        let inputs: [(&str, &[i32]); 3] = [
            (input::TOKENS, &tokens),
            (input::POSITIONS, &positions),
            (input::POSITION, &last),
        ];
        for (name, values) in inputs {
            if let Some(id) = graph.find(name) {
                self.engine.write(placement(plan, id), values)?;
            }
        }
        // A run that fails may have left anything in the cache: then nothing counts as read.
        let mut read = std::mem::take(&mut self.read);
        self.engine.run(graph, plan, &program.part)?;
        if let Some(result) = graph.result.filter(|_| length == rest.len()) {
            let bytes = self.engine.bytes(placement(plan, result))?;
            let words = bytes.as_chunks::<4>().0;
            self.logits.clear();
            let values = words.iter().map(|&word| f32::from_ne_bytes(word));
            self.logits.extend(values);
        }
        read.extend_from_slice(&rest[..length]);
        self.read = read;
        Ok(())
    }
}

/// The first token of a text that is in sight: 0 up to the length of the context, then whole halves
/// of it are left out. It follows from the length alone, so a text does not depend on how it came
/// about.
fn first_in_sight(length: usize, context: usize) -> usize {
    let half = (context / 2).max(1);
    length.saturating_sub(context).div_ceil(half) * half
}

fn goes_back(graph: &Graph, context: usize) -> bool {
    let mut with_cache = graph.nodes.iter().filter(|node| {
        let mut outputs = node.outputs.iter();
        outputs.any(|&id| graph.tensor(id).role == Role::Cache)
    });
    with_cache.all(|node| match &node.op {
        Op::CachedAttention(op) => op.slots >= context,
        Op::CachedSelection(op) => op.slots >= context,
        _ => false,
    })
}

fn memory(graph: &Graph, plan: &Plan, arena: u64) -> GeneratorMemory {
    let of = |wanted: Role| -> u64 {
        let tensors = graph.tensors.iter().filter(|tensor| tensor.role == wanted);
        tensors.map(|tensor| tensor.ty.bytes()).sum()
    };
    let (weights, cache) = (of(Role::Parameter), of(Role::Cache));
    debug_assert!(weights + cache <= plan.persistent_bytes);
    GeneratorMemory {
        weights,
        cache,
        transient: arena.saturating_sub(weights + cache),
    }
}

/// Fills the weights. They have one place in all plans.
pub(crate) fn load(
    engine: &mut Engine,
    graph: &Graph,
    plan: &Plan,
    weights: &mut dyn WeightSource,
) -> Result<(), TrainError> {
    weights.check(graph)?;
    for parameter in &graph.parameters {
        let loaded = match parameter.storage {
            Storage::Quantised(_) => load_codes(engine, graph, plan, parameter, weights),
            Storage::Frozen | Storage::Trained | Storage::TrainedAsRead => {
                load_numbers(engine, graph, plan, parameter, weights)
            }
        };
        loaded?.map_err(|problem| TrainError::OtherModel {
            path: "the checkpoint".into(),
            problem,
        })?;
    }
    Ok(())
}

/// A failure of the engine, or what the source says is wrong.
type Loaded = Result<Result<(), String>, TrainError>;

fn load_numbers(
    engine: &mut Engine,
    graph: &Graph,
    plan: &Plan,
    parameter: &Parameter,
    weights: &mut dyn WeightSource,
) -> Loaded {
    let ty = graph.ty(parameter.master);
    let place = placement(plan, parameter.master);
    let dims = parameter.shape.dims();
    let width: usize = dims.get(1..).unwrap_or(&[]).iter().product();
    let row_bytes = width as u64 * ty.dtype.size();
    let rows_at_once = (PIECE_BYTES / (row_bytes as usize).max(1)).max(1);
    let mut offset = place.offset;
    for part in &parameter.parts {
        let mut shape = dims.to_vec();
        if let Some(rows) = shape.first_mut() {
            *rows = part.rows;
        }
        let wanted = WeightPart {
            name: &part.name,
            shape: &shape,
        };
        for first in (0..part.rows).step_by(rows_at_once) {
            let rows = first..part.rows.min(first + rows_at_once);
            let piece = Placement {
                offset,
                bytes: rows.len() as u64 * row_bytes,
                ..place
            };
            offset += piece.bytes;
            let read = engine.write_with(piece, |bytes: &mut [u8]| {
                weights.read(wanted, rows, ty.dtype, bytes)
            })?;
            if read.is_err() {
                return Ok(read);
            }
        }
    }
    Ok(Ok(()))
}

fn load_codes(
    engine: &mut Engine,
    graph: &Graph,
    plan: &Plan,
    parameter: &Parameter,
    weights: &mut dyn WeightSource,
) -> Loaded {
    let Storage::Quantised(quantisation) = parameter.storage else {
        return Ok(Ok(()));
    };
    let [part] = &parameter.parts[..] else {
        let name = &graph.tensor(parameter.master).name;
        return Ok(Err(format!(
            "`{name}` is several tensors, which have codes of their own"
        )));
    };
    let wanted = WeightPart {
        name: &part.name,
        shape: parameter.shape.dims(),
    };
    let places = parameter.code_scales.iter().map(|&id| placement(plan, id));
    let places: Vec<Placement> = places.collect();
    let mut scales: Vec<Vec<u8>> = places.iter().map(|p| vec![0; p.bytes as usize]).collect();
    let codes = placement(plan, parameter.master);
    let read = engine.write_with(codes, |bytes: &mut [u8]| {
        weights.read_codes(wanted, quantisation, bytes, &mut scales)
    })?;
    if read.is_ok() {
        for (place, bytes) in places.into_iter().zip(&scales) {
            engine.write_with(place, |to: &mut [u8]| to.copy_from_slice(bytes))?;
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_keeps_at_least_half_of_the_context_in_sight() {
        for context in [1, 2, 3, 10, 64, 77] {
            for length in 1..5 * context {
                let seen = length - first_in_sight(length, context);
                assert!(
                    seen <= context && seen > 0,
                    "{seen} of {length} in {context}"
                );
                let at_least = context.div_ceil(2).min(length);
                assert!(seen >= at_least, "{seen} of {length} in {context}");
            }
        }
    }
}
