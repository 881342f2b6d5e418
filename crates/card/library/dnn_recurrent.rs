//! cuDNN's recurrent nets: where their weights lie, and what they take besides. Neither can be asked for without a card.
//!
//! Weights are the gates of each layer and direction, those of the input before those of the state, biases after all
//! weights.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, PoisonError};

use super::host::{self, put};
use super::ledger::{Entry, ledger};
use super::runtime::{SUCCESS, exported};

const BAD_PARAMETER: c_int = 2000;

#[derive(Clone, Copy, Debug)]
struct Net {
    /// 0 and 1 are plain ones, 2 is an LSTM, 3 a GRU.
    cell: c_int,
    is_bidirectional: bool,
    element: c_int,
    input: usize,
    hidden: usize,
    projection: usize,
    layers: usize,
    has_bias: bool,
    has_dropout: bool,
}

#[derive(Clone, Copy, Debug)]
struct Sequence {
    length: usize,
    batch: usize,
}

static NETS: Mutex<BTreeMap<u64, Net>> = Mutex::new(BTreeMap::new());
/// Which descriptors of dropout drop anything.
static DROPOUTS: Mutex<BTreeMap<u64, bool>> = Mutex::new(BTreeMap::new());
static SEQUENCES: Mutex<BTreeMap<u64, Sequence>> = Mutex::new(BTreeMap::new());

fn known<T: Copy>(table: &Mutex<BTreeMap<u64, T>>, descriptor: *mut c_void) -> Option<T> {
    let table = table.lock().unwrap_or_else(PoisonError::into_inner);
    table.get(&(descriptor as u64)).copied()
}

impl Net {
    fn directions(&self) -> usize {
        1 + usize::from(self.is_bidirectional)
    }

    fn gates(&self) -> usize {
        match self.cell {
            2 => 4,
            3 => 3,
            _ => 1,
        }
    }

    fn element_bytes(&self) -> usize {
        match self.element {
            0 => 4,
            1 => 8,
            _ => 2,
        }
    }

    /// Columns of a layer's input matrices.
    fn width(&self, layer: usize) -> usize {
        match layer {
            0 => self.input,
            _ => self.projection * self.directions(),
        }
    }

    /// Elements of all matrices before that of a pseudo layer, and the matrix's rows and columns. Matrices of a layer
    /// are numbered: those of the input, then those of the state.
    fn matrix(&self, pseudo_layer: usize, number: usize) -> (usize, usize, usize) {
        let gates = self.gates();
        let of_layer = |pseudo: usize| {
            let width = self.width(pseudo / self.directions());
            gates * self.hidden * (width + self.projection)
        };
        let before: usize = (0..pseudo_layer).map(of_layer).sum();
        let width = self.width(pseudo_layer / self.directions());
        let input = number.min(gates) * self.hidden * width;
        let state = number.saturating_sub(gates) * self.hidden * self.projection;
        let columns = if number < gates {
            width
        } else {
            self.projection
        };
        (before + input + state, self.hidden, columns)
    }

    fn num_pseudo_layers(&self) -> usize {
        self.layers * self.directions()
    }

    fn matrix_elements(&self) -> usize {
        self.matrix(self.num_pseudo_layers(), 0).0
    }

    fn bias_elements(&self) -> usize {
        match self.has_bias {
            true => self.num_pseudo_layers() * 2 * self.gates() * self.hidden,
            false => 0,
        }
    }

    fn weight_bytes(&self) -> usize {
        (self.matrix_elements() + self.bias_elements()) * self.element_bytes()
    }

    /// Bytes of a state at every step.
    fn unit(&self, sequence: Sequence) -> usize {
        sequence.length * sequence.batch * self.hidden * self.element_bytes()
    }

    /// What the forward pass keeps for the backward: of every layer the gates and states, between layers the outputs,
    /// and where there is dropout a bit for each of them. Exact on an H200 for all 1440 nets that were asked for.
    fn reserve_bytes(&self, sequence: Sequence) -> usize {
        let kept = match self.cell {
            2 => 5,
            3 => 6,
            _ => 1,
        };
        let between = (self.layers.max(1) - 1) * self.directions();
        let unit = self.unit(sequence);
        let mask = match self.has_dropout {
            true => between * unit / self.element_bytes() / 8,
            false => 0,
        };
        (self.num_pseudo_layers() * kept + between) * unit + mask + 256
    }

    /// Fitted to 2880 sizes of an H200, within 2 %: states and inputs of all steps, the weights laid out anew, 8 MiB for
    /// the products of each layer, some states of one step, and the output before dropout.
    fn workspace_bytes(&self, sequence: Sequence) -> usize {
        const PRODUCTS: usize = 8 << 20;
        let (states, inputs, step) = match (self.cell, self.is_bidirectional) {
            (2, false) => (5, 1, 10),
            (2, true) => (14, 1, 24),
            (3, true) => (12, 1, 14),
            (_, true) => (10, 2, 14),
            (_, false) => (4, 2, 7),
        };
        let unit = self.unit(sequence);
        let input = sequence.length * sequence.batch * self.input * self.element_bytes();
        let of_a_step = sequence.batch * self.hidden * self.element_bytes();
        let dropout = if self.has_dropout && self.layers > 1 {
            unit
        } else {
            0
        };
        states * unit
            + inputs * input
            + self.weight_bytes()
            + self.num_pseudo_layers() * PRODUCTS
            + step * self.layers * of_a_step
            + dropout
    }
}

