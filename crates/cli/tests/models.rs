//! The list of models, and what guides say of them.

mod common;

use common::Sandbox;
use serde_json::{Value, json};

/// Every claim, as it is printed.
const GUIDES: &str = "\
│ 000     mamba small           weights                      ~200 MB        161.2 MB │
│ 000     mamba medium          weights                      ~600 MB        348.5 MB │
│ 000     mamba medium          optimizer states             1200 MB        696.9 MB │
│ 000     mamba large           weights                      ~1.6 GB        878.6 MB │
│ 001     gsa 512m-low-memory   parameters                      512M     183,662,144 │
│ 001     gsa 512m-low-memory   weights                      ~7-8 GB        734.6 MB │
│ 001     gsa 512m-low-memory   optimizer states           ~14-16 GB         1.47 GB │
│ 001     gsa 1b                parameters, by its name           1b     405,227,312 │
│ 002     qwen2.5-7b            parameters                        7B   7,615,616,512 │
│ 002     qwen2.5-7b            weights in fp16              14.0 GB        15.23 GB │
│ 002     qwen2.5-7b            trained at rank 128             239M     322,961,408 │
│ 002     qwen2.5-7b            adapters                      0.5 GB         1.29 GB │
│ 003     mu                    parameters                     26.9M      26,940,112 │
│ 003     mu                    block attention, QKV        ~1.57 GB         12.6 MB │
│ 003     mu                    block attention, weights    ~2.15 GB         1.07 GB │
│ 003     mu                    cross attention, QKV        ~0.12 GB         12.6 MB │
│ 003     mu                    cross attention, weights    ~1.07 GB        268.4 MB │
│ 004     naics                 trained parameters               ~1%          13.9 % │
│ 004     naics                 weights                      ~200 MB        422.2 MB │
│ 004     naics                 optimizer states             ~800 MB        117.5 MB │
│ 004     naics                 gradients                    ~200 MB         58.8 MB │
└";

#[test]
fn what_guides_say_stands_beside_what_is_true() {
    let sandbox = Sandbox::new();
    sandbox.cinch_in(120, "models").succeeds().prints(&[
        GUIDES,
        "of naics, 14,689,413 parameters are trained; the others are frozen",
    ]);
}

#[test]
fn claims_and_trainable_parameters_are_in_json() {
    let models = Sandbox::new().cinch("models --json").succeeds().json();
    let list = models.as_array().expect("a list");
    let find = |is_it: &dyn Fn(&Value) -> bool| list.iter().find(|one| is_it(one)).expect("listed");
    let naics = find(&|one| one["size"] == "naics");
    assert_eq!(naics["trainable"], 14_689_413);
    assert_eq!(naics["parameters"], 105_542_277);
    assert_eq!(naics["claims"][0]["computed_parameters"], 14_689_413);
    let low = find(&|one| one["size"] == "512m-low-memory");
    assert_eq!(low["trainable"], 183_662_144);
    assert_eq!(
        low["claims"][1],
        json!({
            "guide": "001",
            "about": "weights",
            "claimed": "~7-8 GB",
            "computed": "734.6 MB",
            "computed_parameters": null,
            "computed_bytes": 734_648_576,
        })
    );
    let qwen = find(&|one| one["names"] == json!(["qwen2.5-7b"]));
    assert_eq!(qwen["claims"][2]["computed_parameters"], 322_961_408);
    // What no guide is about says so.
    assert_eq!(find(&|one| one["size"] == "xl")["claims"], json!([]));
    let claims = list.iter().flat_map(|one| one["claims"].as_array());
    assert_eq!(claims.map(Vec::len).sum::<usize>(), 21);
}
