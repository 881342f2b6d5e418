//! The gated decoder of LLaMA, Mistral, Qwen2 and Qwen3: RMS norms, rotary positions, grouped
//! heads, a gated feed-forward part. Trained whole, or frozen under adapters.
//!
//! Weights have the names that Hugging Face's files give them. Queries, keys and values are one
//! product where nothing keeps them apart (norms of heads, codes with a mean of their own), and
//! adapters that read the same tensor share their first product and its dropout.

use std::sync::Arc;

use cinch_architecture::{Activation, Decoder, Llama, Mistral, Qwen2, Qwen3};
use cinch_graph::op::{ActivationKind, Attention, AttentionInputs, NormKind, Rotary};
use cinch_graph::{Graph, GraphError, Init, TensorId};

use crate::rotary::frequencies;
use crate::{AdapterShape, Build, Builds, EMBEDDINGS, HEAD, Rows};

macro_rules! decoders {
    ($($family:ident),*) => {
        $(impl Builds for $family {
            fn build(&self, graph: &mut Graph, build: &Build) -> Result<(), GraphError> {
                Model::new(graph, &self.0, build).build()
            }

            fn linear_modules(&self) -> Vec<String> {
                linear_modules(&self.0)
            }

            fn whole_modules(&self) -> Vec<String> {
                whole_modules(&self.0)
            }
        })*
    };
}
decoders!(Llama, Mistral, Qwen2, Qwen3);

const ATTENTION: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];
const FEED_FORWARD: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn layer_name(layer: u64) -> String {
    format!("model.layers.{layer}")
}

fn linear_modules(config: &Decoder) -> Vec<String> {
    let of_layer = |layer: u64| {
        let attention = ATTENTION.map(|name| format!("{}.self_attn.{name}", layer_name(layer)));
        let feed = FEED_FORWARD.map(|name| format!("{}.mlp.{name}", layer_name(layer)));
        attention.into_iter().chain(feed)
    };
    (0..config.layers).flat_map(of_layer).collect()
}

/// Embeddings, norms and the head.
fn whole_modules(config: &Decoder) -> Vec<String> {
    let of_layer = |layer: u64| {
        let layer = layer_name(layer);
        let mut names = vec![format!("{layer}.input_layernorm")];
        if config.head_norms {
            names.extend(["q_norm", "k_norm"].map(|name| format!("{layer}.self_attn.{name}")));
        }
        names.push(format!("{layer}.post_attention_layernorm"));
        names
    };
    let mut names = vec![EMBEDDINGS.to_owned()];
    names.extend((0..config.layers).flat_map(of_layer));
    names.extend([LAST_NORM, HEAD].map(str::to_owned));
    names
}

const LAST_NORM: &str = "model.norm";

/// Linear layers that read the same tensor.
struct Modules<'a> {
    /// The module that they belong to.
    parent: &'a str,
    /// Names and outputs, in the order of their rows.
    members: &'a [(&'static str, usize)],
    bias: bool,
    /// Whether they are one product.
    packed: bool,
}

impl Modules<'_> {
    /// Those that have adapters: name, outputs, and where these are: in which of the layers'
    /// tensors, from which column on.
    fn adapted(&self, adapters: &AdapterShape) -> Vec<(&'static str, usize, (usize, usize))> {
        let mut column = 0;
        let mut targets = Vec::new();
        for (index, &(name, rows)) in self.members.iter().enumerate() {
            let path = format!("{}.{name}", self.parent);
            if adapters.modules.contains(&path) {
                let place = match self.packed {
                    true => (0, column),
                    false => (index, 0),
                };
                targets.push((name, rows, place));
            }
            column += rows;
        }
        targets
    }
}

/// A graph in the making.
struct Model<'a> {
    g: &'a mut Graph,
    config: &'a Decoder,
    build: &'a Build,
    /// Of tokens, where they are not 0 to T − 1.
    positions: Option<TensorId>,
    rows: Rows,
    frequencies: Arc<[f64]>,
    rotary_scale: f64,
}

