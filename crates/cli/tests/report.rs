//! `cinch report`: pages that need no network, driven in headless Chromium where one is installed.

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Sandbox;

fn recording() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../monitor/tests/fixtures");
    folder.join("training.jsonl").display().to_string()
}

/// A page of each kind, with the number of its charts.
fn pages(sandbox: &Sandbox) -> Vec<(PathBuf, usize)> {
    sandbox
        .train_tiny("--max-steps 30 --log-steps 1 --eval-steps 10 --output-dir runs/tiny")
        .succeeds();
    sandbox.write(
        "cinch.yaml",
        "model:\n  type: gpt2\nvram:\n  batch_size: 4\n  max_seq_len: 256\n",
    );
    let trainer = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nbf16: true\nmodel_name_or_path: gpt2\n";
    sandbox.write("trainer.yaml", trainer);
    let recording = recording();
    let steps: Vec<String> = (0..100)
        .map(|step| {
            format!(
                "{{'loss': {}, 'step': {step}, 'memory/max_active (GiB)': {}}}\n",
                3.0 - 0.01 * f64::from(step),
                4.0 + 0.1 * f64::from(step)
            )
        })
        .collect();
    let log = format!(
        "***** Running training *****\n  Instantaneous batch size per device = 4\n{}{}",
        steps.concat(),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 14.74 GiB of which 100.00 MiB is free. Of the allocated memory 14.20 GiB is allocated by PyTorch, and 40.00 MiB is reserved by PyTorch but unallocated.\n"
    );
    sandbox.write("train.log", &log);
    for line in [
        vec!["report", "train.log"],
        vec!["report", "runs/tiny"],
        vec![
            "report",
            "cinch.yaml",
            "--gpu",
            "RTX 4090",
            "--output",
            "plan.html",
        ],
        vec![
            "report",
            "trainer.yaml",
            "--gpu-memory",
            "24",
            "--output",
            "pytorch.html",
        ],
        vec!["report", &recording, "--output", "recording.html"],
    ] {
        sandbox.run(line).succeeds().prints(&["wrote ", ".html"]);
    }
    [
        ("runs/tiny.html", 4),
        ("plan.html", 1),
        ("pytorch.html", 1),
        ("recording.html", 5),
        ("train.html", 2),
    ]
    .map(|(name, charts)| (sandbox.join(name), charts))
    .to_vec()
}

#[test]
fn pages_are_whole_and_small() {
    let sandbox = Sandbox::new();
    for (path, charts) in pages(&sandbox) {
        let html = fs::read_to_string(&path).unwrap();
        assert!(html.len() < 1_000_000, "{}: {}", path.display(), html.len());
        assert_eq!(
            html.matches("<figure class=\"chart\"").count(),
            charts,
            "{}",
            path.display()
        );
        // Nothing is loaded: the only address is the name of SVG's elements.
        let addresses: Vec<_> = html
            .match_indices("http")
            .map(|(at, _)| &html[at..at + 30])
            .collect();
        let is_name = |text: &&str| {
            text.starts_with("http://www.w3.org/2000/svg") || text.starts_with("http-equiv")
        };
        assert!(addresses.iter().all(is_name), "{addresses:?}");
    }
    let read = |name: &str| fs::read_to_string(sandbox.join(name)).unwrap();
    let run = read("runs/tiny.html");
    for part in [
        "Plan against measurement",
        "validation",
        "The run stayed within its plan",
        "vram.batch_size",
        "alive at the peak",
    ] {
        assert!(run.contains(part), "no {part}");
    }
    let plan = read("plan.html");
    for part in [
        "The ladder",
        "cinch.yaml",
        "activations",
        "\"name\":\"peak\"",
        "safe",
    ] {
        assert!(plan.contains(part), "no {part}");
    }
    assert!(read("pytorch.html").contains("What each change would do"));
    let log = read("train.html");
    for part in [
        "Diagnosis",
        "leak",
        "climbed by 102.4 MiB a step",
        "What will not help",
        "Loss over the steps",
        "per_device_train_batch_size",
    ] {
        assert!(log.contains(part), "no {part}");
    }
    assert!(run.contains("Diagnosis"));
    for part in ["creep", "waiting for data", "steady", "train.py"] {
        assert!(read("recording.html").contains(part), "no {part}");
    }
}

#[test]
fn what_is_no_subject_is_told() {
    let sandbox = Sandbox::new();
    sandbox
        .cinch("report nowhere")
        .fails(2, &["there is no nowhere", "hint:"]);
    sandbox.write("empty.log", "");
    sandbox
        .cinch("report empty.log")
        .fails(2, &["empty.log is empty", "hint: name a log"]);
    sandbox.write("empty.jsonl", "");
    let ran = sandbox.cinch("report empty.jsonl");
    assert_ne!(ran.code, Some(0));
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
}

