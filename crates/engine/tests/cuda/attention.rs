//! Attention by itself, at sizes where all of a model would take the CPU too long: heads of 32 over
//! short sequences, and grouped heads.

use cinch_engine::{Engine, EngineOptions};
use cinch_graph::op::{Attention, AttentionBackward, AttentionInputs};
use cinch_graph::{DType, Graph, Init, Target, TensorId};
use cinch_plan::{Options, Plan};

use crate::card::card;
use crate::numbers::{fill_lengths, random};
use crate::on_both;
use crate::real::encode;
use crate::shared::VOCABULARY;

/// Columns of what queries, keys and values are projected from.
const WIDTH: usize = 16;

#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    causal: bool,
    padding: bool,
    dropout: f64,
    /// How much larger scores are than those of usual attention.
    sharpness: f64,
}

/// As four encoders of a text have it.
const ENCODER: Shape = Shape {
    batch: 4,
    seq: 512,
    heads: 3,
    kv_heads: 3,
    head_dim: 32,
    causal: false,
    padding: true,
    dropout: 0.1,
    sharpness: 1.0,
};

/// Of a model of 7 billion parameters.
const GROUPED: Shape = Shape {
    batch: 1,
    seq: 1536,
    heads: 28,
    kv_heads: 4,
    head_dim: 128,
    causal: true,
    padding: false,
    dropout: 0.0,
    sharpness: 1.0,
};

impl Shape {
    /// Forward and backward over the tensors that `source` makes, by name and columns. The
    /// gradients come last.
    fn attend(
        &self,
        graph: &mut Graph,
        mut source: impl FnMut(&mut Graph, &str, usize) -> TensorId,
    ) -> Vec<TensorId> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let sources = [("do", q), ("q", q), ("k", kv), ("v", kv)];
        let [d_o, q, k, v] = sources.map(|(name, width)| source(graph, name, width));
        let op = Attention {
            inputs: AttentionInputs::Separate,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            causal: self.causal,
            scale: self.sharpness / (self.head_dim as f64).sqrt(),
            dropout: graph.dropout(self.dropout),
            padding: self.padding,
            window: None,
            documents: false,
            selection: false,
        };
        let random = op.dropout.map(|_| graph.random_state());
        let lengths = self
            .padding
            .then(|| graph.batch("lengths", [self.batch], DType::I32));
        let extras = || random.into_iter().chain(lengths);
        let inputs = [q, k, v].into_iter().chain(extras()).collect();
        let outputs = graph.emit("attention", op.clone(), inputs).unwrap();
        let inputs = [d_o, q, k, v, outputs[0], outputs[1]];
        let inputs = inputs.into_iter().chain(extras()).collect();
        let gradients = graph
            .emit("attention.backward", AttentionBackward(op), inputs)
            .unwrap();
        [outputs, gradients].concat()
    }

    /// Over projections of tokens, which the comparison fills.
    fn graph(&self, compute: DType) -> Graph {
        let init = Init::Normal { std: 1.0 };
        let mut graph = Graph::new(compute);
        let tokens = graph.batch("tokens", [self.batch, self.seq], DType::I32);
        let table = graph.weight("embedding.weight", [VOCABULARY, WIDTH], init);
        let x = graph
            .embedding("embedding", tokens, table, None, None)
            .unwrap();
        let outputs = self.attend(&mut graph, |graph, name, columns| {
            let weight = graph.weight(&format!("{name}.weight"), [columns, WIDTH], init);
            graph.linear(name, x, weight, None).unwrap()
        });
        graph.result = Some(outputs[0]);
        graph
    }

    /// The bytes of all outputs, run after run: each is of the same bits as the first.
    fn assert_same_bits(&self, dtype: DType) {
        const RUNS: usize = 20;
        let _card = card();
        let mut graph = Graph::new(dtype);
        let mut sources = Vec::new();
        let outputs = self.attend(&mut graph, |graph, name, columns| {
            let source = graph.batch(name, [self.batch, self.seq, columns], dtype);
            sources.push(source);
            source
        });
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let place = |id: TensorId| plan.placement(id).unwrap();
        let options = EngineOptions::default();
        let mut engine = Engine::new(Target::Cuda, plan.arena_bytes, options).unwrap();
        let part = engine
            .prepare(&graph, &plan, 0..graph.nodes.len(), true)
            .unwrap();
        for (seed, &source) in sources.iter().enumerate() {
            let elements = graph.ty(source).shape.elements();
            let numbers = random(elements, seed as u64 + 1);
            let numbers: Vec<f32> = numbers.into_iter().map(|x| 2.0 * x as f32).collect();
            engine
                .write(place(source), &encode(&numbers, dtype))
                .unwrap();
        }
        if let Some(lengths) = graph.find("lengths") {
            let mut values = vec![0; self.batch];
            fill_lengths(&mut values, self.seq);
            engine.write(place(lengths), &values).unwrap();
        }
        if let Some(random) = graph.find("random") {
            let words: [i32; 4] = [0x1234_5678, -77, 5, 0];
            engine.write(place(random), &words).unwrap();
        }
        let mut first: Option<Vec<Vec<u8>>> = None;
        for run in 0..RUNS {
            engine.run(&graph, &plan, &part).unwrap();
            engine.synchronize().unwrap();
            let bytes = outputs
                .iter()
                .map(|&id| engine.bytes(place(id)).unwrap().into_owned());
            let bytes: Vec<Vec<u8>> = bytes.collect();
            let expected = first.get_or_insert_with(|| bytes.clone());
            assert!(*expected == bytes, "run {run} gave other bits");
        }
    }
}

