//! The sequences of a whole step in a program's own terms.
//!
//! Some files state the product beside its factors: DeepSpeed's `train_batch_size` is its micro
//! batch × accumulation × GPUs. Such a program refuses a file in which they differ, so when one of
//! the factors changes, the product follows.

use crate::dialect::scalar::is_auto;
use crate::dialect::{ACCUMULATION, BATCH, Naming, WholeBatch, plain_name, stands_for};
use crate::document::{Document, Entry, Scalar};
use crate::edit::Edit;
use crate::error::ConfigError;
use crate::place::FileChange;
use crate::value::Value;

/// A file before and after the changes.
pub(crate) struct Changed<'a> {
    pub before: &'a Document,
    pub after: &'a Document,
    pub naming: Naming,
}

#[derive(Clone, Copy)]
enum Moment {
    Before,
    After,
}

impl Moment {
    const BOTH: [Moment; 2] = [Moment::Before, Moment::After];
}

/// What a product needs.
pub(crate) enum Following {
    Edit(Edit),
    /// It was no product before, so nothing follows from the factors.
    Broken(String),
}

/// Whether a file says the accumulation only by its whole batch.
pub(crate) fn says_accumulation_by_whole(naming: Naming, document: &Document) -> bool {
    terms(naming)
        .is_some_and(|terms| !terms.has_accumulation && entry(document, terms.whole).is_some())
}

/// What must become of the whole batch of the file with this index.
pub(crate) fn follow(
    files: &[Changed<'_>],
    index: usize,
    changes: &[FileChange],
) -> Result<Option<Following>, ConfigError> {
    let file = &files[index];
    let Some(terms) = terms(file.naming) else {
        return Ok(None);
    };
    let Some(stated) = entry(file.before, terms.whole) else {
        return Ok(None);
    };
    let Some(whole) = number(&stated.scalar) else {
        return Ok(None);
    };
    let by_whole = !terms.has_accumulation;
    let micro = Moment::BOTH.map(|moment| factor(files, index, BATCH, moment));
    let steps = Moment::BOTH.map(|moment| match by_whole {
        true => None,
        false => factor(files, index, ACCUMULATION, moment),
    });
    let asked = changes.iter().find_map(|change| match change.value {
        Value::Unsigned(number) if by_whole && change.key == ACCUMULATION => Some(number),
        _ => None,
    });
    let steps = [steps[0], asked.or(steps[1])];
    if micro[0] == micro[1] && steps[0] == steps[1] {
        return Ok(None);
    }
    let product = |micro: u64, steps: u64| micro.saturating_mul(steps);
    let ranks = match (micro[0], steps[0]) {
        (Some(micro), Some(steps)) => {
            let step = product(micro, steps);
            if step == 0 || !whole.is_multiple_of(step) {
                return Ok(Some(Following::Broken(format!(
                    "`{}` = {whole} in {} was not micro batch {micro} × accumulation {steps} × a number of GPUs before either: it is left as it is",
                    stated.key(),
                    file.before.path.display(),
                ))));
            }
            whole / step
        }
        _ => 1,
    };
    let new = match (micro[1], steps[1]) {
        (Some(micro), Some(steps)) => product(product(micro, steps), ranks),
        (Some(factor), None) | (None, Some(factor)) if whole.is_multiple_of(factor.max(1)) => whole,
        (Some(factor), None) | (None, Some(factor)) => {
            return Err(ConfigError::EditRefused {
                path: file.before.path.clone(),
                key: stated.key(),
                value: whole.to_string(),
                problem: format!("{factor} does not divide it"),
            });
        }
        (None, None) => whole,
    };
    Ok((new != whole).then(|| {
        Following::Edit(Edit {
            path: stated.path.clone(),
            value: Scalar::Number(new.to_string()),
            rename: None,
            after: None,
        })
    }))
}

fn terms(naming: Naming) -> Option<&'static WholeBatch> {
    match naming {
        Naming::Own => None,
        Naming::Foreign(dialect) => dialect.whole_batch.as_ref(),
    }
}

fn entry<'a>(document: &'a Document, name: &str) -> Option<&'a Entry> {
    let mut entries = document.entries.iter();
    entries
        .find(|entry| stands_for(name, &plain_name(&entry.path)) && number(&entry.scalar).is_some())
}

fn number(scalar: &Scalar) -> Option<u64> {
    match scalar {
        Scalar::Number(text) => text.parse().ok().filter(|number| *number > 0),
        _ => None,
    }
}

/// A factor as the file states it, or else the files beside it, or what their program takes.
fn factor(files: &[Changed<'_>], index: usize, key: &str, moment: Moment) -> Option<u64> {
    let stated = |file: &Changed<'_>| {
        let document = match moment {
            Moment::Before => file.before,
            Moment::After => file.after,
        };
        let mut entries = document.entries.iter();
        entries.find_map(|entry| {
            let (setting, _) = file.naming.find(&entry.path)?;
            (setting.key == key && !is_auto(&entry.scalar)).then(|| number(&entry.scalar))?
        })
    };
    let default = |file: &Changed<'_>| file.naming.default(key)?.parse().ok();
    let others = || {
        let others = files.iter().enumerate().rev();
        others
            .filter(|(other, _)| *other != index)
            .map(|(_, file)| file)
    };
    // Where the file itself leaves out the accumulation, it follows from the whole batch.
    let own_default = || default(&files[index]).filter(|_| key == BATCH);
    stated(&files[index])
        .or_else(|| others().find_map(stated))
        .or_else(own_default)
        .or_else(|| others().find_map(default))
}
