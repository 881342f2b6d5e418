//! Texts to vectors with a trained model: graphs without backward, planned and run like any.

use std::collections::BTreeMap;
use std::ops::Range;

use cinch_architecture::{Architecture, Bert, Naics};
use cinch_config::Config;
use cinch_data::taxonomy::NUM_CHANNELS;
use cinch_engine::{Element, Engine, EngineOptions, Part};
use cinch_graph::{DType, Graph, Init, Target};
use cinch_model::{ModelError, input};
use cinch_step::{EncoderPlan, EncoderRun, StepError};
use cinch_weights::WeightFiles;

use crate::error::TrainError;
use crate::generate::{self, WeightPart, WeightSource};
use crate::initialize::initialize;
use crate::pretrained::{bytes_in, is_missing_pooler, name_in, numbers};
use crate::sentences::SentenceForm;
use crate::session::placement;

/// How a model is made ready to embed.
#[derive(Clone, Copy, Debug)]
pub struct EmbedderOptions {
    /// Texts at once.
    pub texts: usize,
    /// What weights and activations are in: F32, and on a GPU Bf16.
    pub compute: DType,
    pub target: Target,
    pub engine: EngineOptions,
}

/// Where the weights of an embedder come from: what was trained, the encoders that it was put on,
/// and for what neither has, the seed that it began with.
#[derive(Clone, Copy)]
pub struct EmbedderFiles<'a> {
    pub trained: Option<&'a WeightFiles>,
    pub base: Option<&'a WeightFiles>,
    pub seed: u64,
}

/// A model that turns texts into vectors. A text has tokens for each channel of the model.
pub struct Embedder {
    engine: Engine,
    /// Of each channel's encoder, the shortest texts first.
    channels: Vec<Vec<Program>>,
    /// From what all channels became to points.
    head: Option<Program>,
    texts: usize,
    arena_bytes: u64,
}

/// A graph made ready.
struct Program {
    run: EncoderRun,
    part: Part,
}

impl Embedder {
    /// From texts of four channels to points: plans the graphs, loads the weights and, on a GPU,
    /// compiles and records.
    pub fn of_points(
        config: &Config,
        files: EmbedderFiles<'_>,
        options: &EmbedderOptions,
    ) -> Result<Self, TrainError> {
        let (texts, seq_len) = (options.texts.max(1), config.batch.seq_len);
        let (compute, target) = (options.compute, options.target);
        let plan = EncoderPlan::points(shape_of(config)?, texts, seq_len, compute, target)?;
        let graphs = first_graphs(&plan);
        let mut source = LayeredWeights {
            files,
            initial: graphs.flat_map(initial_parts).collect(),
        };
        Self::new(plan, &mut source, options)
    }

    /// From sentences to what an encoder alone makes of them, in the form that its files ask for.
    pub fn of_sentences(
        encoder: &Bert,
        form: &SentenceForm,
        files: &WeightFiles,
        options: &EmbedderOptions,
    ) -> Result<Self, TrainError> {
        let sizes = [options.texts.max(1), form.longest];
        let (compute, target) = (options.compute, options.target);
        let plan = EncoderPlan::sentences(encoder, form.pooling, sizes, compute, target)?;
        Self::new(plan, &mut EncoderWeights(files), options).map_err(|error| match error {
            TrainError::OtherModel { problem, .. } => TrainError::SentenceModel {
                path: files.path().to_owned(),
                problem,
            },
            other => other,
        })
    }

    fn new(
        plan: EncoderPlan,
        source: &mut dyn WeightSource,
        options: &EmbedderOptions,
    ) -> Result<Self, TrainError> {
        let arena_bytes = plan.arena_bytes();
        let mut engine = Engine::new(options.target, arena_bytes, options.engine)?;
        let mut prepared = |run: EncoderRun| -> Result<Program, TrainError> {
            let nodes = 0..run.graph.nodes.len();
            let part = engine.prepare(&run.graph, &run.plan, nodes, true)?;
            Ok(Program { run, part })
        };
        let mut channels = Vec::with_capacity(plan.channels.len());
        for runs in plan.channels {
            let runs = runs.into_iter().map(&mut prepared);
            channels.push(runs.collect::<Result<Vec<_>, _>>()?);
        }
        let head = plan.head.map(&mut prepared).transpose()?;
        // All lengths of a channel read the same weights.
        let first = channels.iter().filter_map(|runs| runs.first());
        for Program { run, .. } in first.chain(&head) {
            generate::load(&mut engine, &run.graph, &run.plan, source)?;
        }
        Ok(Self {
            engine,
            channels,
            head,
            texts: plan.texts,
            arena_bytes,
        })
    }

