//! The optimizers of bitsandbytes: states of eight bits or fp32, on the card or in memory that the driver pages.

use super::super::dtype::DType;
use super::super::tensor::Tensor;

/// What is kept of each value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct States {
    /// Two of Adam, one of Lion.
    pub count: usize,
    /// In eight bits with scales, or in fp32.
    pub eight_bit: bool,
    /// In managed memory, which the driver moves to the host when the card is full.
    pub paged: bool,
}

/// Parameters smaller than this keep fp32 states.
const MIN_QUANTISED: u64 = 4096;
/// Parameters smaller than this keep their states on the card.
const MIN_PAGED: u64 = 100_000;
/// Values that share one scale.
const BLOCK: u64 = 256;
/// Entries of a code book that maps eight bits to values.
const CODES: u64 = 256;

/// States are made when a parameter first has a gradient: those of a byte a value before their scales, an fp32 number for
/// every block. The code books, one for each state, come with the first quantised parameter and are shared.
pub fn step(
    kind: States,
    parameters: &[Tensor],
    in_float32: impl Fn(&Tensor) -> bool,
    states: &mut [Vec<Tensor>],
    books: &mut Vec<Tensor>,
) {
    for (parameter, state) in parameters.iter().zip(states.iter_mut()) {
        if parameter.grad().is_none() || !state.is_empty() {
            continue;
        }
        let (context, n) = (parameter.context(), parameter.numel());
        let eight_bit = kind.eight_bit && n >= MIN_QUANTISED && !in_float32(parameter);
        let dtype = if eight_bit {
            DType::UInt8
        } else {
            DType::Float32
        };
        if eight_bit && books.is_empty() {
            let book = || context.empty("code book", [CODES], DType::Float32);
            books.extend((0..kind.count).map(|_| book()));
        }
        for _ in 0..kind.count {
            if kind.paged && n >= MIN_PAGED {
                context.page(n * dtype.size());
                // No memory of the allocator's; the state exists.
                state.push(context.meta(parameter.sizes(), dtype));
            } else {
                state.push(context.empty("state", parameter.sizes(), dtype));
            }
        }
        if eight_bit {
            for _ in 0..kind.count {
                state.push(context.empty("scales", [n.div_ceil(BLOCK)], DType::Float32));
            }
        }
    }
}
