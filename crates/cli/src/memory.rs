//! How much memory a command may plan with: the flags that say so, and what the machine has.

use cinch_config::{Bytes, Settings, Source};
use cinch_device::{CATALOGUE, Card, Gpu, Machine, detect, find, find_boards};
use cinch_fit::FitError;
use cinch_graph::Target;

use crate::args::MemoryArguments;
use crate::failure::{DoesNotFit, usage};

/// What stays free of memory that is detected or a card's, where nothing else is said: other
/// programs come and go.
const MARGIN: Margin = Margin::Share(0.1);

/// Memory to stay within, and where it is.
#[derive(Clone, Debug)]
pub struct Budget {
    pub bytes: u64,
    /// What there is, of which the budget is a part.
    pub capacity: u64,
    /// What may be used before a margin is taken off: all of a card, or what is free.
    pub available: u64,
    /// Whether the user said what stays free.
    pub margin_is_stated: bool,
    pub flag: &'static str,
    /// Whose memory it is, for people.
    pub whose: String,
    /// None for host memory.
    pub gpu: Option<Rates>,
    /// Of a card of this machine: what is free beside it, in host memory.
    pub host_free: Option<u64>,
}

/// Whose rates the time of a step is predicted with.
#[derive(Clone, Debug)]
pub struct Rates {
    pub card: Card,
    /// Whether the card was named or found; else it stands for others of its size.
    pub is_known: bool,
}

/// What stays free.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Margin {
    Share(f64),
    Size(u64),
}

impl Margin {
    /// A share such as `0.15` or `15%`, or a size with a unit.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let refuse = |why: &str| {
            usage(format!(
                "--safety-margin {text} {why}\n\
                 hint: it is what stays free: a share from 0 to below 1 (0.15, 15%), or a size \
                 with its unit (2gb)"
            ))
        };
        let number = text.trim().trim_end_matches('%');
        if let Ok(number) = number.parse::<f64>() {
            let percent = text.trim().ends_with('%');
            let share = if percent { number / 100.0 } else { number };
            if !(0.0..1.0).contains(&share) {
                return Err(refuse("is no share of the memory"));
            }
            return Ok(Self::Share(share));
        }
        match text.parse::<Bytes>() {
            Ok(size) => Ok(Self::Size(size.get())),
            Err(_) => Err(refuse("is neither a share nor a size")),
        }
    }

    fn taken_from(self, bytes: u64) -> u64 {
        match self {
            Self::Share(share) => (bytes as f64 * (1.0 - share)) as u64,
            Self::Size(size) => bytes.saturating_sub(size),
        }
    }
}

impl MemoryArguments {
    /// Whether a card is named, by its name or its size. A budget (`--vram`) is one on any device.
    pub fn names_a_gpu(&self) -> bool {
        self.gpu.is_some() || self.gpu_memory.is_some() || self.vram.is_some()
    }

    /// Which board was taken, where a name stands for several that differ in speed.
    pub fn board_note(&self) -> Option<String> {
        let name = self.gpu.as_deref()?;
        let boards = find_boards(name).ok()?;
        let (taken, others) = boards.split_first()?;
        let others: Vec<&str> = others.iter().map(|gpu| gpu.name).collect();
        (!others.is_empty()).then(|| {
            format!(
                "\"{name}\" can be {taken} or {}; {taken} is planned for, which is no faster",
                others.join(" or "),
                taken = taken.name,
            )
        })
    }

    /// The budget that the flags give, if they give one.
    pub fn budget(&self) -> anyhow::Result<Option<Budget>> {
        let budget = self.unmarked_budget()?;
        Ok(budget.map(|budget| Budget {
            margin_is_stated: self.safety_margin.is_some(),
            ..budget
        }))
    }

    fn unmarked_budget(&self) -> anyhow::Result<Option<Budget>> {
        let margin = self.safety_margin.as_deref().map(Margin::parse);
        let margin = margin.transpose()?;
        if let Some(text) = &self.vram {
            let all = size("--vram", text)?;
            let whose = "a GPU".to_owned();
            let bytes = margin.map_or(all, |margin| margin.taken_from(all));
            return Budget::new(bytes, all, "--vram", whose, Some(of_size(all))).map(Some);
        }
        let named = self.gpu.as_deref().map(find).transpose()?;
        if named.is_none() && self.gpu_memory.is_none() {
            return match (self.auto, margin) {
                (true, _) => detected(&detect(), margin.unwrap_or(MARGIN)).map(Some),
                (false, None) => Ok(None),
                (false, Some(_)) => Err(usage(
                    "--safety-margin says what stays free, but not of what\n\
                     hint: add --auto, --gpu NAME, --gpu-memory SIZE or --vram SIZE",
                )),
            };
        }
        let given = self.gpu_memory.as_deref();
        let given = given.map(|text| size("--gpu-memory", text)).transpose()?;
        let flag = if given.is_some() {
            "--gpu-memory"
        } else {
            "--gpu"
        };
        let all = given.or_else(|| named.map(|gpu| gpu.memory.usable_bytes()));
        let all = all.unwrap_or_default();
        let bytes = margin.unwrap_or(MARGIN).taken_from(all);
        let rates = named.map_or_else(
            || of_size(all),
            |gpu| Rates {
                card: gpu.card(),
                is_known: true,
            },
        );
        let whose = named.map_or_else(|| "a GPU".to_owned(), |gpu| gpu.name.to_owned());
        Budget::new(bytes, all, flag, whose, Some(rates)).map(Some)
    }
}

