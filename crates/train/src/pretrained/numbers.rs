//! Numbers in the types in which weights are kept: halves, and codes with their scales.

use std::convert::Infallible;

use cinch_engine::Engine;
use cinch_graph::op::Quantisation;
use cinch_graph::{DType, Parameter, Shape, Storage};
use cinch_plan::Placement;
use cinch_step::StepPlan;
use cinch_weights::{
    Nf4, Nf4Parts, PIECE_BYTES, WeightError, WeightFiles, bf16_bits, bf16_value, f16_bits,
    f16_value, quantize_int8, quantize_nf4, quantize_scales, scale_offset,
};
use rayon::prelude::*;

use super::clear_cut;
use crate::error::TrainError;
use crate::kept;
use crate::session::placement;

/// The numbers of a tensor, from its bytes.
pub(crate) fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let halves = |value: fn(u16) -> f32| {
        let pairs = bytes.as_chunks::<2>().0.iter();
        pairs.map(|&pair| value(u16::from_ne_bytes(pair))).collect()
    };
    match dtype {
        DType::Bf16 => halves(bf16_value),
        DType::F16 => halves(f16_value),
        _ => {
            let words = bytes.as_chunks::<4>().0.iter();
            words.map(|&word| f32::from_ne_bytes(word)).collect()
        }
    }
}

/// Numbers in the bytes of a type, each rounded to nearest.
pub(crate) fn bytes_in(dtype: DType, numbers: &[f32]) -> Vec<u8> {
    let halves = |bits: fn(f32) -> u16| {
        let pairs = numbers.iter().map(|&number| bits(number).to_ne_bytes());
        pairs.flatten().collect()
    };
    match dtype {
        DType::Bf16 => halves(bf16_bits),
        DType::F16 => halves(f16_bits),
        _ => bytes_of(numbers),
    }
}

/// Gives the numbers of a parameter from an element on.
type Numbers<'a> = dyn FnMut(usize, &mut [f32]) + 'a;

/// Numbers as they are kept in a parameter other than fp32, for weights made from a seed.
pub(crate) fn write_numbers(
    step: &StepPlan,
    engine: &mut Engine,
    (parameter, rank): (&Parameter, usize),
    numbers: &mut Numbers<'_>,
) -> Result<(), TrainError> {
    if let Storage::Quantised(quantisation) = parameter.storage {
        let codes = Codes::of(quantisation, &parameter.shape, numbers);
        return codes.write(step, (engine, rank), parameter);
    }
    let bits: fn(f32) -> u16 = match step.training.ty(parameter.master).dtype {
        DType::F16 => f16_bits,
        _ => bf16_bits,
    };
    clear_cut(step, engine, parameter)?;
    let own = kept::elements(parameter, rank);
    let place = Placement {
        bytes: 2 * own.len() as u64,
        ..placement(&step.plan, parameter.master)
    };
    let mut values = Vec::new();
    let Ok(()) = engine.write_pieces(place, 2, PIECE_BYTES, |first, bytes: &mut [u8]| {
        let (halves, _) = bytes.as_chunks_mut::<2>();
        for (number, halves) in halves.chunks_mut(NUMBERS_AT_ONCE).enumerate() {
            values.resize(halves.len(), 0.0);
            let first = own.start + first / 2;
            numbers(first + number * NUMBERS_AT_ONCE, &mut values);
            halves
                .par_iter_mut()
                .zip(&values)
                .with_min_len(NUMBERS_AT_ONCE / 64)
                .for_each(|(half, &value)| *half = bits(value).to_ne_bytes());
        }
        Ok::<(), Infallible>(())
    })?;
    Ok(())
}

/// Numbers that are made at once on their way to another type: whole blocks of any quantisation.
const NUMBERS_AT_ONCE: usize = 1 << 20;

/// A quantised matrix in host memory, on its way to its place.
pub(crate) struct Codes {
    pub codes: Vec<u8>,
    /// In the order of the parameter's scales, as bytes.
    pub scales: Vec<Vec<u8>>,
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

impl Codes {
    /// The tensor of that name, quantised as it is read.
    pub fn read(
        quantisation: Quantisation,
        shape: &Shape,
        files: &WeightFiles,
        name: &str,
    ) -> Result<Self, WeightError> {
        let elements = shape.elements();
        match quantisation {
            Quantisation::Nf4 { double } => {
                let mut buffers = Nf4Buffers::new(double, elements);
                files.read_nf4(name, Nf4 { double }, buffers.parts())?;
                Ok(buffers.into_codes(double))
            }
            Quantisation::Int8 => {
                let mut codes = vec![0_i8; elements];
                let mut scales = vec![0.0; shape.rows()];
                files.read_int8(name, &mut codes, &mut scales)?;
                Ok(Self::of_bytes(codes, &scales))
            }
        }
    }

