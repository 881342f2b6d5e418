//! The screens, drawn from recordings into a terminal of memory. A screen that changes is written
//! anew with `CINCH_UPDATE=1` and looked at in the diff.

use std::path::{Path, PathBuf};

use cinch_device::{GpuReading, Host, Process, ProcessKind, ReadBy};
use cinch_monitor::dashboard::{Action, State, View, draw};
use cinch_monitor::{ProcessFacts, Recording, Sample};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{
    Event, KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind,
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

fn shown(name: &str) -> State {
    let mut state = State::new(View::Machine);
    let mut recording = Recording::open(&fixture(name)).unwrap();
    while let Some(sample) = recording.next_sample().unwrap() {
        state.push(sample);
    }
    state
}

fn screen(state: &mut State, (width, height): (u16, u16)) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let mut text = String::new();
    for row in 0..height {
        let cells = (0..width).map(|column| buffer[(column, row)].symbol());
        text += cells.collect::<String>().trim_end();
        text.push('\n');
    }
    text
}

/// Compares with the screen that is kept.
#[track_caller]
fn is_kept(name: &str, screen: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/screens")
        .join(name);
    if std::env::var_os("CINCH_UPDATE").is_some() {
        std::fs::write(&path, screen).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    assert_eq!(kept, screen, "{name} differs from what is kept:\n{screen}");
}

fn key(state: &mut State, code: KeyCode) -> Action {
    state.answer(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)))
}

fn type_text(state: &mut State, text: &str) {
    for letter in text.chars() {
        key(state, KeyCode::Char(letter));
    }
}

#[test]
fn a_small_and_a_large_screen() {
    let mut state = shown("training.jsonl");
    let small = screen(&mut state, (80, 24));
    is_kept("training_80x24.txt", &small);
    let large = screen(&mut state, (200, 60));
    is_kept("training_200x60.txt", &large);
    for part in [
        "creep",
        "full in",
        "waiting for data",
        "4f2a91c0de77",
        "PCIe in",
    ] {
        assert!(large.contains(part), "no {part}\n{large}");
    }
}

#[test]
fn a_gpu_that_vanishes_and_one_that_hides_its_processes() {
    let mut state = State::new(View::Machine);
    let mut recording = Recording::open(&fixture("vanishing.jsonl")).unwrap();
    let mut screens = Vec::new();
    while let Some(sample) = recording.next_sample().unwrap() {
        state.push(sample);
        screens.push(screen(&mut state, (100, 24)));
    }
    is_kept("vanished_100x24.txt", &screens[12]);
    assert!(screens[12].contains("vanished"), "{}", screens[12]);
    let last = screens.last().unwrap();
    assert!(last.contains("cannot be read: GPU is lost"), "{last}");
    assert!(last.contains("no permission"), "{last}");
}

#[test]
fn without_a_gpu_the_host_and_runs_are_shown() {
    let mut state = shown("host.jsonl");
    let text = screen(&mut state, (80, 24));
    is_kept("host_80x24.txt", &text);
    for part in [
        "no GPU: no NVIDIA driver",
        "740.0 MiB",
        "735.0 MiB",
        "cinch train",
    ] {
        assert!(text.contains(part), "no {part}\n{text}");
    }
}

#[test]
fn a_run_is_shown_with_its_curves() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (1..=200)
        .map(|step| {
            let loss = 2.0 + 9.0 / f64::from(step + 1);
            format!(
                "{{\"step\":{step},\"loss\":{loss},\"tokens_per_second\":{},\"planned_bytes\":900000000,\"resident_bytes\":890000000}}\n",
                5000 + step % 7
            )
        })
        .collect();
    std::fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
    let mut state = State::new(View::Run(folder.path().to_owned()));
    let mut recording = Recording::open(&fixture("host.jsonl")).unwrap();
    state.push(recording.next_sample().unwrap().unwrap());
    for size in [(80, 24), (200, 60)] {
        let text = screen(&mut state, size);
        for part in [
            "step 200",
            "loss 2.04",
            "tokens/s",
            "memory against plan",
            "(98.9",
        ] {
            assert!(text.contains(part), "no {part}\n{text}");
        }
    }
    std::fs::remove_file(folder.path().join("metrics.jsonl")).unwrap();
    state.push(recording.next_sample().unwrap().unwrap());
    let text = screen(&mut state, (80, 24));
    assert!(text.contains("cannot read"), "{text}");
}