    /// The most tokens that are read of each channel of a text.
    pub fn channel_lengths(config: &Config) -> Result<[usize; NUM_CHANNELS], TrainError> {
        let lengths = shape_of(config)?.channel_lengths(config.batch.seq_len as u64);
        Ok(lengths.map(|length| length as usize))
    }

    /// Numbers of an embedding.
    pub fn width(&self) -> usize {
        match &self.head {
            Some(head) => head.width(),
            None => self.pooled_width(),
        }
    }

    /// Of what all channels become, side by side.
    fn pooled_width(&self) -> usize {
        let firsts = self.channels.iter().filter_map(|runs| runs.first());
        firsts.map(Program::width).sum()
    }

    /// What the plan allocated.
    pub fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// The embeddings of texts, one after the other. `told` hears which share of them is done.
    pub fn embed<'t>(
        &mut self,
        texts: impl IntoIterator<Item = &'t [Vec<i32>]>,
        told: &mut dyn FnMut(f64),
    ) -> Result<Vec<f32>, TrainError> {
        let texts: Vec<&[Vec<i32>]> = texts.into_iter().collect();
        let pooled = self.pooled(&texts, told)?;
        let (width, rows) = (self.pooled_width(), self.texts);
        let Some(head) = &self.head else {
            return Ok(pooled);
        };
        let mut found = Vec::with_capacity(texts.len() * head.width());
        let mut room = vec![0.0_f32; rows * width];
        for vectors in pooled.chunks(room.len().max(1)) {
            room[..vectors.len()].copy_from_slice(vectors);
            head.write(&mut self.engine, input::POOLED, &room)?;
            let points = head.result(&mut self.engine)?;
            found.extend_from_slice(&points[..vectors.len() / width.max(1) * head.width()]);
        }
        Ok(found)
    }

    /// What the encoders make of texts, all channels of a text side by side. Texts of about one
    /// length run together; one without tokens is zeros.
    fn pooled(
        &mut self,
        texts: &[&[Vec<i32>]],
        told: &mut dyn FnMut(f64),
    ) -> Result<Vec<f32>, TrainError> {
        let all = self.pooled_width();
        let mut pooled = vec![0.0; texts.len() * all];
        let total: usize = texts.iter().copied().flatten().map(Vec::len).sum();
        let (mut first_column, mut done) = (0, 0);
        for (channel, runs) in self.channels.iter().enumerate() {
            let ids = |text: usize| texts[text].get(channel).map_or(&[][..], Vec::as_slice);
            let mut order: Vec<usize> = (0..texts.len()).collect();
            order.retain(|&text| !ids(text).is_empty());
            order.sort_by_key(|&text| ids(text).len());
            let name = match &self.head {
                Some(_) => input::chunk_of(Naics::CHANNEL_NAMES[channel], 0),
                None => input::SENTENCES.to_owned(),
            };
            for together in order.chunks(self.texts) {
                let longest = together.last().map_or(0, |&text| ids(text).len());
                let holds = |program: &&Program| program.run.length >= longest;
                let Some(program) = runs.iter().find(holds).or(runs.last()) else {
                    continue;
                };
                let length = program.run.length;
                let mut tokens = vec![0; self.texts * length];
                let mut lengths = vec![0; self.texts];
                let rows = tokens.chunks_mut(length).zip(&mut lengths);
                for (&text, (row, count)) in together.iter().zip(rows) {
                    let ids = &ids(text)[..ids(text).len().min(length)];
                    row[..ids.len()].copy_from_slice(ids);
                    *count = ids.len() as i32;
                }
                let (tokens_of, lengths_of) = (input::tokens_of(&name), input::lengths_of(&name));
                program.write(&mut self.engine, &tokens_of, &tokens)?;
                program.write(&mut self.engine, &lengths_of, &lengths)?;
                let vectors = program.result(&mut self.engine)?;
                let width = program.width();
                for (&text, vector) in together.iter().zip(vectors.chunks_exact(width)) {
                    let at = text * all + first_column;
                    pooled[at..at + width].copy_from_slice(vector);
                    done += ids(text).len();
                }
                told(done as f64 / total as f64);
            }
            first_column += runs.first().map_or(0, Program::width);
        }
        Ok(pooled)
    }
}

