//! What the cause and the moment ask for.

use cinch_config::remedy::RemedyKind;

use super::{Case, shown};
use crate::cause::lends_from_host;
use crate::failure::{Cause, Fix};
use crate::frame::Phase;
use crate::message::{
    Accelerator, Event, Framework, LOADER_CRASHED, Message, OLD_DRIVER, ON_WINDOWS, OPEN_FILES,
    RANKS_ON_ONE_GPU,
};

const EXPANDABLE: &str = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
const RECORD: &str = "cinch trace --script > cinch_recorder.py";

/// What the cause and the moment ask for.
pub fn fixes(case: &Case<'_>) -> Vec<Fix> {
    let message = &case.incident.message;
    let own = message.own_changes.iter().map(|change| Fix {
        what: format!("with {}, as cinch computed", change.change),
        saves_bytes: Some(change.saves),
        command: change
            .change
            .starts_with("--")
            .then(|| format!("cinch train {}", change.change)),
    });
    let mut fixes: Vec<Fix> = own.collect();
    if message.event == Event::DoesNotFit && fixes.is_empty() {
        fixes.push(Fix::new(
            "let cinch search all settings for this budget",
            "cinch fit --details",
        ));
    }
    match case.cause {
        Cause::Fragmentation if case.is_torch() => fixes.push(expandable(case)),
        Cause::Fragmentation => fixes.push(Fix::new(
            "free arrays that are no longer used before this program, so that what is free is one piece",
            match message.framework {
                Framework::Jax => "array.delete()",
                _ => "",
            },
        )),
        Cause::OtherProcess => fixes.extend(other_process(case)),
        Cause::Cap => fixes.extend(cap(message)),
        Cause::NonPytorch => fixes.extend(non_pytorch(case)),
        Cause::Leak => fixes.extend(leak()),
        Cause::Spike => fixes.extend(spike(case)),
        Cause::Host => fixes.extend(host(case)),
        Cause::NotOom => fixes.extend(not_memory(message)),
        Cause::Unclear => {
            fixes.extend(holders(message, "see who holds the card at that moment"));
            if message.framework == Framework::Jax {
                fixes.push(Fix::new(
                    "do not take most of the card at the start, where others use it too",
                    "export XLA_PYTHON_CLIENT_PREALLOCATE=false",
                ));
            }
            if case.is_torch() && case.server().is_none() {
                fixes.push(Fix::new(
                    "record the run, and see what is alive when it fails",
                    RECORD,
                ));
            }
        }
        Cause::Capacity if lends_from_host(case.numbers) => fixes.push(Fix::new(
            "let the driver refuse what the card does not hold, so that a run fails at once instead of crawling",
            "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback",
        )),
        Cause::Capacity => {}
    }
    match case.incident.phase {
        Some(Phase::PreferenceLogits) => fixes.extend(preference()),
        Some(Phase::DataParallel) => fixes.push(Fix::new(
            "one process for each GPU in place of nn.DataParallel, whose first GPU holds all outputs",
            "torchrun --nproc_per_node=N train.py",
        )),
        Some(Phase::Setup) => fixes.push(Fix::new(
            "gradients as views of DDP's buckets: without it there is a second copy of all gradients",
            "DistributedDataParallel(model, gradient_as_bucket_view=True)",
        )),
        _ => {}
    }
    fixes
}

/// The command that lists the processes on the device, where there is one.
fn holders(message: &Message, what: &str) -> Option<Fix> {
    let command = message.accelerator.holders()?;
    Some(Fix::new(what, command))
}

fn expandable(case: &Case<'_>) -> Fix {
    let computed = case.run.and_then(|run| {
        let mut priced = run.priced.iter();
        priced.find(|priced| priced.kind == RemedyKind::ExpandableSegments)
    });
    let idle = case.numbers.reserved_unallocated.map(shown);
    Fix {
        what: match idle {
            Some(idle) => format!(
                "segments that grow: the {idle} that is reserved and idle can be used again"
            ),
            None => "segments that grow, so that idle pieces can be used again".to_owned(),
        },
        saves_bytes: computed
            .and_then(|priced| u64::try_from(priced.saves).ok())
            .filter(|saves| *saves > 0),
        command: Some(EXPANDABLE.to_owned()),
    }
}

