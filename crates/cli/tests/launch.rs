//! Several processes that train as one, on this machine and over its loopback only: the same
//! result as one process, one record, and no process left, however they end.
#![cfg(target_os = "linux")]

mod common;

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Ran, Sandbox, checkpoints, metrics, signal};

/// Longer than anything here takes on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(120);

/// A model that takes a millisecond a step, in an effective batch of 8.
fn train<'a>(accumulation: &'a str, line: &'a str) -> Vec<&'a str> {
    let model = "train --set model.d_model=32 --set model.n_layers=2 --set model.max_seq_len=64 \
                 --set model.vocab_size=257 --tokenizer bytes --seq-len 32 --batch-size 2 --lr 3e-3 \
                 --threads 1 --log-steps 1 --grad-accum";
    let words = model.split_whitespace().chain([accumulation]);
    words.chain(line.split_whitespace()).collect()
}

fn launch<'a>(ranks: &'a str, train: Vec<&'a str>) -> Vec<&'a str> {
    ["launch", "--ranks", ranks, "--"]
        .into_iter()
        .chain(train)
        .collect()
}

/// Losses of training and validation.
fn losses(run: &Path) -> Vec<f64> {
    let loss = |line: serde_json::Value| {
        let loss = line.get("loss").or(line.get("validation_loss"));
        loss.and_then(serde_json::Value::as_f64).expect("a loss")
    };
    metrics(run).into_iter().map(loss).collect()
}

#[test]
fn two_processes_are_one_run() {
    let sandbox = Sandbox::new();
    let line = "--max-steps 6 --eval-steps 3 --set training.eval_batches=3 --output-dir";
    let alone = format!("{line} alone");
    sandbox.run(train("4", &alone)).succeeds();
    for (name, shard) in [("replicas", "ddp"), ("cut", "zero3")] {
        let together = format!("{line} {name} --shard {shard}");
        let ran = sandbox.run(launch("2", train("2", &together))).succeeds();
        assert_eq!(
            ran.stdout.matches("checkpoint: ").count(),
            1,
            "{}",
            ran.stdout
        );
        let (one, other) = (losses(&sandbox.join("alone")), losses(&sandbox.join(name)));
        assert_eq!(one.len(), other.len());
        for (a, b) in one.iter().zip(&other) {
            assert!((a - b).abs() < 1e-5 * a.abs(), "{one:?}\n{other:?}");
        }
        // It goes on by itself, with the effective batch that it had.
        sandbox
            .run([
                "train",
                "--resume",
                name,
                "--max-steps",
                "8",
                "--threads",
                "1",
            ])
            .succeeds();
    }
}

/// What every rank did is in the run's folder, on its page and on the monitor's screen.
#[test]
fn all_ranks_are_shown() {
    let sandbox = Sandbox::new();
    let line = "--max-steps 4 --eval-steps 0 --output-dir run";
    let ran = sandbox.run(launch("2", train("2", line))).succeeds();
    assert!(ran.stdout.contains("on each of 2 ranks"), "{}", ran.stdout);
    let seen = sandbox
        .run(["monitor", "--run", "run", "--once"])
        .succeeds();
    for part in ["2 ranks, ", "computes", "1 thread"] {
        assert!(seen.stdout.contains(part), "{}", seen.stdout);
    }
    let seen = sandbox.run(["monitor", "--run", "run", "--once", "--json"]);
    let seen: serde_json::Value = serde_json::from_str(&seen.succeeds().stdout).expect("JSON");
    let ranks = &seen["run"]["ranks"];
    assert_eq!((&ranks["steps"], &ranks["step"]), (&4.into(), &4.into()));
    assert_eq!(ranks["rows"].as_array().expect("rows").len(), 2);
    assert!(seen["run"]["slowest_rank"]["rank"].is_u64(), "{seen}");
    sandbox.run(["report", "run"]).succeeds();
    let page = fs::read_to_string(sandbox.join("run.html")).expect("a page");
    for part in [
        "Ranks",
        "computes",
        "1 thread",
        "Computing in a step, by rank",
    ] {
        assert!(page.contains(part), "no {part}");
    }
}

/// A decoder of two blocks, without weights.
const DECODER: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": false}"#;

