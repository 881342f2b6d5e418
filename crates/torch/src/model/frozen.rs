//! How the weights that are not trained are stored: as they are, or in four or eight bits as bitsandbytes keeps them.

use std::cell::RefCell;
use std::rc::Rc;

use super::adapter::Base;
use crate::eager::op::cast;
use crate::eager::op::quantised::{self, FourBit};
use crate::eager::{Context, DType, Tensor};

/// The storage of frozen linear layers. Embeddings, norms, biases and the output head stay in the model's type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Frozen {
    #[default]
    InTheirType,
    /// NF4 or FP4: half a byte a value. With `double` the scales are quantised too.
    FourBit { double: bool },
    /// LLM.int8(): a byte a value.
    EightBit,
}

impl Frozen {
    pub fn is_quantised(self) -> bool {
        self != Frozen::InTheirType
    }

    pub(super) fn format(self) -> Option<Format> {
        match self {
            Frozen::InTheirType => None,
            Frozen::FourBit { double } => Some(Format::FourBit { double }),
            Frozen::EightBit => Some(Format::EightBit),
        }
    }
}

/// The two ways to quantise.
#[derive(Clone, Copy)]
pub(super) enum Format {
    FourBit { double: bool },
    EightBit,
}

/// The weight of a linear layer.
pub(super) enum Weight {
    Plain(Tensor),
    Quantised(Rc<Quantised>),
}

/// Entries of the code books: of four bits, and of the eight bits of scales.
const FOUR_BIT_CODES: u64 = 16;
const SCALE_CODES: u64 = 256;
/// Scales that share a scale.
const SCALE_BLOCK: u64 = 256;

/// A weight in few bits, with what is needed to restore it. The values lie in `packed`.
pub(super) struct Quantised {
    pub packed: Tensor,
    /// Scales and code books.
    beside: RefCell<Vec<Tensor>>,
    format: Format,
    rows: u64,
    columns: u64,
    /// Of the weight before.
    dtype: DType,
}

impl Quantised {
    /// Without memory, which comes with [`Quantised::load`].
    pub fn new(
        context: &Context,
        format: Format,
        rows: u64,
        columns: u64,
        dtype: DType,
    ) -> Quantised {
        Quantised {
            packed: context.meta([rows, columns], DType::UInt8),
            beside: RefCell::default(),
            format,
            rows,
            columns,
            dtype,
        }
    }

    /// Bytes as transformers counts them before it loads anything: the values alone.
    pub fn counted_bytes(&self) -> u64 {
        let values = self.rows * self.columns;
        match self.format {
            Format::FourBit { .. } => values / 2,
            Format::EightBit => values,
        }
    }

    /// The types and sizes of adapters follow the weight as it was before.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn base(&self) -> Base {
        match self.format {
            Format::FourBit { .. } => Base::FourBit,
            Format::EightBit => Base::EightBit,
        }
    }

    fn four_bit(&self, double: bool) -> FourBit {
        FourBit {
            rows: self.rows,
            columns: self.columns,
            has_quantised_scales: double,
            dtype: self.dtype,
        }
    }

    /// The weight comes to the device in its own type, is quantised there and dropped. `book` is the code book of scales
    /// that the process makes once.
    pub fn load(&self, book: &mut Option<Tensor>) {
        let context = self.packed.context().clone();
        let whole = context.empty("load", [self.rows, self.columns], self.dtype);
        match self.format {
            Format::FourBit { double } => self.load_four_bit(&context, double, book),
            Format::EightBit => {
                let half = cast::to(&whole, DType::Float16);
                let scales = context.empty("int8_vectorwise_quant", [self.rows], DType::Float32);
                self.beside.borrow_mut().push(scales);
                self.packed
                    .set_data("int8_vectorwise_quant", self.rows * self.columns);
                drop(half);
            }
        }
    }

    fn load_four_bit(&self, context: &Context, double: bool, book: &mut Option<Tensor>) {
        let floats = |op, values: u64| context.empty(op, [values], DType::Float32);
        let count = self.four_bit(double).scales();
        let scales = floats("quantize_4bit", count);
        let values = self.rows * self.columns;
        self.packed.set_data("quantize_4bit", values.div_ceil(2));
        let codes = floats("code book", FOUR_BIT_CODES);
        {
            // The code book is divided by its largest entry.
            let (magnitudes, largest) = (floats("abs", FOUR_BIT_CODES), floats("max", 1));
            drop(magnitudes);
            drop(largest);
        }
        let mut beside = self.beside.borrow_mut();
        beside.push(codes);
        if !double {
            beside.push(scales);
            return;
        }
        beside.push(floats("mean", 1));
        let shifted = floats("sub", count);
        let shared = book.get_or_insert_with(|| floats("code book", SCALE_CODES));
        beside.push(shared.clone());
        beside.push(floats("quantize_blockwise", count.div_ceil(SCALE_BLOCK)));
        beside.push(context.empty("quantize_blockwise", [count], DType::UInt8));
        beside.push(floats("code book", SCALE_CODES));
        drop(shifted);
        drop(scales);
    }

    /// `Linear4bit.forward` and `Linear8bitLt.forward`.
    pub fn forward(&self, x: &Tensor, bias: &RefCell<Option<Tensor>>) -> Tensor {
        match self.format {
            Format::FourBit { double } => {
                let (dtype, lowered) = (x.dtype(), cast::to(x, self.dtype));
                give_type(bias, self.dtype);
                let weight = self.four_bit(double);
                let out = quantised::four_bit_linear(&lowered, weight, bias.borrow().as_ref());
                let result = cast::to(&out, dtype);
                drop(out);
                drop(lowered);
                result
            }
            Format::EightBit => {
                give_type(bias, x.dtype());
                quantised::eight_bit_linear(x, self.rows, self.columns)
            }
        }
    }
}

/// `bias.data = bias.data.to(dtype)`: the bias stays in the type that it was first used in.
fn give_type(bias: &RefCell<Option<Tensor>>, dtype: DType) {
    let mut bias = bias.borrow_mut();
    if let Some(old) = bias.as_ref().filter(|old| old.dtype() != dtype) {
        let new = old.context().empty("_to_copy", old.sizes(), dtype);
        *bias = Some(new);
    }
}
