//! A text that the model writes after each pass over the data, for people to read.
//!
//! It is written on the CPU, with the weights as they are at that step, in single precision: an
//! arena of its own, in host memory, that is given back afterwards and is part of the run's plan
//! (`StepPlan::sample`). The memory of a GPU stays as it is, and the training goes on as it would
//! have without.

use std::ops::Range;

use cinch_data::{Decoder, Tokenizer};
use cinch_engine::EngineOptions;
use cinch_graph::{DType, Target};
use cinch_step::SamplePlan;
use cinch_weights::{bf16_value, f16_value};

use crate::checkpoint::{Dtype, TensorView};
use crate::error::TrainError;
use crate::generate::{Generator, GeneratorOptions, Sampling, WeightPart, WeightSource};
use crate::session::Session;

/// How its tokens are chosen.
const SAMPLING: Sampling = Sampling {
    temperature: 0.8,
    top_k: 50,
    top_p: 0.9,
    repetition_penalty: 1.2,
    seed: 42,
};

/// The text, with what it begins with.
pub(crate) fn sample(
    session: &Session,
    planned: SamplePlan,
    tokenizer: &Tokenizer,
    options: EngineOptions,
) -> Result<String, TrainError> {
    let config = &session.plan().config;
    let (prompt, count) = (
        &config.training.sample_prompt,
        config.training.sample_tokens,
    );
    let mut text = tokenizer.encode(prompt)?;
    if text.is_empty() {
        // A text begins where another one ended.
        text.push(tokenizer.end_of_text().unwrap_or(0));
    }
    let snapshot = session.weights();
    let mut weights = TrainedWeights {
        views: snapshot.views(),
    };
    let options = GeneratorOptions {
        context: planned.context,
        compute: DType::F32,
        adapters: None,
        target: Target::Cpu,
        engine: EngineOptions {
            threads: options.threads,
            ..EngineOptions::default()
        },
    };
    let mut generator = Generator::new(&config.model, &mut weights, &options)?;
    let mut decoder = Decoder::new(tokenizer);
    let mut written = prompt.clone();
    for index in 0..count {
        let token = generator.next(&text, &SAMPLING, index as u64)?;
        if tokenizer.end_of_text() == Some(token) {
            break;
        }
        text.push(token);
        written += &decoder.push(token);
    }
    written += &decoder.finish();
    Ok(written)
}

/// The weights of a session.
struct TrainedWeights<'a> {
    views: Vec<TensorView<'a>>,
}

impl WeightSource for TrainedWeights<'_> {
    fn read(
        &mut self,
        part: WeightPart<'_>,
        rows: Range<usize>,
        dtype: DType,
        into: &mut [u8],
    ) -> Result<(), String> {
        let view = self.views.iter().find(|view| view.name == part.name);
        let view = view.filter(|view| view.shape == part.shape && dtype == DType::F32);
        let Some(view) = view else {
            return Err(format!("the run has no `{}` to write with", part.name));
        };
        let mut bytes = Vec::with_capacity(view.bytes.num_bytes() as usize);
        view.bytes
            .give(&mut |piece| {
                bytes.extend_from_slice(piece);
                Ok(())
            })
            .map_err(|error| error.to_string())?;
        let row_bytes = bytes.len() / part.shape.first().copied().unwrap_or(1).max(1);
        let bytes = &bytes[rows.start * row_bytes..rows.end * row_bytes];
        let halves = bytes
            .chunks_exact(2)
            .map(|half| u16::from_le_bytes([half[0], half[1]]));
        match view.dtype {
            Dtype::F32 => into.copy_from_slice(bytes),
            Dtype::BF16 => widen(halves.map(bf16_value), into),
            Dtype::F16 => widen(halves.map(f16_value), into),
            other => return Err(format!("`{}` is in {other:?}", part.name)),
        }
        Ok(())
    }
}

fn widen(values: impl Iterator<Item = f32>, into: &mut [u8]) {
    for (to, value) in into.chunks_exact_mut(4).zip(values) {
        to.copy_from_slice(&value.to_le_bytes());
    }
}
