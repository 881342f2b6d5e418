//! Small models of random structure: chains and branches of the ops that models are built
//! from, with tensors read by several nodes, across layers and blocks.

use cinch_graph::op::{
    ActivationKind, Attention, AttentionInputs, GradientFormat, MomentFormat, NormKind, Rotary,
    ScanInputs,
};
use cinch_graph::{
    DType, Graph, GraphError, Init, Optimizer, Storage, TensorId, TrainingGraph, differentiate,
};
use proptest::prelude::*;

const INIT: Init = Init::Normal { std: 0.02 };
const HEADS: usize = 2;
const STATE: usize = 3;
const RANK: usize = 2;

/// What a layer makes of the stream's norm before it is added to the stream.
#[derive(Clone, Copy, Debug)]
pub enum Layer {
    FeedForward(ActivationKind),
    /// Two projections, one of which gates the other.
    Gated(ActivationKind),
    /// Queries, keys and values side by side.
    Attention,
    /// Three projections of one tensor, queries and keys turned by their positions; both query
    /// heads share a key head.
    SeparateAttention,
    /// The projection is its own query, key and value: three readings by one node.
    SelfSimilarity,
    Mixer {
        convolution: bool,
    },
    /// Attention from here to the norm of some earlier layer, often of another block.
    Skip(usize),
    /// Half of the columns.
    Columns,
    /// A projection added to itself, in place of the stream.
    Doubled,
}

#[derive(Clone, Debug)]
pub struct ModelSpec {
    pub batch: usize,
    pub length: usize,
    pub width: usize,
    pub vocabulary: usize,
    pub compute: DType,
    pub norm: NormKind,
    pub dropout: f64,
    pub positions: bool,
    pub bias: bool,
    pub tied: bool,
    pub padding: bool,
    pub blocks: Vec<Vec<Layer>>,
    /// Parameter i is frozen where bit i is set.
    pub frozen: u64,
}

fn layers() -> impl Strategy<Value = Layer> {
    use ActivationKind::{Gelu, GeluTanh, Relu, Silu};
    let kinds = || prop::sample::select(vec![Gelu, GeluTanh, Relu, Silu]);
    prop_oneof![
        3 => kinds().prop_map(Layer::FeedForward),
        2 => kinds().prop_map(Layer::Gated),
        2 => Just(Layer::Attention),
        1 => Just(Layer::SeparateAttention),
        1 => Just(Layer::SelfSimilarity),
        2 => any::<bool>().prop_map(|convolution| Layer::Mixer { convolution }),
        2 => (0..8_usize).prop_map(Layer::Skip),
        1 => Just(Layer::Columns),
        1 => Just(Layer::Doubled),
    ]
}

/// Models with some of their parameters frozen.
pub fn models() -> impl Strategy<Value = ModelSpec> {
    let sizes = (1..3_usize, 1..9_usize, 1..4_usize, 2..40_usize);
    let kinds = (
        prop::sample::select(vec![DType::F32, DType::F64, DType::Bf16, DType::F16]),
        prop::sample::select(vec![NormKind::Layer, NormKind::Rms]),
        prop::sample::select(vec![0.0, 0.25]),
    );
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let blocks = prop::collection::vec(prop::collection::vec(layers(), 1..4), 1..5);
    // None, some, the first few as in fine-tuning, all.
    let first = (0..40_u32).prop_map(|count| (1_u64 << count) - 1);
    let frozen = prop_oneof![3 => Just(0), 2 => any::<u64>(), 2 => first, 1 => Just(u64::MAX)];
    (sizes, kinds, flags, blocks, frozen).prop_map(|(sizes, kinds, flags, blocks, frozen)| {
        ModelSpec {
            batch: sizes.0,
            length: sizes.1,
            width: sizes.2 * 4,
            vocabulary: sizes.3,
            compute: kinds.0,
            norm: kinds.1,
            dropout: kinds.2,
            positions: flags.0,
            bias: flags.1,
            tied: flags.2,
            padding: flags.3,
            blocks,
            frozen,
        }
    })
}

/// So many random cases; a failure prints its model, which makes a test of its own.
pub fn cases(count: u32) -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(count)
    }
}

pub fn optimizer() -> Optimizer {
    Optimizer {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        max_norm: Some(1.0),
        moments: MomentFormat::Full,
        gradients: GradientFormat::Full,
    }
}

