//! Names of a file in a plain form, so that one table serves `TRAINING_CONFIG["lr"]`,
//! `training.lr` and `TrainingArguments(lr=…)`.

/// Words that only say "this is a config".
const WRAPPINGS: [&str; 15] = [
    "mu",
    "musota",
    "sota",
    "config",
    "configs",
    "cfg",
    "conf",
    "settings",
    "options",
    "args",
    "arguments",
    "params",
    "hyperparameters",
    "hparams",
    "hp",
];

/// Sections in which names without a dot are looked for, besides the top.
const TRAINING: [&str; 10] = [
    "training",
    "train",
    "trainer",
    "training.trainer",
    "seq2_seq_training",
    "sft",
    "sft_trainer",
    "script",
    "model",
    "peft",
];

/// Whether a name of a table is the name in a file, both plain. A name that ends in `*` is a
/// beginning.
pub(crate) fn stands_for(known: &str, name: &str) -> bool {
    if let Some(beginning) = known.strip_suffix('*') {
        return name.starts_with(beginning);
    }
    if known == name {
        return true;
    }
    let inside = name
        .strip_suffix(known)
        .and_then(|section| section.strip_suffix('.'));
    !known.contains('.') && inside.is_some_and(|section| TRAINING.contains(&section))
}

/// Shorter names than this are a letter from many others.
const SHORTEST_SLIP: usize = 5;

/// Whether one plain name is another one in the same section with a letter too many, too few or
/// another, with two that have changed places, or with another plural. Names that differ in a digit
/// are a series.
pub(crate) fn is_slip(name: &str, known: &str) -> bool {
    let split = |name: &str| -> (String, Vec<char>) {
        let (section, leaf) = name.rsplit_once('.').unwrap_or(("", name));
        (section.to_owned(), leaf.chars().collect())
    };
    let ((section, leaf), (known_section, known)) = (split(name), split(known));
    if section != known_section || leaf.len() < SHORTEST_SLIP || known.len() < SHORTEST_SLIP {
        return false;
    }
    let begin = leaf.iter().zip(&known).take_while(|(a, b)| a == b).count();
    let (a, b) = (&leaf[begin..], &known[begin..]);
    let is_digit = |letters: &[char]| letters.first().is_some_and(char::is_ascii_digit);
    match (a, b) {
        ([], []) => false,
        (['e', 's'], []) | ([], ['e', 's']) => true,
        ([_, rest @ ..], _) if rest == b => !is_digit(a),
        (_, [_, rest @ ..]) if rest == a => !is_digit(b),
        ([_, rest @ ..], [_, known @ ..]) if rest == known => !is_digit(a) && !is_digit(b),
        ([x, y, rest @ ..], [u, v, known @ ..]) => (x, y) == (v, u) && rest == known,
        _ => false,
    }
}

/// A path in lower case without wrappings: `TRAINING_CONFIG.Batch-Size` is
/// `training.batch_size`, and `Config.lr` is `lr`.
pub(crate) fn plain_name(path: &[String]) -> String {
    let Some((leaf, sections)) = path.split_last() else {
        return String::new();
    };
    let mut parts: Vec<String> = sections
        .iter()
        .map(|section| plain_section(section))
        .filter(|section| !section.is_empty())
        .collect();
    parts.push(leaf.to_lowercase().replace('-', "_"));
    parts.join(".")
}

fn plain_section(name: &str) -> String {
    let words = words_of(name);
    let kept: Vec<&str> = words
        .iter()
        .map(String::as_str)
        .filter(|word| !WRAPPINGS.contains(word))
        .collect();
    kept.join("_")
}

/// The words of `TrainingConfig`, `TRAINING_CONFIG`, `SFTConfig` or `training-config`.
fn words_of(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut small_before = false;
    let mut characters = name.chars().peekable();
    while let Some(c) = characters.next() {
        let boundary = matches!(c, '_' | '-' | ' ' | '.');
        let small_after = characters.peek().is_some_and(|next| next.is_lowercase());
        if boundary || (c.is_uppercase() && (small_before || small_after)) {
            words.push(String::new());
        }
        if let (false, Some(word)) = (boundary, words.last_mut()) {
            word.extend(c.to_lowercase());
        }
        small_before = c.is_lowercase() || c.is_ascii_digit();
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrappings_fall_away() {
        for (path, plain) in [
            (vec!["TRAINING_CONFIG", "Batch-Size"], "training.batch_size"),
            (vec!["Config", "lr"], "lr"),
            (vec!["TrainingArguments", "bf16"], "training.bf16"),
            (vec!["ModelConfig", "d_model"], "model.d_model"),
            (vec!["SFTConfig", "bf16"], "sft.bf16"),
            (
                vec!["BitsAndBytesConfig", "load_in_4bit"],
                "bits_and_bytes.load_in_4bit",
            ),
            (vec!["EVAL_CONFIG", "batch_size"], "eval.batch_size"),
            (vec!["MAX_SEQ_LENGTH"], "max_seq_length"),
        ] {
            let path: Vec<String> = path.into_iter().map(str::to_owned).collect();
            assert_eq!(plain_name(&path), plain);
        }
    }

    #[test]
    fn a_slip_of_the_pen_is_one_letter_away() {
        for (name, known, answer) in [
            ("model.d_mdoel", "model.d_model", true),
            ("n_layer", "n_layers", true),
            ("n_negativess", "n_negatives", true),
            ("gsa.k_maxx", "gsa.k_max", true),
            ("gsa.k_mex", "gsa.k_max", true),
            (
                "trainer.accumulate_grad_batch",
                "trainer.accumulate_grad_batches",
                true,
            ),
            ("n_layers", "n_layers", false),
            ("model.n_layer", "n_layers", false),
            ("training.beta3", "training.beta2", false),
            ("training.beta", "training.beta1", false),
            ("max_lr", "max_len", false),
            ("lr", "lrs", false),
        ] {
            assert_eq!(is_slip(name, known), answer, "{name} {known}");
        }
    }

    #[test]
    fn a_name_stands_at_the_top_or_in_a_section_about_training() {
        for (known, name, answer) in [
            ("lr", "lr", true),
            ("lr", "training.lr", true),
            ("lr", "eval.lr", false),
            ("training.trainer.precision", "precision", false),
            ("wandb_*", "wandb_project", true),
        ] {
            assert_eq!(stands_for(known, name), answer, "{known} {name}");
        }
    }
}
