//! A decoder with gated sparse attention: RMS norms, rotary positions, grouped heads whose
//! queries see the keys that an indexer selects, gates on values and on attention's output, and a
//! gated feed-forward part. The head is not tied.
//!
//! The indexer is trained beside the model: its scores are fitted to the distribution of the
//! attention, which gets no gradient from that, and neither does the hidden state that the
//! indexer reads. While it warms up, attention is dense.
//!
//! When text is generated, a token selects the keys that it would select as the last of a sequence
//! that ends with it: what comes later cannot be known yet.

use std::sync::Arc;

use cinch_architecture::Gsa;
use cinch_graph::op::{
    ActivationKind, Attention, AttentionInputs, CachedAttention, CachedSelection, Indexer,
    IndexerLoss, KeyCount, NormKind, Rotary,
};
use cinch_graph::{Graph, GraphError, Init, LossTerm, TensorId};

use crate::{Build, Builds, Purpose, TrainingPhase};

const NORM: (NormKind, f64) = (NormKind::Rms, 1e-5);
const EMBEDDING: Init = Init::Normal { std: 0.02 };
const ROTARY_BASE: f64 = 10_000.0;
/// Of the ratio of variances that a number of keys follows.
const TEMPERATURE: f64 = 1.0;
/// The term of the loss that fits the indexers, and its weight. The indexer's weights alone depend
/// on it, and the optimizer's steps hardly do on its size.
const TERM: (&str, f64) = ("indexer", 1.0);
/// Gates start close to open: their weights small, their biases at this.
const GATE_GAIN: f64 = 0.1;
const GATE_BIAS: Init = Init::Constant { value: 0.5 };

impl Builds for Gsa {
    fn build(&self, graph: &mut Graph, build: &Build) -> Result<(), GraphError> {
        Model::new(graph, self, build).build()
    }

    fn phases(&self) -> Vec<TrainingPhase> {
        if !warms_up(self) {
            return vec![TrainingPhase::WHOLE];
        }
        let dense = TrainingPhase {
            name: "dense attention".into(),
            first_step: 0,
        };
        let sparse = TrainingPhase {
            name: "sparse attention".into(),
            first_step: self.indexer_warmup,
        };
        vec![dense, sparse]
    }
}

/// Whether the run begins with dense attention: an indexer that is not trained has nothing to
/// learn from it.
fn warms_up(config: &Gsa) -> bool {
    config.train_indexer && config.indexer_warmup > 0
}

/// Uniform over ±gain·√(6/(inputs + outputs)): Xavier's.
fn xavier([outputs, inputs]: [usize; 2], gain: f64) -> Init {
    Init::Uniform {
        bound: gain * (6.0 / (inputs + outputs) as f64).sqrt(),
    }
}

/// A graph in the making.
struct Model<'a> {
    g: &'a mut Graph,
    config: &'a Gsa,
    build: &'a Build,
    frequencies: Arc<[f64]>,
    /// Positions of tokens that follow those in a cache.
    continued: Option<TensorId>,
    /// Whether queries see all keys before them.
    dense: bool,
    /// What the indexers are fitted by, where they are trained.
    term: Option<LossTerm>,
}

impl<'a> Model<'a> {
    fn new(g: &'a mut Graph, config: &'a Gsa, build: &'a Build) -> Self {
        let head_dim = (config.width / config.heads.max(1)) as usize;
        let trains = matches!(build.purpose, Purpose::Train { .. }) && config.train_indexer;
        let rows = build.batch * build.seq_len * config.layers as usize;
        let (name, weight) = TERM;
        let term = trains.then(|| g.indexer_term(name, rows, weight));
        let generates = matches!(build.purpose, Purpose::Generate { .. });
        Self {
            g,
            config,
            build,
            frequencies: Rotary::frequencies(ROTARY_BASE, head_dim),
            continued: None,
            dense: warms_up(config) && build.phase == 0 && !generates,
            term,
        }
    }

