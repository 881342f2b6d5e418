//! Frozen weights in host memory, fetched block by block: the same bits as in the arena, in the
//! memory that was planned.

mod account;
mod adapted;
mod tiny;

use account::Account;
use adapted::{BLOCKS, config, settings, trace};
use cinch_config::{Config, Precision};
use cinch_device::Card;
use cinch_engine::EngineOptions;
use cinch_graph::{Phase, Role, Target, verify};
use cinch_step::StepPlan;
use cinch_train::{Session, StepResult};

const AWAY: (&str, &str) = ("vram.offload_frozen", "true");

const KINDS: [&[(&str, &str)]; 4] = [
    &[],
    &[("lora.quantization", "4bit")],
    &[("lora.quantization", "8bit")],
    &[
        ("vram.update_in_backward", "true"),
        ("vram.gradient_accumulation_steps", "1"),
    ],
];

#[test]
fn fetched_weights_change_no_bit() {
    for kind in KINDS {
        for recomputed in [0, 2, 4] {
            let expected = trace(&config(&[kind]), recomputed);
            let away = trace(&config(&[kind, &[AWAY]]), recomputed);
            assert_ne!(expected.steps[0], expected.steps[3], "nothing was learned");
            assert!(away == expected, "{kind:?}, {recomputed} recomputed");
        }
    }
}

fn offloaded_bytes(plan: &StepPlan) -> u64 {
    let tensors = plan.training.tensors.iter();
    let offloaded = tensors.filter(|tensor| tensor.role == Role::Offloaded);
    let aligned = offloaded.map(|tensor| cinch_graph::aligned(tensor.ty.bytes()));
    aligned.sum()
}

#[test]
fn what_is_planned_is_allocated_and_two_blocks_are_staged() {
    for kind in KINDS {
        let here = StepPlan::new(&config(&[kind]), Target::Cpu, BLOCKS).unwrap();
        let session = tiny::session(&config(&[kind, &[AWAY]]), BLOCKS, 1);
        let away = session.plan();
        verify(&away.training).unwrap();
        verify(&away.evaluation).unwrap();
        let offloaded = offloaded_bytes(away);
        assert_eq!(away.plan.host_bytes, offloaded);
        assert_eq!(away.host_memory().offloaded_weights, offloaded);
        let executor = session.engine().cpu().unwrap();
        assert_eq!(executor.arena().len() as u64, away.arena_bytes());
        assert_eq!(executor.host().len() as u64, offloaded);
        // Four blocks went, and no more than two came back at once.
        let persistent = here.plan.persistent_bytes - away.plan.persistent_bytes;
        assert_eq!(persistent, offloaded);
        let staged = away.arena_bytes() + offloaded - here.arena_bytes();
        assert!(staged <= offloaded / 2, "{staged} of {offloaded}");
    }
}

/// On a GPU the copies run beside the computing, and change no bit either.
#[test]
#[ignore = "needs a GPU"]
fn fetched_weights_change_no_bit_on_a_gpu() {
    let options = EngineOptions {
        deterministic: true,
        ..EngineOptions::default()
    };
    for kind in KINDS {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let [here, away] = [&[][..], &[AWAY]].map(|own| {
                let mut config = config(&[kind, own]);
                config.batch.precision = precision;
                let mut session = tiny::session_on(Target::Cuda, &config, 2, options);
                let results = (0..6).map(|step| {
                    let batch = tiny::batch(&config, step);
                    session.train_step(&batch, step).unwrap()
                });
                let results: Vec<StepResult> = results.collect();
                (results, tiny::weights(&session))
            });
            assert_eq!(here.0, away.0, "{kind:?} in {precision:?}");
            assert!(here.1 == away.1, "{kind:?} in {precision:?}");
        }
    }
}

/// Each block is fetched once forward and once backward, but the last, whose weights are still
/// there.
#[test]
fn a_block_is_fetched_before_each_pass() {
    let plan = StepPlan::new(&config(&[&[AWAY]]), Target::Cpu, 2).unwrap();
    let fetches = plan
        .training
        .nodes
        .iter()
        .filter(|n| n.op.name() == "fetch");
    let forward = fetches.clone().filter(|n| n.phase == Phase::Forward);
    assert_eq!((forward.count(), fetches.count()), (4, 7));
}

/// A second set of books: nothing is overwritten while it is in use, and nothing dead is read.
#[test]
fn no_live_tensors_overlap() {
    for kind in KINDS {
        let config = config(&[kind, &[AWAY]]);
        let mut session: Session = tiny::session(&config, 2, 1);
        let mut account = Account::new(&session);
        let batch = tiny::batch(&config, 0);
        let mut after = |arena: &mut _, node| account.after(arena, node);
        session.train_step_observed(&batch, 0, &mut after).unwrap();
        account.close();
    }
}

/// The guide's run: 7B with adapters of rank 128, and what host memory saves of it.
#[test]
fn seven_billion_parameters_fit_beside_their_weights() {
    let here = settings(&[
        ("model.type", "qwen2.5-7b"),
        ("lora.rank", "128"),
        ("vram.batch_size", "1"),
        ("vram.gradient_accumulation_steps", "1"),
        ("vram.max_seq_len", "1536"),
        ("vram.precision", "bf16"),
    ]);
    let mut away = here.clone();
    away.batch.offload_frozen = true;
    let blocks = here.model.num_blocks();
    let plan = |config: &Config| StepPlan::new(config, Target::Cuda, blocks).unwrap();
    let (here, away) = (plan(&here), plan(&away));
    // q, k, v, o, gate, up and down of 28 layers, in bf16.
    let block = 3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944;
    let all = 2 * 28 * block;
    assert_eq!(away.plan.host_bytes, all);
    let saved = here.arena_bytes() - away.arena_bytes();
    assert!(saved >= all - 2 * all / 28, "{saved} of {all}");

    let card = &Card::known("NVIDIA GeForce RTX 4090").unwrap();
    let (fast, slow) = (here.predict(card, true), away.predict(card, true));
    let bus = 55.0 * (all / 28) as f64 / card.host_bandwidth;
    assert!(
        slow.seconds >= bus,
        "{} s over a bus that takes {bus} s",
        slow.seconds
    );
    let waited = slow.by_op["fetch"];
    assert!((slow.seconds - fast.seconds - waited).abs() < 1e-9);
}
