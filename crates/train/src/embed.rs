//! Texts to embeddings with a trained model: a graph without backward, planned and run like any.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use cinch_architecture::{Architecture, Bert, Naics};
use cinch_config::Config;
use cinch_data::taxonomy::{self, NUM_CHANNELS, PairRules, Taxonomy};
use cinch_data::{NoProgress, Tokenizer};
use cinch_engine::{Engine, EngineOptions, Part};
use cinch_graph::{DType, Graph, Init, Role, Target, TensorId};
use cinch_model::{Build, Embedded, ModelError, Purpose, build, input};
use cinch_plan::{Options, Plan};
use cinch_step::StepError;
use cinch_weights::WeightFiles;

use crate::batch::Batch;
use crate::data::{load_tokenizer, read_taxonomy};
use crate::error::TrainError;
use crate::generate::{self, WeightPart, WeightSource};
use crate::initialize::initialize;
use crate::pretrained::{bytes_in, name_in, numbers};
use crate::session::placement;
use crate::texts::write_text;

/// How a model is made ready to embed.
#[derive(Clone, Copy, Debug)]
pub struct EmbedderOptions {
    pub what: Embedded,
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

/// A model that turns texts into embeddings.
pub struct Embedder {
    engine: Engine,
    graph: Graph,
    plan: Plan,
    part: Part,
    texts: usize,
    lengths: [usize; NUM_CHANNELS],
    width: usize,
}

impl Embedder {
    /// Plans the graph, loads the weights and, on a GPU, compiles and records.
    pub fn new(
        config: &Config,
        files: EmbedderFiles<'_>,
        options: &EmbedderOptions,
    ) -> Result<Self, TrainError> {
        let shape = shape_of(config)?;
        let (texts, seq_len) = (options.texts.max(1), config.batch.seq_len);
        let purpose = Purpose::Embed {
            what: options.what,
            frozen: true,
        };
        let form = Build::plain(texts, seq_len, options.compute, purpose);
        let graph = build(&config.model, &form).map_err(StepError::from)?;
        let plan = Plan::several(&[&graph], Options::new(options.target));
        let plan = plan.map_err(StepError::from)?.into_iter().next();
        let plan = plan.ok_or(StepError::NoVariant)?;
        plan.check_sizes(&graph).map_err(StepError::from)?;
        let mut engine = Engine::new(options.target, plan.arena_bytes, options.engine)?;
        let part = engine.prepare(&graph, &plan, 0..graph.nodes.len(), true)?;
        let mut source = LayeredWeights {
            files,
            initial: initial_parts(&graph),
        };
        generate::load(&mut engine, &graph, &plan, &mut source)?;
        let lengths = shape.channel_lengths(seq_len as u64);
        Ok(Self {
            engine,
            width: graph.result.map_or(0, |id| graph.ty(id).width()),
            graph,
            plan,
            part,
            texts,
            lengths: lengths.map(|length| length as usize),
        })
    }

    /// Numbers of an embedding.
    pub fn width(&self) -> usize {
        self.width
    }

    /// What the plan allocated.
    pub fn arena_bytes(&self) -> u64 {
        self.plan.arena_bytes
    }

    /// The tokens of a text's channels.
    pub fn tokens(
        &self,
        tokenizer: &Tokenizer,
        texts: &[String; NUM_CHANNELS],
    ) -> Result<[Vec<i32>; NUM_CHANNELS], TrainError> {
        Ok(taxonomy::channels(texts, tokenizer, self.lengths)?)
    }

    /// The embeddings of texts, one after the other.
    pub fn embed<'t>(
        &mut self,
        texts: impl IntoIterator<Item = &'t [Vec<i32>; NUM_CHANNELS]>,
    ) -> Result<Vec<f32>, TrainError> {
        let texts: Vec<&[Vec<i32>; NUM_CHANNELS]> = texts.into_iter().collect();
        let mut batch = Batch::of(&self.graph, self.texts, self.texts);
        let mut found = Vec::with_capacity(texts.len() * self.width);
        for texts in texts.chunks(self.texts) {
            for (row, channels) in texts.iter().enumerate() {
                let named = Naics::CHANNEL_NAMES.iter().zip(*channels);
                for ((name, ids), length) in named.zip(self.lengths) {
                    write_text(&input::chunk_of(name, 0), ids, length, (row, 0), &mut batch);
                }
            }
            for id in (0..self.graph.tensors.len() as u32).map(TensorId) {
                let tensor = self.graph.tensor(id);
                if tensor.role == Role::Batch {
                    let place = placement(&self.plan, id);
                    self.engine.write(place, batch.get(&tensor.name))?;
                }
            }
            self.engine.run(&self.graph, &self.plan, &self.part)?;
            if let Some(result) = self.graph.result {
                let bytes = self.engine.bytes(placement(&self.plan, result))?;
                let values = numbers(self.graph.ty(result).dtype, &bytes);
                found.extend_from_slice(&values[..texts.len() * self.width]);
            }
        }
        Ok(found)
    }
}