/// Lengths of their own, and every head with keys of its own.
const GROUPED_AND_PADDED: Shape = Shape {
    batch: 4,
    seq: 700,
    heads: 6,
    kv_heads: 2,
    padding: true,
    ..GROUPED
};
const OF_64: Shape = Shape {
    batch: 3,
    seq: 1000,
    heads: 7,
    kv_heads: 7,
    head_dim: 64,
    ..GROUPED
};

macro_rules! shapes {
    ($($(#[$long:meta])? $test:ident: $shape:expr;)*) => {
        on_both! {
            emulated: $($(#[$long])? $test: {
                let shape: Shape = $shape;
                move |compute| shape.graph(compute)
            };)*
        }
    };
}

shapes! {
    #[ignore = "takes minutes without a card"]
    heads_of_32_over_512_positions: ENCODER;
    #[ignore = "takes minutes without a card"]
    heads_of_32_without_dropout: Shape { dropout: 0.0, ..ENCODER };
    heads_of_32_over_24_positions: Shape { seq: 24, ..ENCODER };
    #[ignore = "takes minutes without a card"]
    heads_of_32_over_300_positions: Shape { seq: 300, padding: false, ..ENCODER };
    heads_of_32_over_449_positions: Shape { seq: 449, batch: 5, ..ENCODER };
    heads_of_32_over_one_position: Shape { seq: 1, padding: false, ..ENCODER };
    #[ignore = "takes minutes without a card"]
    heads_of_32_of_many_texts: Shape { seq: 130, batch: 70, ..ENCODER };
    // Scores far above those of the first keys, which are what probabilities are relative to.
    #[ignore = "takes minutes without a card"]
    heads_of_32_with_sharp_scores: Shape { sharpness: 6.0, ..ENCODER };
    #[ignore = "takes minutes without a card"]
    heads_of_32_over_600_positions: Shape { seq: 600, ..ENCODER };
    heads_of_32_in_causal_order: Shape { seq: 333, causal: true, kv_heads: 1, ..ENCODER };
    #[ignore = "takes minutes without a card"]
    grouped_heads_of_128: GROUPED;
    #[ignore = "takes minutes without a card"]
    grouped_heads_of_128_over_1500_positions: Shape { seq: 1500, ..GROUPED };
    #[ignore = "takes minutes without a card"]
    grouped_heads_of_128_padded: GROUPED_AND_PADDED;
    #[ignore = "takes minutes without a card"]
    few_heads_of_64: OF_64;
    // More heads than a card has room for at once: a block has several, one after the other.
    many_heads_of_64: Shape { batch: 1, seq: 130, heads: 70, kv_heads: 70, ..OF_64 };
    #[ignore = "takes minutes without a card"]
    one_text_of_heads_of_64: Shape { batch: 1, seq: 1500, ..OF_64 };
    #[ignore = "takes minutes without a card"]
    one_text_of_grouped_heads_of_64: Shape { batch: 1, seq: 1200, heads: 14, kv_heads: 2, ..OF_64 };
    #[ignore = "takes minutes without a card"]
    own_keys_of_heads_of_128: Shape { seq: 1100, heads: 12, kv_heads: 12, ..GROUPED };
}

#[test]
#[ignore = "needs a GPU"]
fn gradients_have_the_same_bits_every_time() {
    for dtype in [DType::Bf16, DType::F16] {
        ENCODER.assert_same_bits(dtype);
        Shape {
            batch: 90,
            ..ENCODER
        }
        .assert_same_bits(dtype);
        GROUPED.assert_same_bits(dtype);
        Shape { batch: 1, ..OF_64 }.assert_same_bits(dtype);
    }
}
