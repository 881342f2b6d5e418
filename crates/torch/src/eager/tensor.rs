//! Tensors: reference-counted handles to storage, freed when the last one goes, as in CPython.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::context::{Category, Context};
use super::dtype::DType;
use super::layout::Layout;
use super::memory::Block;
use super::node::Node;
use super::shape::Dims;

/// Bytes on the device, shared by a tensor and its views.
pub struct Storage {
    context: Context,
    block: Option<Block>,
    event: u32,
    category: Cell<Category>,
}

impl Storage {
    pub(super) fn new(context: &Context, op: &'static str, bytes: u64) -> Rc<Storage> {
        let (block, event) = match context.allocate(op, bytes) {
            Some((block, event)) => (Some(block), event),
            None => (None, u32::MAX),
        };
        Rc::new(Storage {
            context: context.clone(),
            block,
            event,
            category: Cell::new(context.category()),
        })
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(block) = self.block {
            self.context.free(block, self.event, self.category.get());
        }
    }
}

/// What autograd knows of a tensor. Nearly all tensors are results, so what only leaves have is kept apart.
#[derive(Default)]
enum Autograd {
    #[default]
    Unknown,
    Leaf(Box<Leaf>),
    /// The output of an op, and which of its outputs.
    Result(Rc<Node>, u32),
}

#[derive(Default)]
struct Leaf {
    requires_grad: bool,
    grad: Option<Tensor>,
    /// The node that receives gradients. Edges of the graph keep it alive.
    accumulator: Weak<Node>,
}

impl Autograd {
    fn leaf(&self) -> Option<&Leaf> {
        match self {
            Autograd::Leaf(leaf) => Some(leaf),
            _ => None,
        }
    }

    /// The leaf, made one where nothing was known; none of a result.
    fn leaf_mut(&mut self) -> Option<&mut Leaf> {
        if let Autograd::Unknown = self {
            *self = Autograd::Leaf(Box::default());
        }
        match self {
            Autograd::Leaf(leaf) => Some(leaf),
            _ => None,
        }
    }
}

pub struct TensorImpl {
    storage: Rc<Storage>,
    layout: Rc<Layout>,
    dtype: DType,
    /// The tensor that this one is a view of. PyTorch's view metadata holds it, also without
    /// gradients: so a view's storage never has a single owner, and gradients that are views
    /// are not added to in place.
    base: Option<Tensor>,
    autograd: RefCell<Autograd>,
}

#[derive(Clone)]
pub struct Tensor(Rc<TensorImpl>);

impl Tensor {
    pub(super) fn new(storage: Rc<Storage>, layout: Rc<Layout>, dtype: DType) -> Tensor {
        Tensor(Rc::new(TensorImpl {
            storage,
            layout,
            dtype,
            base: None,
            autograd: RefCell::default(),
        }))
    }

    pub fn context(&self) -> &Context {
        &self.0.storage.context
    }

    pub(super) fn layout(&self) -> &Rc<Layout> {
        &self.0.layout
    }

    pub fn sizes(&self) -> Dims {
        self.0.layout.sizes
    }

    pub fn strides(&self) -> Dims {
        self.0.layout.strides
    }

    pub fn size(&self, dim: usize) -> u64 {
        self.0.layout.sizes[dim]
    }

    pub fn dim(&self) -> usize {
        self.0.layout.sizes.len()
    }

    pub fn numel(&self) -> u64 {
        self.0.layout.numel
    }

    pub fn bytes(&self) -> u64 {
        self.numel() * self.0.dtype.size()
    }

    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub fn is_contiguous(&self) -> bool {
        self.0.layout.is_contiguous
    }

    pub fn is_dense(&self) -> bool {
        self.0.layout.is_dense
    }

    pub fn requires_grad(&self) -> bool {
        match &*self.0.autograd.borrow() {
            Autograd::Unknown => false,
            Autograd::Leaf(leaf) => leaf.requires_grad,
            Autograd::Result(..) => true,
        }
    }

