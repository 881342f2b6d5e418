//! What was read of the user's files: key, value, line, and what it was taken for. It stands
//! before any figure, so that a misreading is seen before it is believed.

use cinch_config::{Reading, SETTINGS, Settings};
use comfy_table::Cell;

use super::workload::Run;
use crate::table::{self, right};
use crate::voice;

/// Values that are longer are cut, so that a row stays within a line.
const WIDEST_VALUE: usize = 28;

pub fn text(run: &Run) -> String {
    if voice::is_quiet() {
        return String::new();
    }
    let readings = run.settings.readings();
    let mut text = String::new();
    for reading in readings {
        text += &file(reading);
    }
    match (&run.because, readings.is_empty()) {
        (Some(because), true) => {
            text += &format!("planned as a PyTorch run (--engine pytorch): {because}\n");
        }
        (Some(_), false) => text += "planned as a PyTorch run (--engine pytorch)\n",
        (None, _) => {}
    }
    text
}

fn file(reading: &Reading) -> String {
    let mut text = String::new();
    for unread in &reading.not_understood {
        text += &format!(
            "not understood: {} = {} (line {}), which may bear on memory\n",
            unread.key,
            cut(&unread.value),
            unread.line
        );
    }
    text += &format!(
        "{} read as a file of {}",
        reading.path.display(),
        reading.dialect
    );
    if !reading.because_of.is_empty() {
        text += &format!(" (it has {})", reading.because_of.join(", "));
    }
    text += ":\n";
    let mut table = table::new(&["line", "key", "value", "taken for"]);
    for read in reading
        .read
        .iter()
        .filter(|read| bears_on_memory(read.setting))
    {
        table.add_row([
            right(read.line),
            Cell::new(&read.key),
            Cell::new(cut(&read.value)),
            Cell::new(taken_for(read.setting, &read.means)),
        ]);
    }
    text += &format!("{table}\n");
    let others = reading
        .read
        .iter()
        .filter(|read| !bears_on_memory(read.setting))
        .count();
    text += &format!(
        "{} more keys do not bear on memory\n",
        others + reading.num_harmless
    );
    text
}

fn bears_on_memory(key: &str) -> bool {
    let section = key.split('.').next().unwrap_or(key);
    matches!(section, "model" | "vram" | "lora" | "pytorch") && key != "lora.alpha"
}

fn taken_for(key: &str, means: &str) -> String {
    let setting = SETTINGS.iter().find(|setting| setting.key == key);
    let what = match key {
        "model.type" => "model",
        "vram.batch_size" => "micro batch",
        "vram.gradient_accumulation_steps" => "accumulation",
        "vram.max_seq_len" => "tokens of a sequence",
        "vram.checkpointing" => "checkpointing",
        "pytorch.precision" | "vram.precision" => "precision",
        "pytorch.optimizer" => "optimizer",
        "pytorch.attention" => "attention",
        "pytorch.liger" => "Liger's kernels:",
        "lora.quantization" => "frozen weights",
        "world.shard" => "sharding",
        "world.ranks" => "GPUs",
        "lora.adapter" => "adapters",
        "lora.rank" => "rank of the adapters",
        "lora.dropout" => "dropout of the adapters",
        "lora.targets" => "layers with adapters",
        "lora.modules_to_save" => "modules trained whole:",
        _ => setting.map_or(key, |setting| setting.help),
    };
    format!("{what} {}", cut(means))
}

fn cut(text: &str) -> String {
    match text.chars().count() > WIDEST_VALUE {
        true => text.chars().take(WIDEST_VALUE - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

/// How certain the figure is, in words; none where nothing lowers it.
pub fn certainty(settings: &Settings) -> Option<String> {
    let readings = settings.readings();
    let savings: Vec<&str> = readings
        .iter()
        .flat_map(|reading| reading.savings.iter().map(|saving| saving.key.as_str()))
        .collect();
    let unread: Vec<&str> = readings
        .iter()
        .flat_map(|reading| {
            reading
                .not_understood
                .iter()
                .map(|unread| unread.key.as_str())
        })
        .collect();
    match (unread.is_empty(), savings.is_empty()) {
        (true, true) => None,
        (true, false) => Some(format!(
            "an upper bound: {} save memory that is not counted",
            savings.join(", ")
        )),
        (false, true) => Some(format!("uncertain: {} may change it", unread.join(", "))),
        (false, false) => Some(format!(
            "uncertain: {} may change it, and {} save memory that is not counted",
            unread.join(", "),
            savings.join(", ")
        )),
    }
}
