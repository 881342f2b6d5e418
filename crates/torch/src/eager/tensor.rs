//! Tensors: reference-counted handles to storage, freed when the last one goes, as in CPython.

use std::cell::RefCell;
use std::rc::Rc;

use super::context::{AllocationCategory, Context};
use super::dtype::DType;
use super::layout::Layout;
use super::shape::Dims;
use super::storage::StorageId;
use super::tape::{Edge, Node, NodeId};

/// What autograd knows of a tensor. Nearly all tensors are results, so what only leaves have is kept apart.
#[derive(Default)]
enum Autograd {
    #[default]
    Unknown,
    Leaf(Box<Leaf>),
    /// The output of an op: its node, and which of its outputs.
    Result(Edge),
}

#[derive(Default)]
struct Leaf {
    requires_grad: bool,
    grad: Option<Tensor>,
    /// The node that receives gradients, as long as edges of the graph keep it alive.
    accumulator: Option<NodeId>,
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
    /// None of one that waits to be used again.
    context: Option<Context>,
    storage: StorageId,
    dtype: DType,
    layout: Rc<Layout>,
    /// The tensor that this one is a view of. PyTorch's view metadata holds it, also without
    /// gradients: so a view's storage never has a single owner, and gradients that are views
    /// are not added to in place.
    base: Option<Tensor>,
    autograd: RefCell<Autograd>,
}

#[derive(Clone)]
pub struct Tensor(Rc<TensorImpl>);

/// Tensors that went, for the next ones: a program makes and drops one with every op, and memory that was just used is the
/// fastest there is.
#[derive(Default)]
pub(super) struct SpareTensors(Vec<Rc<TensorImpl>>);

impl Tensor {
    /// A tensor over storage whose owner it becomes.
    pub(super) fn new(
        context: &Context,
        storage: StorageId,
        layout: Rc<Layout>,
        dtype: DType,
    ) -> Tensor {
        Tensor::with_base(context, storage, layout, dtype, None)
    }

    fn with_base(
        context: &Context,
        storage: StorageId,
        layout: Rc<Layout>,
        dtype: DType,
        base: Option<Tensor>,
    ) -> Tensor {
        let tensor = TensorImpl {
            context: Some(context.clone()),
            storage,
            dtype,
            layout,
            base,
            autograd: RefCell::default(),
        };
        let spare = context.spare_tensors.borrow_mut().0.pop();
        if let Some(mut spare) = spare
            && let Some(place) = Rc::get_mut(&mut spare)
        {
            *place = tensor;
            return Tensor(spare);
        }
        Tensor(Rc::new(tensor))
    }

    pub fn context(&self) -> &Context {
        let context = self.0.context.as_ref();
        context.expect("a tensor that has handles has a context")
    }

    fn shared_storage(&self) -> StorageId {
        self.context().share_storage(self.0.storage)
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

    /// Whether its bytes were made with the model.
    pub(super) fn is_parameter(&self) -> bool {
        self.context().storage_category(self.0.storage) == AllocationCategory::Parameter
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
        let base = self.0.base.clone().unwrap_or_else(|| self.clone());
        Tensor::with_base(
            self.context(),
            self.shared_storage(),
            self.context().layout(sizes, strides),
            self.0.dtype,
            Some(base),
        )
    }

    /// Another tensor over the same storage that is no view of this one: `_unsafe_view`, saved
    /// outputs, detached tensors.
    pub(super) fn shallow(&self, sizes: Dims, strides: Dims) -> Tensor {
        let layout = self.context().layout(sizes, strides);
        Tensor::new(self.context(), self.shared_storage(), layout, self.0.dtype)
    }

    /// The same values without history.
    pub fn detach(&self) -> Tensor {
        let layout = self.0.layout.clone();
        Tensor::new(self.context(), self.shared_storage(), layout, self.0.dtype)
    }

    /// `x.data = other`: memory of so many bytes in the place of what it has.
    pub fn set_data(&self, op: &'static str, bytes: u64) {
        self.context().replace_bytes(self.0.storage, op, bytes);
    }

    /// Frees the bytes of a result that nobody else has, although its handle is still there.
    pub(super) fn give_up_bytes(&self) {
        if self.is_sole_owner() {
            self.context().replace_bytes(self.0.storage, "given up", 0);
        }
    }

    /// Takes over the node's reference for this output.
    pub(super) fn set_history(&self, edge: Edge) {
        // What it replaces goes after the borrow has ended: it may reach this tensor.
        if let Autograd::Result(old) = self.0.autograd.replace(Autograd::Result(edge)) {
            self.context().release_node(old.node);
        }
    }

    /// Where this tensor's gradient goes: its node, or the leaf's accumulator. The edge is a reference to the node.
    pub(super) fn gradient_edge(&self) -> Option<Edge> {
        let mut autograd = self.0.autograd.borrow_mut();
        let mut tape = self.context().tape.borrow_mut();
        let edge = match &mut *autograd {
            Autograd::Result(edge) => *edge,
            Autograd::Leaf(leaf) if leaf.requires_grad => {
                let node = *leaf
                    .accumulator
                    .get_or_insert_with(|| tape.push(Node::of_leaf(self)));
                Edge { node, output: 0 }
            }
            _ => return None,
        };
        tape.node_mut(edge.node).references += 1;
        Some(edge)
    }

    /// The accumulator is gone.
    pub(super) fn forget_accumulator(&self) {
        if let Some(leaf) = self.0.autograd.borrow_mut().leaf_mut() {
            leaf.accumulator = None;
        }
    }

    pub fn grad(&self) -> Option<Tensor> {
        let autograd = self.0.autograd.borrow();
        autograd.leaf().and_then(|leaf| leaf.grad.clone())
    }

    pub fn set_grad(&self, grad: Option<Tensor>) {
        if let Some(grad) = &grad {
            let storage = grad.0.storage;
            self.context()
                .set_storage_category(storage, AllocationCategory::Gradient);
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
        Rc::strong_count(&self.0) == 1 && self.context().storage_owners(self.0.storage) == 1
    }

    pub(super) fn handles(&self) -> usize {
        Rc::strong_count(&self.0)
    }
}

impl Drop for Tensor {
    /// With the last handle go a leaf's gradient, the base with its own history, the bytes, then the history.
    fn drop(&mut self) {
        let Some(tensor) = Rc::get_mut(&mut self.0) else {
            return;
        };
        let Some(context) = tensor.context.take() else {
            return;
        };
        let edge = match tensor.autograd.take() {
            Autograd::Result(edge) => Some(edge),
            Autograd::Leaf(leaf) => {
                drop(leaf);
                None
            }
            Autograd::Unknown => None,
        };
        drop(tensor.base.take());
        context.release_storage(tensor.storage);
        if let Some(edge) = edge {
            context.release_node(edge.node);
        }
        let spare = &mut context.spare_tensors.borrow_mut().0;
        spare.push(self.0.clone());
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({:?}, {:?})", self.0.layout.sizes, self.0.dtype)
    }
}