/// A plan that does not fit, with the margin that would let it where one does.
pub fn refused(answer: Box<cinch_fit::DoesNotFit>, memory: &MemoryArguments) -> anyhow::Error {
    let budget = memory.budget().ok().flatten();
    let hint = budget.and_then(|budget| budget.margin_hint(answer.needed_bytes));
    match hint {
        None => FitError::DoesNotFit(answer).into(),
        Some(hint) => DoesNotFit(format!("{answer}\nhint: it {hint}")).into(),
    }
}

impl Budget {
    fn new(
        bytes: u64,
        capacity: u64,
        flag: &'static str,
        whose: String,
        gpu: Option<Rates>,
    ) -> anyhow::Result<Self> {
        if bytes == 0 {
            return Err(usage(format!(
                "--safety-margin leaves nothing of {}\nhint: it is what stays free; 0.1 is the \
                 default",
                Bytes::new(capacity)
            )));
        }
        Ok(Self {
            bytes,
            capacity,
            available: capacity,
            margin_is_stated: false,
            flag,
            whose,
            gpu,
            host_free: None,
        })
    }

    /// All of a size that a setting gives.
    pub fn of_size(bytes: u64, setting: &'static str) -> anyhow::Result<Self> {
        let whose = "a GPU".to_owned();
        Self::new(bytes, bytes, setting, whose, Some(of_size(bytes)))
    }

    /// The budget of a PyTorch run, whose safe figure has a margin of its own: one margin, not
    /// two. A margin that the user states replaces it.
    pub fn of_pytorch(mut self) -> Self {
        if !self.margin_is_stated {
            self.bytes = self.available;
        }
        self
    }

    /// The card, where it was named or found.
    pub fn known_card(&self) -> Option<&Card> {
        let rates = self.gpu.as_ref().filter(|rates| rates.is_known);
        rates.map(|rates| &rates.card)
    }

    /// What to say where a run does not fit because of the margin alone.
    pub fn margin_hint(&self, needed_bytes: u64) -> Option<String> {
        if needed_bytes > self.available || self.bytes == self.available {
            return None;
        }
        let share = 1.0 - needed_bytes as f64 / self.available as f64;
        // Down to a hundredth, so that it fits for sure.
        let share = (share * 100.0).floor() / 100.0;
        Some(format!("fits with --safety-margin {share}"))
    }

    /// Where the figure comes from, with the margin that was taken off.
    pub fn explained(&self) -> String {
        match self.available.checked_sub(self.bytes) {
            None | Some(0) => self.flag.to_owned(),
            Some(free) => format!(
                "{} of {}, less a safety margin of {}",
                self.flag,
                Bytes::new(self.available),
                Bytes::new(free)
            ),
        }
    }

    pub fn target(&self) -> Target {
        match self.gpu {
            Some(_) => Target::Cuda,
            None => Target::Cpu,
        }
    }

    /// What is missing of this machine's own memory for what would be kept there. Of a card that is only named nobody knows
    /// the machine.
    pub fn lacks_on_host(&self, host_bytes: u64) -> Option<String> {
        let free = self.host_free?;
        (host_bytes > free).then(|| {
            format!(
                "what is kept beside the card would take {} of this machine's memory, of which {} is \
                 free; `cinch check` says whether a run can start",
                Bytes::new(host_bytes),
                Bytes::new(free)
            )
        })
    }

    /// As a setting's value.
    pub fn setting(&self) -> String {
        format!("{}b", self.bytes)
    }
}

/// A size that a flag gives; what is wrong with it is told as for the setting.
fn size(flag: &str, text: &str) -> anyhow::Result<u64> {
    Settings::new().set("vram.budget", text, Source::Flag(flag.to_owned()))?;
    Ok(text.parse::<Bytes>()?.get())
}

/// What is free on the GPU that would be used, else in host memory.
pub fn detected_now() -> anyhow::Result<Budget> {
    detected(&detect(), MARGIN)
}

