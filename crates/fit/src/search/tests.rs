//! The search against brute force, and what it promises.

use cinch_config::{Bytes, Config, Settings, Source};
use cinch_device::Card;
use cinch_graph::Target;
use proptest::prelude::*;
use rayon::prelude::*;

use super::explore::SAME_SPEED;
use super::space::{is_sensible, with_recomputed};
use super::*;

pub(super) fn config(own: &[(&str, &str)]) -> Config {
    let mut settings = Settings::new();
    for (key, value) in own {
        let source = Source::Flag("test".to_owned());
        settings.set(key, value, source).unwrap();
    }
    settings.resolve().unwrap()
}

fn card(target: Target) -> Card {
    match target {
        Target::Cuda => Card::known("H200").unwrap(),
        Target::Cpu => Card::cpu(8, 4e11, 1e10, 4e10),
    }
}

/// A point that was planned in full.
#[derive(Clone, Copy, Debug)]
struct Planned {
    tier: usize,
    bytes: u64,
    host_bytes: u64,
    pace: f64,
    changes: usize,
}

/// Every point of the space, each planned and predicted on its own.
fn brute_force(request: &Request<'_>, space: &Space) -> Vec<Planned> {
    let mut points = Vec::new();
    for (tier, resorts) in space.tiers().into_iter().enumerate() {
        for point in space.columns(&resorts).into_iter().flatten() {
            let config = space.config(request.config, &point);
            if is_sensible(&config, request.config) {
                let changes = space.num_changes(request.config, &point);
                let counts = space.recomputed(&config).into_iter();
                points.extend(counts.map(|count| (tier, config.clone(), count, changes)));
            }
        }
    }
    let asked = crate::asked_blocks(request.config);
    points
        .into_par_iter()
        .map(|(tier, config, count, changes)| {
            let config = with_recomputed(&config, count);
            let step = StepPlan::new(&config, request.machine, count).unwrap();
            let tokens = config.batch.effective_batch() * config.batch.seq_len;
            Planned {
                tier,
                bytes: step.total_bytes(),
                host_bytes: step.plan.host_bytes,
                pace: step.predict(request.card, false).seconds / tokens as f64,
                changes: changes + usize::from(asked.is_some_and(|asked| asked != count)),
            }
        })
        .collect()
}

/// The rule of the objective, word for word.
fn best_of(points: &[Planned], budget: u64) -> Option<Planned> {
    let fits: Vec<&Planned> = points.iter().filter(|p| p.bytes <= budget).collect();
    let tier = fits.iter().map(|p| p.tier).min()?;
    let in_tier = || fits.iter().filter(|p| p.tier == tier);
    let fastest = in_tier().map(|p| p.pace).fold(f64::INFINITY, f64::min);
    let same = fastest * (1.0 + SAME_SPEED);
    let best = in_tier().filter(|p| p.pace <= same);
    best.min_by_key(|p| (p.host_bytes, p.bytes, p.changes))
        .map(|p| **p)
}

const FIXABLE: [&str; 8] = [
    "vram.batch_size",
    "vram.checkpointing",
    "vram.loss_chunk",
    "vram.optimizer_states",
    "vram.update_in_backward",
    "vram.use_cpu_offload",
    "vram.max_seq_len",
    "model.scan_chunk",
];

#[derive(Clone, Debug)]
struct Case {
    model: &'static str,
    target: Target,
    layers: usize,
    width: usize,
    seq_len: usize,
    micro: usize,
    accumulation: usize,
    fixed: Vec<&'static str>,
    permissions: [Permission; 2],
    ranks: usize,
    /// Where the budget lies between the smallest and the largest plan.
    budget: f64,
}

fn permission() -> impl Strategy<Value = Permission> {
    use Permission::{Free, LastResort, Never};
    prop::sample::select(vec![Never, LastResort, Free])
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (1_usize..7, 1_usize..4, prop::sample::select(vec![96, 160]));
    let batch = (1_usize..5, 1_usize..4);
    let fixed = prop::sample::subsequence(FIXABLE.to_vec(), 1..=FIXABLE.len());
    let permissions = [permission(), permission()];
    let kinds = (
        prop::sample::select(vec!["mamba", "gpt2"]),
        prop::sample::select(vec![Target::Cpu, Target::Cuda]),
        prop::sample::select(vec![1_usize, 1, 3]),
    );
    (kinds, shape, batch, fixed, permissions, -0.05..1.1_f64).prop_map(
        |(kinds, shape, batch, fixed, permissions, budget)| Case {
            model: kinds.0,
            target: kinds.1,
            ranks: kinds.2,
            layers: shape.0,
            width: 32 * shape.1,
            seq_len: shape.2,
            micro: batch.0,
            accumulation: batch.1,
            fixed,
            permissions,
            budget,
        },
    )
}

