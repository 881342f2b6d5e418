//! The guides' claims beside figures that were measured or are known from elsewhere.

use std::sync::LazyLock;

use cinch_torch::claim::{self, GuideClaim};
use cinch_torch::truth;

/// Some forty replays: made once for all tests.
static CLAIMS: LazyLock<Vec<GuideClaim>> = LazyLock::new(|| claim::claims().unwrap());

const PEAKS: &str = include_str!("fixtures/peaks.jsonl");

fn find<'a>(claims: &'a [GuideClaim], guide: &str, quote: &str) -> &'a GuideClaim {
    claims
        .iter()
        .find(|claim| claim.guide == guide && claim.quote.starts_with(quote))
        .unwrap_or_else(|| panic!("{guide}: {quote}"))
}

#[test]
fn computed_totals_are_what_was_measured() {
    let claims = &*CLAIMS;
    let measured = truth::parse(PEAKS, "fixture").unwrap();
    let pairs = [
        (
            "001",
            "a run with micro batch 1",
            "gsa-b1-t1024-amp_bf16-ckpt",
        ),
        (
            "001",
            "a run with micro batch 2",
            "gsa-b2-t1024-amp_bf16-ckpt",
        ),
        (
            "002",
            "total at batch 2",
            "qwen2.5-7b-lora128-b2-t2048-ckpt-a32",
        ),
        (
            "002",
            "total at batch 1",
            "qwen2.5-7b-lora128-b1-t1536-ckpt-a32",
        ),
        ("003", "the model, batch 32", "mu-b32-t512-fp32"),
        ("003", "the model, batch 4", "mu-b4-t256-amp_fp16"),
        ("004", "batch 45 with 24", "naics-b45-n24-t512-amp_fp16"),
    ];
    for (guide, quote, name) in pairs {
        let computed = find(claims, guide, quote).computed_bytes.unwrap() as f64;
        let run = measured.iter().find(|run| run.case.name == name).unwrap();
        let truth = run.peak_allocated.unwrap() as f64;
        assert!(
            (computed / truth - 1.0).abs() < 0.01,
            "{name}: {computed} against {truth}"
        );
    }
}

#[test]
fn sizes_of_parts_follow_from_the_parameters() {
    let claims = &*CLAIMS;
    // Parameters of each model as its own code counts them, four bytes each.
    for (name, parameters) in [
        ("small", 40_306_176u64),
        ("medium", 87_118_080),
        ("large", 219_646_976),
    ] {
        let claim = find(claims, "000", &format!("weights of the {name}"));
        assert_eq!(claim.computed_bytes, Some(4 * parameters));
        assert!(claim.verdict.contains("times too high"), "{claim:?}");
    }
    let optimizer = find(claims, "000", "optimizer states of the medium");
    assert_eq!(optimizer.computed_bytes, Some(8 * 87_118_080));
    assert_eq!(
        find(claims, "001", "AdamW's states").computed_bytes,
        Some(8 * 183_662_144)
    );
    assert_eq!(
        find(claims, "002", "adapters").computed_bytes,
        Some(4 * 322_961_408)
    );
    let states = find(claims, "004", "optimizer states").computed_bytes;
    assert_eq!(states, Some(8 * 14_689_413));
    // [blocks, B, T, 3, values] and [B, heads, T, T] in fp32, for batch 32 and length 512.
    let layer = [
        (
            "query, key and value of a layer's 16",
            16 * 32 * 512 * 3 * 4 * 4,
        ),
        (
            "attention weights of a layer's 16",
            16 * 32 * 2 * 512 * 512 * 4,
        ),
        (
            "query, key and value of a layer's cross",
            32 * 512 * 3 * 64 * 4,
        ),
        (
            "attention weights of a layer's cross",
            32 * 8 * 512 * 512 * 4,
        ),
    ];
    for (quote, bytes) in layer {
        assert_eq!(
            find(claims, "003", quote).computed_bytes,
            Some(bytes),
            "{quote}"
        );
    }
}

#[test]
fn every_guide_has_claims_and_every_claim_a_verdict() {
    let claims = &*CLAIMS;
    for guide in ["000", "001", "002", "003", "004"] {
        assert!(claims.iter().filter(|claim| claim.guide == guide).count() >= 8);
    }
    for claim in claims {
        let texts = [
            &claim.quote,
            &claim.claimed,
            &claim.computed,
            &claim.verdict,
        ];
        assert!(texts.iter().all(|text| !text.is_empty()), "{claim:?}");
        assert!(!claim.verdict.contains("inf"), "{claim:?}");
    }
}
