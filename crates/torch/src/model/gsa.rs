//! The gathered sparse attention system in plain PyTorch: an indexer scores every pair, the best keys of each query are
//! gathered, and attention runs over the gathered copies.

use std::rc::Rc;

use cinch_architecture as architecture;

use super::module::{Builder, Embedding, Linear, next_token_loss};
use super::replay::{Replay, Setup};
use crate::eager::checkpoint::Checkpointing;
use crate::eager::line::at;
use crate::eager::op::einsum::einsum;
use crate::eager::op::{cast, creation, index, matmul, pointwise, reduce, softmax, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Tensor};

/// RMS norm in plain ops.
struct RmsNorm {
    weight: Tensor,
}

impl RmsNorm {
    fn forward(&self, x: &Tensor) -> Tensor {
        at!(x.context(), "x / √(mean(x²) + ε) · w");
        let v = cast::to(x, DType::Float32);
        let last = v.dim() - 1;
        let mean = reduce::mean(pointwise::pow_number(&v), &[last], true);
        let normed = pointwise::mul(&v, pointwise::rsqrt(pointwise::add_number(mean)));
        let normed = cast::to(normed, x.dtype());
        pointwise::mul(normed, &self.weight)
    }
}

/// Rotary positions, made anew at every call.
fn rope(x: Tensor) -> Tensor {
    let context = x.context().clone();
    let (length, width) = (x.size(1), x.size(3));
    at!(context, "f = base^(−2i / width)");
    let exponents = cast::to(
        creation::arange(&context, width / 2, DType::Int64),
        DType::Float32,
    );
    let powers = pointwise::number_pow(pointwise::mul_number(exponents));
    let frequencies = pointwise::reciprocal(powers);
    at!(context, "angles = [t · f, t · f]");
    let positions = cast::to(
        creation::arange(&context, length, DType::Int64),
        DType::Float32,
    );
    let angles = {
        let outer = pointwise::mul(view::reshape(positions, [length, 1]), &frequencies);
        view::cat(vec![outer.clone(), outer], 1)
    };
    let angles = view::unsqueeze(view::unsqueeze(angles, 0), 2);
    at!(context, "x1, x2 = halves of x");
    let halves = view::split(&x, &[width / 2, width / 2], 3);
    at!(context, "x · cos(angles) + [−x2, x1] · sin(angles)");
    let straight = pointwise::mul(&x, pointwise::apply(&angles, "cos", DType::Float32));
    let turned = view::cat(vec![pointwise::neg(&halves[1]), halves[0].clone()], 3);
    let turned = pointwise::mul(turned, pointwise::apply(&angles, "sin", DType::Float32));
    let out = pointwise::add(straight, turned);
    drop(frequencies);
    drop(angles);
    drop(halves);
    drop(x);
    out
}

struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    value_gate: Linear,
    output_gate: Linear,
    indexer_query: Linear,
    indexer_key: Linear,
    indexer_weight: Linear,
    indexer_bias: Tensor,
    config: architecture::Gsa,
}

impl Attention {
    fn new(builder: &Builder, config: &architecture::Gsa) -> Attention {
        let (width, head) = (config.width, config.width / config.heads);
        let (queries, keys) = (config.heads * head, config.key_heads * head);
        Attention {
            query: builder.linear("q", width, queries, false),
            key: builder.linear("k", width, keys, false),
            value: builder.linear("v", width, keys, false),
            output: builder.linear("o", queries, width, false),
            value_gate: builder.linear("vg", width, keys, true),
            output_gate: builder.linear("og", width, queries, true),
            indexer_query: builder.linear(
                "iq",
                width,
                config.indexer_heads * config.indexer_width,
                false,
            ),
            indexer_key: builder.linear("ik", width, config.indexer_width, false),
            indexer_weight: builder.linear("iw", width, config.indexer_heads, true),
            indexer_bias: builder.parameter([config.indexer_heads]),
            config: config.clone(),
        }
    }

    fn parameters(&self) -> Vec<Tensor> {
        let mut list = vec![self.indexer_bias.clone()];
        for linear in [
            &self.query,
            &self.key,
            &self.value,
            &self.output,
            &self.value_gate,
            &self.output_gate,
            &self.indexer_query,
            &self.indexer_key,
            &self.indexer_weight,
        ] {
            list.extend(linear.parameters());
        }
        list
    }

