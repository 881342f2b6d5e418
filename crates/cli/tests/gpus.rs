//! `cinch gpus`: the catalogue, and a machine that is described whatever it has.

mod common;

use common::Sandbox;
use serde_json::Value;

#[test]
fn the_catalogue_is_a_table() {
    let ran = Sandbox::new().cinch("gpus").succeeds();
    ran.prints(&[
        "RTX 4090",
        "H200",
        "790.0",
        "MI300X",
        "plan only: no CUDA",
        "plan only: compute capability 7.5",
        "This machine",
        "host: ",
    ]);
}

#[test]
fn the_catalogue_is_json() {
    let json = Sandbox::new().cinch("gpus --json").succeeds().json();
    let cards = json["catalogue"].as_array().expect("a list of cards");
    let card = |name: &str| -> &Value {
        let found = cards.iter().find(|card| card["name"] == name);
        found.unwrap_or_else(|| panic!("{name} is not listed"))
    };
    let h200 = card("H200");
    assert_eq!(h200["half_flops"], 790e12);
    assert_eq!(h200["rates_from"], "measured");
    assert_eq!(h200["compute_capability"], "9.0");
    assert_eq!(h200["trainable"], true);
    let t4 = card("T4");
    assert_eq!(t4["bf16_flops"], Value::Null);
    assert_eq!(t4["trainable"], false);
    assert!(
        t4["plan_only_because"]
            .as_str()
            .is_some_and(|why| why.contains("8.0"))
    );
    assert_eq!(card("A100 SXM4 80GB")["shown_bytes"], 81_920_u64 << 20);

    let machine = &json["machine"];
    // The sandbox hides every card from CUDA, whether there is one or not.
    assert_eq!(machine["visible"], Value::Array(Vec::new()));
    let by = machine["read_by"].as_str().expect("who told");
    assert!(["nvml", "nvidia_smi", "nobody"].contains(&by), "{by}");
    if by == "nobody" {
        assert!(machine["reason"].is_string(), "{machine}");
    }
    if cfg!(target_os = "linux") {
        assert!(
            machine["host"]["available_bytes"].as_u64() > Some(0),
            "{machine}"
        );
    }
}

#[test]
fn one_card_by_any_of_its_names() {
    let sandbox = Sandbox::new();
    let json = sandbox.run(["gpus", "NVIDIA A100-SXM4-80GB", "--json"]);
    let json = json.succeeds().json();
    assert_eq!(json["catalogue"][0]["name"], "A100 SXM4 80GB");
    assert_eq!(json["catalogue"].as_array().map(Vec::len), Some(1));
    sandbox
        .cinch("gpus a100")
        .fails(2, &["`a100`", "A100 PCIe 40GB", "A100 SXM4 80GB", "hint: "]);
    sandbox
        .cinch("gpus rtx-4900")
        .fails(2, &["`rtx-4900`", "did you mean RTX 4090", "hint: "]);
    sandbox
        .cinch("gpus abacus")
        .fails(2, &["`abacus`", "no GPU that cinch knows", "hint: "]);
}
