//! Autocast: which operands are cast, and the cache of cast weights that lives until the
//! outermost context is left.

use std::collections::HashMap;

use super::context::Context;
use super::dtype::DType;
use super::op::cast;
use super::tensor::{Tensor, TensorImpl};

#[derive(Default)]
pub struct Autocast {
    dtype: Option<DType>,
    depth: u32,
    cache: Cache,
}

/// Casts of leaves that require a gradient, so that a weight used twice is cast once. PyTorch's
/// map is in the order of addresses; this one in the order of use.
#[derive(Default)]
struct Cache {
    index: HashMap<*const TensorImpl, usize>,
    casts: Vec<(Tensor, Tensor)>,
}

impl Autocast {
    pub fn dtype(&self) -> Option<DType> {
        self.dtype
    }
}

/// Runs under `torch.autocast("cuda", dtype)`; with none, under a disabled one.
pub fn with<T>(context: &Context, dtype: Option<DType>, body: impl FnOnce() -> T) -> T {
    let before = {
        let mut autocast = context.autocast.borrow_mut();
        autocast.depth += 1;
        std::mem::replace(&mut autocast.dtype, dtype)
    };
    let result = body();
    let cleared = {
        let mut autocast = context.autocast.borrow_mut();
        autocast.depth -= 1;
        autocast.dtype = before;
        (autocast.depth == 0).then(|| std::mem::take(&mut autocast.cache))
    };
    drop(cleared);
    result
}

/// What the first `torch.autocast("cuda", dtype)` of a process asks: whether the card takes bf16. One that only emulates it is
/// asked by a tensor.
pub fn ask(context: &Context, dtype: Option<DType>) {
    if dtype == Some(DType::BFloat16) && !context.chip().has_bf16() {
        drop(context.empty("tensor", [1], DType::BFloat16));
    }
}

/// `torch.is_autocast_enabled()`.
pub fn is_enabled(context: &Context) -> bool {
    context.autocast.borrow().dtype.is_some()
}

/// An operand of an op that autocast runs in the low precision.
pub fn lower(tensor: &Tensor) -> Tensor {
    let context = tensor.context();
    match context.autocast.borrow().dtype {
        Some(dtype) if tensor.dtype().is_floating() && tensor.dtype() != dtype => {
            if let Some(found) = lookup(&context.autocast.borrow().cache, tensor) {
                return found;
            }
        }
        _ => return tensor.clone(),
    }
    let Some(dtype) = context.autocast.borrow().dtype else {
        return tensor.clone();
    };
    let result = cast::to(tensor, dtype);
    let cacheable = tensor.dtype() == DType::Float32
        && tensor.is_leaf()
        && tensor.requires_grad()
        && !tensor.is_view()
        && !context.is_stopped();
    if cacheable {
        let cache = &mut context.autocast.borrow_mut().cache;
        cache.index.insert(tensor.key(), cache.casts.len());
        cache.casts.push((tensor.clone(), result.clone()));
    }
    result
}

fn lookup(cache: &Cache, tensor: &Tensor) -> Option<Tensor> {
    cache
        .index
        .get(&tensor.key())
        .map(|&at| cache.casts[at].1.clone())
}

/// An operand of an op that autocast runs in fp32.
pub fn raise(tensor: &Tensor) -> Tensor {
    let enabled = tensor.context().autocast.borrow().dtype.is_some();
    if enabled && tensor.dtype().is_half() {
        cast::to(tensor, DType::Float32)
    } else {
        tensor.clone()
    }
}

/// Whether an op with an optional result type (softmax, sum) gives fp32 here.
pub fn wants_float(tensor: &Tensor) -> bool {
    tensor.context().autocast.borrow().dtype.is_some() && tensor.dtype().is_half()
}
