//! `--fit`: the largest batch that fits the card, by rehearsing it, with the effective batch kept.

use cinch_card::Emulated;
use cinch_device::Gpu;

use super::answer::Answer;
use super::knob::{Copies, Knob, MOST};
use super::process::{Ended, Rehearsal};
use crate::args::RehearseArguments;
use crate::failure::{DoesNotFit, Interrupted, usage};
use crate::voice::tell;

/// What is asked for: `batch_size=PLACE`, and where the script accumulates, `accumulation=PLACE` after a comma.
struct Asked {
    batch: Knob,
    accumulation: Option<Knob>,
}

impl Asked {
    fn parse(arguments: &RehearseArguments, asked: &str) -> anyhow::Result<Self> {
        let command = &arguments.command;
        let not_understood = || {
            usage(format!(
                "--fit {asked} is not understood\nhint: batch_size=--batch-size or batch_size=config.yaml:batch_size, as the script has it, \
                 and accumulation=--accumulation-steps after a comma"
            ))
        };
        let (batch, accumulation) = match asked.split_once(',') {
            Some((batch, accumulation)) => {
                let place = accumulation
                    .strip_prefix("accumulation=")
                    .ok_or_else(not_understood)?;
                (batch, Some(place))
            }
            None => (asked, None),
        };
        let batch = batch
            .strip_prefix("batch_size=")
            .ok_or_else(not_understood)?;
        Ok(Self {
            batch: Knob::find(batch, command, 1)?,
            accumulation: accumulation
                .map(|place| Knob::find(place, command, 1))
                .transpose()?,
        })
    }

    /// The batch of an update, which is kept where the script says how it accumulates.
    fn effective(&self) -> u64 {
        self.batch.value
            * self
                .accumulation
                .as_ref()
                .map_or(1, |accumulation| accumulation.value)
    }

    fn turned(&self, batch: u64) -> Vec<(&Knob, u64)> {
        let accumulation = self.accumulation.as_ref();
        let accumulation = accumulation.map(|knob| (knob, self.effective() / batch));
        [(&self.batch, batch)]
            .into_iter()
            .chain(accumulation)
            .collect()
    }

    fn told(&self, batch: u64) -> String {
        let parts = self.turned(batch);
        let parts: Vec<String> = parts
            .iter()
            .map(|(knob, value)| format!("{} {value}", knob.name()))
            .collect();
        parts.join(" ")
    }
}

pub fn run(
    arguments: &RehearseArguments,
    gpu: &'static Gpu,
    emulated: &Emulated,
    asked: &str,
) -> anyhow::Result<()> {
    let asked = Asked::parse(arguments, asked)?;
    let rehearsal = Rehearsal::new(emulated, arguments)?;
    let mut copies = Copies::default();
    let mut last = None;
    let mut fits = |batch: u64| -> anyhow::Result<bool> {
        rehearsal.clear()?;
        let ended = rehearsal.run(&copies.command(&arguments.command, &asked.turned(batch))?)?;
        if ended == Ended::Interrupted {
            return Err(Interrupted.into());
        }
        let answer = Answer::new(gpu, &rehearsal, &ended)?;
        // A script that fails for another reason says nothing of memory.
        if ended != Ended::Code(0) && !answer.ran_out() {
            return Err(usage(format!(
                "with {} the script fails, and not for want of memory: its own message is above",
                asked.told(batch)
            )));
        }
        let fits = answer.fits();
        tell(&format!(
            "{}: {}",
            asked.told(batch),
            if fits { "fits" } else { "does not fit" }
        ));
        if fits {
            last = Some(answer);
        }
        Ok(fits)
    };
    let found = match &asked.accumulation {
        Some(_) => largest_of(&divisors(asked.effective()), asked.batch.value, &mut fits)?,
        None => largest(asked.batch.value, &mut fits)?,
    };
    let Some(found) = found else {
        return Err(DoesNotFit(format!("not even {} fits {}", asked.told(1), gpu.name)).into());
    };
    tell(&format!(
        "the largest that fits {} is {}{}",
        gpu.name,
        asked.told(found),
        kept(&asked, found)
    ));
    if let (Some(path), Some(answer)) = (&arguments.report, &last) {
        super::write_report(path, answer)?;
    }
    Ok(())
}

/// How the effective batch is kept.
fn kept(asked: &Asked, found: u64) -> String {
    let effective = asked.effective();
    if asked.accumulation.is_some() {
        return format!(", which keeps the batch of {effective}");
    }
    let whole = divisors(effective)
        .into_iter()
        .rev()
        .find(|&divisor| divisor <= found);
    match whole {
        Some(whole) if found < effective => {
            format!(
                "; {} micro batches of {whole} keep the batch of {effective}",
                effective / whole
            )
        }
        _ => String::new(),
    }
}

fn divisors(number: u64) -> Vec<u64> {
    (1..=number.min(MOST))
        .filter(|&divisor| number.is_multiple_of(divisor))
        .collect()
}

/// The largest of some values that fits, each of which fits where a larger one does. The one that stands now is tried
/// first.
fn largest_of(
    values: &[u64],
    start: u64,
    fits: &mut impl FnMut(u64) -> anyhow::Result<bool>,
) -> anyhow::Result<Option<u64>> {
    let (mut low, mut high) = (0, values.len());
    let mut middle = values
        .iter()
        .position(|&value| value == start)
        .unwrap_or(high / 2);
    while low < high {
        match fits(values[middle])? {
            true => low = middle + 1,
            false => high = middle,
        }
        middle = low + (high - low) / 2;
    }
    Ok(low.checked_sub(1).map(|index| values[index]))
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
    fn finds_the_largest_divisor_from_anywhere() {
        let values = divisors(48);
        assert_eq!(values, [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]);
        for start in [1, 8, 48] {
            for (limit, expected) in [
                (0, None),
                (1, Some(1)),
                (7, Some(6)),
                (23, Some(16)),
                (99, Some(48)),
            ] {
                let mut tries = 0;
                let found = largest_of(&values, start, &mut |value| {
                    tries += 1;
                    Ok(value <= limit)
                });
                assert_eq!(found.unwrap(), expected);
                assert!(tries <= 5, "{tries} for {limit} from {start}");
            }
        }
    }
}
