//! The process that a program runs in: its card, device memory, grad mode, autocast, saved-tensor hooks,
//! library workspaces. Tensors and nodes hold a handle to it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::autocast::Autocast;
use super::checkpoint::Hook;
use super::dtype::DType;
use super::layout::{Layout, Layouts};
use super::line::Line;
use super::memory::{Block, MemoryModel};
use super::place::{Place, PlaceId, Places, Scope};
use super::shape::Dims;
use super::storage::Storages;
use super::tape::Tape;
use super::tensor::{SpareTensors, Tensor};
use crate::chip::Chip;

/// What a block of memory is for. Decided by the phase that allocates it; a gradient becomes one
/// when a leaf takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AllocationCategory {
    Parameter,
    Batch,
    Activation,
    Backward,
    Gradient,
    Optimizer,
    Workspace,
}

/// One thing that the allocator was asked for, in order.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// Of an allocation; of a free, the size that was allocated.
    pub bytes: u64,
    /// Number of the allocation, counted from the start of the recording.
    pub id: u32,
    pub is_free: bool,
    pub category: AllocationCategory,
    /// The op that asked, in PyTorch's name for it.
    pub op: &'static str,
    /// The part of the model that ran, and its layer.
    pub scope: Scope,
    /// The line that ran; in backward, the line whose gradient was computed. None while the model is built.
    pub line: Option<&'static Line>,
}

/// The thread that runs: each has its own cuBLAS handle, and with it its own workspace.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    Main,
    Backward,
}

/// Kernels that bring device memory with them when they are first used, outside the allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Libraries {
    pub cudnn: bool,
    pub nonzero: bool,
    /// bitsandbytes multiplies eight-bit integers through a cuBLASLt handle of its own.
    pub int8: bool,
}

/// Workspaces of the thread's BLAS handles, kept by the allocator once they exist.
#[derive(Default)]
struct Workspaces {
    cublas: Option<Block>,
    cublas_lt: Option<Block>,
}

/// cuBLASLt's own workspace.
const CUBLAS_LT_WORKSPACE: u64 = 1 << 20;

pub struct State {
    chip: Chip,
    memory: RefCell<Box<dyn MemoryModel>>,
    grad_enabled: Cell<bool>,
    /// Set when nothing more is to happen: after a recomputation has all it needs, or when the
    /// device is full. Ops then make tensors without memory and record nothing.
    stopped: Cell<bool>,
    out_of_memory: Cell<Option<u64>>,
    thread: Cell<Thread>,
    category: Cell<AllocationCategory>,
    place: Cell<Place>,
    places: RefCell<Places>,
    libraries: Cell<Libraries>,
    /// Managed memory, outside the allocator.
    paged: Cell<u64>,
    workspaces: [RefCell<Workspaces>; 2],
    pub(super) autocast: RefCell<Autocast>,
    pub(super) hooks: RefCell<Vec<Rc<dyn Hook>>>,
    recording: Cell<bool>,
    events: RefCell<Vec<Event>>,
    layouts: RefCell<Layouts>,
    pub(super) storages: RefCell<Storages>,
    pub(super) tape: RefCell<Tape>,
    pub(super) spare_tensors: RefCell<SpareTensors>,
}

/// A handle to the process.
#[derive(Clone)]
pub struct Context(Rc<State>);

impl std::ops::Deref for Context {
    type Target = State;
    fn deref(&self) -> &State {
        &self.0
    }
}

impl Context {
    /// A process on such a card.
    pub fn new(chip: Chip, memory: Box<dyn MemoryModel>) -> Context {
        Context(Rc::new(State {
            chip,
            memory: RefCell::new(memory),
            grad_enabled: Cell::new(true),
            stopped: Cell::new(false),
            out_of_memory: Cell::new(None),
            thread: Cell::new(Thread::Main),
            category: Cell::new(AllocationCategory::Parameter),
            place: Cell::new(Place {
                scope: Scope {
                    name: "model",
                    layer: None,
                },
                line: None,
            }),
            places: RefCell::default(),
            libraries: Cell::new(Libraries::default()),
            paged: Cell::new(0),
            workspaces: [RefCell::default(), RefCell::default()],
            autocast: RefCell::new(Autocast::default()),
            hooks: RefCell::new(Vec::new()),
            recording: Cell::new(false),
            events: RefCell::new(Vec::new()),
            layouts: RefCell::default(),
            storages: RefCell::default(),
            tape: RefCell::default(),
            spare_tensors: RefCell::default(),
        }))
    }

    /// An uninitialised tensor on the device.
    pub fn empty(&self, op: &'static str, sizes: impl Into<Dims>, dtype: DType) -> Tensor {
        let sizes = sizes.into();
        self.empty_strided(op, sizes, sizes.contiguous_strides(), dtype)
    }

    /// The same, with the element order of another tensor.
    pub fn empty_strided(
        &self,
        op: &'static str,
        sizes: Dims,
        strides: Dims,
        dtype: DType,
    ) -> Tensor {
        self.empty_laid_out(op, self.layout(sizes, strides), dtype)
    }

    /// The same, in a layout that another tensor has.
    pub(super) fn empty_laid_out(
        &self,
        op: &'static str,
        layout: Rc<Layout>,
        dtype: DType,
    ) -> Tensor {
        let storage = self.new_storage(op, layout.numel * dtype.size());
        Tensor::new(self, storage, layout, dtype)
    }

    /// A tensor whose memory comes later, by [`Tensor::set_data`]: one on the device `meta`.
    pub fn meta(&self, sizes: impl Into<Dims>, dtype: DType) -> Tensor {
        let sizes = sizes.into();
        let layout = self.layout(sizes, sizes.contiguous_strides());
        Tensor::new(self, self.new_empty_storage(), layout, dtype)
    }

