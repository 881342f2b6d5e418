//! `cinch check`: what a run will meet, before it starts. The exit code says go or no go.
//!
//! Nothing is started, changed or ended here: programs that hold the GPU are named, and what to
//! do about them is the user's decision.

mod files;

use cinch_config::{Bytes, Explained};
use cinch_device::{Machine, detect};
use cinch_fit::FitError;
use cinch_graph::Target;
use cinch_step::{HostMemory, StepPlan};
use serde::Serialize;
use serde_json::json;

use self::files::{check_data, check_disk, check_folder, check_model, check_rows};
use super::{print, print_json};
use crate::args::CheckArguments;
use crate::failure::NoGo;
use crate::run::{AskedRun, Origin};
use crate::unfollowed::before_figures;
use crate::{device, table, voice};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Good,
    /// Worth knowing; the run can start.
    Warning,
    /// The run would fail.
    Bad,
}

impl Verdict {
    fn mark(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Warning => "!",
            Self::Bad => "NO",
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Finding {
    topic: &'static str,
    verdict: Verdict,
    message: String,
}

struct Findings(Vec<Finding>);

impl Findings {
    fn add(&mut self, topic: &'static str, verdict: Verdict, message: impl Into<String>) {
        self.0.push(Finding {
            topic,
            verdict,
            message: message.into(),
        });
    }

    fn bad(&self) -> Vec<&'static str> {
        let bad = self.0.iter().filter(|one| one.verdict == Verdict::Bad);
        let mut topics: Vec<&'static str> = bad.map(|one| one.topic).collect();
        topics.dedup();
        topics
    }
}

pub fn run(arguments: &CheckArguments) -> anyhow::Result<()> {
    let target = device::train_target(arguments.device)?;
    let settings = arguments.settings.about(arguments.subject.as_deref())?;
    let asked = AskedRun::new(&settings, None, target, 1, |_| Ok(()))?;
    let config = &asked.config;
    let machine = detect();
    let mut findings = Findings(Vec::new());
    check_device(&mut findings, &machine, target);
    let (step, does_not_fit) = match asked.plan(&settings.plain.memory, target)? {
        Ok(step) => (Some(step), false),
        Err(FitError::DoesNotFit(answer)) => {
            findings.add("plan", Verdict::Bad, answer.to_string());
            (None, true)
        }
        Err(other) => return Err(other.into()),
    };
    if let Some(step) = &step {
        check_plan(&mut findings, step, asked.budget_name);
        check_free_memory(&mut findings, &machine, step, target);
        check_host(&mut findings, &machine, step, asked.samples_bytes());
        check_disk(&mut findings, step);
        check_model(&mut findings, step);
    }
    check_programs(&mut findings, &machine, target);
    check_environment(&mut findings, target);
    check_folder(&mut findings, config);
    check_data(&mut findings, config, &asked.rows);
    if let Some(step) = &step {
        check_rows(&mut findings, &asked.rows, step);
    }
    let planned = step.as_ref().map_or(config, |step| &step.config);
    let mut notes = before_figures(&asked.settings, planned);
    notes.extend_from_slice(&asked.notes);
    let bad = findings.bad();
    if arguments.json {
        print_json(&json!({
            "go": bad.is_empty(),
            "findings": findings.0,
            "run": {
                "demo": matches!(asked.origin, Origin::Demo),
                "folder": cinch_files::shown(&config.output.output_dir).to_string(),
            },
            "settings": asked.settings.explain(),
            "notes": notes,
            "machine": machine,
            "plan": step.as_ref().map(|step| asked.report(step, target)),
        }))?;
    } else {
        print(&describe(&asked, arguments.all, &notes, &findings))?;
    }
    if bad.is_empty() {
        return Ok(());
    }
    Err(NoGo {
        problems: bad.join(", "),
        does_not_fit,
    }
    .into())
}

fn check_device(findings: &mut Findings, machine: &Machine, target: Target) {
    let verdict = match (target, machine.chosen()) {
        (Target::Cpu, None) => {
            let why = machine.reason.as_deref().unwrap_or("no GPU is visible");
            let cores = machine.host.cores.unwrap_or(1);
            findings.add(
                "device",
                Verdict::Good,
                format!("the CPU, {cores} cores ({why})"),
            );
            return;
        }
        (Target::Cpu, Some(chosen)) => {
            let message = format!("the CPU; there is also {}", chosen.gpu.name);
            findings.add("device", Verdict::Good, message);
            return;
        }
        // CUDA answered, or the target would not be a GPU.
        (Target::Cuda, None) => Verdict::Warning,
        (Target::Cuda, Some(_)) => Verdict::Good,
    };
    let name = machine.chosen().map_or_else(
        || "a GPU that the driver does not describe".to_owned(),
        |chosen| chosen.gpu.name.clone(),
    );
    let version = |what: &str, version: &Option<String>| {
        version
            .as_ref()
            .map_or_else(String::new, |version| format!(", {what} {version}"))
    };
    findings.add(
        "device",
        verdict,
        format!(
            "{name}{}{}, read by {}",
            version("driver", &machine.driver_version),
            version("CUDA", &machine.cuda_version),
            machine.read_by.name()
        ),
    );
    for note in &machine.notes {
        findings.add("device", Verdict::Warning, note.clone());
    }
}

fn check_plan(findings: &mut Findings, step: &StepPlan, budget_name: &str) {
    let batch = &step.config.batch;
    let fits = batch.budget.map_or_else(String::new, |budget| {
        let share = 100.0 * step.total_bytes() as f64 / budget.get() as f64;
        format!(", {share:.1} % of the {budget_name} of {budget}")
    });
    findings.add(
        "plan",
        Verdict::Good,
        format!(
            "{} for {} × {} = {} of {} tokens in {}{fits}",
            Bytes::new(step.total_bytes()),
            batch.batch_size,
            batch.accumulation,
            table::counted(batch.effective_batch() as u64, "sequence"),
            batch.seq_len,
            batch.precision.name()
        ),
    );
}

fn check_free_memory(findings: &mut Findings, machine: &Machine, step: &StepPlan, target: Target) {
    let free = match target {
        Target::Cpu => machine.host.available_bytes,
        Target::Cuda => machine.chosen().and_then(|chosen| chosen.free_bytes()),
    };
    let Some(free) = free else {
        let message = "what is free now cannot be read";
        return findings.add("free memory", Verdict::Warning, message);
    };
    let (needed, free_shown) = (Bytes::new(step.total_bytes()), Bytes::new(free));
    if needed.get() > free {
        findings.add(
            "free memory",
            Verdict::Bad,
            format!(
                "{needed} is needed and {free_shown} is free; `--auto` finds what fits into what \
                 is free, and `cinch fit` the fastest of it"
            ),
        );
    } else {
        let message = format!("{free_shown} free, {needed} needed");
        findings.add("free memory", Verdict::Good, message);
    }
}

fn check_programs(findings: &mut Findings, machine: &Machine, target: Target) {
    let Some(chosen) = machine.chosen().filter(|_| target == Target::Cuda) else {
        return;
    };
    let topic = "other programs";
    let Some(processes) = &chosen.gpu.processes else {
        let message = "the driver does not say who holds the GPU";
        return findings.add(topic, Verdict::Warning, message);
    };
    if processes.is_empty() {
        findings.add(topic, Verdict::Good, "nobody else holds the GPU");
    }
    for process in processes {
        let name = process.name.as_deref().unwrap_or("(another user's)");
        let held = process.used_bytes.map_or_else(
            || "memory".to_owned(),
            |bytes| Bytes::new(bytes).to_string(),
        );
        let message = format!("process {} ({name}) holds {held} of the GPU", process.pid);
        findings.add(topic, Verdict::Warning, message);
    }
}

/// Variables that change a run, and what each does here.
const VARIABLES: [(&str, Option<Target>, &str); 11] = [
    (
        "CUDA_VISIBLE_DEVICES",
        Some(Target::Cuda),
        "which GPUs a program sees",
    ),
    (
        "CUDA_DEVICE_ORDER",
        Some(Target::Cuda),
        "how GPUs are counted",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        Some(Target::Cuda),
        "waits after every kernel: slow",
    ),
    (
        "NVIDIA_TF32_OVERRIDE",
        Some(Target::Cuda),
        "overrides --tf32",
    ),
    (
        "PYTORCH_CUDA_ALLOC_CONF",
        None,
        "PyTorch's allocator; nothing here, where one allocation is all",
    ),
    (
        "PYTORCH_ALLOC_CONF",
        None,
        "PyTorch's allocator; nothing here, where one allocation is all",
    ),
    ("RAYON_NUM_THREADS", None, "the number of CPU threads"),
    (
        "OMP_NUM_THREADS",
        None,
        "nothing here; --threads sets CPU threads",
    ),
    (
        "TOKENIZERS_PARALLELISM",
        None,
        "nothing here: no process is forked while text is encoded",
    ),
    (
        "HF_HOME",
        None,
        "where models that are named are looked for",
    ),
    (
        cinch_files::CACHE_VARIABLE,
        None,
        "where tokenised data and kernels are kept",
    ),
];

fn check_environment(findings: &mut Findings, target: Target) {
    let topic = "environment";
    let mut any = false;
    for (name, only, effect) in VARIABLES {
        let Some(value) = std::env::var_os(name) else {
            continue;
        };
        if only.is_some_and(|only| only != target) {
            continue;
        }
        any = true;
        let slow = name == "CUDA_LAUNCH_BLOCKING" && value != "0";
        let verdict = if slow {
            Verdict::Warning
        } else {
            Verdict::Good
        };
        let message = format!("{name}={}: {effect}", value.to_string_lossy());
        findings.add(topic, verdict, message);
    }
    if !any {
        findings.add(topic, Verdict::Good, "no variable changes this run");
    }
}

/// On the CPU the plan itself is in host memory too, and is counted with the rest.
fn check_host(findings: &mut Findings, machine: &Machine, step: &StepPlan, samples: u64) {
    let topic = "host memory";
    let host = HostMemory {
        samples,
        ..step.host_memory()
    };
    let needed = host.total();
    let mut parts = table::host_parts(&host);
    if host.arena > 0 {
        let program = host.process.unwrap_or(0).saturating_add(host.arena);
        parts = format!("arena and program {}, {parts}", Bytes::new(program));
    }
    match machine.host.available_bytes {
        Some(free) if needed > free => findings.add(
            topic,
            Verdict::Bad,
            format!("{parts}; {} is available", Bytes::new(free)),
        ),
        Some(free) => {
            let message = format!("{parts}; {} is available", Bytes::new(free));
            findings.add(topic, Verdict::Good, message);
        }
        None => findings.add(
            topic,
            Verdict::Warning,
            format!("{parts}; unknown how much is available"),
        ),
    }
}

fn describe(asked: &AskedRun, all: bool, notes: &[String], findings: &Findings) -> String {
    /// Where messages begin.
    const INDENT: usize = 24;
    let width = table::line_width();
    let settings = &asked.settings;
    let explained = settings.explain();
    let is_shown =
        |one: &&Explained| all || settings.is_explicit(one.key) || one.key.starts_with("vram.");
    let shown: Vec<&Explained> = explained.iter().filter(is_shown).collect();
    let hidden = explained.len() - shown.len();
    let mut text = format!("{}\n{}\n", asked.describe(), table::explain(shown));
    if hidden > 0 {
        text += &format!("{hidden} more settings; --all shows them\n");
    }
    text += &voice::notes(notes);
    text.push('\n');
    for one in &findings.0 {
        text += &format!(
            "  {:>2}  {:<16}  {}\n",
            one.verdict.mark(),
            one.topic,
            table::wrapped(&one.message, INDENT, width.into())
        );
    }
    if findings.bad().is_empty() {
        text += "\ngo\n";
    }
    text
}