impl<'a> Model<'a> {
    fn new(g: &'a mut Graph, config: &'a Decoder, build: &'a Build) -> Self {
        let head_dim = config.head_width as usize;
        // A scaling that grows with the length follows the longest text that there may be, because
        // keys in a cache have turned already.
        let (frequencies, rotary_scale) = frequencies(&config.rotary, head_dim, build.context());
        Self {
            g,
            config,
            build,
            positions: None,
            rows: Rows::default(),
            frequencies,
            rotary_scale,
        }
    }

    fn build(mut self) -> Result<(), GraphError> {
        let config = self.config;
        let (vocabulary, d) = (config.vocabulary as usize, config.width as usize);
        let tokens = self.build.tokens(self.g);
        if let Some(positions) = self.build.continued(self.g) {
            self.positions = Some(positions);
            self.rows.continued = Some(positions);
        } else if let Some([positions, starts]) = self.build.documents(self.g) {
            self.positions = Some(positions);
            self.rows.starts = Some(starts);
        }
        let table = self.matrix(&format!("{EMBEDDINGS}.weight"), [vocabulary, d]);
        let mut stream = self.g.embedding("embedding", tokens, table, None, None)?;
        let norm = (NormKind::Rms, config.norm_epsilon);

        let opening = |layer: u64| format!("{}.input_layernorm", layer_name(layer));
        let gamma = self.small(&format!("{}.weight", opening(0)), d, Init::Ones);
        let mut normed = self.g.norm(&opening(0), stream, norm, gamma, None)?;
        for layer in 0..config.layers {
            let name = layer_name(layer);
            self.g.enter_block(&name);
            let branch = self.attention(layer, normed)?;
            let middle = format!("{name}.post_attention_layernorm");
            let gamma = self.small(&format!("{middle}.weight"), d, Init::Ones);
            let pair = (stream, branch);
            let out = self
                .g
                .residual_norm(&middle, pair, None, norm, gamma, None)?;
            (stream, normed) = (out.stream, out.normed);

            let branch = self.feed_forward(&name, normed)?;
            let next = match layer + 1 < config.layers {
                true => opening(layer + 1),
                false => LAST_NORM.to_owned(),
            };
            let gamma = self.small(&format!("{next}.weight"), d, Init::Ones);
            let pair = (stream, branch);
            let out = self.g.residual_norm(&next, pair, None, norm, gamma, None)?;
            (stream, normed) = (out.stream, out.normed);
            self.g.leave_block();
        }
        let adapters = self.build.adapters.as_ref();
        let is_untied = adapters.is_some_and(AdapterShape::unties_the_head);
        let head = match config.tied && !is_untied {
            true => table,
            false => self.matrix(&format!("{HEAD}.weight"), [vocabulary, d]),
        };
        self.build.head(self.g, normed, head)
    }

