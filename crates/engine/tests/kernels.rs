//! The CUDA sources, checked without a GPU: each compiles for the oldest and the newest
//! architecture in every precision, what it compiles to is what lowering asks for, and nothing in
//! it is left over. Needs NVRTC, which the PyPI package nvidia-cuda-nvrtc has; where it is absent
//! the test says so and passes.
#![expect(clippy::print_stderr, reason = "a skipped test says why")]

#[path = "gradients/graphs.rs"]
mod graphs;
#[path = "gradients/shared.rs"]
mod shared;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use cinch_architecture::{Architecture, Gpt2, Mu};
use cinch_engine::MicroBatch;
use cinch_engine::cuda::command;
use cinch_engine::cuda::compile::{
    SOURCES, cubin, generated_cubin, generated_ptx, is_available, ptx, target,
};
use cinch_engine::cuda::lowering::Card;
use cinch_engine::cuda::op::{COPY_TO_REAL, lower_all};
use cinch_graph::{DType, Graph, Target, differentiate};
use cinch_model::Purpose;
use cinch_plan::{Options, Plan};

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90"];
const PRECISIONS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// The functions of every source, by its name and precision.
type Functions = BTreeMap<(&'static str, DType), BTreeSet<String>>;

/// Set for the second start.
const CACHE: &str = "CINCH_CACHE";

/// A program of its own that starts itself again, with a cache that is not the user's. The cache
/// outlives the test: what has been compiled once, source and options and version the same, is not
/// compiled again.
fn main() {
    if !is_available() {
        eprintln!("skipped: no NVRTC");
        return;
    }
    if std::env::var_os(CACHE).is_none_or(|set| set != *cache().as_os_str()) {
        let again = Command::new(std::env::current_exe().unwrap())
            .env(CACHE, cache())
            .status();
        assert!(again.unwrap().success());
        return;
    }
    let compiled = compile_all();
    for dtype in PRECISIONS {
        assert_lowering_finds_its_kernels(dtype, &compiled);
    }
    assert_no_kernel_is_left_over(&compiled);
    assert_kernels_wait();
    for dtype in PRECISIONS {
        assert_generated_kernels_compile(dtype);
    }
}

/// What is made for the expressions of a training step compiles, and has the functions that are
/// launched.
fn assert_generated_kernels_compile(dtype: DType) {
    let graphs = graphs::ALL.map(|(_, make)| make(dtype));
    let mu = Mu {
        vocabulary: 61,
        layers: 1,
        ..Mu::default()
    };
    let mu = graphs::model(&Architecture::Mu(mu), dtype);
    let launched = graphs.into_iter().chain([mu]).flat_map(commands);
    let generated: BTreeSet<_> = launched
        .filter_map(|command| match command {
            command::Command::LaunchGenerated { kernel, .. } => Some(kernel),
            _ => None,
        })
        .map(|kernel| (kernel.source, kernel.function))
        .collect();
    assert!(!generated.is_empty());
    let jobs = generated
        .iter()
        .flat_map(|kernel| ARCHITECTURES.map(|architecture| (kernel, architecture)));
    on_all_cores(jobs.collect(), |((source, function), architecture)| {
        let code = generated_cubin(source, dtype, architecture)
            .unwrap_or_else(|error| panic!("{dtype}: {error}\n{source}"));
        assert!(
            functions(&code).contains(*function),
            "{function} of\n{source}"
        );
        let ptx = generated_ptx(source, dtype, architecture, cache());
        assert_all_wait(&ptx.unwrap(), architecture);
    });
}

/// Kernels on new cards begin before what precedes them has ended, so that each has to wait before
/// it touches memory.
fn assert_kernels_wait() {
    let mut jobs = Vec::new();
    for (file, _) in SOURCES {
        for dtype in [DType::F32, DType::Bf16] {
            if target(file, dtype, "sm_90").is_some() {
                jobs.push((file, dtype));
            }
        }
    }
    on_all_cores(jobs, |(file, dtype)| {
        let ptx = ptx(file, dtype, "sm_90", cache());
        assert_all_wait(&ptx.unwrap(), "sm_90");
    });
}

/// Each kernel of a text waits before its first access to memory that others see; older cards, whose
/// kernels never begin early, have no such instruction.
fn assert_all_wait(ptx: &[u8], architecture: &str) {
    const WAIT: &str = "griddepcontrol.wait;";
    let text = String::from_utf8_lossy(ptx);
    for kernel in text.split(".entry").skip(1) {
        let name = kernel.split('(').next().unwrap_or_default().trim();
        if architecture == "sm_80" {
            assert!(!kernel.contains(WAIT), "{name}");
            continue;
        }
        let (before, _) = kernel
            .split_once(WAIT)
            .unwrap_or_else(|| panic!("`{name}` does not wait"));
        let early = before.lines().find(|line| is_access(line));
        assert_eq!(early, None, "`{name}` does not wait for this");
    }
}

/// Whether a line of PTX reads or writes memory that other blocks see.
fn is_access(line: &str) -> bool {
    let words = line
        .split_whitespace()
        .filter(|word| !word.starts_with('@'));
    let instruction = words.into_iter().next().unwrap_or_default();
    let mut parts = instruction.split('.');
    let reaches = matches!(
        parts.next(),
        Some("ld" | "st" | "cp" | "atom" | "red" | "prefetch")
    );
    let own = [".param", ".shared", ".local", ".const"];
    let is_copy = instruction.starts_with("cp.");
    reaches && (is_copy || !own.iter().any(|space| instruction.contains(space)))
}

fn cache() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// Compiles everything, on all cores.
fn compile_all() -> Functions {
    let mut jobs = Vec::new();
    for (file, _) in SOURCES {
        for dtype in PRECISIONS {
            for architecture in ARCHITECTURES {
                if target(file, dtype, architecture).is_some() {
                    jobs.push((file, dtype, architecture));
                }
            }
        }
    }
    let compiled = Mutex::new(Functions::new());
    on_all_cores(jobs, |(file, dtype, architecture)| {
        let code =
            cubin(file, dtype, architecture).unwrap_or_else(|error| panic!("{dtype}: {error}"));
        let functions = functions(&code);
        assert!(!functions.is_empty(), "{file}.cu has no kernel in {dtype}");
        let mut compiled = compiled.lock().unwrap();
        let key = (file, dtype);
        let others = compiled.entry(key).or_insert_with(|| functions.clone());
        // Otherwise a card would lack what another has.
        assert_eq!(
            *others, functions,
            "{file}.cu in {dtype} for {architecture}"
        );
    });
    compiled.into_inner().unwrap()
}

fn on_all_cores<T: Send>(jobs: Vec<T>, work: impl Fn(T) + Sync) {
    let num_threads = thread::available_parallelism().map_or(1, usize::from);
    let jobs = Mutex::new(jobs.into_iter());
    thread::scope(|scope| {
        for _ in 0..num_threads {
            scope.spawn(|| {
                loop {
                    let job = jobs.lock().unwrap().next();
                    let Some(job) = job else {
                        break;
                    };
                    work(job);
                }
            });
        }
    });
}

/// The kernels in machine code: each has a section of its own, `.text.` and its name.
fn functions(code: &[u8]) -> BTreeSet<String> {
    const SECTION: &[u8] = b"\0.text.";
    let starts = code.windows(SECTION.len()).enumerate();
    starts
        .filter(|(_, window)| *window == SECTION)
        .map(|(start, _)| {
            let name = code[start + SECTION.len()..].split(|&byte| byte == 0);
            let name = name.into_iter().next().unwrap_or_default();
            String::from_utf8_lossy(name).into_owned()
        })
        .collect()
}

/// Every launch of a training step, or of a text's continuation, names a kernel that its source has.
fn assert_lowering_finds_its_kernels(dtype: DType, compiled: &Functions) {
    let models = [32, 64, 128].map(|head| graphs::model(&gpt2(head), dtype));
    let graphs = graphs::ALL.map(|(_, make)| make(dtype));
    let generate = Purpose::Generate {
        context: 15,
        longest_run: 13,
    };
    let generating =
        [graphs::mamba(4), graphs::gpt2()].map(|c| graphs::with_purpose(&c, dtype, generate));
    for graph in graphs.into_iter().chain(models).chain(generating) {
        for kernel in launched(graph) {
            let functions = &compiled[&(kernel.file, dtype)];
            let (file, function) = (kernel.file, kernel.function);
            assert!(
                functions.contains(function),
                "{file}.cu has no `{function}` in {dtype}"
            );
        }
    }
}

fn launched(graph: Graph) -> BTreeSet<command::Kernel> {
    let launch = |command| match command {
        command::Command::Launch { kernel, .. } => Some(kernel),
        _ => None,
    };
    let launches = commands(graph).into_iter().filter_map(launch);
    launches.chain([COPY_TO_REAL]).collect()
}

/// The commands of a training step, or of a text's continuation, on both kinds of cards.
fn commands(graph: Graph) -> Vec<command::Command> {
    let graph = match graph.terms.first() {
        Some(_) => Graph::clone(&differentiate(graph, &shared::OPTIMIZER).unwrap()),
        None => graph,
    };
    let plan = Plan::new(&graph, Options::new(Target::Cuda));
    let nodes = 0..graph.nodes.len();
    let lowered = [Card::ANY, Card::HOPPER]
        .into_iter()
        .flat_map(|card| lower_all(&graph, &plan, nodes.clone(), MicroBatch::of_one(true), card));
    let each = lowered.flat_map(|node| node.commands);
    let all = each.flat_map(|command| match command {
        command::Command::Ways(ways) => ways.concat(),
        command => vec![command],
    });
    all.collect()
}

/// One head of a width that tensor cores take.
fn gpt2(d_model: usize) -> Architecture {
    let Architecture::Gpt2(config) = graphs::gpt2() else {
        panic!("not GPT-2");
    };
    Architecture::Gpt2(Gpt2 {
        width: d_model as u64,
        heads: 1,
        ..config
    })
}

/// Every kernel's name is in the lowering of some op, as a literal, or in what fills operands while
/// they are timed. Which one a graph gets depends on its sizes, so that no set of graphs would reach
/// all of them for sure.
fn assert_no_kernel_is_left_over(compiled: &Functions) {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
    let mut lowering = std::fs::read_to_string(sources.join("noise.rs")).unwrap();
    let folder = sources.join("op");
    // Those that join the products of several ops have a folder, and so have those of adapters.
    for folder in [folder.join("joined"), folder.join("linear"), folder] {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                lowering += &std::fs::read_to_string(path).unwrap();
            }
        }
    }
    for ((file, dtype), functions) in compiled {
        for function in functions {
            assert!(
                lowering.contains(&format!("\"{function}\"")),
                "no lowering uses `{function}` of {file}.cu ({dtype})"
            );
        }
    }
}