    pub fn is_leaf(&self) -> bool {
        !matches!(&*self.0.autograd.borrow(), Autograd::Result(..))
    }

    pub fn is_view(&self) -> bool {
        self.0.base.is_some()
    }

    /// Marks a leaf as trained, or as frozen.
    pub fn set_requires_grad(&self, requires_grad: bool) {
        if let Some(leaf) = self.0.autograd.borrow_mut().leaf_mut() {
            leaf.requires_grad = requires_grad;
        }
    }

    pub fn same_as(&self, other: &Tensor) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }

    pub(super) fn key(&self) -> *const TensorImpl {
        Rc::as_ptr(&self.0)
    }

    /// A view: other sizes over the same storage, holding its base.
    pub(super) fn alias(&self, sizes: Dims, strides: Dims) -> Tensor {
        Tensor(Rc::new(TensorImpl {
            storage: self.0.storage.clone(),
            layout: self.context().layout(sizes, strides),
            dtype: self.0.dtype,
            base: Some(self.0.base.clone().unwrap_or_else(|| self.clone())),
            autograd: RefCell::default(),
        }))
    }

    /// Another tensor over the same storage that is no view of this one: `_unsafe_view`, saved
    /// outputs, detached tensors.
    pub(super) fn shallow(&self, sizes: Dims, strides: Dims) -> Tensor {
        let layout = self.context().layout(sizes, strides);
        Tensor::new(self.0.storage.clone(), layout, self.0.dtype)
    }

    /// The same values without history.
    pub fn detach(&self) -> Tensor {
        Tensor::new(self.0.storage.clone(), self.0.layout.clone(), self.0.dtype)
    }

    pub(super) fn set_history(&self, node: Rc<Node>, output: u32) {
        // What it replaces goes after the borrow has ended: it may reach this tensor.
        drop(self.0.autograd.replace(Autograd::Result(node, output)));
    }

    /// Where this tensor's gradient goes: its node, or the leaf's accumulator.
    pub(super) fn gradient_edge(&self) -> Option<(Rc<Node>, u32)> {
        let mut autograd = self.0.autograd.borrow_mut();
        let leaf = match &mut *autograd {
            Autograd::Result(node, output) => return Some((node.clone(), *output)),
            Autograd::Leaf(leaf) if leaf.requires_grad => leaf,
            _ => return None,
        };
        if let Some(node) = leaf.accumulator.upgrade() {
            return Some((node, 0));
        }
        let node = Node::accumulator(self.clone());
        leaf.accumulator = Rc::downgrade(&node);
        Some((node, 0))
    }

    pub fn grad(&self) -> Option<Tensor> {
        let autograd = self.0.autograd.borrow();
        autograd.leaf().and_then(|leaf| leaf.grad.clone())
    }

    pub fn set_grad(&self, grad: Option<Tensor>) {
        if let Some(grad) = &grad {
            grad.0.storage.category.set(Category::Gradient);
        }
        // The old gradient must go after the borrow has ended: freeing it may reach this tensor.
        let mut autograd = self.0.autograd.borrow_mut();
        let old = match autograd.leaf_mut() {
            Some(leaf) => std::mem::replace(&mut leaf.grad, grad),
            None => grad,
        };
        drop(autograd);
        drop(old);
    }

    /// Whether nothing else refers to this tensor or its storage, so that a sum may be made in
    /// its place.
    pub(super) fn is_sole_owner(&self) -> bool {
        Rc::strong_count(&self.0) == 1 && Rc::strong_count(&self.0.storage) == 1
    }

    pub(super) fn handles(&self) -> usize {
        Rc::strong_count(&self.0)
    }

    /// Takes the history out of a tensor nobody else holds, so that a graph can be taken down
    /// without recursion.
    pub(super) fn take_history(&self) -> Option<Rc<Node>> {
        if Rc::strong_count(&self.0) > 1 || self.is_leaf() {
            return None;
        }
        match self.0.autograd.take() {
            Autograd::Result(node, _) => Some(node),
            _ => None,
        }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({:?}, {:?})", self.0.layout.sizes, self.0.dtype)
    }
}