fn other_process(case: &Case<'_>) -> Vec<Fix> {
    let message = &case.incident.message;
    let found = holders(message, "see who holds the card, and wait for them or ask");
    let mut fixes: Vec<Fix> = found.into_iter().collect();
    // Ranks that were given no card of their own all make their context, and more, on the first.
    if message.device == Some(0) && message.holders.len() >= 2 {
        fixes.push(Fix::new(
            "where the others are ranks of this run: each on its own card, before anything is made on one",
            "torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))",
        ));
    }
    if case.incident.phase == Some(Phase::Resuming) {
        fixes.insert(0, Fix::new(
            "load checkpoints into host memory: without map_location every rank loads onto the GPU that saved, mostly GPU 0",
            "torch.load(path, map_location=\"cpu\")",
        ));
    }
    match message.framework {
        Framework::Vllm => fixes.push(Fix::new(
            "ask for a smaller share of the card",
            "vllm serve MODEL --gpu-memory-utilization 0.5",
        )),
        Framework::Jax => fixes.push(Fix::new(
            "do not take most of the card at the start",
            "export XLA_PYTHON_CLIENT_PREALLOCATE=false",
        )),
        _ => fixes.push(Fix::new(
            "take another card",
            match message.accelerator {
                Accelerator::Amd => "HIP_VISIBLE_DEVICES=1 python train.py",
                Accelerator::Intel => "ZE_AFFINITY_MASK=1 python train.py",
                Accelerator::Ascend => "ASCEND_RT_VISIBLE_DEVICES=1 python train.py",
                _ => "CUDA_VISIBLE_DEVICES=1 python train.py",
            },
        )),
    }
    fixes
}

fn cap(message: &Message) -> Vec<Fix> {
    match message.framework {
        Framework::Sglang if message.event == Event::Pool => vec![
            Fix::new(
                "fewer requests at once",
                "python -m sglang.launch_server … --max-running-requests 16",
            ),
            Fix::new(
                "a larger pool, where the card has room",
                "python -m sglang.launch_server … --mem-fraction-static 0.9",
            ),
        ],
        Framework::Vllm => vec![
            Fix::new(
                "let vLLM use more of the card",
                "vllm serve MODEL --gpu-memory-utilization 0.95",
            ),
            Fix::new(
                "shorter contexts need fewer blocks",
                "vllm serve MODEL --max-model-len 8192",
            ),
        ],
        Framework::Sglang => vec![Fix::new(
            "let SGLang use more of the card, or take shorter contexts",
            "python -m sglang.launch_server … --mem-fraction-static 0.9 --context-length 8192",
        )],
        _ => vec![Fix::new(
            "raise the limit, or take it away: set_per_process_memory_fraction in the program, per_process_memory_fraction in PYTORCH_ALLOC_CONF",
            "torch.cuda.set_per_process_memory_fraction(1.0)",
        )],
    }
}

fn non_pytorch(case: &Case<'_>) -> Vec<Fix> {
    let is_collective = case.incident.message.event == Event::Collective;
    let is_mac = case.incident.message.event == Event::Unified;
    if is_mac {
        return vec![Fix::new(
            "give cached graphs and buffers back between phases; they are this process's own here",
            "torch.mps.empty_cache()",
        )];
    }
    let mut fixes = vec![Fix::new(
        "leave room outside the allocator: PyTorch keeps what it has reserved",
        "torch.cuda.set_per_process_memory_fraction(0.9)",
    )];
    match is_collective {
        true => fixes.push(Fix::new(
            "make the process groups before the first step, while there is room, and fewer of them",
            "torch.distributed.barrier()",
        )),
        false => fixes.extend(holders(
            &case.incident.message,
            "see what else of this process uses the card: NCCL, another framework, a second model",
        )),
    }
    fixes
}

fn leak() -> Vec<Fix> {
    vec![
        Fix::new(
            "keep numbers, not tensors: a loss that is added up or put in a list keeps its graph",
            "total += loss.item()",
        ),
        Fix::new(
            "what a hook, a list or a cache keeps from step to step: detach it and move it to the host",
            "outputs.append(output.detach().cpu())",
        ),
        Fix::new("record a few steps, and see by line what grows", RECORD),
    ]
}