    fn build(mut self) -> Result<(), GraphError> {
        let config = self.config;
        let (vocabulary, d) = (config.vocabulary as usize, config.width as usize);
        let tokens = self.build.tokens(self.g);
        self.continued = self.build.continued(self.g);
        let table = self.matrix("model.embed_tokens.weight", [vocabulary, d], EMBEDDING);
        let mut stream = self.g.embedding("embedding", tokens, table, None, None)?;
        let opening = |layer: u64| format!("model.layers.{layer}.input_layernorm");
        let gamma = self.small(&format!("{}.weight", opening(0)), d, Init::Ones);
        let mut normed = self.g.norm(&opening(0), stream, NORM, gamma, None)?;
        for layer in 0..config.layers {
            let name = format!("model.layers.{layer}");
            self.g.enter_block(&name);
            let branch = self.attention(&format!("{name}.self_attn"), normed)?;
            let middle = format!("{name}.post_attention_layernorm");
            (stream, normed) = self.add(&middle, stream, branch)?;
            let branch = self.feed_forward(&format!("{name}.mlp"), normed)?;
            let next = match layer + 1 < config.layers {
                true => opening(layer + 1),
                false => "model.norm".to_owned(),
            };
            (stream, normed) = self.add(&next, stream, branch)?;
            self.g.leave_block();
        }
        let head = self.matrix("lm_head.weight", [vocabulary, d], EMBEDDING);
        self.build.head(self.g, normed, head)
    }

    /// `stream + branch`, and its norm.
    fn add(
        &mut self,
        name: &str,
        stream: TensorId,
        branch: TensorId,
    ) -> Result<(TensorId, TensorId), GraphError> {
        let width = self.g.ty(stream).width();
        let gamma = self.small(&format!("{name}.weight"), width, Init::Ones);
        let pair = (stream, branch);
        let out = self.g.residual_norm(name, pair, None, NORM, gamma, None)?;
        Ok((out.stream, out.normed))
    }

    fn attention(&mut self, parent: &str, x: TensorId) -> Result<TensorId, GraphError> {
        let config = self.config;
        let name = |part: &str| format!("{parent}.{part}");
        let (d, heads) = (config.width as usize, config.heads as usize);
        let kv_heads = config.key_heads as usize;
        let head_dim = d / heads.max(1);
        let keys = kv_heads * head_dim;
        let gain = std::f64::consts::FRAC_1_SQRT_2;
        let q = self.linear(&name("q_proj"), x, d, gain)?;
        let k = self.linear(&name("k_proj"), x, keys, gain)?;
        let mut v = self.linear(&name("v_proj"), x, keys, gain)?;
        if config.value_gate {
            v = self.gated(&name("value_gate"), v, x)?;
        }
        let q = self
            .g
            .rotary(&name("q_rotary"), q, &self.frequencies, self.continued)?;
        let k = self
            .g
            .rotary(&name("k_rotary"), k, &self.frequencies, self.continued)?;
        let attention = Attention {
            inputs: AttentionInputs::Separate,
            heads,
            kv_heads,
            head_dim,
            causal: true,
            scale: 1.0 / (head_dim as f64).sqrt(),
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        };
        let mut o = self.attend(parent, attention, [q, k, v], x)?;
        if config.output_gate {
            o = self.gated(&name("output_gate"), o, x)?;
        }
        let gain = 1.0 / (2.0 * config.layers as f64).sqrt();
        self.linear(&name("o_proj"), o, d, gain)
    }

