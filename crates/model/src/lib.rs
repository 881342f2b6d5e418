//! The architectures, each a function that builds a graph from its configuration.
//!
//! A model says what is computed; what that costs in memory follows from the ops it uses.
//!
//! ```
//! use cinch_architecture::{Architecture, Gpt2};
//! use cinch_graph::DType;
//! use cinch_model::{Build, Purpose, build};
//!
//! let graph = build(
//!     &Architecture::Gpt2(Gpt2::default()),
//!     &Build::plain(1, 128, DType::Bf16, Purpose::Evaluate { loss_chunk: None }),
//! )?;
//! assert_eq!(graph.terms.len(), 1);
//! assert_eq!(graph.blocks.len(), 12);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bert;
mod decoder;
mod gpt2;
mod gsa;
mod mamba;
mod mu;
mod naics;
mod rotary;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use cinch_architecture::{Architecture, with_architectures};
use cinch_config::Precision;
use cinch_graph::op::{Add, Attention, CachedAttention, Head, Quantisation};
use cinch_graph::{DType, Dropout, Graph, GraphError, Init, Shape, TensorId};
use thiserror::Error;

pub use bert::sentence_encoder;
pub use naics::stage_phase;

#[derive(Debug, Error)]
pub enum ModelError {
    #[error(
        "a sequence of {seq_len} is longer than the model's {positions} positions\n\
         hint: lower vram.max_seq_len to {positions}, or raise model.max_seq_len to {seq_len}"
    )]
    SequenceTooLong { seq_len: usize, positions: usize },
    #[error(
        "cinch's engine does not train {family} yet\nhint: `cinch plan --engine pytorch` predicts what PyTorch takes for it; `cinch models` lists what can be trained"
    )]
    NotTrained { family: &'static str },
    #[error(
        "cinch trains {family} whole and from rows of one piece: adapters and packed documents \
         are there for Qwen2, Qwen3, LLaMA and Mistral\n\
         hint: leave out --lora-rank and --packing"
    )]
    WholeOnly { family: &'static str },
    #[error(
        "cinch does not generate text with {family}: {reason}\n\
         hint: language models generate text, for example gpt2 and mamba; `cinch models` lists them"
    )]
    NotGenerated {
        family: &'static str,
        reason: &'static str,
    },
    #[error("{problem}\nhint: `cinch plan --engine pytorch` predicts what PyTorch takes for it")]
    Beyond { problem: String },
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// What a graph is built for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Purpose {
    /// The loss, with dropout.
    Train {
        label_smoothing: f64,
        /// Rows of logits at once; chosen from the vocabulary where not given.
        loss_chunk: Option<usize>,
    },
    /// The loss, without dropout or smoothing.
    Evaluate { loss_chunk: Option<usize> },
    /// What each text of a batch becomes, without dropout.
    Embed {
        what: Embedded,
        /// Whether weights are frozen, in the compute type; else they are those of a graph that
        /// is trained.
        frozen: bool,
    },
    /// The logits of one of the tokens, which follow those whose keys, values and states are in
    /// the cache. Weights are frozen, in the compute type.
    Generate {
        /// The most tokens that a text has.
        context: usize,
        /// The most tokens that any graph which shares the cache reads at once.
        longest_run: usize,
    },
}

/// What is asked of an embedder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Embedded {
    /// The points that distances are measured between, from the tokens of all channels.
    Points,
    /// What one channel's encoder makes of its texts.
    Channel(usize),
    /// The points, from what the encoders of all channels made of the texts, side by side.
    PointsOfPooled,
}

/// How the outputs for a text's tokens become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Their average.
    Mean,
    /// The first of them.
    First,
}

/// What does not belong to the model itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Build {
    pub batch: usize,
    pub seq_len: usize,
    /// Which of the model's [`phases`] it is for. Generation is not part of any: what it builds
    /// is the model as it is after the last.
    pub phase: usize,
    /// What activations are computed in.
    pub compute: DType,
    pub purpose: Purpose,
    /// Whether a row holds several documents, none of which sees another.
    pub packed: bool,
    /// Whether trained weights have masters in the precision of sums.
    pub masters: bool,
    /// What is trained in place of the weights.
    pub adapters: Option<AdapterShape>,
}

impl Build {
    /// All weights are trained, and rows are of one piece.
    pub fn plain(batch: usize, seq_len: usize, compute: DType, purpose: Purpose) -> Self {
        Self {
            batch,
            seq_len,
            phase: 0,
            compute,
            purpose,
            packed: false,
            masters: true,
            adapters: None,
        }
    }
}