fn spike(case: &Case<'_>) -> Vec<Fix> {
    match case.incident.phase {
        Some(Phase::EvaluationOutputs) => vec![
            Fix::new(
                "keep what the metric needs, not the logits",
                "Trainer(…, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1))",
            ),
            Fix::new(
                "move outputs to host memory every few batches",
                "eval_accumulation_steps=4",
            ),
            Fix::new("a smaller evaluation batch", "per_device_eval_batch_size=1"),
            Fix::new(
                "without metrics: the loss alone",
                "prediction_loss_only=True",
            ),
        ],
        Some(Phase::Evaluation) => vec![
            Fix::new(
                "a smaller evaluation batch: its default of 8 is not that of training",
                "per_device_eval_batch_size=1",
            ),
            Fix::new(
                "no graph in a loop of your own",
                "with torch.inference_mode():",
            ),
            Fix::new("cut or sort the longest samples of the evaluation set", ""),
        ],
        Some(Phase::Saving) => vec![
            Fix::new(
                "save in shards, each rank its own",
                "fsdp_state_dict_type: SHARDED_STATE_DICT",
            ),
            Fix::new(
                "with ZeRO 3: do not gather all weights on one rank",
                "\"stage3_gather_16bit_weights_on_model_save\": false",
            ),
            Fix::new(
                "in a loop of your own: copy to the host tensor by tensor",
                "state = {name: value.cpu() for name, value in model.state_dict().items()}",
            ),
        ],
        Some(Phase::Resuming) => vec![
            Fix::new(
                "load into host memory",
                "torch.load(path, map_location=\"cpu\")",
            ),
            Fix::new(
                "let go of the loaded checkpoint before the first step",
                "del checkpoint",
            ),
        ],
        Some(Phase::Merging) => vec![
            Fix::new(
                "merge by parts, without a GPU",
                "cinch merge ADAPTER --base BASE --to merged",
            ),
            Fix::new(
                "or load the base into host memory for it",
                "AutoModelForCausalLM.from_pretrained(base, device_map=\"cpu\")",
            ),
        ],
        Some(Phase::Generation) => vec![Fix::new(
            "fewer sequences at once, or shorter ones",
            "generate(…, max_new_tokens=256, num_beams=1)",
        )],
        Some(Phase::OptimizerStep) => Vec::new(),
        _ => vec![
            Fix::new("cut samples at a length that fits", "max_length=1024"),
            Fix::new(
                "meet the longest batch first, so that a run fails at its first step or not at all",
                "train_sampling_strategy=\"group_by_length\"",
            ),
        ],
    }
}

fn host(case: &Case<'_>) -> Vec<Fix> {
    let message = &case.incident.message;
    let workers = Fix::new(
        "fewer loader workers: each has its own copy of what it touches",
        "DataLoader(…, num_workers=2, prefetch_factor=2)",
    );
    let mut fixes = Vec::new();
    match message.event {
        Event::SharedMemory => {
            fixes.push(Fix::new(
                "more shared memory for the container",
                "docker run --shm-size=16g …",
            ));
            if message.framework == Framework::PyTorch {
                fixes.push(workers);
            }
            fixes.push(Fix::new("see how full it is", "df -h /dev/shm"));
            return fixes;
        }
        _ if message.remarks.iter().any(|remark| remark == ON_WINDOWS) => fixes.push(Fix::new(
            "a larger paging file",
            "System > Advanced system settings > Performance > Advanced > Virtual memory",
        )),
        _ => {}
    }
    if case.told.programs.contains(&"DeepSpeed") {
        fixes.push(Fix::new(
            "where ZeRO offloads to the host: states of the optimizer take 12 bytes there for each parameter; keep them on the GPUs, or offload to a disk",
            "\"offload_optimizer\": {\"device\": \"nvme\", \"nvme_path\": \"/local_nvme\"}",
        ));
    }
    if case.server().is_some() {
        fixes.extend(looking(message));
        return fixes;
    }
    fixes.push(workers);
    match message.framework {
        Framework::Slurm => fixes.push(Fix::new("ask for more memory", "#SBATCH --mem=128G")),
        Framework::Kubernetes => fixes.push(Fix::new(
            "raise the container's limit",
            "resources: {limits: {memory: 128Gi}}",
        )),
        Framework::Ray => fixes.push(Fix::new("fewer workers on a node", "ray.init(num_cpus=4)")),
        _ => {}
    }
    let loads = matches!(case.incident.phase, Some(Phase::Loading | Phase::Resuming));
    if loads {
        fixes.insert(
            0,
            Fix::new(
                "read weights by parts, on one rank at a time",
                "from_pretrained(…, device_map=\"auto\")",
            ),
        );
    }
    fixes.push(Fix::new(
        "read data as it is needed, not all at the start",
        "load_dataset(…, streaming=True)",
    ));
    fixes.extend(looking(message));
    fixes
}

