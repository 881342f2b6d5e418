//! `cinch generate`: text from a checkpoint.

use std::io::Write;
use std::path::PathBuf;

use cinch_data::{Decoder, Tokenizer, TokenizerSpec};
use cinch_engine::EngineOptions;
use cinch_train::checkpoint;
use cinch_train::{Generator, Sampling, State};
use serde_json::json;

use super::{open_run, print_json};
use crate::args::GenerateArguments;
use crate::device;
use crate::failure::usage;

pub fn run(arguments: &GenerateArguments) -> anyhow::Result<()> {
    check(arguments)?;
    let target = device::train_target(arguments.device)?;
    let path = checkpoint_folder(arguments)?;
    let state = State::from_json(&path, checkpoint::load_state(&path)?)?;
    let weights = checkpoint::load_weights(&path)?;
    let spec: TokenizerSpec = match state.config.data.tokenizer.parse() {
        Ok(spec) => spec,
        Err(never) => match never {},
    };
    let tokenizer = Tokenizer::load(&spec)?;
    let mut context = tokenizer.encode(&arguments.prompt)?;
    let num_prompt = context.len();
    if context.is_empty() {
        // A text begins where another one ended.
        context.push(tokenizer.end_of_text().unwrap_or(0));
    }
    let longest = context.len().saturating_add(arguments.max_tokens);
    let options = EngineOptions {
        threads: arguments.threads,
        ..EngineOptions::default()
    };
    let model = &state.config.model;
    let mut generator = Generator::new(model, &weights, longest, target, options)?;
    let sampling = Sampling {
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        repetition_penalty: arguments.repetition_penalty,
        seed: arguments.seed,
    };
    let mut out = std::io::stdout().lock();
    let mut decoder = Decoder::new(&tokenizer);
    let mut text = String::new();
    if !arguments.json {
        out.write_all(arguments.prompt.as_bytes())?;
    }
    let mut num_tokens = 0;
    for index in 0..arguments.max_tokens as u64 {
        let token = generator.next(&context, &sampling, index)?;
        if Some(token) == tokenizer.end_of_text() {
            break;
        }
        context.push(token);
        num_tokens += 1;
        let piece = decoder.push(token);
        if arguments.json {
            text += &piece;
        } else {
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
    }
    let rest = decoder.finish();
    if arguments.json {
        drop(out);
        return print_json(&json!({
            "checkpoint": cinch_files::shown(&path).to_string(),
            "prompt": arguments.prompt,
            "text": text + &rest,
            "prompt_tokens": num_prompt,
            "tokens": num_tokens,
        }));
    }
    out.write_all(rest.as_bytes())?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

fn check(arguments: &GenerateArguments) -> anyhow::Result<()> {
    if arguments.temperature.is_nan() || arguments.temperature < 0.0 {
        return Err(usage(format!(
            "--temperature {} is negative\nhint: 0 takes the likeliest token, 1 follows the model",
            arguments.temperature
        )));
    }
    if !(arguments.top_p > 0.0 && arguments.top_p <= 1.0) {
        return Err(usage(format!(
            "--top-p {} is not a probability\nhint: above 0, up to 1",
            arguments.top_p
        )));
    }
    if arguments.repetition_penalty.is_nan() || arguments.repetition_penalty <= 0.0 {
        return Err(usage(format!(
            "--repetition-penalty {} must be above 0\nhint: 1 is none, 1.2 is usual",
            arguments.repetition_penalty
        )));
    }
    Ok(())
}

fn checkpoint_folder(arguments: &GenerateArguments) -> anyhow::Result<PathBuf> {
    let store = open_run(&arguments.checkpoint)?;
    if arguments.best
        && let Some(best) = store.best()?
    {
        return Ok(best.path);
    }
    Ok(checkpoint::resolve(&store, Some(&arguments.checkpoint))?)
}
