//! Numbers of step lines: memory, step, length, and settings that a run prints at its start.

use crate::size;

/// Bytes after a word that its number may stand in.
const REACH: usize = 48;

/// What follows a word of a step line: its unit in brackets, separators, a device, a number and a
/// unit of its own. Nothing where no number follows.
pub fn number_after(line: &[u8], end: usize) -> Option<(f64, Option<f64>)> {
    let mut letters = [0; REACH];
    let mut rest = window(line, end, &mut letters)?;
    let mut unit = None;
    let bracket = rest.trim_start_matches(['_', '/', ' ', '-']);
    if let Some(inside) = bracket.strip_prefix('(')
        && let Some((name, after)) = inside.split_once(')')
    {
        unit = size::unit(name)
            .filter(|(_, left)| left.is_empty())
            .map(|(bytes, _)| bytes);
        rest = after;
    } else if let Some(name) = rest.strip_prefix('_') {
        let letters = name.bytes().take_while(u8::is_ascii_alphabetic).count();
        unit = size::unit(&name[..letters])
            .filter(|(_, left)| left.is_empty())
            .map(|(bytes, _)| bytes);
        unit?;
        rest = &name[letters..];
    }
    const SEPARATORS: [char; 9] = ['"', '\'', ':', '=', ' ', '\t', '|', ',', '['];
    let value = rest.trim_start_matches(SEPARATORS);
    if value.len() == rest.len() {
        return None;
    }
    // In words: "reserved memory is 16.6", "Virtual Memory: used = 30.1 GB".
    let value = ["is ", "used "]
        .iter()
        .find_map(|word| value.strip_prefix(word))
        .map_or(value, |after| after.trim_start_matches(SEPARATORS));
    // The device between a name and its number: mem_usage:cuda:0 8.9GB.
    let value = match value.strip_prefix("cuda:") {
        Some(device) => device
            .trim_start_matches(|letter: char| letter.is_ascii_digit())
            .trim_start(),
        None => value,
    };
    let (number, rest) = size::number(value)?;
    let rest = rest.trim_start_matches(' ');
    // A share is no size and no count.
    if rest.starts_with('%') {
        return None;
    }
    let own = size::unit(rest)
        .filter(|(_, left)| !left.starts_with(|letter: char| letter.is_ascii_alphabetic()));
    Some((number, own.map(|(bytes, _)| bytes).or(unit)))
}

/// A size of a step line. Without a unit it is what such a number can only be: bytes from millions
/// on, MiB from hundreds on, GiB below.
pub fn bytes_after(line: &[u8], end: usize) -> Option<f64> {
    const GIB: f64 = (1_u64 << 30) as f64;
    const MIB: f64 = (1_u64 << 20) as f64;
    let (number, unit) = number_after(line, end)?;
    let unit = unit.unwrap_or(match number {
        number if number >= 4e6 => 1.0,
        number if number >= 256.0 => MIB,
        _ => GIB,
    });
    let bytes = number * unit;
    // Below a mebibyte and above all of a cluster's memory it is something else.
    (MIB..1e15).contains(&bytes).then_some(bytes)
}

/// The word or number that a setting is given.
pub fn value_after(line: &[u8], end: usize) -> Option<String> {
    const LONGEST: usize = 160;
    let rest = &line[end..line.len().min(end + LONGEST)];
    let rest = std::str::from_utf8(rest).ok().or_else(|| {
        let valid = std::str::from_utf8(rest).err()?.valid_up_to();
        std::str::from_utf8(&rest[..valid]).ok()
    })?;
    let value = rest.trim_start_matches(['"', '\'', ':', '=', ' ', '\t']);
    if value.len() == rest.len() {
        return None;
    }
    // Commas between digits belong to a number.
    let letters = value.as_bytes();
    let is_grouped = |at: usize| {
        let digit = |place: usize| letters.get(place).is_some_and(u8::is_ascii_digit);
        at > 0 && digit(at - 1) && (1..4).all(|next| digit(at + next))
    };
    let is_end = |(at, letter): &(usize, char)| {
        let is_mark = "\"';)}]".contains(*letter) || *letter == ',' && !is_grouped(*at);
        letter.is_whitespace() || is_mark
    };
    let end = value
        .char_indices()
        .find(is_end)
        .map_or(value.len(), |(at, _)| at);
    let value = value[..end].trim_end_matches('.');
    (!value.is_empty() && value.len() < LONGEST).then(|| value.to_owned())
}

/// Whether a progress bar is that of training: it has no name, or one that says so. Others count
/// files that are loaded, samples that are tokenized, batches of an evaluation.
pub fn is_bar_of_training(line: &[u8]) -> bool {
    const TRAINING: [&str; 5] = ["train", "epoch", "step", "iter", "fit"];
    const OTHERS: [&str; 6] = ["load", "token", "valid", "eval", "test", "sanity"];
    let Some(at) = memchr::memmem::find(line, b"%|") else {
        return true;
    };
    let name = String::from_utf8_lossy(&line[..at]).to_lowercase();
    let name = name.trim_end_matches(|letter: char| letter.is_ascii_digit() || letter == ' ');
    let has = |words: &[&str]| words.iter().any(|word| name.contains(word));
    name.is_empty() || has(&TRAINING) && !has(&OTHERS)
}