/// Where to look for more, by who refused or ended.
fn looking(message: &Message) -> Option<Fix> {
    let is_windows = message.remarks.iter().any(|remark| remark == ON_WINDOWS);
    match (message.framework, &message.event) {
        (Framework::Ray, _) => Some(Fix::new(
            "see what Ray ended, and who held most",
            "ray logs raylet.out",
        )),
        (_, Event::HostKilled | Event::KilledBySignal) => Some(Fix::new(
            "see what the kernel ended, and with how much",
            "journalctl -k | grep -i 'killed process'",
        )),
        _ if is_windows => None,
        _ => Some(Fix::new(
            "see who holds host memory",
            "ps -eo pid,rss,comm --sort=-rss | head",
        )),
    }
}

fn not_memory(message: &Message) -> Vec<Fix> {
    match (message.framework, &message.event) {
        (Framework::Triton, _) => vec![Fix::new(
            "smaller blocks or fewer stages of the kernel, or an older attention kernel for this card",
            "attn_implementation=\"sdpa\"",
        )],
        (_, Event::NotMemory(LOADER_CRASHED)) => vec![Fix::new(
            "load in the process itself once, where the failing sample and library show",
            "DataLoader(…, num_workers=0)",
        )],
        (_, Event::NotMemory(OPEN_FILES)) => vec![
            Fix::new("raise the limit of open files", "ulimit -n 65536"),
            Fix::new(
                "pass tensors by name, which keeps no file open",
                "torch.multiprocessing.set_sharing_strategy(\"file_system\")",
            ),
        ],
        (_, Event::NotMemory(OLD_DRIVER)) => vec![Fix::new(
            "a newer driver, or PyTorch built with an older CUDA: the line beside the driver's version tells the newest that it runs",
            "nvidia-smi",
        )],
        (Framework::BitsAndBytes, _) => vec![Fix::new(
            "see which CUDA and which card the library finds",
            "python -m bitsandbytes",
        )],
        (_, Event::NotMemory(RANKS_ON_ONE_GPU)) => vec![Fix::new(
            "as many ranks as there are GPUs, each on its own",
            "torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"]))",
        )],
        (Framework::PyTorch, Event::AbsurdSize) => vec![Fix::new(
            "find the request: run with checks of every launch",
            "CUDA_LAUNCH_BLOCKING=1 python train.py",
        )],
        (Framework::PyTorch, _) => vec![Fix::new(
            "see the failing operation",
            "CUDA_LAUNCH_BLOCKING=1 python train.py",
        )],
        (Framework::Linux, _) => vec![Fix::new("see which file system is full", "df -h")],
        (Framework::Nccl, _) => vec![Fix::new(
            "see which rank stopped first, and where: the others only wait for it",
            "NCCL_DEBUG=INFO TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        )],
        _ => Vec::new(),
    }
}

fn preference() -> Vec<Fix> {
    vec![
        Fix::new(
            "a loss that never holds all logits at once",
            "use_liger_kernel=True",
        ),
        Fix::new(
            "DPO: the reference's log-probabilities once, before training",
            "precompute_ref_log_probs=True",
        ),
        Fix::new(
            "GRPO: shorter completions, or fewer at once",
            "max_completion_length=256, num_generations=4",
        ),
    ]
}
