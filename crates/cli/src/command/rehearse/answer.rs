//! What a rehearsal says: memory, phases, reads, and where it would fit.

use std::fmt::Write;
use std::fs;

use cinch_card::{Entry, Record};
use cinch_config::Bytes;
use cinch_device::{CATALOGUE, Gpu};
use cinch_torch::overhead::{Overhead, safety_margin};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::process::{Ended, Rehearsal};

/// PyTorch's versions that were tried, by major and minor number.
const TRIED: [&str; 4] = ["2.6", "2.8", "2.11", "2.15"];

/// Reads and cards named in the text; the report has all.
const NUM_READS: usize = 8;
const NUM_CARDS: usize = 6;

/// What the script's process wrote at its end.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Script {
    torch: String,
    cuda: Option<String>,
    steps: u64,
    /// The step after which it was to end, or 0.
    until: u64,
    pid: u32,
    reads: Vec<Read>,
    phases: Vec<Phase>,
    complete: bool,
    allocated_bytes: u64,
    reserved_bytes: u64,
    host_bytes: u64,
    retries: u64,
    tries_engines: bool,
}

/// A value that was read of the card and that nobody computed.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Read {
    line: String,
    within: String,
    what: String,
    taken_as: String,
    count: u64,
    decides: bool,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
struct Phase {
    name: String,
    allocated_bytes: u64,
    reserved_bytes: u64,
}

pub struct Answer {
    gpu: &'static Gpu,
    ended: Ended,
    script: Option<Script>,
    record: Option<Record>,
    world: Option<(u32, u32)>,
}

impl Answer {
    pub fn new(gpu: &'static Gpu, rehearsal: &Rehearsal, ended: &Ended) -> anyhow::Result<Self> {
        let records = Record::read_all(rehearsal.folder())?;
        let record = records.into_iter().next();
        let mut scripts = Vec::new();
        for file in fs::read_dir(rehearsal.folder())? {
            let path = file?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            if name.starts_with("script-") && name.ends_with(".json") {
                let text = fs::read_to_string(&path)?;
                scripts.extend(serde_json::from_str::<Script>(&text));
            }
        }
        let of_record = |script: &&Script| {
            record
                .as_ref()
                .is_some_and(|record| record.process == script.pid)
        };
        let script = scripts
            .iter()
            .find(of_record)
            .or_else(|| scripts.first())
            .cloned();
        Ok(Self {
            gpu,
            ended: *ended,
            script,
            record,
            world: rehearsal.world,
        })
    }

    /// The process that used the card.
    pub fn process(&self) -> Option<u32> {
        self.record.as_ref().map(|record| record.process)
    }

    fn entry(&self, entry: Entry) -> u64 {
        self.record.as_ref().map_or(0, |record| record.get(entry))
    }

    fn reserved(&self) -> u64 {
        let counted = self
            .entry(Entry::Peak)
            .saturating_sub(self.entry(Entry::Outside));
        self.script
            .as_ref()
            .map_or(counted, |script| script.reserved_bytes)
    }

    fn device(&self) -> u64 {
        self.entry(Entry::Peak)
    }

    fn safe(&self) -> u64 {
        self.device() + safety_margin(self.reserved())
    }

    pub fn ran_out(&self) -> bool {
        self.entry(Entry::Refused) > 0 && self.ended != Ended::Code(0)
    }

    pub fn fits(&self) -> bool {
        self.ended == Ended::Code(0) && self.safe() <= self.gpu.memory.usable_bytes()
    }

