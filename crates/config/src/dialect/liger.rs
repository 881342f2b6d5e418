//! Liger's kernels, as the files of programs that know them switch them on: all at once, with a mapping beside it, or kernel by
//! kernel.

use super::LIGER;
use super::draft::Draft;

/// The arguments by which Liger is told which kernels to apply, and whether it applies them where nobody says it.
const ARGUMENTS: [(&str, bool); 6] = [
    ("rope", true),
    ("rms_norm", true),
    ("swiglu", true),
    ("geglu", true),
    ("cross_entropy", false),
    ("fused_linear_cross_entropy", true),
];

/// A switch for all kernels; what a section beside it says of one outweighs what Liger would do.
pub(super) fn switched(draft: &mut Draft<'_>, switches: &[&str], section: &str) {
    let Some((name, entry)) = switches
        .iter()
        .find_map(|name| Some((*name, draft.find(name)?)))
    else {
        return;
    };
    if !draft.is_on(name) {
        draft.harmless();
        return;
    }
    let said = |argument: &str| {
        let name = format!("{section}.{argument}");
        draft.find(&name).map(|_| draft.is_on(&name))
    };
    let kernels: Vec<&str> = ARGUMENTS
        .iter()
        .filter(|(argument, usual)| said(argument).unwrap_or(*usual))
        .map(|(argument, _)| *argument)
        .collect();
    let is_usual = ARGUMENTS
        .iter()
        .all(|(argument, _)| said(argument).is_none());
    let value = match (is_usual, kernels.is_empty()) {
        (true, _) => "all".to_owned(),
        (false, true) => "none".to_owned(),
        (false, false) => kernels.join(","),
    };
    let chosen = ARGUMENTS.map(|(argument, _)| draft.find(&format!("{section}.{argument}")));
    for entry in std::iter::once(entry).chain(chosen.into_iter().flatten()) {
        draft.say(entry, LIGER, &value);
    }
}

/// A key for each kernel; whether one is on.
pub(super) fn by_kernel(draft: &mut Draft<'_>, keys: &[(&str, &'static str)]) -> bool {
    let mut kernels: Vec<&str> = Vec::new();
    let mut entries: Vec<usize> = Vec::new();
    for (name, kernel) in keys {
        let Some(entry) = draft.find(name) else {
            continue;
        };
        if !draft.is_on(name) {
            draft.harmless();
            continue;
        }
        entries.push(entry);
        if !kernels.contains(kernel) {
            kernels.push(kernel);
        }
    }
    let kernels = kernels.join(",");
    for &entry in &entries {
        draft.say(entry, LIGER, &kernels);
    }
    !entries.is_empty()
}