/// `100/5000 [00:12<…` of a progress bar.
pub fn progress(line: &[u8]) -> Option<u64> {
    let at = memchr::memmem::find(line, b" [")?;
    let before = &line[at.saturating_sub(24)..at];
    let slash = memchr::memrchr(b'/', before)?;
    let digits = before[..slash]
        .iter()
        .rev()
        .take_while(|byte| byte.is_ascii_digit())
        .count();
    std::str::from_utf8(&before[slash - digits..slash])
        .ok()?
        .parse()
        .ok()
}

/// What follows, in small letters, as far as it is ASCII; nothing without a digit.
fn window<'a>(line: &[u8], end: usize, letters: &'a mut [u8; REACH]) -> Option<&'a str> {
    let rest = line.get(end..line.len().min(end + REACH))?;
    if !rest.iter().any(u8::is_ascii_digit) {
        return None;
    }
    let ascii = rest.iter().take_while(|byte| byte.is_ascii()).count();
    letters[..ascii].copy_from_slice(&rest[..ascii]);
    letters[..ascii].make_ascii_lowercase();
    std::str::from_utf8(&letters[..ascii]).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(line: &str, word: &str) -> Option<f64> {
        let end = line.find(word).expect("the word is there") + word.len();
        bytes_after(line.as_bytes(), end).map(|bytes| (bytes / f64::from(1 << 20)).round())
    }

    #[test]
    fn memory_is_read_from_the_step_lines_of_many_programs() {
        for (line, word, mebibytes) in [
            (
                "step: 10  loss: 9.0  memory: 47.51GiB(50.01%)",
                "memory",
                48_650.0,
            ),
            (
                "{'loss': 1.2, 'memory/max_active (GiB)': 12.5}",
                "memory/max_active",
                12_800.0,
            ),
            ("max_mem: 9311M", "max_mem", 9311.0),
            ("memory: 9311, loss: 0.3", "memory", 9311.0),
            ("mem_usage:cuda:0 8.9GB, 0.750 sec", "mem_usage", 9114.0),
            (
                "peak_memory_alloc:12.25 tokens",
                "peak_memory_alloc",
                12_544.0,
            ),
            ("gpu_mem_gb=10.5", "gpu_mem", 10_752.0),
            ("allocated: 50900.0244140625 | max", "allocated", 50_900.0),
            ("memory_allocated=8589934592", "memory_allocated", 8192.0),
        ] {
            assert_eq!(bytes(line, word), Some(mebibytes), "{line}");
        }
        assert_eq!(
            bytes("reserved memory is 16.5 and", "reserved memory"),
            Some(16_896.0)
        );
        assert_eq!(
            bytes(
                "CPU Virtual Memory:  used = 30.0 GB, percent = 8.3%",
                "CPU Virtual Memory"
            ),
            Some(30_720.0)
        );
        assert_eq!(bytes("GPU memory is 95% full", "GPU memory"), None);
        assert_eq!(bytes("memory is short", "memory"), None);
        assert_eq!(bytes("memory", "memory"), None);
    }

    #[test]
    fn settings_and_progress_are_read() {
        let value = |line: &str, word: &str| {
            let end = line.find(word).expect("the word is there") + word.len();
            value_after(line.as_bytes(), end)
        };
        assert_eq!(
            value("  Gradient Accumulation steps = 8", "steps").as_deref(),
            Some("8")
        );
        assert_eq!(
            value("\"base_model\": \"a/b-7B\",", "base_model").as_deref(),
            Some("a/b-7B")
        );
        assert_eq!(
            value("--optim adamw_8bit \\", "optim").as_deref(),
            Some("adamw_8bit")
        );
        assert_eq!(
            value("parameters = 322,961,408", "parameters").as_deref(),
            Some("322,961,408")
        );
        assert_eq!(value("lora_r=16, x=1", "lora_r").as_deref(), Some("16"));
        assert_eq!(value("optimizers are", "optimizer"), None);
        assert_eq!(
            progress(" 12%|x| 100/5000 [00:12<10:00, 1.2it/s]".as_bytes()),
            Some(100)
        );
        assert_eq!(progress(b" [x"), None);
        for (line, is_of_training) in [
            (" 12%|x| 100/5000 [00:12<10:00, 1.2it/s]", true),
            ("Epoch 3:  12%|x| 100/5000 [00:12<10:00, 1.2it/s]", true),
            ("steps:  12%|x| 100/5000 [00:12<10:00, 1.2it/s]", true),
            (
                "Loading checkpoint shards: 50%|x| 2/4 [00:12<00:12, 6s/it]",
                false,
            ),
            (
                "Tokenizing train set: 50%|x| 2/4 [00:12<00:12, 6s/it]",
                false,
            ),
            (
                "Validation DataLoader 0: 50%|x| 2/4 [00:12<00:12, 6s/it]",
                false,
            ),
            ("Fetching 11 files: 50%|x| 2/4 [00:12<00:12, 6s/it]", false),
        ] {
            assert_eq!(
                is_bar_of_training(line.as_bytes()),
                is_of_training,
                "{line}"
            );
        }
    }
}
