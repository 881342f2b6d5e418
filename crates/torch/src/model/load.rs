//! `from_pretrained` of a quantised model: parameters are made without memory, then filled from the file one by one in the order
//! of their names, each quantised before the next is read.

use std::cell::RefCell;
use std::rc::Rc;

use super::frozen::{Format, Quantised};
use crate::eager::{Context, DType, Dims, Tensor};

/// What is read from the file.
enum Item {
    Plain(Tensor),
    Quantised(Rc<Quantised>),
}

impl Item {
    fn is(&self, tensor: &Tensor) -> bool {
        match self {
            Item::Plain(own) => own.same_as(tensor),
            Item::Quantised(weight) => weight.packed.same_as(tensor),
        }
    }
}

/// Makes a model's parameters and fills them.
pub struct Loader {
    format: Format,
    /// Of the weights in the file, and of computation.
    dtype: DType,
    /// `prepare_model_for_kbit_training`: what is not quantised becomes fp32.
    prepared: bool,
    /// In the order of `model.parameters()`.
    items: RefCell<Vec<Item>>,
}

impl Loader {
    pub(super) fn new(format: Format, dtype: DType, prepared: bool) -> Loader {
        Loader {
            format,
            dtype,
            prepared,
            items: RefCell::default(),
        }
    }

    /// A parameter that stays as it is, in the type that it will have.
    pub(super) fn parameter(&self, context: &Context, sizes: Dims) -> Tensor {
        let dtype = if self.prepared {
            DType::Float32
        } else {
            self.dtype
        };
        let tensor = context.meta(sizes, dtype);
        self.items.borrow_mut().push(Item::Plain(tensor.clone()));
        tensor
    }

    /// The weight of a linear layer.
    pub(super) fn linear(&self, context: &Context, rows: u64, columns: u64) -> Rc<Quantised> {
        let weight = Quantised::new(context, self.format, rows, columns, self.dtype);
        let weight = Rc::new(weight);
        self.items
            .borrow_mut()
            .push(Item::Quantised(weight.clone()));
        weight
    }

    /// Fills the parameters in the order of their names in the file. Before that transformers asks for one block of the size of
    /// all, less what the allocator has to spare, and gives it back: the weights are cut from it.
    pub fn load(&self, context: &Context, order: &[Tensor]) {
        let items = self.items.borrow();
        let bytes: u64 = items
            .iter()
            .map(|item| match item {
                Item::Plain(tensor) => tensor.numel() * self.dtype.size(),
                Item::Quantised(weight) => weight.counted_bytes(),
            })
            .sum();
        let spare = {
            let memory = context.memory();
            memory.reserved() - memory.allocated()
        };
        drop(context.workspace("caching_allocator_warmup", bytes.saturating_sub(spare)));
        let mut book = None;
        for tensor in order {
            match items.iter().find(|item| item.is(tensor)) {
                Some(Item::Plain(tensor)) => {
                    tensor.set_data("load", tensor.numel() * self.dtype.size());
                }
                Some(Item::Quantised(weight)) => weight.load(&mut book),
                None => {}
            }
        }
    }

    /// Brings what is not quantised to fp32, where that was asked for.
    pub(super) fn prepare(&self) {
        let items = self.items.borrow();
        let plain = items.iter().filter_map(|item| match item {
            Item::Plain(tensor) => Some(tensor),
            Item::Quantised(_) => None,
        });
        for tensor in plain.filter(|tensor| self.prepared && tensor.dtype() != self.dtype) {
            tensor.set_data("_to_copy", tensor.bytes());
        }
    }
}