/// The configuration in which one encoder gives averages of single texts: the first channel has
/// all of the encoder's positions, the others hardly any.
pub fn sentence_config(config: &Config, encoder: &Bert) -> Config {
    let mut sentences = config.clone();
    sentences.model = Architecture::Naics(Naics {
        encoder: encoder.clone(),
        title_length: encoder.positions,
        ..Naics::default()
    });
    sentences.batch.seq_len = 1;
    sentences
}

/// The first `own` of the `width` numbers of each row, as vectors of length 1.
pub fn normalised(numbers: &[f32], width: usize, own: usize) -> Vec<f32> {
    let rows = numbers.chunks_exact(width.max(1));
    let unit = rows.flat_map(|row| {
        let row = &row[..own.min(row.len())];
        let square: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
        let length = square.sqrt().max(f64::MIN_POSITIVE);
        row.iter().map(move |&x| (f64::from(x) / length) as f32)
    });
    unit.collect()
}

fn shape_of(config: &Config) -> Result<&Naics, TrainError> {
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

/// Rows of a parameter that have a name of their own, as the seed fills them.
struct InitialPart {
    parameter: String,
    first_row: usize,
    init: Init,
}

fn initial_parts(graph: &Graph) -> BTreeMap<String, InitialPart> {
    let mut parts = BTreeMap::new();
    for parameter in &graph.parameters {
        let mut first_row = 0;
        for part in &parameter.parts {
            let initial = InitialPart {
                parameter: graph.tensor(parameter.master).name.clone(),
                first_row,
                init: parameter.init,
            };
            first_row += part.rows;
            parts.insert(part.name.clone(), initial);
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
        if let Some(mut files) = self.files.base.filter(|_| is_encoder) {
            let name = name_in(files, part.name);
            let part = WeightPart {
                name: &name,
                ..part
            };
            return WeightSource::read(&mut files, part, rows, dtype, into);
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

/// How well held-out positives are found among all codes.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Retrieval {
    /// Held-out pairs.
    pub pairs: usize,
    /// Codes that are looked through for each.
    pub codes: usize,
    /// The share of pairs whose positive is among the first k, by k.
    pub recall: BTreeMap<usize, f64>,
    /// The mean of 1 over the place at which a positive is found.
    pub mean_reciprocal_rank: f64,
}

/// Embeds a taxonomy and looks for the positives of the pairs that a run holds out. Positives of
/// other pairs of an anchor are left out: they are no mistakes.
pub fn evaluate_retrieval(
    config: &Config,
    embedder: &mut Embedder,
    first: &[usize],
) -> Result<Retrieval, TrainError> {
    let shape = shape_of(config)?;
    let tokenizer = load_tokenizer(config, &NoProgress)?.tokenizer;
    let taxonomy = read_taxonomy(shape, config, &tokenizer)?;
    let points = embedder.embed(taxonomy.entries().iter().map(|entry| &entry.channels))?;
    retrieval(config, &taxonomy, &points, embedder.width(), first)
}

fn retrieval(
    config: &Config,
    taxonomy: &Taxonomy,
    points: &[f32],
    width: usize,
    first: &[usize],
) -> Result<Retrieval, TrainError> {
    let rules = PairRules::plain(config.data.positives, 0);
    let (held_out, seed) = (config.data.val_split, config.training.seed);
    let (training, validation) = taxonomy.pairs(&rules, held_out, seed)?;
    if validation.is_empty() {
        return Err(TrainError::NothingHeldOut);
    }
    let all = training.pairs().iter().chain(validation.pairs());
    let known: BTreeSet<(usize, usize)> = all.map(|pair| (pair.anchor, pair.positive)).collect();
    let point = |index: usize| &points[index * width..(index + 1) * width];
    // The larger −⟨a, b⟩ = t_a·t_b − a·b, the farther.
    let product = |a: usize, b: usize| {
        let (a, b) = (point(a), point(b));
        let inner: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum();
        2.0 * f64::from(a[0]) * f64::from(b[0]) - inner
    };
    let codes = taxonomy.entries().len();
    let ranks: Vec<usize> = validation
        .pairs()
        .iter()
        .map(|pair| {
            let own = product(pair.anchor, pair.positive);
            let others = (0..codes).filter(|&other| {
                other != pair.anchor
                    && other != pair.positive
                    && !known.contains(&(pair.anchor, other))
            });
            1 + others
                .filter(|&other| product(pair.anchor, other) <= own)
                .count()
        })
        .collect();
    let count = ranks.len() as f64;
    let share = |k: usize| ranks.iter().filter(|&&rank| rank <= k).count() as f64 / count;
    Ok(Retrieval {
        pairs: ranks.len(),
        codes,
        recall: first.iter().map(|&k| (k, share(k))).collect(),
        mean_reciprocal_rank: ranks.iter().map(|&rank| 1.0 / rank as f64).sum::<f64>() / count,
    })
}