/// Four ranks, of which the third computes longest.
#[test]
fn the_ranks_of_a_run_are_shown_and_the_slowest_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (1..=20)
        .map(|step| {
            format!(
                "{{\"step\":{step},\"loss\":{},\"tokens_per_second\":900,\"planned_bytes\":900000000,\"resident_bytes\":890000000}}\n",
                8.0 - 0.1 * f64::from(step)
            )
        })
        .collect();
    std::fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
    let member = |rank: u32| {
        format!(
            "{{\"host\":\"node-{}\",\"process\":{},\"device\":\"NVIDIA H100 80GB HBM3\"}}",
            rank / 2,
            4000 + rank
        )
    };
    let members: Vec<String> = (0..4).map(member).collect();
    let ranks = format!(
        "{{\"step\":0,\"members\":[{}],\"planned_bytes\":900000000}}\n\
         {{\"step\":20,\"steps\":20,\"seconds\":[20,20,20,20],\"waited_seconds\":[12,11,1,12.5],\
         \"resident_bytes\":[890000000,880000000,895000000,null]}}\n",
        members.join(",")
    );
    std::fs::write(folder.path().join("ranks.jsonl"), ranks).unwrap();
    let mut state = State::new(View::Run(folder.path().to_owned()));
    let mut recording = Recording::open(&fixture("host.jsonl")).unwrap();
    state.push(recording.next_sample().unwrap().unwrap());
    let text = screen(&mut state, (80, 24));
    // The folder's own name is another in every run.
    let below: Vec<&str> = text.lines().skip(2).collect();
    is_kept("ranks_80x24.txt", &(below.join("\n") + "\n"));
    assert!(
        text.contains("4 ranks, slowest: rank 2 on node-1 (process 4002)"),
        "{text}"
    );
    for width in [1, 40, 80, 200] {
        for height in 1..=40 {
            screen(&mut state, (width, height));
        }
    }
}

#[test]
fn keys_sort_filter_select_and_pause() {
    let mut state = shown("training.jsonl");
    let before = screen(&mut state, (120, 30));
    let place = |text: &str, part: &str| text.find(part).unwrap_or(usize::MAX);
    assert!(place(&before, "train.py") < place(&before, "cinch train"));
    key(&mut state, KeyCode::Char('p'));
    let by_pid = screen(&mut state, (120, 30));
    assert!(
        place(&by_pid, "cinch train") < place(&by_pid, "train.py"),
        "{by_pid}"
    );
    key(&mut state, KeyCode::Char('/'));
    type_text(&mut state, "BOB");
    key(&mut state, KeyCode::Enter);
    let filtered = screen(&mut state, (120, 30));
    assert!(
        filtered.contains("train.py") && !filtered.contains("cinch train"),
        "{filtered}"
    );
    type_text(&mut state, "/zzz");
    assert!(screen(&mut state, (120, 30)).contains("no process matches"));
    key(&mut state, KeyCode::Esc);
    key(&mut state, KeyCode::Tab);
    assert!(screen(&mut state, (120, 30)).contains("GPU 1 NVIDIA H200: memory"));
    key(&mut state, KeyCode::Char('o'));
    let only = screen(&mut state, (120, 30));
    assert!(
        only.contains("torch.d") && !only.contains("cinch train"),
        "{only}"
    );
    key(&mut state, KeyCode::Char('?'));
    assert!(screen(&mut state, (80, 24)).contains("No process is ever ended"));
    key(&mut state, KeyCode::Esc);
    key(&mut state, KeyCode::Char(' '));
    assert!(screen(&mut state, (80, 24)).contains("PAUSED"));
    assert_eq!(key(&mut state, KeyCode::Char('q')), Action::Leave);
    let suspend = KeyEvent::new(KeyCode::Char('z'), KeyModifiers::CONTROL);
    assert_eq!(state.answer(&Event::Key(suspend)), Action::Suspend);
}