impl Case {
    fn config(&self) -> Config {
        let text = |number: usize| number.to_string();
        let (layers, width, seq_len) = (text(self.layers), text(self.width), text(self.seq_len));
        let (micro, accumulation) = (text(self.micro), text(self.accumulation));
        let ranks = text(self.ranks);
        let precision = match self.target {
            Target::Cpu => "fp32",
            Target::Cuda => "bf16",
        };
        config(&[
            ("model.type", self.model),
            ("model.size", "tiny"),
            ("model.n_layers", &layers),
            ("model.d_model", &width),
            ("model.max_seq_len", "512"),
            ("vram.max_seq_len", &seq_len),
            ("vram.batch_size", &micro),
            ("vram.gradient_accumulation_steps", &accumulation),
            ("vram.precision", precision),
            ("vram.checkpointing", "1"),
            ("world.ranks", &ranks),
        ])
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_search_equals_brute_force(case in case()) {
        let config = case.config();
        let card = card(case.target);
        let mut request = Request::new(&config, &card, 0);
        // A small overhead, so that a budget is about the model.
        request.machine.overhead_bytes = 1 << 20;
        request.fixed = case.fixed.clone();
        [request.permissions.states, request.permissions.sequence_length] = case.permissions;
        let space = Space::new(&request).unwrap();
        let points = brute_force(&request, &space);
        let least = points.iter().map(|p| p.bytes).min().unwrap() as f64;
        let most = points.iter().map(|p| p.bytes).max().unwrap() as f64;
        request.memory_bytes = (least + case.budget * (most - least)).max(0.0) as u64;
        request.budget_bytes = request.memory_bytes;
        let expected = best_of(&points, request.budget_bytes);
        match (best(&request), expected) {
            (Ok(step), Some(expected)) => {
                let batch = &step.config.batch;
                let tokens = batch.effective_batch() * batch.seq_len;
                let pace = step.predict(&card, false).seconds / tokens as f64;
                prop_assert!(step.total_bytes() <= request.budget_bytes);
                prop_assert_eq!(batch.effective_batch(), config.batch.effective_batch());
                prop_assert_eq!(step.total_bytes(), expected.bytes);
                prop_assert!((pace / expected.pace - 1.0).abs() <= SAME_SPEED);
                let shorter = batch.seq_len < config.batch.seq_len;
                let may_shorten = request.permissions.sequence_length != Permission::Never
                    && !request.fixed.contains(&"vram.max_seq_len");
                prop_assert!(may_shorten || !shorter);
            }
            (Err(FitError::DoesNotFit(_)), None) => {}
            (found, expected) => {
                prop_assert!(false, "{:?} against {expected:?}", found.map(|s| s.total_bytes()));
            }
        }
    }
}

fn gib(gib: u64) -> u64 {
    Bytes::from_gib(gib).get()
}

fn named(model: &str, size: &str) -> Config {
    config(&[("model.type", model), ("model.size", size)])
}

/// What a report says of its own recommendation, ladder, front and techniques holds against
/// plans that are made anew. Models whose blocks are no chain are planned whole at every step of
/// the search, which takes minutes for the embedder.
#[test]
fn a_report_holds_for_every_size() {
    for (family, size) in cinch_architecture::trained_sizes() {
        let config = named(family.name, size.name);
        if !config.model.is_chain() {
            continue;
        }
        let card = Card::known("RTX 3090").unwrap();
        let mut request = Request::new(&config, &card, gib(24));
        request.budget_bytes = budget_with_margin(gib(24), 0.05).unwrap();
        request.effective_batch = Some(24);
        let fit = fit(&request).unwrap();
        let report = &fit.report;
        let best = &report.recommended;
        let title = family.title_of(size);
        assert!(best.total_bytes <= request.budget_bytes, "{title}");
        assert_eq!(best.total_bytes, best.breakdown.total(), "{title}");
        assert_eq!(best.settings.effective_batch, 24, "{title}");
        if let Some(positions) = config.model.positions() {
            assert_eq!(best.settings.seq_len as u64, positions, "{title}");
        }
        assert!(report.notes.is_empty(), "{title}: {:?}", report.notes);
        let blocks = best.settings.checkpointing.blocks;
        let again = StepPlan::new(fit.config(), request.machine, blocks).unwrap();
        assert_eq!(again.total_bytes(), best.total_bytes, "{title}");
        let rungs = &report.ladder;
        for pair in rungs.windows(2) {
            let [lower, upper] = [&pair[0], &pair[1]].map(|rung| rung.outcome.as_ref());
            let (Some(lower), Some(upper)) = (lower, upper) else {
                assert!(lower.is_none(), "{title}: a larger share holds no less");
                continue;
            };
            let slack = 1.0 + SAME_SPEED;
            assert!(
                lower.tokens_per_second <= upper.tokens_per_second * slack,
                "{title}"
            );
        }
        for rung in rungs {
            let bytes = rung
                .outcome
                .as_ref()
                .map_or(0, |outcome| outcome.total_bytes);
            assert!(bytes <= rung.budget_bytes, "{title} {}", rung.name);
        }
        assert_eq!(rungs[3].outcome.as_ref(), Some(best), "{title}");
        assert!((1..=8).contains(&report.front.len()), "{title}");
        for pair in report.front.windows(2) {
            assert!(pair[0].total_bytes < pair[1].total_bytes, "{title}");
            assert!(
                pair[0].tokens_per_second < pair[1].tokens_per_second,
                "{title}"
            );
        }
        let marked = report.front.iter().filter(|point| *point == best);
        assert_eq!(marked.count(), 1, "{title}");
        let keys: Vec<&str> = report.values.iter().map(|value| value.key).collect();
        assert!(keys.contains(&"vram.batch_size") && keys.contains(&"vram.checkpointing"));
    }
}

/// A technique's bytes and speed are those of the two plans beside each other.
#[test]
fn a_technique_is_the_difference_of_two_plans() {
    let config = named("mamba", "small");
    let card = Card::known("RTX 3070").unwrap();
    let request = Request::new(&config, &card, gib(8));
    let fit = fit(&request).unwrap();
    let report = &fit.report;
    let full = report
        .techniques
        .iter()
        .find(|t| t.change == "recompute 8 of 8 blocks");
    let full = full.unwrap();
    let step = StepPlan::new(fit.config(), request.machine, 8).unwrap();
    let bytes = step.total_bytes() as i64 - fit.plan.total_bytes() as i64;
    assert_eq!(full.bytes, bytes);
    let seconds = |step: &StepPlan| step.predict(&card, false).seconds;
    let speed = seconds(&fit.plan) / seconds(&step) - 1.0;
    assert!((full.speed - speed).abs() < 1e-12 && full.bytes < 0 && full.speed < 0.0);
    let size = Bytes::new(bytes.unsigned_abs());
    let expected = format!("recompute 8 of 8 blocks: −{size}, −{:.1} %", -100.0 * speed);
    assert_eq!(full.text(), expected);
}

/// So is that of activations in host memory, which is told where blocks are recomputed and the bus has
/// time for them.
#[test]
fn activations_in_host_memory_are_offered_where_they_gain() {
    let stated = [
        ("model.type", "qwen2.5-7b"),
        ("lora.rank", "128"),
        ("vram.batch_size", "1"),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.max_seq_len", "1536"),
    ];
    let config = config(&stated);
    let card = Card::known("H200").unwrap();
    let offered = |gibibytes, fixed: &[&'static str]| {
        let mut request = Request::new(&config, &card, gib(gibibytes));
        request.fixed = fixed.to_vec();
        let fit = fit(&request).unwrap();
        let mut techniques = fit.report.techniques.iter();
        let stored = techniques.find(|t| t.change.contains("activations of"));
        (stored.cloned(), fit)
    };
    let (stored, fit) = offered(22, &[]);
    let stored = stored.unwrap();
    let mut other = fit.config().clone();
    other.batch.offload_activations = stored.values[0].value.as_ref().unwrap().parse().unwrap();
    let blocks = fit.report.recommended.settings.checkpointing.blocks;
    let step = StepPlan::new(&other, cinch_step::StepTarget::from(card.target), blocks).unwrap();
    let seconds = |step: &StepPlan| step.predict(&card, false).seconds;
    let speed = seconds(&fit.plan) / seconds(&step) - 1.0;
    assert!(
        (stored.speed - speed).abs() < 1e-12 && speed > 0.02,
        "{speed}"
    );
    assert_eq!(stored.fits, step.total_bytes() <= gib(22));
    assert_eq!(stored.host_bytes as u64, step.plan.host_bytes);
    let host = format!(
        " and {} of host memory, +",
        Bytes::new(step.plan.host_bytes)
    );
    assert!(stored.text().contains(&host), "{}", stored.text());
    assert!(offered(22, &["vram.offload_activations"]).0.is_none());
    assert!(offered(100, &[]).0.is_none(), "nothing is recomputed");
}

#[test]
fn eight_gigabytes_keep_the_batch_and_the_sequence() {
    let config = named("mamba", "small");
    let card = Card::known("RTX 3070").unwrap();
    let fit = fit(&Request::new(&config, &card, gib(8))).unwrap();
    let settings = &fit.report.recommended.settings;
    assert_eq!((settings.effective_batch, settings.seq_len), (16, 1024));
    assert_eq!(settings.optimizer_states, "fp32");
}

#[test]
fn an_effective_batch_is_exact_or_the_nearest_are_offered() {
    let config = config(&[("vram.batch_size", "3")]);
    let card = Card::known("H200").unwrap();
    let mut request = Request::new(&config, &card, gib(100));
    request.effective_batch = Some(256);
    request.fixed = vec!["vram.batch_size"];
    let message = best(&request).unwrap_err().to_string();
    assert_eq!(
        message,
        "an effective batch of 256 cannot be had exactly with vram.batch_size = 3\n\
         hint: the nearest that can is 255 or 258; or leave the micro batch and the accumulation open"
    );
    request.effective_batch = Some(255);
    let batch = best(&request).unwrap().config.batch.clone();
    assert_eq!((batch.batch_size, batch.accumulation), (3, 85));
    request.fixed = vec!["vram.batch_size", "vram.gradient_accumulation_steps"];
    let error = best(&request).unwrap_err().to_string();
    assert!(
        error.contains(
            "= 3 and vram.gradient_accumulation_steps = 5\nhint: the nearest that can is 15;"
        ),
        "{error}"
    );
}

#[test]
fn a_margin_is_a_share() {
    assert_eq!(budget_with_margin(1000, 0.1).unwrap(), 900);
    for margin in [1.0, -0.1, f64::NAN, 7.0] {
        assert!(matches!(
            budget_with_margin(1000, margin),
            Err(FitError::Margin { .. })
        ));
    }
}

#[test]
fn the_precision_is_the_cards_best_unless_stated() {
    let config = named("mamba", "small");
    for (name, expected) in [("RTX 3090", "bf16"), ("T4", "fp16")] {
        let card = Card::known(name).unwrap();
        let step = best(&Request::new(&config, &card, gib(14))).unwrap();
        assert_eq!(step.config.batch.precision.name(), expected);
        let mut request = Request::new(&config, &card, gib(14));
        request.fixed = vec!["vram.precision"];
        assert_eq!(
            best(&request).unwrap().config.batch.precision.name(),
            "fp32"
        );
    }
}

/// What changes the result is taken where nothing else fits, and that is said; not where it is
/// forbidden.
#[test]
fn a_last_resort_is_taken_last_and_said() {
    let config = config(&[
        ("model.type", "gpt2"),
        ("vram.batch_size", "1"),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.checkpointing", "none"),
        ("vram.loss_chunk", "1024"),
    ]);
    let card = Card::known("RTX 3070").unwrap();
    let mut request = Request::new(&config, &card, gib(20));
    request.fixed = vec![
        "vram.checkpointing",
        "vram.loss_chunk",
        "vram.use_cpu_offload",
        "vram.update_in_backward",
    ];
    let smallest = fit(&request).unwrap().report.front[0].total_bytes;
    request.memory_bytes = smallest - 1;
    request.budget_bytes = request.memory_bytes;
    let found = fit(&request).unwrap().report;
    let settings = &found.recommended.settings;
    assert!(settings.seq_len < 1024 || settings.optimizer_states == "8bit");
    assert!(!found.notes.is_empty());
    assert!(
        found.notes[0].starts_with("nothing with "),
        "{:?}",
        found.notes
    );
    request.permissions = Permissions {
        states: Permission::Never,
        sequence_length: Permission::Never,
        precisions: None,
    };
    let Err(FitError::DoesNotFit(answer)) = best(&request) else {
        panic!("nothing is left to try");
    };
    assert_eq!(answer.budget_bytes, smallest - 1);
    assert!(answer.needed_bytes > answer.budget_bytes);
    let mut offered = answer.changes.iter().map(|change| &change.change);
    assert!(offered.any(|change| change.starts_with("--seq-len 512")));
}

/// More sequences at once take no less memory, but for the planner's own choice of logits: what
/// the search leaves out beyond the limit rests on it.
#[test]
fn memory_grows_with_the_micro_batch() {
    for (model, size) in [("mamba", "small"), ("mamba", "large"), ("gpt2", "gpt2")] {
        for target in [Target::Cpu, Target::Cuda] {
            let mut config = named(model, size);
            let mut most = 0;
            for micro in 1..=24 {
                config.batch.batch_size = micro;
                let step = StepPlan::new(&config, target, config.model.num_blocks()).unwrap();
                let bytes = step.total_bytes();
                assert!(
                    bytes + cinch_step::CUDA_CHUNK_BYTES >= most,
                    "{model} {micro}"
                );
                most = most.max(bytes);
            }
        }
    }
}
