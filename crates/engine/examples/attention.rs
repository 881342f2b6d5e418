//! How fast attention runs on the GPU at hand: forward and backward in bf16, causal unless `all`
//! keys are seen, between CUDA events, as a training step runs them. `benchmarks/attention.py` times
//! PyTorch's kernels on the same shapes.
//!
//! ```text
//! cargo run --release -p cinch-engine --example attention [-- batch,heads,key_heads,tokens,width[,dropout[,all]] …]
//! ```
#![expect(clippy::print_stdout, reason = "a table is what this is for")]

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use cinch_engine::{Engine, EngineOptions};
use cinch_graph::op::{Attention, AttentionBackward, AttentionInputs};
use cinch_graph::{DType, Graph, Target};
use cinch_plan::{Options, Plan};

/// GPT-2 124M; a model of 7 billion parameters at two lengths; a channel of the embedder's texts.
const SHAPES: [&str; 4] = [
    "32,12,12,1024,64",
    "1,28,4,1536,128",
    "1,28,4,8192,128",
    "1170,12,12,512,32,0.1,all",
];
const WARM_UPS: usize = 3;
const RUNS: usize = 21;

struct Shape {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    tokens: usize,
    width: usize,
    dropout: f64,
    causal: bool,
}

impl Shape {
    fn parse(text: &str) -> Result<Self, Box<dyn Error>> {
        let parts: Vec<&str> = text.split(',').collect();
        let &[batch, heads, kv_heads, tokens, width, ref rest @ ..] = &parts[..] else {
            return Err(format!("`{text}` is not batch,heads,key_heads,tokens,width").into());
        };
        Ok(Self {
            batch: batch.parse()?,
            heads: heads.parse()?,
            kv_heads: kv_heads.parse()?,
            tokens: tokens.parse()?,
            width: width.parse()?,
            dropout: rest.first().map_or(Ok(0.0), |rate| rate.parse())?,
            causal: match rest.get(1) {
                None => true,
                Some(&"all") => false,
                Some(other) => return Err(format!("`{other}` is not `all`").into()),
            },
        })
    }

    /// Pairs of positions that see each other.
    fn pairs(&self) -> f64 {
        let per_head = match self.causal {
            true => self.tokens * (self.tokens + 1) / 2,
            false => self.tokens * self.tokens,
        };
        (self.batch * self.heads * per_head) as f64
    }

    fn graph(&self) -> Result<Graph, Box<dyn Error>> {
        let mut graph = Graph::new(DType::Bf16);
        let op = Attention {
            inputs: AttentionInputs::Separate,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.width,
            causal: self.causal,
            scale: 1.0 / (self.width as f64).sqrt(),
            dropout: graph.dropout(self.dropout),
            padding: false,
            window: None,
            documents: false,
            selection: false,
        };
        let random = op.dropout.map(|_| graph.random_state());
        let mut tensor = |name: &str, heads: usize| {
            graph.batch(
                name,
                [self.batch, self.tokens, heads * self.width],
                DType::Bf16,
            )
        };
        let [q, k, v, d_o] = [
            tensor("q", self.heads),
            tensor("k", self.kv_heads),
            tensor("v", self.kv_heads),
            tensor("do", self.heads),
        ];
        let inputs = [q, k, v].into_iter().chain(random).collect();
        let outputs = graph.emit("attention", op.clone(), inputs)?;
        let inputs = [d_o, q, k, v, outputs[0], outputs[1]];
        let inputs = inputs.into_iter().chain(random).collect();
        graph.emit("attention.backward", AttentionBackward(op), inputs)?;
        Ok(graph)
    }

    /// Seconds of each op, the median of some runs.
    fn measure(&self) -> Result<BTreeMap<&'static str, f64>, Box<dyn Error>> {
        let graph = self.graph()?;
        let plan = Plan::new(&graph, Options::new(Target::Cuda));
        let mut engine = Engine::new(Target::Cuda, plan.arena_bytes, EngineOptions::default())?;
        let nodes = 0..graph.nodes.len();
        let part = engine.prepare(&graph, &plan, nodes, true)?;
        for name in ["q", "k", "v", "do"] {
            let id = graph.find(name).ok_or("a tensor of the graph")?;
            let place = plan.placement(id).ok_or("a planned tensor")?;
            engine.write(place, &noise(place.bytes as usize))?;
        }
        let mut times: BTreeMap<&'static str, Vec<f64>> = BTreeMap::new();
        for run in 0..WARM_UPS + RUNS {
            let mut told = |op: &'static str, _: &str, time: Duration| {
                if run >= WARM_UPS {
                    times.entry(op).or_default().push(time.as_secs_f64());
                }
            };
            engine.run_traced(&graph, &plan, &part, &mut told)?;
        }
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let times = times.into_iter().map(|(op, times)| (op, median(times)));
        Ok(times.collect())
    }
}

/// Numbers in bf16 between −2 and 2: what is read of zeroes is read faster.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let elements = (0..bytes / 2).flat_map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = f64::from(state >> 8) / f64::from(1_u32 << 22) - 2.0;
        ((value as f32).to_bits() >> 16).to_le_bytes()[..2].to_vec()
    });
    elements.collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let shapes: Vec<&str> = match &given[..] {
        [] => SHAPES.to_vec(),
        given => given.iter().map(String::as_str).collect(),
    };
    for text in shapes {
        let shape = Shape::parse(text)?;
        for (op, seconds) in shape.measure()? {
            // Two products forwards, five backwards.
            let products = if op == "attention" { 2.0 } else { 5.0 };
            let rate = products * 2.0 * shape.pairs() * shape.width as f64 / seconds / 1e12;
            println!(
                "{text:26} {op:20} {:8.3} ms {rate:6.0} TFLOP/s",
                seconds * 1e3
            );
        }
    }
    Ok(())
}
