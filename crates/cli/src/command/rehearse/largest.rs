//! `--fit`: the largest value of one of the script's flags that fits the card, by rehearsing it.

use std::ffi::OsString;

use cinch_card::Emulated;
use cinch_device::Gpu;

use super::answer::Answer;
use super::process::{Ended, Rehearsal};
use crate::args::RehearseArguments;
use crate::failure::{DoesNotFit, Interrupted, usage};
use crate::voice::tell;

/// As the setting's limit.
const MOST: u64 = 1 << 20;

/// A flag of the script, and where its value stands in the command.
struct Flag {
    name: String,
    /// The word with the value, and whether the flag is in the same word.
    place: Option<(usize, bool)>,
    value: u64,
}

impl Flag {
    fn find(asked: &str, command: &[OsString]) -> anyhow::Result<Self> {
        let name = asked
            .strip_prefix("batch_size=")
            .filter(|name| name.starts_with('-'));
        let Some(name) = name else {
            return Err(usage(format!(
                "--fit {asked} is not understood\nhint: batch_size=--batch-size, with the flag that the script has for it"
            )));
        };
        let words: Vec<&str> = command
            .iter()
            .map(|word| word.to_str().unwrap_or_default())
            .collect();
        let joined = format!("{name}=");
        let place = words.iter().enumerate().find_map(|(index, word)| {
            if *word == name {
                return Some((index + 1, false));
            }
            word.starts_with(&joined).then_some((index, true))
        });
        let value = match place {
            Some((index, is_joined)) => {
                let text = words.get(index).copied().unwrap_or_default();
                let text = if is_joined {
                    &text[joined.len()..]
                } else {
                    text
                };
                text.parse()
                    .ok()
                    .filter(|value| (1..=MOST).contains(value))
                    .ok_or_else(|| {
                        usage(format!(
                            "the script's {name} is `{text}`, which is no number of samples"
                        ))
                    })?
            }
            None => 1,
        };
        Ok(Self {
            name: name.to_owned(),
            place,
            value,
        })
    }

    fn command(&self, command: &[OsString], value: u64) -> Vec<OsString> {
        let mut command = command.to_vec();
        match self.place {
            Some((index, false)) => command[index] = value.to_string().into(),
            Some((index, true)) => command[index] = format!("{}={value}", self.name).into(),
            None => command.extend([self.name.clone().into(), value.to_string().into()]),
        }
        command
    }
}

pub fn run(
    arguments: &RehearseArguments,
    gpu: &'static Gpu,
    emulated: &Emulated,
    asked: &str,
) -> anyhow::Result<()> {
    let flag = Flag::find(asked, &arguments.command)?;
    let rehearsal = Rehearsal::new(emulated, arguments)?;
    let mut last = None;
    let mut fits = |value: u64| -> anyhow::Result<bool> {
        rehearsal.clear()?;
        let ended = rehearsal.run(&flag.command(&arguments.command, value))?;
        if ended == Ended::Interrupted {
            return Err(Interrupted.into());
        }
        let answer = Answer::new(gpu, &rehearsal, &ended)?;
        // A script that fails for another reason says nothing of memory.
        if ended != Ended::Code(0) && !answer.ran_out() {
            return Err(usage(format!(
                "with {} {value} the script fails, and not for want of memory: its own message is above",
                flag.name
            )));
        }
        let fits = answer.fits();
        tell(&format!(
            "{} {value}: {}",
            flag.name,
            if fits { "fits" } else { "does not fit" }
        ));
        if fits {
            last = Some(answer);
        }
        Ok(fits)
    };
    let Some(largest) = largest(flag.value, &mut fits)? else {
        return Err(DoesNotFit(format!("not even {} 1 fits {}", flag.name, gpu.name)).into());
    };
    let kept = match flag.value > largest && flag.value.is_multiple_of(largest) {
        true => format!(
            "; {} micro batches of it keep the batch of {}",
            flag.value / largest,
            flag.value
        ),
        false => String::new(),
    };
    tell(&format!(
        "the largest that fits {} is {} {largest}{kept}",
        gpu.name, flag.name
    ));
    if let (Some(path), Some(answer)) = (&arguments.report, &last) {
        super::write_report(path, answer)?;
    }
    Ok(())
}

/// The largest value that fits, from one that is likely near: doubled or halved until it is enclosed, then halved between.
fn largest(
    start: u64,
    fits: &mut impl FnMut(u64) -> anyhow::Result<bool>,
) -> anyhow::Result<Option<u64>> {
    let (mut low, mut high) = match fits(start)? {
        true => {
            let mut low = start;
            loop {
                let next = (low * 2).min(MOST);
                if next == low {
                    return Ok(Some(low));
                }
                if !fits(next)? {
                    break (low, next);
                }
                low = next;
            }
        }
        false => {
            let mut high = start;
            loop {
                if high == 1 {
                    return Ok(None);
                }
                let next = high / 2;
                if fits(next)? {
                    break (next, high);
                }
                high = next;
            }
        }
    };
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match fits(middle)? {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok(Some(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_largest_from_anywhere() {
        for limit in [1, 2, 5, 7, 64, 100] {
            for start in [1, 3, 8, 200] {
                let found = largest(start, &mut |value| Ok(value <= limit)).unwrap();
                assert_eq!(found, Some(limit), "from {start}");
            }
        }
        assert_eq!(largest(8, &mut |_| Ok(false)).unwrap(), None);
        assert_eq!(largest(8, &mut |_| Ok(true)).unwrap(), Some(MOST));
    }

    #[test]
    fn a_flag_is_found_in_both_forms_or_added() {
        let words = |text: &str| -> Vec<OsString> { text.split(' ').map(OsString::from).collect() };
        for (text, changed) in [
            ("python t.py --b 4 -x", "python t.py --b 9 -x"),
            ("python t.py --b=4", "python t.py --b=9"),
            ("python t.py", "python t.py --b 9"),
        ] {
            let command = words(text);
            let flag = Flag::find("batch_size=--b", &command).unwrap();
            assert_eq!(flag.command(&command, 9), words(changed));
        }
        for (asked, text) in [
            ("lr=--lr", "python t.py"),
            ("batch_size=b", "p"),
            ("batch_size=--b", "p --b many"),
        ] {
            assert!(Flag::find(asked, &words(text)).is_err(), "{asked}");
        }
    }
}
