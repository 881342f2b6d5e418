//! AdamW with states of eight bits, as bitsandbytes keeps them.

use super::super::dtype::DType;
use super::super::tensor::Tensor;

/// Parameters smaller than this keep fp32 states.
const MIN_QUANTISED: u64 = 4096;
/// Values that share one scale.
const BLOCK: u64 = 256;
/// Entries of the two code books that map eight bits to values.
const CODES: u64 = 256;

/// Two states of a byte a value, each with an fp32 scale for every block; the code books are made with the
/// first quantised state and shared.
pub fn step(parameters: &[Tensor], states: &mut [Vec<Tensor>]) {
    let mut has_codes = states.iter().any(|state| state.len() > 2);
    for (parameter, state) in parameters.iter().zip(states.iter_mut()) {
        if parameter.grad().is_none() || !state.is_empty() {
            continue;
        }
        let (context, n) = (parameter.context(), parameter.numel());
        if n < MIN_QUANTISED {
            for _ in 0..2 {
                state.push(context.empty("state", parameter.sizes(), DType::Float32));
            }
            continue;
        }
        if !has_codes {
            for _ in 0..2 {
                state.push(context.empty("code book", [CODES], DType::Float32));
            }
            has_codes = true;
        }
        for _ in 0..2 {
            state.push(context.empty("state", parameter.sizes(), DType::UInt8));
            state.push(context.empty("scales", [n.div_ceil(BLOCK)], DType::Float32));
        }
    }
}