/// A stretch of a run in which a model is trained by one graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingPhase {
    pub name: Cow<'static, str>,
    /// The step with which it begins, counting from 0.
    pub first_step: u64,
}

impl TrainingPhase {
    /// Phases from here on begin at a step that is known once the data has been read; until then
    /// they only have an order.
    pub(crate) const OPEN: u64 = u64::MAX / 2;

    /// The step that it begins at, as far as that is known.
    pub fn begins(&self) -> Option<u64> {
        (self.first_step < Self::OPEN).then_some(self.first_step)
    }

    /// The only one of a model that does not change.
    pub const WHOLE: Self = Self {
        name: Cow::Borrowed("training"),
        first_step: 0,
    };
}

/// Adapters of low rank on linear layers, whose own weights are frozen.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterShape {
    pub rank: usize,
    /// Of what an adapter adds.
    pub scale: f64,
    /// Of what it reads.
    pub dropout: f64,
    /// The modules that have one, of those that [`linear_modules`] lists.
    pub modules: Arc<BTreeSet<String>>,
    /// Modules that are trained whole beside them, of those that [`whole_modules`] lists.
    pub whole: Arc<BTreeSet<String>>,
    /// How the weights of linear layers are kept.
    pub quantisation: Option<Quantisation>,
}

impl AdapterShape {
    /// Whether the head has numbers of its own though the model's files tie it to the embeddings:
    /// peft trains a copy of either, and leaves the other as it is.
    pub fn unties_the_head(&self) -> bool {
        [EMBEDDINGS, HEAD]
            .iter()
            .any(|name| self.whole.contains(*name))
    }
}

/// The module of a language model's embeddings, as Hugging Face names it.
pub const EMBEDDINGS: &str = "model.embed_tokens";
/// The module of its head.
pub const HEAD: &str = "lm_head";

/// The element type of a precision's activations.
pub fn compute_type(precision: Precision) -> DType {
    match precision {
        Precision::Fp32 => DType::F32,
        Precision::Bf16 => DType::Bf16,
        Precision::Fp16 => DType::F16,
    }
}

/// An architecture that cinch's engine trains. Every one that the list calls trained has it.
trait Builds {
    fn build(&self, graph: &mut Graph, build: &Build) -> Result<(), GraphError>;

    /// The linear layers that can have adapters, as Hugging Face's files name them.
    fn linear_modules(&self) -> Vec<String> {
        Vec::new()
    }

    /// The modules that can be trained whole beside adapters.
    fn whole_modules(&self) -> Vec<String> {
        Vec::new()
    }

    /// Why no text can be generated, where none can.
    fn without_generation(&self) -> Option<&'static str> {
        None
    }

    /// Whether it turns texts into embeddings.
    fn embeds(&self) -> bool {
        false
    }

    /// How the model changes while it is trained: phases in the order of their first steps, the
    /// first of which is 0. All have the same parameters, and [`Build::phase`] says for which of
    /// them a graph is built.
    fn phases(&self) -> Vec<TrainingPhase> {
        vec![TrainingPhase::WHOLE]
    }
}

macro_rules! dispatch {
    (trained { $($trained:ident),* } predicted { $($predicted:ident),* }) => {
        fn build_into(
            model: &Architecture,
            graph: &mut Graph,
            build: &Build,
        ) -> Result<(), ModelError> {
            match model {
                $(Architecture::$trained(shape) => Ok(Builds::build(shape, graph, build)?),)*
                $(Architecture::$predicted(_))|* => Err(ModelError::NotTrained {
                    family: model.family().title,
                }),
            }
        }

        /// The linear layers of a model that can have adapters, in the order in which they run.
        pub fn linear_modules(model: &Architecture) -> Vec<String> {
            match model {
                $(Architecture::$trained(shape) => Builds::linear_modules(shape),)*
                $(Architecture::$predicted(_))|* => Vec::new(),
            }
        }

        /// The modules of a model that can be trained whole beside adapters.
        pub fn whole_modules(model: &Architecture) -> Vec<String> {
            match model {
                $(Architecture::$trained(shape) => Builds::whole_modules(shape),)*
                $(Architecture::$predicted(_))|* => Vec::new(),
            }
        }

        /// Why a model that is trained generates no text, where it does not.
        pub fn without_generation(model: &Architecture) -> Option<&'static str> {
            match model {
                $(Architecture::$trained(shape) => Builds::without_generation(shape),)*
                $(Architecture::$predicted(_))|* => None,
            }
        }

        /// Whether a model turns texts into embeddings.
        pub fn embeds(model: &Architecture) -> bool {
            match model {
                $(Architecture::$trained(shape) => Builds::embeds(shape),)*
                $(Architecture::$predicted(_))|* => false,
            }
        }

        /// How a model changes while it is trained; one phase for most.
        pub fn phases(model: &Architecture) -> Vec<TrainingPhase> {
            match model {
                $(Architecture::$trained(shape) => Builds::phases(shape),)*
                $(Architecture::$predicted(_))|* => vec![TrainingPhase::WHOLE],
            }
        }
    };
}
with_architectures!(dispatch);