    /// Why the figures are not certain; none where they are.
    fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        let Some(script) = &self.script else {
            doubts.push("the script's process left no word of its own".to_owned());
            return doubts;
        };
        let deciding = script.reads.iter().filter(|read| read.decides).count();
        match deciding {
            0 => {}
            1 => doubts.push("a line decides something by a value that does not exist".to_owned()),
            _ => doubts.push(format!(
                "{deciding} lines decide something by values that do not exist"
            )),
        }
        if self.entry(Entry::Convolutions) > 0 {
            doubts.push(
                "cuDNN chose convolutions without a card, where it may choose others".to_owned(),
            );
        }
        if script.tries_engines && self.entry(Entry::Convolutions) > 0 {
            doubts.push(
                "with cudnn.benchmark the fastest engine is kept, which only a card can tell"
                    .to_owned(),
            );
        }
        if self.entry(Entry::UnaskedPlans) > 0 {
            doubts.push(
                "this cuDNN cannot be asked without a card: workspaces are not counted".to_owned(),
            );
        }
        if self.entry(Entry::Estimates) > 0 {
            doubts.push("workspaces of recurrent nets or transforms are estimated".to_owned());
        }
        if self.entry(Entry::PooledBytes) > 0 {
            doubts.push(
                "how the pool of cudaMallocAsync cuts its memory is not known: gaps in it are not counted"
                    .to_owned(),
            );
        }
        if !script.complete {
            doubts.push("the record of the run is not complete".to_owned());
        }
        if !TRIED
            .iter()
            .any(|tried| script.torch.starts_with(&format!("{tried}.")))
        {
            doubts.push(format!(
                "PyTorch {} was not tried; {} were",
                script.torch,
                TRIED.join(", ")
            ));
        }
        if script.until == 1 {
            doubts.push(
                "it was ended after its first step, and later ones begin with the optimizer's states"
                    .to_owned(),
            );
        }
        if !matches!(self.ended, Ended::Code(0)) {
            doubts.push("the script did not come to its end".to_owned());
        }
        doubts
    }

    /// Why its peak says nothing of other cards; none where it does.
    fn unseen(&self) -> Option<&'static str> {
        let steps = self.script.as_ref().map_or(0, |script| script.steps);
        match self.ended {
            _ if self.ran_out() => Some(
                "it wanted more than this card has, nobody knows how much: rehearse it on a larger one",
            ),
            Ended::Code(0) => None,
            _ if steps < 2 => Some("it ended before its second step was done"),
            _ => None,
        }
    }

    /// Cards that hold the safe figure, the smallest first.
    fn cards(&self) -> Vec<&'static Gpu> {
        let own = Overhead::of(Some(self.gpu.generation)).context;
        let without = self.safe().saturating_sub(own);
        let mut cards: Vec<&Gpu> = CATALOGUE
            .iter()
            .filter(|gpu| gpu.compute_capability.is_some())
            .filter(|gpu| {
                without + Overhead::of(Some(gpu.generation)).context <= gpu.memory.usable_bytes()
            })
            .collect();
        cards.sort_by_key(|gpu| gpu.memory.usable_mib);
        cards
    }

    pub fn report(&self) -> Value {
        let script = self.script.clone().unwrap_or_default();
        let doubts = self.doubts();
        let outside = Overhead::of(Some(self.gpu.generation));
        json!({
            "card": {
                "name": self.gpu.name,
                "memory_bytes": self.gpu.memory.usable_bytes(),
                "verified": self.gpu.name == "H200",
                "overhead": outside.basis,
            },
            "certain": doubts.is_empty(),
            "doubts": doubts,
            "fits": self.fits(),
            "ran_out_of_memory": self.ran_out(),
            "refused_bytes": self.entry(Entry::RefusedBytes),
            "reads": script.reads,
            "memory": {
                "allocated_bytes": self.script.as_ref().map(|script| script.allocated_bytes),
                "reserved_bytes": self.reserved(),
                "device_bytes": self.device(),
                "safe_bytes": self.safe(),
                "outside_bytes": self.entry(Entry::Outside),
                "host_bytes": script.host_bytes,
            },
            "phases": script.phases,
            "steps": script.steps,
            "retries": script.retries,
            "fits_on": match self.unseen() {
                None => json!(self.cards().iter().map(|gpu| gpu.name).collect::<Vec<_>>()),
                Some(_) => Value::Null,
            },
            "torch": script.torch,
            "cuda": script.cuda,
            "world": self.world.map(|(world, rank)| json!({ "size": world, "rank": rank })),
            "ended": match self.ended {
                Ended::Code(code) => json!({ "code": code }),
                Ended::Signal(signal) => json!({ "signal": signal }),
                Ended::TimedOut => json!("timed out"),
                Ended::Interrupted => json!("interrupted"),
            },
            "wrong_frees": self.entry(Entry::WrongFrees),
            "kernel_launches": self.entry(Entry::Launches),
        })
    }

    pub fn text(&self) -> String {
        let mut text = format!(
            "rehearsal on {} ({})\n",
            self.gpu.name,
            Bytes::new(self.gpu.memory.usable_bytes())
        );
        if self.record.is_none() {
            let reason = match &self.script {
                Some(script) if script.cuda.is_none() => "its PyTorch is built without CUDA",
                Some(_) => "it did not use the card",
                None => "it did not import PyTorch, or ended before it could say",
            };
            let _ = writeln!(text, "  nothing to tell of the script: {reason}");
            return text;
        }
        let script = self.script.clone().unwrap_or_default();
        let verdict = match (self.ran_out(), self.fits()) {
            (true, _) => format!(
                "out of memory: {} more were asked for",
                Bytes::new(self.entry(Entry::RefusedBytes))
            ),
            (_, true) => "fits".to_owned(),
            _ if self.ended != Ended::Code(0) => "the script did not come to its end".to_owned(),
            _ => "does not fit with a margin".to_owned(),
        };
        let _ = writeln!(text, "  {verdict}");
        // What it allocated, only the script's process knows.
        let allocated = self.script.as_ref().map(|script| script.allocated_bytes);
        for (name, bytes) in allocated
            .map(|bytes| ("allocated", bytes))
            .into_iter()
            .chain([
                ("reserved", self.reserved()),
                ("on the card", self.device()),
                ("safe figure", self.safe()),
            ])
        {
            let _ = writeln!(text, "  {name:<12} {:>12}", Bytes::new(bytes).to_string());
        }
        for phase in &script.phases {
            let (allocated, reserved) = (
                Bytes::new(phase.allocated_bytes),
                Bytes::new(phase.reserved_bytes),
            );
            let _ = writeln!(
                text,
                "  {:<12} {allocated} allocated, {reserved} reserved",
                phase.name
            );
        }
        let cards = self.cards();
        let names: Vec<&str> = cards.iter().take(NUM_CARDS).map(|gpu| gpu.name).collect();
        if let Some(reason) = self.unseen() {
            let _ = writeln!(text, "  where it would fit is not known: {reason}");
        } else if !names.is_empty() {
            let rest = cards.len() - names.len();
            let more = if rest > 0 {
                format!(" and {rest} more")
            } else {
                String::new()
            };
            let _ = writeln!(text, "  would fit on {}{more}", names.join(", "));
        }
        let doubts = self.doubts();
        match doubts.is_empty() {
            true => text.push_str("  certain: nothing that was read decides memory\n"),
            false => {
                let _ = writeln!(text, "  not certain: {}", doubts.join("; "));
            }
        }
        for read in script
            .reads
            .iter()
            .filter(|read| read.decides)
            .take(NUM_READS)
        {
            let _ = writeln!(
                text,
                "    {}: {}, taken as {} ({}×)",
                read.line, read.what, read.taken_as, read.count
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use cinch_device::find;

    use super::*;

    /// A script that did so many steps, and how often the card had no memory for it.
    fn answer(ended: Ended, steps: u64, refused: u64) -> Answer {
        let folder = tempfile::tempdir().unwrap();
        let mut entries = vec![0_u64; 64];
        entries[Entry::Peak as usize] = 1 << 30;
        entries[Entry::Refused as usize] = refused;
        let bytes: Vec<u8> = entries.into_iter().flat_map(u64::to_le_bytes).collect();
        fs::write(folder.path().join("card-1"), bytes).unwrap();
        let script = Script {
            steps,
            ..Script::default()
        };
        Answer {
            gpu: find("RTX 4090").unwrap(),
            ended,
            script: Some(script),
            record: Record::read_all(folder.path()).unwrap().into_iter().next(),
            world: None,
        }
    }

    #[test]
    fn other_cards_are_named_where_the_peak_was_seen() {
        for (answer, is_seen) in [
            (answer(Ended::Code(0), 0, 0), true),
            (answer(Ended::Interrupted, 2, 0), true),
            (answer(Ended::Interrupted, 1, 0), false),
            (answer(Ended::TimedOut, 0, 0), false),
            (answer(Ended::Code(1), 5, 1), false),
            // It was told that there was no more, and went on to its end.
            (answer(Ended::Code(0), 5, 1), true),
        ] {
            let (text, report) = (answer.text(), answer.report());
            assert_eq!(text.contains("  would fit on "), is_seen, "{text}");
            assert_eq!(text.contains("where it would fit is not known"), !is_seen);
            assert_eq!(report["fits_on"].is_null(), !is_seen);
        }
    }

    #[test]
    fn a_single_step_is_no_certain_answer() {
        let mut answer = answer(Ended::Code(0), 1, 0);
        let doubts = |answer: &Answer| answer.doubts().join("; ");
        assert!(!doubts(&answer).contains("first step"));
        answer.script.as_mut().unwrap().until = 1;
        assert!(doubts(&answer).contains("ended after its first step"));
    }
}