impl Program {
    /// Numbers of what a text becomes.
    fn width(&self) -> usize {
        let graph = &self.run.graph;
        graph.result.map_or(0, |id| graph.ty(id).width())
    }

    fn write<T: Element>(
        &self,
        engine: &mut Engine,
        name: &str,
        values: &[T],
    ) -> Result<(), TrainError> {
        let EncoderRun { graph, plan, .. } = &self.run;
        if let Some(id) = graph.find(name) {
            engine.write(placement(plan, id), values)?;
        }
        Ok(())
    }

    /// Runs, and gives what the texts became.
    fn result(&self, engine: &mut Engine) -> Result<Vec<f32>, TrainError> {
        let EncoderRun { graph, plan, .. } = &self.run;
        engine.run(graph, plan, &self.part)?;
        let Some(id) = graph.result else {
            return Ok(Vec::new());
        };
        let bytes = engine.bytes(placement(plan, id))?;
        Ok(numbers(graph.ty(id).dtype, &bytes))
    }
}

/// One graph for each set of weights.
fn first_graphs(plan: &EncoderPlan) -> impl Iterator<Item = &Graph> {
    let first = plan.channels.iter().filter_map(|runs| runs.first());
    first.chain(&plan.head).map(|run| &run.graph)
}

/// Vectors of that width at length 1.
pub fn normalised(numbers: &[f32], width: usize) -> Vec<f32> {
    let rows = numbers.chunks_exact(width.max(1));
    let unit = rows.flat_map(|row| {
        let square: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
        let length = square.sqrt().max(f64::MIN_POSITIVE);
        row.iter().map(move |&x| (f64::from(x) / length) as f32)
    });
    unit.collect()
}

pub(crate) fn shape_of(config: &Config) -> Result<&Naics, TrainError> {
    match &config.model {
        Architecture::Naics(shape) => Ok(shape),
        other => Err(TrainError::Step(StepError::from(ModelError::Beyond {
            problem: format!(
                "{} embeds no texts: an embedder such as naics does",
                other.family().title
            ),
        }))),
    }
}

/// The files of an encoder, under whichever names it was saved.
struct EncoderWeights<'a>(&'a WeightFiles);

impl WeightSource for EncoderWeights<'_> {
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String> {
        let name = name_in(self.0, part.name);
        let part = WeightPart {
            name: &name,
            ..part
        };
        WeightSource::read(&mut self.0, part, rows, dtype, into)
    }
}

/// Rows of a parameter that have a name of their own, as the seed fills them.
struct InitialPart {
    parameter: String,
    first_row: usize,
    init: Init,
}

fn initial_parts(graph: &Graph) -> Vec<(String, InitialPart)> {
    let mut parts = Vec::new();
    for parameter in &graph.parameters {
        let mut first_row = 0;
        for part in &parameter.parts {
            let initial = InitialPart {
                parameter: graph.tensor(parameter.master).name.clone(),
                first_row,
                init: parameter.init,
            };
            first_row += part.rows;
            parts.push((part.name.clone(), initial));
        }
    }
    parts
}

struct LayeredWeights<'a> {
    files: EmbedderFiles<'a>,
    initial: BTreeMap<String, InitialPart>,
}

impl WeightSource for LayeredWeights<'_> {
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String> {
        let trained = self.files.trained;
        if let Some(mut files) = trained.filter(|files| files.get(part.name).is_some()) {
            return WeightSource::read(&mut files, part, rows, dtype, into);
        }
        // Encoders that were trained before are all in their files; adapters and what follows the
        // encoders are not.
        let is_encoder = part.name.starts_with("encoders.") && !part.name.contains(".lora_");
        let base = self.files.base.filter(|_| is_encoder);
        if let Some(files) = base.filter(|files| !is_missing_pooler(files, part.name)) {
            return EncoderWeights(files).read(part, rows, dtype, into);
        }
        let Some(initial) = self.initial.get(part.name) else {
            return Err(format!("it has no tensor `{}`", part.name));
        };
        let width: usize = part.shape.get(1..).unwrap_or(&[]).iter().product();
        let mut values = vec![0.0; rows.len() * width];
        let first = (initial.first_row + rows.start) * width;
        let (init, seed) = (initial.init, self.files.seed);
        initialize(&mut values, first, width, init, &initial.parameter, seed);
        into.copy_from_slice(&bytes_in(dtype, &values));
        Ok(())
    }
}