/// Builds the forward graph of a model.
pub fn build(model: &Architecture, build: &Build) -> Result<Graph, ModelError> {
    if let Some(problem) = model.beyond_the_engine() {
        return Err(ModelError::Beyond { problem });
    }
    check_positions(build.seq_len.max(build.context()), model.positions())?;
    let generates = matches!(build.purpose, Purpose::Generate { .. });
    if let Some(reason) = without_generation(model).filter(|_| generates) {
        return Err(ModelError::NotGenerated {
            reason,
            family: model.family().title,
        });
    }
    let without_modules = linear_modules(model).is_empty();
    if without_modules && (build.adapters.is_some() || build.packed) {
        return Err(ModelError::WholeOnly {
            family: model.family().title,
        });
    }
    let mut graph = Graph::new(build.compute);
    graph.masters = build.masters;
    build_into(model, &mut graph, build)?;
    Ok(graph)
}

/// Refuses sequences that a model has no positions for.
fn check_positions(seq_len: usize, positions: Option<u64>) -> Result<(), ModelError> {
    match positions {
        Some(positions) if seq_len as u64 > positions => Err(ModelError::SequenceTooLong {
            seq_len,
            positions: positions as usize,
        }),
        _ => Ok(()),
    }
}

/// Names of the inputs that the training loop fills.
pub mod input {
    pub const TOKENS: &str = "tokens";
    pub const TARGETS: &str = "targets";
    /// Of each token in its document, or in the text that is generated.
    pub const POSITIONS: &str = "positions";
    /// Where each token's document begins in its row.
    pub const STARTS: &str = "starts";
    /// Which of the tokens of a row has its logits computed.
    pub const POSITION: &str = "position";
    /// Of each anchor, which of its positive and its negatives are compared: 1, or 0 for those
    /// that are left out.
    pub const COMPARED: &str = "compared";
    /// The texts of an encoder alone.
    pub const SENTENCES: &str = "sentences";
    /// What the encoders of all channels made of each text, side by side.
    pub const POOLED: &str = "pooled";

    /// A chunk of the texts of a channel.
    pub fn chunk_of(channel: &str, chunk: usize) -> String {
        format!("{channel}.{chunk}")
    }

    /// The tokens of a chunk of texts.
    pub fn tokens_of(chunk: &str) -> String {
        format!("{chunk}.tokens")
    }

    /// How many tokens each text of a chunk has.
    pub fn lengths_of(chunk: &str) -> String {
        format!("{chunk}{LENGTHS}")
    }

    /// The chunk whose lengths a tensor holds, if it does.
    pub fn texts_of_lengths(name: &str) -> Option<&str> {
        name.strip_suffix(LENGTHS)
    }

    const LENGTHS: &str = ".lengths";
}

impl Build {
    fn tokens(&self, graph: &mut Graph) -> TensorId {
        graph.batch(input::TOKENS, [self.batch, self.seq_len], DType::I32)
    }

    /// Positions and starts of documents, where rows hold several.
    fn documents(&self, graph: &mut Graph) -> Option<[TensorId; 2]> {
        self.packed.then(|| {
            [input::POSITIONS, input::STARTS]
                .map(|name| graph.batch(name, [self.batch, self.seq_len], DType::I32))
        })
    }

    fn quantisation(&self) -> Option<Quantisation> {
        self.adapters.as_ref()?.quantisation
    }

    /// The rate while training, zero otherwise.
    fn dropout(&self, rate: f64) -> f64 {
        match self.purpose {
            Purpose::Train { .. } => rate,
            Purpose::Evaluate { .. } | Purpose::Embed { .. } | Purpose::Generate { .. } => 0.0,
        }
    }

    /// The tokens that a query may have before it, its own included.
    fn context(&self) -> usize {
        match self.purpose {
            Purpose::Generate { context, .. } => context,
            Purpose::Train { .. } | Purpose::Evaluate { .. } | Purpose::Embed { .. } => {
                self.seq_len
            }
        }
    }