impl ModelSpec {
    /// The forward graph, up to the loss.
    pub fn forward(&self) -> Graph {
        let mut graph = Graph::new(self.compute);
        Builder::new(self, &mut graph)
            .build()
            .expect("a random model is well formed");
        let count = graph.parameters.len();
        for (index, parameter) in graph.parameters.iter_mut().enumerate() {
            // The last one is always trained: a step has to have something to do.
            let frozen = self.frozen >> (index % 64) & 1 == 1;
            if frozen && index + 1 < count {
                parameter.storage = Storage::Frozen;
            }
        }
        graph
    }

    pub fn training(&self) -> TrainingGraph {
        differentiate(self.forward(), &optimizer()).expect("a random model has a derivative")
    }
}

struct Builder<'a> {
    spec: &'a ModelSpec,
    graph: &'a mut Graph,
    stream: TensorId,
    normed: TensorId,
    /// Norms so far, for layers that reach back.
    earlier: Vec<TensorId>,
}

impl<'a> Builder<'a> {
    fn new(spec: &'a ModelSpec, graph: &'a mut Graph) -> Self {
        Self {
            spec,
            graph,
            stream: TensorId(0),
            normed: TensorId(0),
            earlier: Vec::new(),
        }
    }

    fn build(mut self) -> Result<(), GraphError> {
        let spec = self.spec;
        let tokens = self
            .graph
            .batch("tokens", [spec.batch, spec.length], DType::I32);
        let table = self
            .graph
            .weight("table", [spec.vocabulary, spec.width], INIT);
        let positions = spec.positions.then(|| {
            self.graph
                .weight("positions", [spec.length + 1, spec.width], INIT)
        });
        let dropout = self.graph.dropout(spec.dropout);
        self.stream = self
            .graph
            .embedding("embedding", tokens, table, positions, dropout)?;
        let (gamma, beta) = self.norm_weights("first");
        let norm = (spec.norm, 1e-5);
        self.normed = self.graph.norm("first", self.stream, norm, gamma, beta)?;
        for (block, layers) in spec.blocks.iter().enumerate() {
            self.graph.enter_block(format!("block{block}"));
            for (index, &layer) in layers.iter().enumerate() {
                self.add_layer(&format!("{block}.{index}"), layer)?;
            }
            self.graph.leave_block();
        }
        let head = if spec.tied {
            table
        } else {
            self.graph
                .weight("head", [spec.vocabulary, spec.width], INIT)
        };
        let targets = self
            .graph
            .batch("targets", [spec.batch, spec.length], DType::I32);
        self.graph
            .cross_entropy("loss", self.normed, head, targets, 0.0, Some(2))?;
        Ok(())
    }

    fn add_layer(&mut self, name: &str, layer: Layer) -> Result<(), GraphError> {
        self.earlier.push(self.normed);
        let (x, width) = (self.normed, self.spec.width);
        let branch = match layer {
            Layer::FeedForward(kind) => {
                let up = self.linear(&format!("{name}.up"), x, 0, width, 2 * width)?;
                let active = self.graph.activation(&format!("{name}.act"), up, kind)?;
                self.linear(&format!("{name}.down"), active, 0, 2 * width, width)?
            }
            Layer::Gated(kind) => {
                let gate = self.linear(&format!("{name}.gate"), x, 0, width, 2 * width)?;
                let up = self.linear(&format!("{name}.up"), x, 0, width, 2 * width)?;
                let active = self.graph.gated(&format!("{name}.act"), gate, up, kind)?;
                self.linear(&format!("{name}.down"), active, 0, 2 * width, width)?
            }
            Layer::Attention => {
                let qkv = self.linear(&format!("{name}.qkv"), x, 0, width, 3 * width)?;
                let dropout = self.graph.dropout(self.spec.dropout);
                let name = format!("{name}.attention");
                self.graph.attention(&name, qkv, HEADS, true, dropout)?
            }
            Layer::SeparateAttention => {
                let q = self.linear(&format!("{name}.q"), x, 0, width, width)?;
                let k = self.linear(&format!("{name}.k"), x, 0, width, width / HEADS)?;
                let (q, k) = (self.turned(q)?, self.turned(k)?);
                let v = self.linear(&format!("{name}.v"), x, 0, width, width / HEADS)?;
                self.separate(&format!("{name}.attention"), [q, k, v], 1)?
            }
            Layer::SelfSimilarity => {
                let y = self.linear(&format!("{name}.y"), x, 0, width, width)?;
                self.separate(&format!("{name}.attention"), [y; 3], HEADS)?
            }
            Layer::Mixer { convolution } => self.mixer(name, convolution)?,
            Layer::Skip(back) => {
                let from = self.earlier[self.earlier.len().saturating_sub(1 + back)];
                let q = self.linear(&format!("{name}.q"), x, 0, width, width)?;
                let k = self.linear(&format!("{name}.k"), from, 0, width, width)?;
                self.separate(&format!("{name}.attention"), [q, k, from], HEADS)?
            }
            Layer::Columns => {
                let half = width / 2;
                self.linear(&format!("{name}.columns"), x, half, half, width)?
            }
            Layer::Doubled => {
                self.stream = self.linear(&format!("{name}.twice"), x, 0, width, width)?;
                self.stream
            }
        };
        let (gamma, beta) = self.norm_weights(name);
        let dropout = self.graph.dropout(self.spec.dropout);
        let pair = (self.stream, branch);
        let norm = (self.spec.norm, 1e-5);
        let name = format!("{name}.norm");
        let out = self
            .graph
            .residual_norm(&name, pair, dropout, norm, gamma, beta)?;
        (self.stream, self.normed) = (out.stream, out.normed);
        Ok(())
    }

