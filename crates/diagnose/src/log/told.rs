//! What the lines of a log tell of the run: settings, the program, and the numbers of step lines.

use std::collections::BTreeMap;

use crate::step;
use crate::words::{Found, Known, Measure, Word};

/// What a run says of itself.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Settings with the lines they stand in.
    pub settings: BTreeMap<Known, (String, u64)>,
    /// Whether the allocator has expandable segments already.
    pub expandable_segments: bool,
    pub programs: Vec<&'static str>,
}

/// The numbers of a step line.
#[derive(Debug, Default)]
pub(super) struct Readings {
    pub(super) memory: Vec<(Measure, f64)>,
    pub(super) step: Option<u64>,
    pub(super) length: Option<f64>,
    pub(super) has_loss: bool,
    pub(super) has_progress: bool,
}

impl Readings {
    pub(super) fn is_step(&self) -> bool {
        self.has_loss || self.has_progress || self.step.is_some() && !self.memory.is_empty()
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
                let number = step::number_after(text, found.end).map(|(number, _)| number);
                readings.step = readings.step.or(number.map(|number| number as u64));
            }
            Word::Loss if begins => {
                readings.has_loss |= step::number_after(text, found.end).is_some();
            }
            Word::Length if begins && ends => {
                readings.length = step::number_after(text, found.end).map(|(number, _)| number);
            }
            Word::Progress => {
                readings.has_progress = true;
                readings.step = readings.step.or(step::progress(text));
            }
            Word::Setting(known) if begins || known == Known::Model => {
                self.setting(line, text, found, known);
            }
            Word::CachedModel => {
                let rest = &text[found.end..text.len().min(found.end + 120)];
                let end = rest
                    .iter()
                    .position(|byte| matches!(byte, b'/' | b'\\' | b'"' | b'\'' | b' '));
                let name =
                    String::from_utf8_lossy(&rest[..end.unwrap_or(rest.len())]).replace("--", "/");
                if name.contains('/') {
                    self.settings.entry(Known::Model).or_insert((name, line));
                }
            }
            Word::AllocConf => {
                let rest = String::from_utf8_lossy(&text[found.end..]).to_lowercase();
                // The message's own hint says "try setting"; what is set stands behind a sign.
                let is_hint = memchr::memmem::find(text, b"try setting").is_some();
                self.expandable_segments |= !is_hint && rest.contains("expandable_segments:true");
            }
            Word::Program(name) if !self.programs.contains(&name) => {
                self.programs.push(name);
            }
            _ => {}
        }
    }

    fn setting(&mut self, line: u64, text: &[u8], found: Found, known: Known) {
        let is_statement = memchr::memmem::find(&text[found.start..found.end], b" ").is_some()
            && matches!(known, Known::Bf16 | Known::Fp16);
        let value = match is_statement {
            true => Some("true".to_owned()),
            false => step::value_after(text, found.end),
        };
        let Some(value) = value else { return };
        let value = match known {
            Known::Trainable => value.replace(',', ""),
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