fn detected(machine: &Machine, margin: Margin) -> anyhow::Result<Budget> {
    if let Some(chosen) = machine.chosen()
        && let (Some(all), Some(free)) = (chosen.usable_bytes(), chosen.free_bytes())
    {
        let card = chosen.gpu.card();
        let rates = card.map_or_else(
            || of_size(all),
            |card| Rates {
                card,
                is_known: true,
            },
        );
        let whose = format!("{} ({} free)", chosen.gpu.name, Bytes::new(free));
        let budget = Budget::new(margin.taken_from(free), all, "--auto", whose, Some(rates))?;
        return Ok(Budget {
            host_free: machine.host.available_bytes,
            available: free,
            ..budget
        });
    }
    let host = &machine.host;
    let (Some(all), Some(free)) = (host.total_bytes, host.available_bytes) else {
        return Err(usage(
            "the free memory cannot be read here\nhint: say --vram SIZE",
        ));
    };
    let reason = machine.reason.as_deref().unwrap_or("no GPU to use");
    let whose = format!("host memory ({} free; {reason})", Bytes::new(free));
    let budget = Budget::new(margin.taken_from(free), all, "--auto", whose, None)?;
    Ok(Budget {
        available: free,
        ..budget
    })
}

/// The rates of a card of about that size: of those nearest in memory on which cinch trains, the
/// one in the middle by its matrix rate.
fn of_size(bytes: u64) -> Rates {
    let distance = |gpu: &Gpu| gpu.memory.shown_bytes().abs_diff(bytes);
    let trainable = || CATALOGUE.iter().filter(|gpu| gpu.training().is_supported());
    let nearest = trainable().map(distance).min().unwrap_or(0);
    // Cards of one size differ by some hundred MiB in what they show.
    let slack = nearest.saturating_add(bytes / 16);
    let mut alike: Vec<Card> = trainable()
        .filter(|gpu| distance(gpu) <= slack)
        .map(Gpu::card)
        .collect();
    alike.sort_by(|a, b| a.half_flops.total_cmp(&b.half_flops));
    Rates {
        card: alike.swap_remove(alike.len() / 2),
        is_known: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(set: impl FnOnce(&mut MemoryArguments)) -> MemoryArguments {
        let mut arguments = MemoryArguments::default();
        set(&mut arguments);
        arguments
    }

    #[test]
    fn a_margin_is_a_share_or_a_size() {
        assert_eq!(Margin::parse("0.25").unwrap(), Margin::Share(0.25));
        assert_eq!(Margin::parse("25%").unwrap(), Margin::Share(0.25));
        assert_eq!(Margin::parse("2gb").unwrap(), Margin::Size(2 << 30));
        for wrong in ["1.5", "1", "-0.1", "120%", "much", ""] {
            let message = Margin::parse(wrong).unwrap_err().to_string();
            assert!(
                message.contains("--safety-margin") && message.contains("hint:"),
                "{wrong}: {message}"
            );
        }
    }

    #[test]
    fn a_budget_is_taken_as_it_is_and_a_card_less_the_margin() {
        let budget = memory(|m| m.vram = Some("24".into())).budget().unwrap();
        assert_eq!(budget.unwrap().bytes, 24 << 30);
        let budget = memory(|m| m.gpu_memory = Some("10".into())).budget();
        assert_eq!(budget.unwrap().unwrap().bytes, 9 << 30);
        let budget = memory(|m| {
            m.gpu = Some("h200".into());
            m.safety_margin = Some("1gb".into());
        });
        let budget = budget.budget().unwrap().unwrap();
        assert_eq!(budget.bytes, budget.capacity - (1 << 30));
        assert!(budget.gpu.unwrap().is_known);
    }

    #[test]
    fn a_name_of_two_boards_says_which_is_taken() {
        let note = |name: &str| memory(|m| m.gpu = Some(name.into())).board_note();
        let taken = note("A100 80GB").unwrap();
        for name in ["A100 PCIe 80GB", "A100 SXM4 80GB"] {
            assert!(taken.contains(name), "{taken}");
        }
        assert_eq!(note("A100 SXM4 80GB"), None);
        assert_eq!(note("no such card"), None);
    }

    #[test]
    fn what_the_host_lacks_is_said_of_this_machine_alone() {
        let named = Budget::of_size(8 << 30, "--vram").unwrap();
        assert_eq!(named.lacks_on_host(64 << 30), None);
        let here = Budget {
            host_free: Some(16 << 30),
            ..named
        };
        assert_eq!(here.lacks_on_host(16 << 30), None);
        let note = here.lacks_on_host(64 << 30).unwrap();
        assert!(note.contains("64.0") && note.contains("16.0"), "{note}");
    }

    #[test]
    fn a_card_without_a_name_is_one_of_its_size() {
        for gib in [8, 11, 16, 24, 48, 80, 141] {
            let bytes = gib << 30;
            let card = of_size(bytes).card;
            let same = CATALOGUE.iter().find(|gpu| gpu.name == card.name).unwrap();
            let shown = same.memory.shown_bytes();
            assert!(
                shown.abs_diff(bytes) <= bytes / 5,
                "{gib} GiB: {} has {shown}",
                card.name
            );
        }
    }

    #[test]
    fn a_margin_that_leaves_nothing_is_refused() {
        let arguments = memory(|m| {
            m.gpu_memory = Some("4".into());
            m.safety_margin = Some("8gb".into());
        });
        let message = arguments.budget().unwrap_err().to_string();
        assert!(message.contains("leaves nothing of 4.00 GiB"), "{message}");
    }
}