#[test]
fn adapters_and_frozen_weights_are_cut_too() {
    let sandbox = Sandbox::new();
    sandbox.write("decoder/config.json", DECODER);
    let line = "train --model decoder --tokenizer bytes --seq-len 32 --lr 1e-2 --threads 1 \
                --log-steps 1 --eval-steps 0 --max-steps 4 --lora-rank 4 --weights initial \
                --batch-size 2";
    let arguments = |accumulation: &'static str, more: &'static str| {
        let words = line
            .split_whitespace()
            .chain(["--grad-accum", accumulation]);
        words.chain(more.split_whitespace()).collect::<Vec<_>>()
    };
    sandbox.run(arguments("4", "--output-dir alone")).succeeds();
    for (ranks, accumulation, more) in [
        ("2", "2", "--output-dir 2 --shard ddp"),
        ("4", "1", "--output-dir 4 --shard zero3"),
    ] {
        sandbox
            .run(launch(ranks, arguments(accumulation, more)))
            .succeeds();
        let (one, other) = (losses(&sandbox.join("alone")), losses(&sandbox.join(ranks)));
        assert_eq!(one.len(), other.len());
        for (a, b) in one.iter().zip(&other) {
            assert!((a - b).abs() < 1e-5 * a.abs(), "{one:?}\n{other:?}");
        }
    }
}

#[test]
fn the_others_are_heard_where_asked() {
    let sandbox = Sandbox::new();
    let mut arguments = vec!["launch", "--ranks", "2", "--log-all-ranks=said", "--"];
    arguments.extend(train("2", "--max-steps 2 --output-dir run"));
    sandbox.run(arguments).succeeds();
    let said = fs::read_to_string(sandbox.join("said/rank-1.log")).expect("a log");
    assert!(said.contains("2 steps"), "{said}");
}

/// The processes that a launcher has started, by rank.
fn ranks_of(launcher: &Child, num_ranks: usize) -> Vec<u32> {
    let path = format!("/proc/{0}/task/{0}/children", launcher.id());
    let begun = Instant::now();
    loop {
        let children = fs::read_to_string(&path).unwrap_or_default();
        let children: Vec<u32> = children
            .split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect();
        if children.len() == num_ranks {
            return children;
        }
        assert!(begun.elapsed() < PATIENCE, "{children:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Ended, or only not yet waited for.
fn is_gone(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(_) => true,
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with('Z')),
    }
}

fn kill(pid: u32, name: &str) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &pid.to_string()])
        .status();
    assert!(status.expect("kill starts").success());
}

/// A run that would go on for long, once it has saved something.
fn started(sandbox: &Sandbox, ranks: usize, shard: &str) -> (Child, Vec<u32>, PathBuf) {
    let line = format!(
        "--max-steps 1000000 --save-steps 5 --eval-steps 0 --shard {shard} --output-dir run"
    );
    let number = ranks.to_string();
    let child = sandbox.start(launch(&number, train("2", &line)));
    let processes = ranks_of(&child, ranks);
    let run = sandbox.join("run");
    let checkpoints = run.join("checkpoints");
    wait_until("nothing was saved", || {
        let names = fs::read_dir(&checkpoints).into_iter().flatten().flatten();
        names
            .map(|entry| entry.file_name())
            .any(|name| name.to_string_lossy().starts_with("step-"))
    });
    (child, processes, run)
}

fn ended(child: Child) -> Ran {
    let command = Command::new("cinch");
    Ran::new(&command, &child.wait_with_output().expect("it ends"))
}

/// The newest checkpoint is whole, and nothing else is there but what a killed writer left.
fn goes_on(sandbox: &Sandbox, run: &Path, ranks: &str) {
    let newest = checkpoints(run)
        .into_iter()
        .filter(|name| name.starts_with("step-"))
        .max();
    let step: u64 = newest.expect("a checkpoint")[5..].parse().expect("a step");
    let more = (step + 2).to_string();
    let resume = [
        "train",
        "--resume",
        "run",
        "--max-steps",
        &more,
        "--threads",
        "1",
    ];
    sandbox.run(launch(ranks, resume.into())).succeeds();
}