#[test]
fn the_mouse_selects_a_gpu_and_sorts_by_a_title() {
    let mut state = shown("training.jsonl");
    let text = screen(&mut state, (120, 30));
    let click = |state: &mut State, column, row| {
        state.answer(&Event::Mouse(MouseEvent {
            kind: MouseEventKind::Down(MouseButton::Left),
            column,
            row,
            modifiers: KeyModifiers::NONE,
        }))
    };
    click(&mut state, 5, 2);
    assert!(screen(&mut state, (120, 30)).contains("GPU 1 NVIDIA H200: memory"));
    let row = text
        .lines()
        .position(|line| line.contains("PID") && line.contains("USER"));
    click(&mut state, 4, row.unwrap() as u16);
    assert!(screen(&mut state, (120, 30)).contains("PID▾"));
}

/// A frame of every size, with wild samples, draws without a panic.
#[test]
fn every_size_can_be_drawn() {
    for name in ["training.jsonl", "vanishing.jsonl", "host.jsonl"] {
        let mut state = shown(name);
        for width in (1..=220).step_by(13) {
            for height in 1..=64 {
                screen(&mut state, (width, height));
            }
        }
    }
    let mut empty = State::new(View::Machine);
    assert!(screen(&mut empty, (80, 24)).contains("reading"));
}

fn crowd(second: u64) -> Sample {
    const GIB: u64 = 1 << 30;
    let gpus = (0..16).map(|index| GpuReading {
        index,
        name: "NVIDIA H200".to_owned(),
        total_bytes: Some(141 * GIB),
        used_bytes: Some(100 * GIB + second * (1 << 20)),
        free_bytes: Some(41 * GIB),
        utilization_percent: Some(80),
        processes: Some(
            (0..200)
                .map(|place| Process {
                    pid: (index * 200 + place) as u32 + 1000,
                    name: Some("python".to_owned()),
                    used_bytes: Some((place as u64 + 1) << 28),
                    kind: ProcessKind::Compute,
                })
                .collect(),
        ),
        ..GpuReading::default()
    });
    Sample {
        at: 1e9 + second as f64,
        seconds: second as f64,
        read_by: ReadBy::Nvml,
        reason: None,
        gpus: gpus.collect(),
        host: Host::default(),
        processes: (1000..4200)
            .map(|pid| ProcessFacts {
                pid,
                command: Some(format!("python train.py --rank {pid}")),
                user: Some("ann".to_owned()),
                ..ProcessFacts::default()
            })
            .collect(),
    }
}

#[test]
fn sixteen_gpus_with_two_hundred_processes_each() {
    let mut state = State::new(View::Machine);
    for second in 0..30 {
        state.push(crowd(second));
    }
    for size in [(80, 24), (200, 60)] {
        let text = screen(&mut state, size);
        assert!(text.contains("16 GPUs by NVML"), "{text}");
        assert!(text.contains("50.00 GiB"), "{text}");
    }
    key(&mut state, KeyCode::End);
    assert!(screen(&mut state, (200, 60)).contains("256.0 MiB"));
}

/// Processor time of a sample and a frame: `cargo test --release -p cinch-monitor -- --ignored
/// --nocapture`.
#[test]
#[ignore = "measures time"]
fn a_sample_of_a_crowd_costs_little() {
    let mut state = State::new(View::Machine);
    let samples: Vec<Sample> = (0..120).map(crowd).collect();
    let begin = std::time::Instant::now();
    for sample in samples {
        state.push(sample);
        screen(&mut state, (200, 60));
    }
    let each = begin.elapsed().as_secs_f64() / 120.0;
    let mut out = std::io::stderr();
    let _ = std::io::Write::write_all(
        &mut out,
        format!("{:.2} ms a sample\n", each * 1e3).as_bytes(),
    );
    assert!(each < 0.02);
}
