//! Adapters on linear layers: y + B(A(drop(x))) · s, as each library writes it.

use crate::eager::op::{cast, dropout, matmul, pointwise};
use crate::eager::{DType, Tensor};

/// Which layers get an adapter, and of which kind.
#[derive(Clone, Debug)]
pub struct Lora {
    pub rank: u64,
    pub dropout: f64,
    /// Names of the layers that get one.
    pub targets: Vec<String>,
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

/// The two factors of one layer.
pub(super) struct Adapter {
    pub a: Tensor,
    pub b: Tensor,
    pub dropout: f64,
    pub library: LoraLibrary,
}

impl Adapter {
    /// The layer's output with the adapter's: its type is the layer's, computed in the adapter's.
    pub fn add_to(&self, y: Tensor, x: &Tensor) -> Tensor {
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

    /// The type of adapters on a layer of this type.
    pub fn dtype(lora: &Lora, layer: DType) -> DType {
        if lora.in_float32 {
            DType::Float32
        } else {
            layer
        }
    }
}