    /// Scores of every pair, and from them which keys each query takes. Nothing of it is trained: the choice has no
    /// gradient.
    fn choose(&self, x: &Tensor) -> Chosen {
        let context = x.context().clone();
        let (batch, length) = (x.size(0), x.size(1));
        let (heads, width) = (self.config.indexer_heads, self.config.indexer_width);
        at!(context, "iq = Wiq x");
        let query = view::view(self.indexer_query.forward(x), [batch, length, heads, width]);
        at!(context, "ik = Wik x");
        let key = self.indexer_key.forward(x);
        at!(context, "w = sigmoid(Wiw x)");
        let weight = pointwise::sigmoid(self.indexer_weight.forward(x));
        at!(context, "s = sigmoid(iq ikᵀ / √d + b)");
        let bias = view::view(&self.indexer_bias, [1, heads, 1, 1]);
        let scaled = pointwise::mul_number(einsum(&query, "bthd", &key, "bsd", "bhts"));
        let scores = pointwise::sigmoid(pointwise::add(scaled, bias));
        at!(context, "I = Σ w · s over heads");
        let mut total = {
            let lowered = cast::to(&scores, weight.dtype());
            einsum(&weight, "bth", &lowered, "bhts", "bts")
        };
        at!(context, "causal = triu(1)");
        let causal = pointwise::apply(
            creation::filled(&context, [length, length], DType::Bool),
            "triu",
            DType::Bool,
        );
        at!(context, "I = −∞ where causal");
        total = pointwise::masked_fill(&total, &causal);
        at!(context, "v = var(I)");
        let variance = {
            let filled = pointwise::masked_fill(&total, &causal);
            reduce::var(cast::to(filled, DType::Float32), &[2])
        };
        at!(context, "r = v / (mean(v) + ε)");
        let ratio = pointwise::div(
            &variance,
            pointwise::add_number(reduce::mean(&variance, &[0, 1], false)),
        );
        at!(context, "k = clamp(base · (½ + 1 / (1 + r)))");
        let mut count = {
            let inverse = pointwise::reciprocal(pointwise::add_number(&ratio));
            pointwise::clamp(pointwise::mul_number(pointwise::add_number(inverse)))
        };
        at!(context, "k = min(k, t)");
        count = {
            let range = cast::to(
                creation::arange(&context, length, DType::Int64),
                DType::Float32,
            );
            let smaller = pointwise::minimum(&count, range);
            pointwise::apply(smaller, "to", DType::Int64)
        };
        let most = self.config.most_keys.min(length);
        at!(context, "values, chosen = topk(I)");
        let (values, indices) = index::topk(&total, most);
        at!(context, "mask = place ≥ k or values infinite");
        let mask = {
            let range = view::view(creation::arange(&context, most, DType::Int64), [1, 1, most]);
            let beyond = pointwise::compare(range, view::unsqueeze(&count, 2), DType::Bool);
            let infinite = pointwise::apply(pointwise::abs(&values), "eq", DType::Bool);
            pointwise::compare(beyond, infinite, DType::Bool)
        };
        let names = vec![
            query, key, weight, scores, total, causal, variance, ratio, count, values,
        ];
        Chosen {
            _names: names,
            indices,
            mask,
        }
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let (batch, length, heads) = (x.size(0), x.size(1), self.config.heads);
        let width = self.config.width / heads;
        let key_heads = self.config.key_heads;
        let context = x.context();
        at!(context, "q = rope(Wq x)");
        let query = rope(view::view(
            self.query.forward(x),
            [batch, length, heads, width],
        ));
        at!(context, "k = rope(Wk x)");
        let mut key = rope(view::view(
            self.key.forward(x),
            [batch, length, key_heads, width],
        ));
        at!(context, "v = Wv x · sigmoid(Wvg x)");
        let mut value = {
            let plain = self.value.forward(x);
            let gate = pointwise::sigmoid(self.value_gate.forward(x));
            view::view(
                pointwise::mul(plain, gate),
                [batch, length, key_heads, width],
            )
        };
        let chosen = self.choose(x);
        let most = chosen.indices.sizes().last();
        at!(context, "k = repeat(k)");
        key = view::repeat_interleave(&key, heads / key_heads, 2);
        at!(context, "v = repeat(v)");
        value = view::repeat_interleave(&value, heads / key_heads, 2);
        at!(context, "chosen for every head");
        let places = view::expand(
            view::unsqueeze(view::unsqueeze(&chosen.indices, 3), 4),
            [batch, length, most, heads, width],
        );
        let gather = |tensor: &Tensor| {
            let spread = view::expand(
                view::unsqueeze(tensor, 1),
                [batch, length, length, heads, width],
            );
            index::gather(spread, &places)
        };
        at!(context, "kg = gather(k, chosen)");
        let keys = gather(&key);
        at!(context, "vg = gather(v, chosen)");
        let values = gather(&value);
        at!(context, "a = q kgᵀ / √d");
        let mut attention = pointwise::mul_number(einsum(&query, "bthd", &keys, "btkhd", "bhtk"));
        at!(context, "a = softmax(a where not mask)");
        attention = softmax::softmax(
            pointwise::masked_fill(&attention, view::unsqueeze(&chosen.mask, 1)),
            None,
        );
        at!(context, "o = a vg");
        let mixed = {
            let lowered = cast::to(&attention, values.dtype());
            einsum(&lowered, "bhtk", &values, "btkhd", "bthd")
        };
        let mixed = view::reshape(mixed, [batch, length, heads * width]);
        at!(context, "Wo (o · sigmoid(Wog x))");
        let gate = pointwise::sigmoid(self.output_gate.forward(x));
        let gated = pointwise::mul(&mixed, gate);
        let out = self.output.forward(&gated);
        drop(gated);
        drop((query, key, value));
        drop(chosen);
        drop(places);
        drop((keys, values, attention, mixed));
        out
    }
}

