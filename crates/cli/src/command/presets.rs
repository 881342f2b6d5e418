//! `cinch presets`: settings that have a name.

use cinch_config::Preset;
use serde_json::json;

use super::{print, print_json};
use crate::args::ListArguments;
use crate::table;

pub fn run(arguments: &ListArguments) -> anyhow::Result<()> {
    if arguments.json {
        let list: Vec<serde_json::Value> = Preset::all()
            .map(|preset| {
                let values: serde_json::Map<String, serde_json::Value> = preset
                    .values()
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), json!(value)))
                    .collect();
                json!({ "name": preset.title(), "flag": flag(&preset), "values": values })
            })
            .collect();
        return print_json(&list);
    }
    let mut table = table::new(&["preset", "flag", "settings"]);
    for preset in Preset::all() {
        let values: Vec<String> = preset
            .values()
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        table.add_row([preset.title(), flag(&preset), values.join("\n")]);
    }
    // The flag has the preset's name.
    table::settle(&mut table, &[0]);
    print(&format!(
        "{table}\nA budget (--vram 8gb) keeps batch and sequence length and finds what fits; \
         a preset (--vram-preset 8gb) takes the settings above."
    ))
}

fn flag(preset: &Preset) -> String {
    match preset {
        Preset::Demo => "cinch train".to_owned(),
        Preset::Vram(preset) => format!("--vram-preset {}", preset.name),
        Preset::Training(preset) => format!("--training-preset {}", preset.name),
    }
}