    fn mixer(&mut self, name: &str, convolution: bool) -> Result<TensorId, GraphError> {
        let inner = self.spec.width;
        let zu = self.linear(&format!("{name}.in"), self.normed, 0, inner, 2 * inner)?;
        let (u, u_column) = if convolution {
            let weight = self
                .graph
                .small_weight(&format!("{name}.conv.weight"), [inner, 3], INIT);
            let bias = self
                .graph
                .small_weight(&format!("{name}.conv.bias"), [inner], Init::Zeros);
            let name = format!("{name}.conv");
            (self.graph.convolution(&name, zu, inner, weight, bias)?, 0)
        } else {
            (zu, inner)
        };
        let p = self.linear(&format!("{name}.p"), u, u_column, inner, RANK + 2 * STATE)?;
        let dt = self.linear(&format!("{name}.dt"), p, 0, RANK, inner)?;
        let a_log = format!("{name}.A_log");
        let inputs = ScanInputs {
            x: u,
            x_column: u_column,
            z: zu,
            z_column: 0,
            p,
            dt,
            a_log: self
                .graph
                .small_weight(&a_log, [inner, STATE], Init::LogRange),
            d: self
                .graph
                .small_weight(&format!("{name}.D"), [inner], Init::Ones),
        };
        self.graph.scan(&format!("{name}.scan"), inputs, RANK, 2)
    }

    fn separate(
        &mut self,
        name: &str,
        sources: [TensorId; 3],
        kv_heads: usize,
    ) -> Result<TensorId, GraphError> {
        let op = Attention {
            inputs: AttentionInputs::Separate,
            heads: HEADS,
            kv_heads,
            head_dim: self.spec.width / HEADS,
            causal: false,
            scale: 1.0,
            dropout: None,
            padding: false,
            window: None,
            documents: false,
            selection: false,
        };
        let lengths = self.spec.padding.then(|| self.lengths());
        self.graph.attend(name, op, &sources, lengths, None)
    }

    /// The length of each sequence, one tensor for all layers.
    fn lengths(&mut self) -> TensorId {
        let batch = [self.spec.batch];
        let there = self.graph.find("lengths");
        there.unwrap_or_else(|| self.graph.batch("lengths", batch, DType::I32))
    }

    fn turned(&mut self, x: TensorId) -> Result<TensorId, GraphError> {
        let name = format!("{}.turned", self.graph.tensor(x).name);
        self.graph.rotary(
            &name,
            x,
            &Rotary::frequencies(10_000.0, self.spec.width / HEADS),
            None,
        )
    }

    fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        first_column: usize,
        inputs: usize,
        outputs: usize,
    ) -> Result<TensorId, GraphError> {
        let weight = format!("{name}.weight");
        let weight = self.graph.weight(&weight, [outputs, inputs], INIT);
        let bias = self.spec.bias.then(|| {
            let bias = format!("{name}.bias");
            self.graph.small_weight(&bias, [outputs], Init::Zeros)
        });
        self.graph
            .linear_columns(name, x, first_column, weight, bias)
    }

    fn norm_weights(&mut self, name: &str) -> (TensorId, Option<TensorId>) {
        let width = self.spec.width;
        let gamma = format!("{name}.gamma");
        let gamma = self.graph.small_weight(&gamma, [width], Init::Ones);
        let beta = (self.spec.norm == NormKind::Layer).then(|| {
            let beta = format!("{name}.beta");
            self.graph.small_weight(&beta, [width], Init::Zeros)
        });
        (gamma, beta)
    }
}