/// The keys that each query takes.
struct Chosen {
    /// What else Python has names for in the attention's forward: alive until it returns.
    _names: Vec<Tensor>,
    indices: Tensor,
    mask: Tensor,
}

struct Block {
    index: u32,
    first_norm: RmsNorm,
    second_norm: RmsNorm,
    attention: Attention,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(builder: &Builder, config: &architecture::Gsa, index: u32) -> Block {
        let (width, inner) = (config.width, config.inner);
        Block {
            index,
            first_norm: RmsNorm {
                weight: builder.parameter([width]),
            },
            second_norm: RmsNorm {
                weight: builder.parameter([width]),
            },
            attention: Attention::new(builder, config),
            gate: builder.linear("gate", width, inner, false),
            up: builder.linear("up", width, inner, false),
            down: builder.linear("down", inner, width, false),
        }
    }

    fn parameters(&self) -> Vec<Tensor> {
        let mut list = vec![
            self.first_norm.weight.clone(),
            self.second_norm.weight.clone(),
        ];
        list.extend(self.attention.parameters());
        for linear in [&self.gate, &self.up, &self.down] {
            list.extend(linear.parameters());
        }
        list
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let context = x.context().clone();
        context.set_scope("attention", Some(self.index));
        let attended = {
            let normed = self.first_norm.forward(x);
            self.attention.forward(&normed)
        };
        at!(context, "x = x + attention(norm(x))");
        let x = pointwise::add(x, attended);
        context.set_scope("feed-forward", Some(self.index));
        let hidden = self.second_norm.forward(&x);
        at!(context, "x + Wd (silu(Wg h) · Wu h)");
        let product = pointwise::mul(
            pointwise::silu(self.gate.forward(&hidden)),
            self.up.forward(&hidden),
        );
        let fed = self.down.forward(&product);
        drop(product);
        let out = pointwise::add(&x, fed);
        drop(x);
        drop(hidden);
        out
    }
}

/// The language model with its loss.
pub struct Gsa {
    context: Context,
    tokens: Embedding,
    blocks: Vec<Rc<Block>>,
    norm: RmsNorm,
    head: Linear,
    vocabulary: u64,
    checkpoints: Checkpointing,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
}

impl Gsa {
    pub fn new(
        builder: &Builder,
        config: &architecture::Gsa,
        checkpoints: Checkpointing,
        batch: [u64; 2],
    ) -> Gsa {
        let tokens = builder.embedding(config.vocabulary, config.width);
        let blocks: Vec<Rc<Block>> = (0..config.layers)
            .map(|index| Rc::new(Block::new(builder, config, index as u32)))
            .collect();
        let norm = RmsNorm {
            weight: builder.parameter([config.width]),
        };
        let head = builder.linear("head", config.width, config.vocabulary, false);
        let mut order = vec![tokens.table.clone()];
        order.extend(blocks.iter().flat_map(|block| block.parameters()));
        order.push(norm.weight.clone());
        order.extend(head.parameters());
        builder.set_order(order);
        Gsa {
            context: builder.context.clone(),
            tokens,
            blocks,
            norm,
            head,
            vocabulary: config.vocabulary,
            checkpoints,
            batch,
            trainable: builder.trainable(),
        }
    }

    fn logits(&self, ids: &Tensor) -> Tensor {
        let context = &self.context;
        context.set_scope("embedding", None);
        at!(context, "x = tokens[ids]");
        let mut x = self.tokens.forward(ids);
        for block in &self.blocks {
            let block = block.clone();
            x = self.checkpoints.run(context, &x, move |x| block.forward(x));
        }
        context.set_scope("head", None);
        let normed = self.norm.forward(&x);
        at!(context, "logits = Wh norm(x)");
        let logits = matmul::linear(normed, self.head.weight(), None);
        drop(x);
        logits
    }
}

impl Program for Gsa {
    fn batch(&self) -> Vec<Tensor> {
        vec![creation::filled(&self.context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        next_token_loss(self.logits(&batch[0]), &batch[0], self.vocabulary)
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}

impl Replay for architecture::Gsa {
    fn program(&self, setup: &Setup) -> Box<dyn Program> {
        Box::new(Gsa::new(
            &setup.builder(),
            self,
            setup.checkpoints,
            setup.batch,
        ))
    }
}