    fn attention(&mut self, layer: u64, x: TensorId) -> Result<TensorId, GraphError> {
        let config = self.config;
        let parent = format!("{}.self_attn", layer_name(layer));
        let name = |part: &str| format!("{parent}.{part}");
        let head_dim = config.head_width as usize;
        let (heads, kv_heads) = (config.heads as usize, config.key_heads as usize);
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let members = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)];
        let packed = !config.head_norms && self.build.quantisation().is_none();
        let modules = Modules {
            parent: &parent,
            members: &members,
            bias: config.attention_bias,
            packed,
        };
        let mut sources = self.project(&modules, x)?;
        if config.head_norms {
            for (source, which) in sources.iter_mut().zip(["q_norm", "k_norm"]) {
                *source = self.head_norm(&name(which), *source, head_dim)?;
            }
        }
        let turned: &[(&str, usize)] = match packed {
            true => &[("rotary", queries + keys)],
            false => &[("q_rotary", queries), ("k_rotary", keys)],
        };
        for (source, &(part, columns)) in sources.iter_mut().zip(turned) {
            *source = self.rotary(&name(part), *source, columns)?;
        }
        let op = Attention {
            inputs: match packed {
                true => AttentionInputs::Packed,
                false => AttentionInputs::Separate,
            },
            heads,
            kv_heads,
            head_dim,
            causal: true,
            scale: 1.0 / (head_dim as f64).sqrt(),
            dropout: {
                let rate = self.build.dropout(config.attention_dropout);
                self.g.dropout(rate)
            },
            padding: false,
            window: config
                .window(layer)
                .map(|window| window as usize)
                .filter(|&window| window < self.build.context()),
            documents: false,
            selection: false,
        };
        let (name, rows) = (name("attention"), self.rows);
        let o = self.build.attend(self.g, &name, op, &sources, rows)?;
        let modules = Modules {
            parent: &parent,
            members: &[("o_proj", config.width as usize)],
            bias: config.output_bias,
            packed: true,
        };
        Ok(self.project(&modules, o)?[0])
    }

    fn feed_forward(&mut self, layer: &str, x: TensorId) -> Result<TensorId, GraphError> {
        let (inner, d) = (self.config.inner as usize, self.config.width as usize);
        let parent = format!("{layer}.mlp");
        let modules = Modules {
            parent: &parent,
            members: &[("gate_proj", inner), ("up_proj", inner)],
            bias: self.config.feed_bias,
            packed: false,
        };
        let both = self.project(&modules, x)?;
        let kind = match self.config.activation {
            Activation::Relu => ActivationKind::Relu,
            // The description says of others that they are not there.
            _ => ActivationKind::Silu,
        };
        let active = self
            .g
            .gated(&format!("{parent}.act_fn"), both[0], both[1], kind)?;
        let modules = Modules {
            parent: &parent,
            members: &[("down_proj", d)],
            bias: self.config.feed_bias,
            packed: true,
        };
        Ok(self.project(&modules, active)?[0])
    }

    /// Linear layers of x with their adapters: one tensor where they are packed, otherwise one
    /// for each.
    fn project(&mut self, modules: &Modules<'_>, x: TensorId) -> Result<Vec<TensorId>, GraphError> {
        let inputs = self.g.ty(x).width();
        let groups: Vec<&[(&str, usize)]> = match modules.packed {
            true => vec![modules.members],
            false => modules.members.chunks(1).collect(),
        };
        // Before the layers' own products, so that what adapters add follows those at once.
        let adapters = self.build.adapters.as_ref();
        let low = match adapters {
            Some(adapters) => self.adapter_inputs(modules, adapters, x)?,
            None => None,
        };
        let mut outputs = Vec::with_capacity(groups.len());
        for group in &groups {
            let path = |name: &str| format!("{}.{name}", modules.parent);
            let name = match group {
                [(name, _)] => path(name),
                _ => path("qkv_proj"),
            };
            let rows = group.iter().map(|(_, rows)| rows).sum();
            let parts = |kind: &str| {
                let part = |&(name, rows): &(&str, usize)| (format!("{}.{kind}", path(name)), rows);
                group.iter().map(part).collect::<Vec<_>>()
            };
            let weight = self.module_matrix(&format!("{name}.weight"), [rows, inputs])?;
            self.g.name_parts(parts("weight"));
            let bias = modules.bias.then(|| {
                let bias = self.small(&format!("{name}.bias"), rows, Init::Zeros);
                self.g.name_parts(parts("bias"));
                bias
            });
            outputs.push(self.g.linear(&name, x, weight, bias)?);
        }
        if let (Some(adapters), Some(low)) = (adapters, low) {
            self.adapt(modules, adapters, low, &mut outputs)?;
        }
        Ok(outputs)
    }

    /// `A(dropout(x))` of all modules that have adapters, side by side; none where none has.
    fn adapter_inputs(
        &mut self,
        modules: &Modules<'_>,
        adapters: &AdapterShape,
        x: TensorId,
    ) -> Result<Option<TensorId>, GraphError> {
        let (rank, inputs) = (adapters.rank, self.g.ty(x).width());
        let path = |name: &str| format!("{}.{name}", modules.parent);
        let targets = modules.adapted(adapters);
        let Some(&(first, ..)) = targets.first() else {
            return Ok(None);
        };
        // What peft starts with: uniform over ±1/√K.
        let bound = 1.0 / (inputs as f64).sqrt();
        let name = match targets.len() {
            1 => format!("{}.lora_A", path(first)),
            _ => format!("{}.{first}_and_more.lora_A", modules.parent),
        };
        let shape = [targets.len() * rank, inputs];
        let down = self.adapter_matrix(&name, shape, Init::Uniform { bound });
        let part = |name: &str| (format!("{}.lora_A.weight", path(name)), rank);
        self.g
            .name_parts(targets.iter().map(|(name, ..)| part(name)));
        let rate = self.build.dropout(adapters.dropout);
        let dropout = self.g.dropout(rate);
        let low = self.g.linear_of_dropped(&name, x, down, dropout)?;
        Ok(Some(low))
    }

    /// Adds `scale·B(low)` to the outputs of the modules that have adapters.
    fn adapt(
        &mut self,
        modules: &Modules<'_>,
        adapters: &AdapterShape,
        low: TensorId,
        outputs: &mut [TensorId],
    ) -> Result<(), GraphError> {
        let rank = adapters.rank;
        let targets = modules.adapted(adapters);
        for (index, (name, rows, (output, column))) in targets.into_iter().enumerate() {
            let name = format!("{}.{name}.lora_B", modules.parent);
            let up = self.adapter_matrix(&name, [rows, rank], Init::Zeros);
            let (to, from) = ((outputs[output], column), (low, index * rank));
            outputs[output] = self.g.linear_add(&name, to, from, up, adapters.scale)?;
        }
        Ok(())
    }

    /// The RMS norm of each head by itself.
    fn head_norm(
        &mut self,
        name: &str,
        x: TensorId,
        head_dim: usize,
    ) -> Result<TensorId, GraphError> {
        let whole = self.g.ty(x).shape;
        let dims = whole.dims();
        let heads = [dims[0], dims[1], dims[2] / head_dim, head_dim];
        let gamma = self.small(&format!("{name}.weight"), head_dim, Init::Ones);
        let split = self.g.view(&format!("{name}.heads"), x, heads)?;
        let norm = (NormKind::Rms, self.config.norm_epsilon);
        let normed = self.g.norm(name, split, norm, gamma, None)?;
        self.g.view(&format!("{name}.joined"), normed, whole)
    }

    /// The first columns of x, turned by their positions.
    fn rotary(&mut self, name: &str, x: TensorId, columns: usize) -> Result<TensorId, GraphError> {
        let op = Rotary {
            frequencies: self.frequencies.clone(),
            columns,
            scale: self.rotary_scale,
            positions: self.positions.is_some(),
            inverse: false,
        };
        let inputs = [x].into_iter().chain(self.positions).collect();
        Ok(self.g.emit(name, op, inputs)?[0])
    }

    fn init(&self) -> Init {
        Init::Normal {
            std: self.config.initial_std,
        }
    }

    /// An embedding or the head: trained, or frozen under adapters.
    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> TensorId {
        let init = self.init();
        self.build.weight(self.g, name, shape, init)
    }

    /// One of the two matrices of adapters, which are trained under a frozen model.
    fn adapter_matrix(&mut self, name: &str, shape: [usize; 2], init: Init) -> TensorId {
        let name = format!("{name}.weight");
        match self.build.trains() {
            true => self.g.weight(&name, shape, init),
            false => self.g.frozen_weight(&name, shape, init),
        }
    }

    /// The weight of a linear layer, which may be quantised besides.
    fn module_matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<TensorId, GraphError> {
        match self.build.quantisation() {
            Some(quantisation) => {
                let init = self.init();
                self.g.quantised_weight(name, shape, init, quantisation)
            }
            None => Ok(self.matrix(name, shape)),
        }
    }

    /// A norm's scale or a bias.
    fn small(&mut self, name: &str, width: usize, init: Init) -> TensorId {
        self.build.small_weight(self.g, name, [width], init)
    }
}
