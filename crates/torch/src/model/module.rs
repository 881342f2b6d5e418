//! The building blocks that the models share: parameters in the order in which Python makes them, and modules as
//! their `forward` runs.

use std::cell::RefCell;
use std::collections::VecDeque;

use super::adapter::{Adapter, Base, Lora};
use super::frozen::Weight;
use super::liger::Liger;
use super::load::Loader;
use crate::eager::line::at;
use crate::eager::op::{creation, embedding, loss, matmul, norm, pointwise, view};
use crate::eager::{Context, DType, Dims, Tensor};

/// Makes a model's parameters and keeps the list of them.
pub struct Builder {
    pub context: Context,
    pub dtype: DType,
    parameters: RefCell<Vec<Tensor>>,
    /// What the next parameters take the place of.
    replaced: RefCell<VecDeque<Tensor>>,
    lora: Option<Lora>,
    /// Of a model whose weights are read from a file and quantised on the way.
    loader: Option<Loader>,
    /// Kernels that take the place of the modules' own ops.
    pub liger: Liger,
}

impl Builder {
    pub fn new(context: &Context, dtype: DType, lora: Option<Lora>) -> Builder {
        Builder {
            context: context.clone(),
            dtype,
            parameters: RefCell::default(),
            replaced: RefCell::default(),
            lora,
            loader: None,
            liger: Liger::default(),
        }
    }

    pub fn loading(self, loader: Option<Loader>) -> Builder {
        Builder { loader, ..self }
    }

    pub fn with_liger(self, liger: Liger) -> Builder {
        Builder { liger, ..self }
    }

    pub fn loader(&self) -> Option<&Loader> {
        self.loader.as_ref()
    }

    /// `model.to(dtype)` of a model that is on the device already: every parameter is made anew, and the one that it
    /// replaces is freed then.
    pub fn replacing(self, parameters: Vec<Tensor>) -> Builder {
        Builder {
            replaced: RefCell::new(parameters.into()),
            ..self
        }
    }

    /// A parameter; trained unless only adapters are.
    pub fn parameter(&self, sizes: impl Into<Dims>) -> Tensor {
        match &self.loader {
            None => self.listed(self.context.empty("parameter", sizes, self.dtype)),
            Some(loader) => self.listed(loader.parameter(&self.context, sizes.into())),
        }
    }

    fn listed(&self, tensor: Tensor) -> Tensor {
        tensor.set_requires_grad(true);
        self.parameters.borrow_mut().push(tensor.clone());
        drop(self.replaced.borrow_mut().pop_front());
        tensor
    }

    /// Puts the parameters into the order in which `model.parameters()` gives them, where that is not the order in
    /// which they reach the device: `model.to(device)` moves what the children own first.
    pub fn set_order(&self, order: Vec<Tensor>) {
        self.parameters.replace(order);
    }

    /// `model.parameters()` gives what a module owns itself before what its children own, whichever was made first.
    pub fn put_before(&self, own: &Tensor, of_a_child: &Tensor) {
        let mut parameters = self.parameters.borrow_mut();
        parameters.retain(|parameter| !parameter.same_as(own));
        let child = parameters
            .iter()
            .position(|parameter| parameter.same_as(of_a_child))
            .unwrap_or(parameters.len());
        parameters.insert(child, own.clone());
    }

    /// Forgets a parameter that another takes the place of: tied weights.
    pub fn forget(&self, tensor: &Tensor) {
        self.parameters
            .borrow_mut()
            .retain(|parameter| !parameter.same_as(tensor));
    }

    pub fn linear(&self, name: &'static str, input: u64, output: u64, bias: bool) -> Linear {
        let weight = match &self.loader {
            None => Weight::Plain(self.parameter([output, input])),
            Some(loader) => Weight::Quantised(loader.linear(&self.context, output, input)),
        };
        let bias = bias.then(|| self.parameter([output]));
        Linear {
            name,
            sizes: [output, input],
            weight,
            bias: RefCell::new(bias),
            adapter: RefCell::new(None),
        }
    }

    pub fn embedding(&self, rows: u64, width: u64) -> Embedding {
        Embedding {
            table: self.parameter([rows, width]),
        }
    }

    pub fn layer_norm(&self, width: u64) -> LayerNorm {
        LayerNorm {
            weight: self.parameter([width]),
            bias: self.parameter([width]),
        }
    }

    /// The output head of a transformers language model, and a number that its construction leaves behind. A tied
    /// head has its own weight until the model is whole.
    pub fn head(&self, tokens: &Tensor, tied: bool) -> (Tensor, Tensor) {
        if tied && self.loader.is_some() {
            return (tokens.clone(), self.context.meta([], self.dtype));
        }
        let own = self.parameter(tokens.sizes());
        let scalar = match self.loader {
            None => self.context.empty("scalar", [], self.dtype),
            Some(_) => self.context.meta([], self.dtype),
        };
        if !tied {
            return (own, scalar);
        }
        self.forget(&own);
        (tokens.clone(), scalar)
    }

    /// The output head of a model whose construction leaves nothing else behind. A tied head has its own weight until the model
    /// is whole.
    pub fn tied_head(&self, tokens: &Tensor, tied: bool) -> Tensor {
        let own = self.parameter(tokens.sizes());
        if !tied {
            return own;
        }
        self.forget(&own);
        tokens.clone()
    }