    /// Attention to the keys that the indexer selects, and its fit.
    fn attend(
        &mut self,
        parent: &str,
        attention: Attention,
        sources: [TensorId; 3],
        x: TensorId,
    ) -> Result<TensorId, GraphError> {
        let config = self.config;
        let indexer = Indexer {
            heads: config.indexer_heads as usize,
            width: config.indexer_width as usize,
        };
        let inputs = self.indexer(&format!("{parent}.indexer"), indexer, x)?;
        let count = match config.adaptive_keys {
            false => KeyCount::Fixed(config.base_keys as usize),
            true => KeyCount::Adaptive {
                base: config.base_keys as usize,
                least: config.least_keys as usize,
                most: config.most_keys as usize,
                temperature: TEMPERATURE,
            },
        };
        if let (Purpose::Generate { context, .. }, Some(positions)) =
            (self.build.purpose, self.continued)
        {
            let selection = CachedSelection {
                indexer,
                count,
                slots: context,
            };
            let name = format!("{parent}.indexer.selection");
            let selection = self.g.select_cached(&name, selection, inputs, positions)?;
            let name = format!("{parent}.attention");
            let op = CachedAttention {
                attention,
                slots: context,
            };
            return self
                .g
                .attend_cached_selected(&name, op, &sources, selection, positions);
        }
        let count = (!self.dense).then_some(count);
        // In the warm-up nobody but the fit asks for scores.
        let scored = match self.dense && self.term.is_none() {
            true => None,
            false => {
                let name = format!("{parent}.indexer.selection");
                Some(self.g.select_keys(&name, indexer, inputs, count)?)
            }
        };
        let selection = scored.and_then(|(_, selection)| selection);
        let name = format!("{parent}.attention");
        let [o, lse] = self
            .g
            .attend_selected(&name, attention.clone(), &sources, selection)?;
        if let (Some(term), Some((scores_lse, _))) = (&self.term, scored) {
            let op = IndexerLoss { indexer, attention };
            let of = (&sources[..], lse, selection);
            let name = format!("{parent}.indexer.loss");
            self.g
                .indexer_loss(&name, term, op, inputs, scores_lse, of)?;
        }
        Ok(o)
    }

    /// What an indexer's scores are computed from. It passes no gradient on to x.
    fn indexer(
        &mut self,
        parent: &str,
        indexer: Indexer,
        x: TensorId,
    ) -> Result<[TensorId; Indexer::NUM_INPUTS], GraphError> {
        let d = self.g.ty(x).width();
        let Indexer { heads, width } = indexer;
        let rate = self.config.indexer_rate;
        let mut project = |part: &str, outputs: usize, gain: f64| {
            let name = format!("{parent}.{part}");
            let shape = [outputs, d];
            let weight = self.matrix(&format!("{name}.weight"), shape, xavier(shape, gain));
            self.g.scale_learning_rate(rate);
            self.g.linear_detached(&name, x, weight)
        };
        let q = project("q_proj", heads * width, 1.0)?;
        let k = project("k_proj", width, 1.0)?;
        let c = project("weights_proj", heads, 0.1)?;
        let mut bias = |part: &str| {
            let bias = self.small(&format!("{parent}.{part}"), heads, Init::Zeros);
            self.g.scale_learning_rate(rate);
            bias
        };
        Ok([q, k, c, bias("weights_proj.bias"), bias("bias")])
    }

    fn feed_forward(&mut self, parent: &str, x: TensorId) -> Result<TensorId, GraphError> {
        let (inner, d) = (self.config.inner as usize, self.config.width as usize);
        let gate = self.linear(&format!("{parent}.gate_proj"), x, inner, 1.0)?;
        let up = self.linear(&format!("{parent}.up_proj"), x, inner, 1.0)?;
        let name = format!("{parent}.act_fn");
        let active = self.g.gated(&name, gate, up, ActivationKind::Silu)?;
        self.linear(&format!("{parent}.down_proj"), active, d, 1.0)
    }

    /// `y·σ(W·x + b)`.
    fn gated(&mut self, name: &str, y: TensorId, x: TensorId) -> Result<TensorId, GraphError> {
        let shape = [self.g.ty(y).width(), self.g.ty(x).width()];
        let init = xavier(shape, GATE_GAIN);
        let weight = self.matrix(&format!("{name}.weight"), shape, init);
        let bias = self.small(&format!("{name}.bias"), shape[0], GATE_BIAS);
        let gate = self.g.linear(name, x, weight, Some(bias))?;
        let name = format!("{name}.gated");
        self.g.map(&name, &[y, gate], |v| &v[0] * v[1].sigmoid())
    }

    fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        outputs: usize,
        gain: f64,
    ) -> Result<TensorId, GraphError> {
        let shape = [outputs, self.g.ty(x).width()];
        let weight = self.matrix(&format!("{name}.weight"), shape, xavier(shape, gain));
        self.g.linear(name, x, weight, None)
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], init: Init) -> TensorId {
        self.build.weight(self.g, name, shape, init)
    }

    /// A norm's scale or a bias.
    fn small(&mut self, name: &str, width: usize, init: Init) -> TensorId {
        self.build.small_weight(self.g, name, [width], init)
    }
}
