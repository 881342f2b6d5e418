//! What the lines of a log tell of the run: settings, the program, and the numbers of step lines.

use std::collections::BTreeMap;

use crate::step;
use crate::words::{Found, Known, Measure, Word, paths_of};

/// What a run says of itself.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Settings with the lines they stand in.
    pub settings: BTreeMap<Known, (String, u64)>,
    /// Whether the allocator has expandable segments already.
    pub expandable_segments: bool,
    pub programs: Vec<&'static str>,
    num_paths: u32,
}

/// Frames whose paths are searched: those of later tracebacks are the same again.
const MOST_PATHS: u32 = 10_000;

/// The numbers of a step line.
#[derive(Debug, Default)]
pub(super) struct Readings {
    pub(super) memory: Vec<(Measure, f64)>,
    pub(super) step: Option<u64>,
    pub(super) length: Option<f64>,
    pub(super) loss: Option<f64>,
    /// A progress bar, of whatever.
    pub(super) has_progress: bool,
    /// The bar counts a step of training that is done.
    pub(super) is_counted: bool,
}

impl Readings {
    pub(super) fn is_step(&self) -> bool {
        self.loss.is_some() || self.is_counted || self.step.is_some() && !self.memory.is_empty()
    }

    /// Whether no message goes on in this line.
    pub(super) fn ends_a_message(&self) -> bool {
        self.is_step() || self.has_progress
    }
}

impl Told {
    /// A word that says something of the run.
    pub(super) fn note(&mut self, line: u64, text: &[u8], found: Found, readings: &mut Readings) {
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
        let begins = found.start == 0 || !is_name(&text[found.start - 1]);
        let ends = text
            .get(found.end)
            .is_none_or(|byte| !byte.is_ascii_alphanumeric());
        match found.word {
            Word::Memory(measure) if begins && ends => {
                if let Some(bytes) = step::bytes_after(text, found.end)
                    && readings.memory.len() < 8
                {
                    readings.memory.push((measure, bytes));
                }
            }
            Word::Step if begins && ends => {
                // "first step 3.19 GiB" counts no steps.
                let number = step::number_after(text, found.end)
                    .filter(|(number, unit)| unit.is_none() && number.fract() == 0.0);
                readings.step = readings.step.or(number.map(|(number, _)| number as u64));
            }
            Word::Loss if begins => {
                let number = step::number_after(text, found.end).map(|(number, _)| number);
                readings.loss = readings.loss.or(number);
            }
            Word::Length if begins && ends => {
                readings.length = step::number_after(text, found.end).map(|(number, _)| number);
            }
            Word::Progress => {
                readings.has_progress = true;
                if step::is_bar_of_training(text) {
                    let done = step::progress(text);
                    readings.step = readings.step.or(done);
                    readings.is_counted = done != Some(0);
                }
            }
            Word::Setting(known) if begins || known == Known::Model => {
                self.setting(line, text, found, known);
            }
            Word::CachedModel => self.cached_model(line, text, found.end),
            Word::AllocConf => {
                let rest = String::from_utf8_lossy(&text[found.end..]).to_lowercase();
                // The message's own hint says "try setting"; what is set stands behind a sign.
                let is_hint = memchr::memmem::find(text, b"try setting").is_some();
                self.expandable_segments |= !is_hint && rest.contains("expandable_segments:true");
            }
            Word::Program(name) => self.program(name),
            _ => {}
        }
    }

    /// A frame's line, whose path may tell the program.
    pub(super) fn note_path(&mut self, line: u64, text: &[u8]) {
        if self.num_paths == MOST_PATHS {
            return;
        }
        self.num_paths += 1;
        for found in paths_of(text) {
            match found.word {
                Word::CachedModel => self.cached_model(line, text, found.end),
                Word::Program(name) => self.program(name),
                _ => {}
            }
        }
    }

    fn program(&mut self, name: &'static str) {
        if !self.programs.contains(&name) {
            self.programs.push(name);
        }
    }

    /// `models--ORGANISATION--NAME`, a folder of the Hugging Face cache.
    fn cached_model(&mut self, line: u64, text: &[u8], end: usize) {
        let rest = &text[end..text.len().min(end + 120)];
        let end = rest
            .iter()
            .position(|byte| matches!(byte, b'/' | b'\\' | b'"' | b'\'' | b' '));
        let name = String::from_utf8_lossy(&rest[..end.unwrap_or(rest.len())]).replace("--", "/");
        if name.contains('/') {
            self.settings.entry(Known::Model).or_insert((name, line));
        }
    }

    fn setting(&mut self, line: u64, text: &[u8], found: Found, known: Known) {
        let is_statement = memchr::memmem::find(&text[found.start..found.end], b" ").is_some()
            && matches!(known, Known::Bf16 | Known::Fp16);
        let takes_switch = matches!(
            known,
            Known::Checkpointing | Known::Bf16 | Known::Fp16 | Known::FourBit | Known::EightBit
        );
        // As a switch of a command line it stands alone: "--fp16 \\", "--bf16 --do_train".
        let stands_alone = text.get(found.end).is_none_or(u8::is_ascii_whitespace);
        let is_flag = takes_switch && stands_alone && text[..found.start].ends_with(b"--");
        let value = match is_statement {
            true => Some("true".to_owned()),
            false => step::value_after(text, found.end),
        };
        let value = match value {
            Some(value) if !(is_flag && (value == "\\" || value.starts_with("--"))) => Some(value),
            _ => is_flag.then(|| "true".to_owned()),
        };
        let Some(value) = value else { return };
        let value = match known {
            Known::Trainable => value.replace(',', ""),
            // As Python prints the member of an enumeration.
            Known::Optimizer => match value.strip_prefix("OptimizerNames.") {
                Some(member) => member.to_lowercase(),
                None => value,
            },
            _ => value,
        };
        let lower = value.to_lowercase();
        let is_switch = matches!(lower.as_str(), "true" | "false");
        let is_count = lower.parse::<u64>().is_ok_and(|number| number > 0);
        let fits = match known {
            Known::Model => {
                value.contains('/') && !value.starts_with('/') && !value.contains(".json")
            }
            Known::Batch
            | Known::Accumulation
            | Known::Length
            | Known::LoraRank
            | Known::Trainable => is_count,
            Known::Optimizer => ["adamw", "paged_adamw", "sgd"]
                .iter()
                .any(|name| lower.starts_with(name)),
            Known::Attention => ["sdpa", "eager", "flash_attention"]
                .iter()
                .any(|name| lower.starts_with(name)),
            Known::Checkpointing | Known::Bf16 | Known::Fp16 | Known::FourBit | Known::EightBit => {
                is_switch
            }
        };
        if fits {
            let value = match is_switch {
                true => lower,
                false => value,
            };
            self.settings.insert(known, (value, line));
        }
    }
}