#[test]
fn a_killed_rank_ends_all_others_and_nothing_is_lost() {
    for (who, shard) in [(1, "ddp"), (0, "ddp"), (2, "zero2")] {
        let sandbox = Sandbox::new();
        let (child, processes, run) = started(&sandbox, 3, shard);
        kill(processes[who], "KILL");
        let begun = Instant::now();
        let ran = ended(child).exits(137).says(&[
            &format!("rank {who}"),
            "killed by signal 9",
            "the newest checkpoint is",
            "--resume run/checkpoints/step-",
        ]);
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", ran.stderr);
        assert!(processes.iter().all(|&pid| is_gone(pid)));
        goes_on(&sandbox, &run, "2");
    }
}

#[test]
fn a_stopped_rank_is_given_up() {
    let sandbox = Sandbox::new();
    let line = "--max-steps 1000000 --save-steps 5 --eval-steps 0 --output-dir run";
    let child = sandbox
        .command(launch("2", train("1", line)))
        .env("CINCH_SILENCE_SECONDS", "3")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let processes = ranks_of(&child, 2);
    wait_until("no step", || {
        fs::read_dir(sandbox.join("run/checkpoints")).is_ok()
    });
    kill(processes[1], "STOP");
    let ran = ended(child);
    assert_ne!(ran.code, Some(0));
    ran.says(&["rank 1", "has said nothing for 3 s"]);
    assert!(processes.iter().all(|&pid| is_gone(pid)));
}

#[test]
fn a_killed_launcher_leaves_no_process() {
    let sandbox = Sandbox::new();
    let (mut child, processes, run) = started(&sandbox, 2, "zero1");
    child.kill().expect("a child of ours can be killed");
    child.wait().expect("it ends");
    wait_until("a rank is left", || {
        processes.iter().all(|&pid| is_gone(pid))
    });
    goes_on(&sandbox, &run, "2");
}

#[test]
fn a_request_to_stop_saves_the_same_step_on_all_ranks() {
    for name in ["TERM", "INT", "USR1"] {
        let sandbox = Sandbox::new();
        let (child, processes, run) = started(&sandbox, 2, "zero1");
        signal(&child, name);
        ended(child)
            .exits(130)
            .prints(&["go on with: cinch train --resume run"]);
        assert!(processes.iter().all(|&pid| is_gone(pid)));
        assert!(
            checkpoints(&run)
                .iter()
                .all(|name| !name.starts_with(".partial"))
        );
        goes_on(&sandbox, &run, "4");
    }
}

/// One rank of two, as another launcher would start it.
fn rank(sandbox: &Sandbox, rank: &str, port: u16, line: &str) -> Child {
    sandbox
        .command(train("2", line))
        .envs([("RANK", rank), ("LOCAL_RANK", rank)])
        .envs([
            ("WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
        ])
        .env("MASTER_PORT", port.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

#[test]
fn ranks_that_were_told_different_things_say_which() {
    let sandbox = Sandbox::new();
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|socket| socket.local_addr());
    let port = port.expect("a port").port();
    let ranks = [("0", "--seed 1"), ("1", "--seed 2")];
    let ranks = ranks.map(|(number, seed)| {
        rank(
            &sandbox,
            number,
            port,
            &format!("{seed} --max-steps 2 --output-dir run"),
        )
    });
    for child in ranks {
        ended(child).fails(2, &["training.seed: 2 on rank 1, 1 on rank 0"]);
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let sandbox = Sandbox::new();
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a socket");
    let port = taken.local_addr().expect("an address").port();
    let child = rank(&sandbox, "0", port, "--max-steps 2 --output-dir run");
    ended(child).fails(1, &[&format!("127.0.0.1:{port}"), "in use", "MASTER_PORT"]);
}

#[test]
fn what_cannot_be_launched_is_told_once() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("launch --ranks 2 -- plan")
        .fails(2, &["starts `train`, not `plan`"]);
    sandbox.cinch("launch -- train").exits(2);
    let odd = "launch --ranks 3 -- train --model-size tiny --max-steps 2 --tokenizer bytes";
    let ran = sandbox
        .cinch(odd)
        .fails(2, &["3 ranks do not divide", "2 or 4 ranks do"]);
    assert_eq!(
        ran.stderr.matches("do not divide").count(),
        1,
        "{}",
        ran.stderr
    );
    let child = sandbox
        .command(["train"])
        .env("RANK", "1")
        .output()
        .expect("it starts");
    Ran::new(&Command::new("cinch"), &child).fails(2, &["WORLD_SIZE is not set"]);
}