    fn of(quantisation: Quantisation, shape: &Shape, numbers: &mut Numbers<'_>) -> Self {
        let (elements, width) = (shape.elements(), shape.width().max(1));
        match quantisation {
            Quantisation::Nf4 { double } => {
                let mut buffers = Nf4Buffers::new(double, elements);
                buffers.quantise(double, elements, numbers);
                buffers.into_codes(double)
            }
            Quantisation::Int8 => {
                let mut codes = vec![0_i8; elements];
                let mut scales = vec![0.0; shape.rows()];
                let rows = (NUMBERS_AT_ONCE / width).max(1);
                let mut values = Vec::new();
                let pieces = codes.chunks_mut(rows * width).zip(scales.chunks_mut(rows));
                for (number, (codes, scales)) in pieces.enumerate() {
                    values.resize(codes.len(), 0.0);
                    numbers(number * rows * width, &mut values);
                    quantize_int8(&values, width, codes, scales);
                }
                Self::of_bytes(codes, &scales)
            }
        }
    }

    fn of_bytes(codes: Vec<i8>, scales: &[f32]) -> Self {
        Self {
            // In place: both are one byte.
            codes: codes.into_iter().map(i8::cast_unsigned).collect(),
            scales: vec![bytes_of(scales)],
        }
    }

    pub(super) fn write(
        &self,
        step: &StepPlan,
        (engine, rank): (&mut Engine, usize),
        parameter: &Parameter,
    ) -> Result<(), TrainError> {
        let codes = placement(&step.plan, parameter.master);
        kept::write_part(engine, codes, &self.codes, rank)?;
        for (&id, scales) in parameter.code_scales.iter().zip(&self.scales) {
            kept::write_part(engine, placement(&step.plan, id), scales, rank)?;
        }
        Ok(engine.synchronize()?)
    }
}

struct Nf4Buffers {
    codes: Vec<u8>,
    scale_codes: Vec<u8>,
    scales: Vec<f32>,
    offset: Vec<f32>,
}

impl Nf4Buffers {
    fn new(double: bool, elements: usize) -> Self {
        let layout = Nf4 { double }.layout(elements);
        Self {
            codes: vec![0; layout.codes],
            scale_codes: vec![0; layout.scale_codes],
            scales: vec![0.0; layout.scales],
            offset: vec![0.0; layout.offsets],
        }
    }

    fn parts(&mut self) -> Nf4Parts<'_> {
        Nf4Parts {
            codes: &mut self.codes,
            scale_codes: &mut self.scale_codes,
            scales: &mut self.scales,
            offset: &mut self.offset,
        }
    }

    fn quantise(&mut self, double: bool, elements: usize, numbers: &mut Numbers<'_>) {
        const { assert!(NUMBERS_AT_ONCE.is_multiple_of(Nf4::BLOCK)) };
        let mut largest = vec![0.0; if double { self.scale_codes.len() } else { 0 }];
        let scales = if double {
            &mut largest
        } else {
            &mut self.scales
        };
        let codes = self.codes.chunks_mut(Nf4::codes_bytes(NUMBERS_AT_ONCE));
        let scales = scales.chunks_mut(NUMBERS_AT_ONCE / Nf4::BLOCK);
        let mut values = Vec::new();
        for (number, (codes, scales)) in codes.zip(scales).enumerate() {
            let first = number * NUMBERS_AT_ONCE;
            values.resize(NUMBERS_AT_ONCE.min(elements - first), 0.0);
            numbers(first, &mut values);
            quantize_nf4(&values, codes, scales);
        }
        if double {
            let offset = scale_offset(&largest);
            quantize_scales(&largest, offset, &mut self.scale_codes, &mut self.scales);
            self.offset.fill(offset);
        }
    }

    fn into_codes(self, double: bool) -> Codes {
        let scales = match double {
            true => vec![
                self.scale_codes,
                bytes_of(&self.scales),
                bytes_of(&self.offset),
            ],
            false => vec![bytes_of(&self.scales)],
        };
        Codes {
            codes: self.codes,
            scales,
        }
    }
}
