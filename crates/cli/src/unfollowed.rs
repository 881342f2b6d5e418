//! What files of other programs say and cinch's own engine does not follow: what takes other
//! memory stands before any figure, what changes only the result beside a run.

use cinch_config::{Config, Instead, Reading, Settings};
use cinch_files::shown;

/// Keys that bear on memory and are not followed, with what is done in their place, and those that
/// may bear on it and were not understood.
pub fn before_figures(settings: &Settings, config: &Config) -> Vec<String> {
    let mut notes = Vec::new();
    for reading in settings.readings() {
        let path = shown(&reading.path);
        notes.extend(reading.not_understood.iter().map(|key| {
            format!(
                "{path}: {} = {} (line {}) is not understood, and may bear on memory",
                key.key, key.value, key.line
            )
        }));
        notes.extend(reading.not_followed.iter().filter_map(|key| {
            let instead = key.instead?;
            let told = instead.told(config)?;
            // The precision itself is.
            let followed = match instead {
                Instead::Masters => "followed in part",
                _ => "not followed",
            };
            Some(format!(
                "{path}: {} = {} (line {}) is {followed}: {told}",
                key.key, key.value, key.line
            ))
        }));
    }
    notes
}

/// Keys that change what is learned and take the same memory, as a note.
pub fn by_training(reading: &Reading) -> Option<String> {
    let keys = reading.not_followed.iter();
    let keys: Vec<String> = keys
        .filter(|key| key.instead.is_none())
        .map(|key| format!("{} = {} (line {})", key.key, key.value, key.line))
        .collect();
    let path = shown(&reading.path);
    (!keys.is_empty()).then(|| format!("{path}: training here does not follow {}", keys.join(", ")))
}