exported! {
    fn cudnnSetRNNDescriptor_v8(
        descriptor: *mut c_void, _algorithm: c_int, cell: c_int, bias: c_int, direction: c_int, _input_mode: c_int,
        element: c_int, _precision: c_int, _math: c_int, input: c_int, hidden: c_int, projection: c_int, layers: c_int,
        dropout: *mut c_void, _flags: c_uint,
    ) -> c_int {
        let size = |number: c_int| number.max(0) as usize;
        let net = Net {
            cell,
            is_bidirectional: direction == 1,
            element,
            input: size(input),
            hidden: size(hidden),
            projection: size(projection),
            layers: size(layers),
            has_bias: bias != 0,
            has_dropout: known(&DROPOUTS, dropout).unwrap_or_default(),
        };
        NETS.lock().unwrap_or_else(PoisonError::into_inner).insert(descriptor as u64, net);
        SUCCESS
    }

    fn cudnnSetRNNDataDescriptor(
        descriptor: *mut c_void, _element: c_int, _layout: c_int, length: c_int, batch: c_int, _width: c_int,
        _lengths: *const c_int, _fill: *mut c_void,
    ) -> c_int {
        let sequence = Sequence { length: length.max(0) as usize, batch: batch.max(0) as usize };
        SEQUENCES.lock().unwrap_or_else(PoisonError::into_inner).insert(descriptor as u64, sequence);
        SUCCESS
    }

    fn cudnnGetRNNWeightSpaceSize(_handle: *mut c_void, descriptor: *mut c_void, bytes: *mut usize) -> c_int {
        let Some(net) = known(&NETS, descriptor) else {
            return BAD_PARAMETER;
        };
        // SAFETY: as documented for this function.
        unsafe { put(bytes, net.weight_bytes()) };
        SUCCESS
    }

    fn cudnnGetRNNTempSpaceSizes(_handle: *mut c_void, descriptor: *mut c_void, mode: c_int, x: *mut c_void, workspace: *mut usize, reserve: *mut usize) -> c_int {
        let (Some(net), Some(sequence)) = (known(&NETS, descriptor), known(&SEQUENCES, x)) else {
            return BAD_PARAMETER;
        };
        ledger().add(Entry::Estimates, 1);
        let is_training = mode == 1;
        // SAFETY: as documented for this function.
        unsafe {
            put(workspace, net.workspace_bytes(sequence));
            put(reserve, if is_training { net.reserve_bytes(sequence) } else { 0 });
        }
        SUCCESS
    }

    fn cudnnGetRNNWeightParams(
        _handle: *mut c_void, descriptor: *mut c_void, pseudo_layer: c_int, _bytes: usize, weights: *const c_void,
        number: c_int, matrix: *mut c_void, matrix_address: *mut *mut c_void, bias: *mut c_void,
        bias_address: *mut *mut c_void,
    ) -> c_int {
        let Some(net) = known(&NETS, descriptor) else {
            return BAD_PARAMETER;
        };
        let (layer, number) = (pseudo_layer.max(0) as usize, number.max(0) as usize);
        if number >= 2 * net.gates() {
            // A projection, which PyTorch asks for by a number past the gates.
            // SAFETY: as documented for this function: no such matrix.
            unsafe {
                put(matrix_address, std::ptr::null_mut());
                put(bias_address, std::ptr::null_mut());
            }
            return SUCCESS;
        }
        let (offset, rows, columns) = net.matrix(layer, number);
        let bias_offset = net.matrix_elements() + (layer * 2 * net.gates() + number) * net.hidden;
        let at = |elements: usize| (weights as usize + elements * net.element_bytes()) as *mut c_void;
        describe(matrix, net.element, [1, rows as c_int, columns as c_int]);
        describe(bias, net.element, [1, rows as c_int, 1]);
        // SAFETY: as documented for this function.
        unsafe {
            put(matrix_address, at(offset));
            put(bias_address, if net.has_bias { at(bias_offset) } else { std::ptr::null_mut() });
        }
        SUCCESS
    }

    fn cudnnSetDropoutDescriptor(descriptor: *mut c_void, _handle: *mut c_void, rate: f32) -> c_int {
        DROPOUTS.lock().unwrap_or_else(PoisonError::into_inner).insert(descriptor as u64, rate > 0.0);
        SUCCESS
    }

    fn cudnnRestoreDropoutDescriptor(descriptor: *mut c_void, handle: *mut c_void, rate: f32) -> c_int {
        // SAFETY: the same contract.
        unsafe { cudnnSetDropoutDescriptor(descriptor, handle, rate) }
    }

    fn cudnnDropoutGetStatesSize(_handle: *mut c_void, bytes: *mut usize) -> c_int {
        // SAFETY: as documented for this function.
        unsafe { put(bytes, dropout_state_bytes()) };
        SUCCESS
    }
}

/// Random states of every thread that the card runs at once.
fn dropout_state_bytes() -> usize {
    let card = super::card::card();
    let threads = card.multiprocessors * card.limits().threads_per_multiprocessor;
    threads as usize * 24
}

/// Says in a descriptor of cuDNN's which tensor it is.
fn describe(descriptor: *mut c_void, element: c_int, dims: [c_int; 3]) {
    type Set = unsafe extern "C" fn(*mut c_void, c_int, c_int, *const c_int, *const c_int) -> c_int;
    let function = host::function_of(c"libcudnn.so.9", c"cudnnSetTensorNdDescriptor");
    let Some(function) = function.filter(|_| !descriptor.is_null()) else {
        return;
    };
    // SAFETY: the name belongs to this signature in every version of cuDNN.
    let set: Set = unsafe { std::mem::transmute(function) };
    let strides = [dims[1] * dims[2], dims[2], 1];
    // SAFETY: the caller's descriptor, and arrays of three.
    unsafe { set(descriptor, element, 3, dims.as_ptr(), strides.as_ptr()) };
}