    /// Bytes that a kernel needs while it runs.
    pub fn workspace(&self, op: &'static str, bytes: u64) -> Tensor {
        self.empty(op, [bytes], DType::UInt8)
    }
}

impl State {
    pub(super) fn layout(&self, sizes: Dims, strides: Dims) -> Rc<Layout> {
        self.layouts.borrow_mut().of(sizes, strides)
    }

    pub(super) fn allocate(&self, op: &'static str, bytes: u64) -> Option<(Block, u32)> {
        if bytes == 0 || self.stopped.get() {
            return None;
        }
        let Some(block) = self.memory.borrow_mut().allocate(bytes) else {
            self.out_of_memory.set(Some(bytes));
            self.stopped.set(true);
            return None;
        };
        let mut id = u32::MAX;
        if self.recording.get() {
            let mut events = self.events.borrow_mut();
            id = events.len() as u32;
            events.push(Event {
                bytes,
                id,
                is_free: false,
                category: self.category.get(),
                op,
                scope: self.place.get().scope,
                line: self.place.get().line,
            });
        }
        Some((block, id))
    }

    pub(super) fn free(&self, block: Block, id: u32, category: AllocationCategory) {
        self.memory.borrow_mut().free(block);
        if self.recording.get() && id != u32::MAX {
            let mut events = self.events.borrow_mut();
            let event = events[id as usize];
            events.push(Event {
                is_free: true,
                category,
                ..event
            });
        }
    }

    /// From here every request is kept as an [`Event`].
    pub fn start_recording(&self) {
        self.recording.set(true);
    }

    pub fn stop_recording(&self) {
        self.recording.set(false);
    }

    pub fn take_events(&self) -> Vec<Event> {
        self.recording.set(false);
        self.events.take()
    }

    pub fn memory(&self) -> std::cell::Ref<'_, Box<dyn MemoryModel>> {
        self.memory.borrow()
    }

    pub fn empty_cache(&self) {
        self.memory.borrow_mut().empty_cache();
    }

    pub fn reset_peaks(&self) {
        self.memory.borrow_mut().reset_peaks();
    }

    /// The size that was asked for when the device was full.
    pub fn out_of_memory(&self) -> Option<u64> {
        self.out_of_memory.get()
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.get()
    }

    pub(super) fn set_stopped(&self, stopped: bool) {
        self.stopped
            .set(stopped || self.out_of_memory.get().is_some());
    }

    pub fn is_grad_enabled(&self) -> bool {
        self.grad_enabled.get()
    }

    pub(super) fn set_grad_enabled(&self, enabled: bool) -> bool {
        self.grad_enabled.replace(enabled)
    }

    /// Runs without recording for backward.
    pub fn no_grad<T>(&self, body: impl FnOnce() -> T) -> T {
        let before = self.grad_enabled.replace(false);
        let result = body();
        self.grad_enabled.set(before);
        result
    }

    pub fn category(&self) -> AllocationCategory {
        self.category.get()
    }

    pub fn set_category(&self, category: AllocationCategory) -> AllocationCategory {
        self.category.replace(category)
    }

    pub fn set_scope(&self, name: &'static str, layer: Option<u32>) {
        self.place.set(Place {
            scope: Scope { name, layer },
            ..self.place.get()
        });
    }

    /// The line that runs from here on.
    pub fn at(&self, line: &'static Line) {
        self.place.set(Place {
            line: Some(line),
            ..self.place.get()
        });
    }

    pub(super) fn place(&self) -> PlaceId {
        self.places.borrow_mut().number(self.place.get())
    }

    pub(super) fn restore_place(&self, place: PlaceId) {
        self.place.set(self.places.borrow().of(place));
    }

    pub fn chip(&self) -> Chip {
        self.chip
    }

    pub fn libraries(&self) -> Libraries {
        self.libraries.get()
    }

    /// Managed memory that was asked for so far.
    pub fn paged(&self) -> u64 {
        self.paged.get()
    }

    pub(super) fn page(&self, bytes: u64) {
        self.paged.set(self.paged.get() + bytes);
    }

    pub(super) fn uses(&self, mark: impl FnOnce(&mut Libraries)) {
        let mut libraries = self.libraries.get();
        mark(&mut libraries);
        self.libraries.set(libraries);
    }

    pub(super) fn set_thread(&self, thread: Thread) -> Thread {
        self.thread.replace(thread)
    }

    /// Called after a matrix product's result exists: the first product of a thread's handle
    /// brings its workspace, which stays.
    pub(super) fn use_cublas(&self) {
        let mut workspaces = self.workspaces[self.thread.get() as usize].borrow_mut();
        if workspaces.cublas.is_none() && !self.stopped.get() {
            let category = self.category.replace(AllocationCategory::Workspace);
            workspaces.cublas = self
                .allocate("cublas workspace", self.chip.cublas_workspace())
                .map(|(block, _)| block);
            self.category.set(category);
        }
    }

    /// The same for a product with a fused bias, which goes through cuBLASLt.
    pub(super) fn use_cublas_lt(&self) {
        self.use_cublas();
        let mut workspaces = self.workspaces[self.thread.get() as usize].borrow_mut();
        if workspaces.cublas_lt.is_none() && !self.stopped.get() {
            let category = self.category.replace(AllocationCategory::Workspace);
            workspaces.cublas_lt = self
                .allocate("cublasLt workspace", CUBLAS_LT_WORKSPACE)
                .map(|(block, _)| block);
            self.category.set(category);
        }
    }
}