#[test]
fn a_live_run_is_served_on_this_machine() {
    let sandbox = Sandbox::new();
    sandbox
        .train_tiny("--max-steps 5 --log-steps 1 --output-dir runs/tiny")
        .succeeds();
    let mut child = sandbox.start(["report", "runs/tiny", "--serve"]);
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let address = line
        .trim()
        .trim_start_matches("http://")
        .trim_end_matches('/')
        .to_owned();
    let ask = |path: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes())
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let (page, before) = (ask("/"), ask("/body"));
    // A step more is there at the next question.
    let metrics = sandbox.join("runs/tiny/metrics.jsonl");
    let mut file = fs::OpenOptions::new().append(true).open(metrics).unwrap();
    file.write_all(b"{\"step\":4242,\"loss\":1.5}\n").unwrap();
    let after = ask("/body");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(address.starts_with("127.0.0.1:"), "{line}");
    assert!(page.contains("data-refresh=\"3\"") && page.contains("connect-src 'self'"));
    assert!(
        !before.contains("4242") && after.contains("step 4242"),
        "{after}"
    );
}

/// Reads a value under the pointer, one by keys, zooms and goes back, and changes the theme; what
/// went wrong is written into the page.
const DRIVE: &str = r#"<script>
const failures = [];
const check = (holds, what) => { if (!holds) failures.push(what); };
try {
  const figures = [...document.querySelectorAll("figure.chart")];
  for (const figure of figures) {
    const svg = () => figure.querySelector("svg");
    const readout = () => figure.querySelector(".readout").textContent;
    check(svg(), "no svg in " + figure.id);
    if (!svg()) continue;
    const box = svg().getBoundingClientRect();
    const at = (share) => ({ clientX: box.left + box.width * share, clientY: box.top + box.height / 2, bubbles: true });
    svg().dispatchEvent(new PointerEvent("pointermove", at(0.5)));
    check(readout().length > 5, "nothing under the pointer in " + figure.id);
    const key = (name) => figure.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
    key("Home");
    const first = readout();
    key("End");
    check(readout() !== first || figure.querySelectorAll("polyline").length === 0, "keys do not move in " + figure.id);
    const ticks = () => [...figure.querySelectorAll("svg > text")].map((text) => text.textContent).join("|");
    const whole = ticks();
    key("+"); key("+");
    check(ticks() !== whole, "no zoom by keys in " + figure.id);
    key("0");
    check(ticks() === whole, "no way back in " + figure.id);
    svg().dispatchEvent(new PointerEvent("pointerdown", { ...at(0.4), buttons: 1 }));
    svg().dispatchEvent(new PointerEvent("pointermove", { ...at(0.6), buttons: 1 }));
    svg().dispatchEvent(new PointerEvent("pointerup", at(0.6)));
    check(ticks() !== whole, "no zoom by dragging in " + figure.id);
    figure.querySelectorAll(".tools button")[2].click();
    check(ticks() === whole, "the button does not go back in " + figure.id);
  }
  const paper = () => getComputedStyle(document.body).backgroundColor;
  const before = paper();
  document.getElementById("theme").click();
  check(paper() !== before, "the theme does not change");
  check(document.documentElement.scrollWidth <= window.innerWidth, "wider than the window: " + document.documentElement.scrollWidth);
} catch (error) { failures.push(String(error)); }
document.body.append(Object.assign(document.createElement("output"), { textContent: "driven: " + (failures.join("; ") || "well") }));
</script></body>"#;

fn browser() -> Option<&'static str> {
    let names = [
        "chromium",
        "chromium-browser",
        "google-chrome",
        "google-chrome-stable",
    ];
    names.into_iter().find(|name| {
        let version = Command::new(name).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    })
}

#[test]
fn pages_work_in_a_browser() {
    let Some(browser) = browser() else {
        // Said, so that nobody takes the pages for driven.
        let _ = writeln!(
            std::io::stderr(),
            "no Chromium is installed: the pages were not opened in a browser"
        );
        return;
    };
    let sandbox = Sandbox::new();
    for (path, _) in pages(&sandbox) {
        let html = fs::read_to_string(&path).unwrap();
        let driven = path.with_extension("driven.html");
        fs::write(&driven, html.replace("</body>", DRIVE)).unwrap();
        for size in ["1280,1600", "500,900"] {
            let output = Command::new(browser)
                .args([
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                ])
                .args([
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--no-first-run",
                ])
                .args(["--enable-logging=stderr", "--v=0", "--dump-dom"])
                .arg(format!(
                    "--user-data-dir={}",
                    sandbox.join("profile").display()
                ))
                .arg(format!("--window-size={size}"))
                .arg(format!("file://{}", driven.display()))
                .output()
                .unwrap();
            let dom = String::from_utf8_lossy(&output.stdout);
            let log = String::from_utf8_lossy(&output.stderr);
            let outcome = dom
                .split("<output>")
                .nth(1)
                .and_then(|rest| rest.split("</output>").next());
            assert_eq!(
                outcome,
                Some("driven: well"),
                "{} at {size}\n{log}",
                path.display()
            );
            // A request would be refused by the page's own policy, and told on the console.
            let console: Vec<&str> = log
                .lines()
                .filter(|line| line.contains("CONSOLE"))
                .collect();
            assert!(console.is_empty(), "{console:?}");
        }
    }
}