    /// Freezes what exists and puts adapters on the chosen layers, in the order given. Called when the model is
    /// whole, as peft does.
    pub fn add_adapters<'a>(&self, layers: impl Iterator<Item = &'a Linear>) {
        let Some(lora) = &self.lora else { return };
        for parameter in self.parameters.borrow().iter() {
            parameter.set_requires_grad(false);
        }
        if let Some(loader) = &self.loader {
            loader.prepare();
        }
        let mut casts = Vec::new();
        for layer in layers.filter(|layer| lora.targets.iter().any(|target| target == layer.name)) {
            let made_in = layer.dtype();
            let [output, input] = layer.sizes;
            let [a, b] = [[lora.rank, input], [output, lora.rank]].map(|sizes| {
                let factor = self.context.meta(sizes, lora.dtype(made_in));
                let first = lora.library.first_dtype(made_in, factor.dtype());
                factor.set_data("parameter", factor.numel() * first.size());
                if first != factor.dtype() {
                    casts.push(factor.clone());
                }
                self.listed(factor)
            });
            layer.adapter.replace(Some(Adapter::new(a, b, lora)));
        }
        for factor in casts {
            factor.set_data("_to_copy", factor.bytes());
        }
    }

    /// peft's ModulesToSaveWrapper: the copy of a module that is trained in its place, if it is one that was named. The
    /// module stays where it is.
    pub fn copy_of(&self, module: &str, weight: &Tensor) -> Option<Tensor> {
        let lora = self.lora.as_ref()?;
        let is_named = lora.whole.iter().any(|end| module.ends_with(end.as_str()));
        is_named.then(|| {
            let dtype = match lora.whole_in_float32 {
                true => DType::Float32,
                false => weight.dtype(),
            };
            let copy = self.context.meta(weight.sizes(), dtype);
            copy.set_data("clone", weight.bytes());
            copy.set_requires_grad(true);
            copy
        })
    }

    /// Puts a parameter before all others.
    pub fn put_first(&self, parameter: &Tensor) {
        self.parameters.borrow_mut().insert(0, parameter.clone());
    }

    /// Puts a parameter behind all others.
    pub fn put_last(&self, parameter: &Tensor) {
        self.parameters.borrow_mut().push(parameter.clone());
    }

    pub fn has_adapters(&self) -> bool {
        self.lora.is_some()
    }

    pub fn parameters(&self) -> Vec<Tensor> {
        self.parameters.borrow().clone()
    }

    /// What an optimizer is given.
    pub fn trainable(&self) -> Vec<Tensor> {
        self.parameters
            .borrow()
            .iter()
            .filter(|parameter| parameter.requires_grad())
            .cloned()
            .collect()
    }
}

/// `nn.Linear`, with an adapter where one was added.
pub struct Linear {
    name: &'static str,
    /// Output and input.
    sizes: [u64; 2],
    weight: Weight,
    bias: RefCell<Option<Tensor>>,
    adapter: RefCell<Option<Adapter>>,
}

impl Linear {
    /// The weight's values.
    pub fn weight(&self) -> &Tensor {
        match &self.weight {
            Weight::Plain(weight) => weight,
            Weight::Quantised(weight) => &weight.packed,
        }
    }

    pub fn bias(&self) -> Option<Tensor> {
        self.bias.borrow().clone()
    }

    /// Weight and bias.
    pub fn parameters(&self) -> impl Iterator<Item = Tensor> + use<> {
        [Some(self.weight().clone()), self.bias()]
            .into_iter()
            .flatten()
    }

    /// The type it computes in.
    fn dtype(&self) -> DType {
        match &self.weight {
            Weight::Plain(weight) => weight.dtype(),
            Weight::Quantised(weight) => weight.dtype(),
        }
    }

    pub fn forward(&self, x: &Tensor) -> Tensor {
        let (y, base) = match &self.weight {
            Weight::Plain(weight) => {
                let y = matmul::linear(x, weight, self.bias.borrow().as_ref());
                (y, Base::Plain)
            }
            Weight::Quantised(weight) => (weight.forward(x, &self.bias), weight.base()),
        };
        match &*self.adapter.borrow() {
            Some(adapter) => adapter.add_to(y, x, base),
            None => y,
        }
    }
}

/// `nn.Embedding`.
pub struct Embedding {
    pub table: Tensor,
}

impl Embedding {
    pub fn forward(&self, ids: &Tensor) -> Tensor {
        embedding::embedding(ids, &self.table)
    }
}

/// `nn.LayerNorm`.
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
}

impl LayerNorm {
    pub fn parameters(&self) -> [Tensor; 2] {
        [self.weight.clone(), self.bias.clone()]
    }

    pub fn forward(&self, x: &Tensor) -> Tensor {
        norm::layer_norm(x, &self.weight, &self.bias)
    }
}

/// The measured programs touch the device with one number before the model is built: the first small segment.
pub fn touch_device(context: &Context) {
    drop(creation::filled(context, [1], DType::Float32));
}

/// `torch.arange(length) + past`, then `unsqueeze(0)`: position ids of one row.
pub fn position_ids(context: &Context, length: u64) -> Tensor {
    let range = creation::arange(context, length, DType::Int64);
    view::unsqueeze(pointwise::add_number(range), 0)
}

/// The loss of the plain-PyTorch systems: logits and ids shifted by slices, which are copied where rows are not
/// neighbours.
pub fn next_token_loss(logits: Tensor, ids: &Tensor, vocabulary: u64) -> Tensor {
    at!(ids.context(), "loss = cross_entropy(logits[:−1], ids[1:])");
    let (batch, length) = (ids.size(0), ids.size(1));
    let rows = batch * (length - 1);
    let shifted = view::reshape(view::slice(&logits, 1, length - 1), [rows, vocabulary]);
    let targets = view::reshape(view::slice(ids, 1, length - 1), [rows]);
    let result = loss::cross_entropy(&shifted, &targets);
    drop(shifted);
    drop(targets);
    drop(logits);
    result
}
