//! Changes as exact lines: of the user's file, or in the words of the program that printed the log.

use cinch_config::remedy::{self, RemedyKind};
use cinch_config::{Application, FileChange, Program};
use cinch_diagnose::{Spelling, Values};
use cinch_torch::model::Workload;

use crate::pytorch::estimate::{optimizer_name, precision_name};
use crate::settings::Asked;

/// In whose words changes are told.
pub struct Wording<'a> {
    pub asked: &'a Asked,
    pub spelling: Spelling,
}

impl Wording<'_> {
    /// The exact lines of some changes: of the user's file, or in the program's words.
    pub fn lines(
        &self,
        before: &Workload,
        after: &Workload,
        kinds: &[RemedyKind],
    ) -> Option<String> {
        let mut lines = Vec::new();
        let mut values = Vec::new();
        let values_of = |kind: &RemedyKind| match self.asked.files.is_empty() {
            true => Vec::new(),
            false => changed(self.asked, before, after, *kind),
        };
        for kind in kinds {
            match values_of(kind) {
                of_file if of_file.is_empty() => lines.extend(self.spelled(after, *kind)),
                of_file => values.extend(of_file),
            }
        }
        if !values.is_empty() {
            let of_file = self.in_file(&values).or_else(|| {
                let spelled: Vec<String> = kinds
                    .iter()
                    .filter(|kind| !values_of(kind).is_empty())
                    .filter_map(|kind| self.spelled(after, *kind))
                    .collect();
                (!spelled.is_empty()).then(|| spelled.join("\n"))
            });
            lines.splice(0..0, of_file);
        }
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    /// The lines of the user's file that an edit would write.
    fn in_file(&self, values: &[(&'static str, String)]) -> Option<String> {
        let changes: Option<Vec<FileChange>> = values
            .iter()
            .map(|(key, value)| FileChange::parse(key, value).ok())
            .collect();
        let application = Application::prepare(&self.asked.files, &changes?).ok()?;
        let lines: Vec<String> = application
            .diff()
            .lines()
            .filter(|line| line.starts_with('+') && !line.starts_with("+++"))
            .map(|line| line[1..].trim().to_owned())
            .collect();
        (application.unplaced().is_empty() && !lines.is_empty()).then(|| lines.join("\n"))
    }

    fn spelled(&self, after: &Workload, kind: RemedyKind) -> Option<String> {
        let values = Values {
            batch: after.batch,
            accumulation: u64::from(after.recipe.accumulation),
            length: after.length,
            rank: after.lora.as_ref().map(|lora| lora.rank),
        };
        self.spelling.lines(kind, values)
    }
}

/// The settings that a change writes, with their values, as the file's program takes them.
fn changed(
    asked: &Asked,
    before: &Workload,
    after: &Workload,
    kind: RemedyKind,
) -> Vec<(&'static str, String)> {
    let is_foreign = asked.settings.program() == Some(Program::PyTorch);
    match kind {
        RemedyKind::MicroBatch => vec![
            (remedy::BATCH_SIZE, after.batch.to_string()),
            (remedy::ACCUMULATION, after.recipe.accumulation.to_string()),
        ],
        RemedyKind::Recomputation => vec![(remedy::CHECKPOINTING, "full".to_owned())],
        RemedyKind::SequenceLength => vec![(remedy::SEQUENCE, after.length.to_string())],
        RemedyKind::FusedOptimizer | RemedyKind::EightBitStates | RemedyKind::PlainSgd
            if is_foreign =>
        {
            vec![(
                remedy::TORCH_OPTIMIZER,
                optimizer_name(after.recipe.optimizer).to_owned(),
            )]
        }
        RemedyKind::Bf16 | RemedyKind::Fp16 | RemedyKind::Bf16Weights
            if is_foreign && before.recipe.precision != after.recipe.precision =>
        {
            vec![(
                remedy::TORCH_PRECISION,
                precision_name(after.recipe.precision).to_owned(),
            )]
        }
        _ => Vec::new(),
    }
}