    /// The positions of tokens that follow those in a cache.
    fn continued(&self, graph: &mut Graph) -> Option<TensorId> {
        matches!(self.purpose, Purpose::Generate { .. })
            .then(|| graph.batch(input::POSITIONS, [self.batch, self.seq_len], DType::I32))
    }

    /// Whether a weight of the model is not trained; those of adapters may be.
    fn is_frozen(&self, name: &str) -> bool {
        let is_whole = |adapters: &AdapterShape| {
            let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
            adapters.whole.contains(module)
        };
        !self.trains()
            || self
                .adapters
                .as_ref()
                .is_some_and(|adapters| !is_whole(adapters))
    }

    /// Whether anything is trained.
    fn trains(&self) -> bool {
        !matches!(
            self.purpose,
            Purpose::Generate { .. } | Purpose::Embed { frozen: true, .. }
        )
    }

    /// A weight that is read by matrix products.
    fn weight(&self, graph: &mut Graph, name: &str, shape: [usize; 2], init: Init) -> TensorId {
        match self.is_frozen(name) {
            true => graph.frozen_weight(name, shape, init),
            false => graph.weight(name, shape, init),
        }
    }

    /// A weight that is read in the precision of sums.
    fn small_weight(
        &self,
        graph: &mut Graph,
        name: &str,
        shape: impl Into<Shape>,
        init: Init,
    ) -> TensorId {
        match self.is_frozen(name) {
            true => graph.frozen_small_weight(name, shape, init),
            false => graph.small_weight(name, shape, init),
        }
    }

    /// Scale and shift of a layer norm.
    fn norm_weights(&self, graph: &mut Graph, name: &str, width: usize) -> (TensorId, TensorId) {
        let gamma = self.small_weight(graph, &format!("{name}.weight"), [width], Init::Ones);
        let beta = self.small_weight(graph, &format!("{name}.bias"), [width], Init::Zeros);
        (gamma, beta)
    }

    /// The sum of the embeddings of tokens and of their positions: those given, or 0 to T − 1.
    fn embedding(
        &self,
        graph: &mut Graph,
        [tokens, table, learned]: [TensorId; 3],
        positions: Option<TensorId>,
        dropout: Option<Dropout>,
    ) -> Result<TensorId, GraphError> {
        let Some(positions) = positions else {
            return graph.embedding("embedding", tokens, table, Some(learned), dropout);
        };
        let words = graph.embedding("embedding", tokens, table, None, None)?;
        let places = graph.embedding("position_embedding", positions, learned, None, None)?;
        Ok(graph.emit("embedding_sum", Add, vec![words, places])?[0])
    }

    /// Causal attention over the sequence, or over the cache as well.
    fn attend(
        &self,
        graph: &mut Graph,
        name: &str,
        attention: Attention,
        sources: &[TensorId],
        rows: Rows,
    ) -> Result<TensorId, GraphError> {
        let (
            Purpose::Generate {
                context,
                longest_run,
            },
            Some(positions),
        ) = (self.purpose, rows.continued)
        else {
            return graph.attend(name, attention, sources, None, rows.starts);
        };
        // Of a window, what the first of the tokens that are read at once sees must outlast the
        // arrival of the others.
        let slots = attention.window.map_or(context, |window| {
            context.min(window.saturating_add(longest_run).saturating_sub(1))
        });
        let op = CachedAttention { attention, slots };
        graph.attend_cached(name, op, sources, positions)
    }

    /// What comes after the last norm: the loss, or the logits.
    fn head(
        &self,
        graph: &mut Graph,
        h: TensorId,
        head: impl Into<Head>,
    ) -> Result<(), GraphError> {
        let (label_smoothing, loss_chunk) = match self.purpose {
            Purpose::Train {
                label_smoothing,
                loss_chunk,
            } => (label_smoothing, loss_chunk),
            Purpose::Evaluate { loss_chunk } => (0.0, loss_chunk),
            Purpose::Embed { .. } => {
                graph.result = Some(h);
                return Ok(());
            }
            Purpose::Generate { .. } => {
                let position = graph.batch(input::POSITION, [self.batch], DType::I32);
                graph.logits("logits", h, head, position)?;
                return Ok(());
            }
        };
        let targets = graph.batch(input::TARGETS, [self.batch, self.seq_len], DType::I32);
        graph.cross_entropy("loss", h, head, targets, label_smoothing, loss_chunk)?;
        Ok(())
    }
}

/// What tells the tokens of a row apart besides their order.
#[derive(Clone, Copy, Default)]
struct Rows {
    /// Where documents begin that share a row.
    starts: Option<TensorId>,
    /// Positions of tokens that follow those in a cache.
    continued: Option<TensorId>,
}
