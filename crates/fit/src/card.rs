//! What a processor can do: the rates that a step's time is predicted from.

use cinch_graph::{DType, Target};

/// Rates of one processor, as programs reach them.
#[derive(Clone, Debug, PartialEq)]
pub struct Card {
    pub name: String,
    pub target: Target,
    /// Operations per second of a large matrix product of 16-bit numbers.
    pub half_flops: f64,
    /// Of single-precision numbers rounded to tf32.
    pub tf32_flops: f64,
    /// Of single-precision numbers.
    pub single_flops: f64,
    /// Bytes per second of a large copy, read and written bytes counted.
    pub bandwidth: f64,
    pub multiprocessors: usize,
}

/// Cards whose rates were measured: part of the driver's name, rates and multiprocessors. The
/// rates are those of products of random numbers, which draw more power than zeros and so run
/// slower.
const CARDS: [(&str, [f64; 4], usize); 1] = [("H200", [790e12, 395e12, 51e12, 4.3e12], 132)];

impl Card {
    /// The card of that name, where its rates are known.
    pub fn known(name: &str) -> Option<Self> {
        let (_, [half_flops, tf32_flops, single_flops, bandwidth], multiprocessors) =
            CARDS.into_iter().find(|(part, ..)| name.contains(part))?;
        Some(Self {
            name: name.to_owned(),
            target: Target::Cuda,
            half_flops,
            tf32_flops,
            single_flops,
            bandwidth,
            multiprocessors,
        })
    }

    /// A CPU, by what was measured on it.
    pub fn cpu(num_threads: usize, matrix_flops: f64, bandwidth: f64) -> Self {
        Self {
            name: format!("{num_threads} threads"),
            target: Target::Cpu,
            half_flops: matrix_flops,
            tf32_flops: matrix_flops,
            single_flops: matrix_flops,
            bandwidth,
            multiprocessors: num_threads,
        }
    }

    /// The rate of matrix products in a precision.
    pub fn matrix_flops(&self, dtype: DType, tf32: bool) -> f64 {
        match dtype {
            DType::Bf16 | DType::F16 => self.half_flops,
            _ if tf32 => self.tf32_flops,
            _ => self.single_flops,
        }
    }
}
