//! Adapters on linear layers: y + B(A(drop(x))) · s, as each library writes it.

use crate::eager::op::{cast, dropout, matmul, pointwise, view};
use crate::eager::{DType, Tensor, autocast};

/// Which layers get an adapter, and of which kind.
#[derive(Clone, Debug)]
pub struct Lora {
    pub rank: u64,
    pub dropout: f64,
    /// Names of the layers that get one.
    pub targets: Vec<String>,
    /// Embeddings and head that are trained whole, in a copy.
    pub whole: Vec<String>,
    /// Whether those copies are raised to fp32 once they are there, as LLaMA-Factory does.
    pub whole_in_float32: bool,
    /// The adapters' type: fp32 as peft makes them, or that of the layer.
    pub in_float32: bool,
    pub library: LoraLibrary,
}

/// Whose code adds the adapters: what it holds until when decides memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoraLibrary {
    /// peft, which binds `result` anew: the layer's own output goes as soon as the sum exists.
    Peft,
    /// A module of one's own that holds the layer's output under a name until it returns.
    Plain,
}

impl LoraLibrary {
    /// The type in which a factor first reaches the device: peft follows the layer, then casts.
    pub(super) fn first_dtype(self, layer: DType, wanted: DType) -> DType {
        match self {
            LoraLibrary::Peft => layer,
            LoraLibrary::Plain => wanted,
        }
    }
}

impl Lora {
    /// The type of adapters on a layer of this type.
    pub(super) fn dtype(&self, layer: DType) -> DType {
        if self.in_float32 {
            DType::Float32
        } else {
            layer
        }
    }
}

/// What an adapter is added to: peft has a module for each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Base {
    Plain,
    FourBit,
    EightBit,
}

/// The two factors of one layer.
pub(super) struct Adapter {
    pub a: Tensor,
    pub b: Tensor,
    pub dropout: f64,
    pub library: LoraLibrary,
}

impl Adapter {
    /// The layer's output with the adapter's.
    pub fn add_to(&self, y: Tensor, x: &Tensor, base: Base) -> Tensor {
        match base {
            Base::Plain => self.add_to_plain(y, x),
            Base::FourBit => {
                let copy = view::clone(&y);
                drop(y);
                self.add_to_quantised(copy, x)
            }
            Base::EightBit => self.add_to_quantised(y, x),
        }
    }

    /// Its type is the layer's, computed in the adapter's.
    fn add_to_plain(&self, y: Tensor, x: &Tensor) -> Tensor {
        let dtype = y.dtype();
        let x = cast::to(x, self.a.dtype());
        let scaled = pointwise::mul_number(self.product(&x));
        let sum = pointwise::add(&y, scaled);
        match self.library {
            LoraLibrary::Peft => {
                drop(y);
                let out = cast::to(sum, dtype);
                drop(x);
                out
            }
            LoraLibrary::Plain => {
                let out = cast::to(sum, dtype);
                drop(x);
                drop(y);
                out
            }
        }
    }

    /// Types are brought together here only where autocast does not: then before the sum.
    fn add_to_quantised(&self, y: Tensor, x: &Tensor) -> Tensor {
        let converts = !autocast::is_enabled(x.context());
        let x = match converts {
            true => cast::to(x, self.a.dtype()),
            false => x.clone(),
        };
        let mut scaled = pointwise::mul_number(self.product(&x));
        if converts {
            scaled = cast::to(&scaled, y.dtype());
        }
        let sum = pointwise::add(&y, &scaled);
        drop(y);
        drop(x);
        drop(scaled);
        sum
    }

    /// B(A(drop(x))).
    fn product(&self, x: &Tensor) -> Tensor {
        let down = matmul::linear(dropout::dropout(x, self.dropout), &self.a, None);
        matmul::linear(down, &self.b, None)
    }

    pub fn new(a: Tensor, b: Tensor, lora: &Lora) -> Adapter {
        Adapter {
            a,
            b,
            dropout: lora.dropout,
            library: lora.library,
        }
    }
}
