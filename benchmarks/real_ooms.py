#!/usr/bin/env python3
"""Makes a GPU run out of memory in every way there is, keeps what was printed, and asks `cinch diagnose` for the cause.

    python3 benchmarks/real_ooms.py --output OUT --cinch target/release/cinch
    python3 benchmarks/real_ooms.py --output OUT capacity leak          # only these
    python3 benchmarks/real_ooms.py --output OUT --cinch CINCH --watch  # monitor and run beside PyTorch and a cinch run

Needs PyTorch and one NVIDIA GPU that nobody else uses; nothing is downloaded. Every case is a process of its own, sized
by the card's memory. All of them import PyTorch at once and then take their turns, so that the whole takes about a
minute. OUT/logs has what each printed, OUT/diagnosis the answers, OUT/table.md causes that were expected and found.
Exits with 1 where one differs.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

GIB = 1 << 30
MIB = 1 << 20
HERE = os.path.abspath(__file__)
# Seconds that a case may take once it is its turn.
PATIENCE = 25

# ---------------------------------------------------------------------------------------------------------------- cases
# A case is a function that fails as users' programs do. It gets PyTorch and the bytes of the card.


def capacity(torch, total):
    """A forward pass whose activations are larger than the card."""
    width, layers = 2048, 24
    rows = int(1.4 * total / (layers * width * 2 * 3))
    block = lambda: torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
    model = torch.nn.Sequential(*[block() for _ in range(layers)]).to("cuda", torch.bfloat16)
    batch = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    model(batch).sum().backward()


def fragmented(torch, total):
    """Segments of a sixteenth of the card, each with one small tensor left in it."""
    segment, piece = total // 20 // (2 * MIB) * (2 * MIB), total // 400 // (2 * MIB) * (2 * MIB)
    large = [torch.empty(segment, dtype=torch.uint8, device="cuda") for _ in range(18)]
    large.clear()
    pieces = [torch.empty(piece, dtype=torch.uint8, device="cuda") for _ in range(18 * (segment // piece))]
    kept = pieces[:: segment // piece]
    pieces.clear()
    print(f"{len(kept)} tensors are kept, {torch.cuda.memory_allocated()} bytes of {torch.cuda.memory_reserved()} reserved ones")
    return kept, torch.empty(3 * segment, dtype=torch.uint8, device="cuda")


def capped(torch, total):
    """A limit that the program sets itself."""
    torch.cuda.set_per_process_memory_fraction(0.25)
    return [torch.empty(total // 16, dtype=torch.uint8, device="cuda") for _ in range(8)]


def beside_another(torch, total):
    """Another process holds most of the card."""
    with another(0.7):
        return [torch.empty(total // 8, dtype=torch.uint8, device="cuda") for _ in range(8)]


def without_context(torch, total):
    """Another process holds all of the card, and not even a context can be made."""
    with another(1.0):
        return torch.zeros(1, device="cuda")


def leaking(torch, total):
    """A list that keeps every step's loss with its graph."""
    width = 1024
    rows = total // 150 // (2 * width * 4)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1)).to("cuda")
    losses = []
    for step in range(1, 1000):
        loss = model(torch.randn(rows, width, device="cuda")).square().mean()
        losses.append(loss)
        print(f"step {step}: loss {loss.item():.4f}, memory_allocated {torch.cuda.memory_allocated() / MIB:.1f} MiB", flush=True)


def evaluating(torch, total):
    """Training that fits, and an evaluation that keeps all logits on the GPU."""
    vocabulary, length, width = 128_000, 1024, 256
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary, bias=False)).to("cuda", torch.bfloat16)
    rows = max(1, total // 40 // (length * vocabulary * 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def evaluate():
        kept = []
        with torch.no_grad():
            for _ in range(1000):
                kept.append(model(torch.randint(vocabulary, (rows, length), device="cuda")))
        return torch.cat(kept)

    for step in range(1, 6):
        tokens = torch.randint(vocabulary, (1, length), device="cuda")
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, memory_allocated {torch.cuda.memory_allocated() / MIB:.1f} MiB", flush=True)
    print("***** Running Evaluation *****", flush=True)
    evaluate()


def first_update(torch, total):
    """Weights and gradients fit, and the states that AdamW makes in its first step do not."""
    count, layers = int(0.7 * total / 8), 16
    weights = [torch.nn.Parameter(torch.ones(count // layers, device="cuda")) for _ in range(layers)]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, foreach=False)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


def long_sample(torch, total):
    """Ten batches of usual length, and one that is far longer."""
    width = 1024
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1)).to("cuda")
    usual = total // 8 // (3 * width * 4)
    for step in range(1, 60):
        length = usual + 8 * (step % 5) if step < 59 else 12 * usual
        print(f"step {step}: seq_len {length}", flush=True)
        loss = model(torch.randn(length, width, device="cuda")).square().mean()
        loss.backward()
        print(f"step {step}: loss {loss.item():.4f}, memory_allocated {torch.cuda.memory_allocated() / MIB:.1f} MiB, seq_len {length}", flush=True)


def asynchronous(torch, total):
    """The driver's own allocator (PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync)."""
    return [torch.empty(total // 16, dtype=torch.uint8, device="cuda") for _ in range(24)]


def expandable(torch, total):
    """Segments that grow, and still too much (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)."""
    print(f"PYTORCH_CUDA_ALLOC_CONF={os.environ['PYTORCH_CUDA_ALLOC_CONF']}", flush=True)
    return [torch.empty(total // 16 + 12345, dtype=torch.uint8, device="cuda") for _ in range(24)]


def handle(torch, total):
    """No room is left for cuBLAS, which is first needed now."""
    matrix = torch.ones(64, 64, device="cuda")
    kept = filled(torch)
    return kept, matrix @ matrix


def captured(torch, total):
    """Memory of a graph that is captured lies in a private pool."""
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(24):
            kept.append(torch.zeros(total // 16, dtype=torch.uint8, device="cuda"))


def collective(torch, total):
    """No room is left for NCCL's buffers."""
    import torch.distributed as distributed

    tensor = torch.ones(1024, device="cuda")
    kept = filled(torch)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    distributed.all_reduce(tensor)
    torch.cuda.synchronize()
    return kept


def two_ranks(torch, total):
    """Two ranks on one GPU, which NCCL refuses."""
    import torch.distributed as distributed

    distributed.init_process_group("nccl")
    distributed.all_reduce(torch.ones(1024, device="cuda:0"))
    torch.cuda.synchronize()


def crowded(torch, total):
    """Two ranks on one GPU, each of which takes more than half of it."""
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    kept = [torch.empty(total // 16, dtype=torch.uint8, device="cuda:0") for _ in range(6)]
    torch.cuda.synchronize()
    distributed.barrier()
    kept += [torch.empty(total // 16, dtype=torch.uint8, device="cuda:0") for _ in range(6)]
    torch.cuda.synchronize()
    distributed.barrier()


def out_of_range(torch, total):
    """A token outside the vocabulary: it looks like a fault of the card and is none of memory."""
    table = torch.nn.Embedding(100, 8).to("cuda")
    table(torch.full((4, 16), 100, device="cuda"))
    torch.cuda.synchronize()


# Name: the function, causes that are right, variables of the environment, ranks.
CASES = {
    "capacity": (capacity, {"capacity"}, {}, 0),
    "fragmentation": (fragmented, {"fragmentation"}, {}, 0),
    "cap": (capped, {"cap"}, {}, 0),
    "other_process": (beside_another, {"other_process"}, {}, 0),
    "no_context": (without_context, {"other_process", "unclear"}, {}, 0),
    "leak": (leaking, {"leak"}, {}, 0),
    "evaluation": (evaluating, {"spike"}, {}, 0),
    "optimizer_step": (first_update, {"spike"}, {}, 0),
    "long_sample": (long_sample, {"spike"}, {}, 0),
    "malloc_async": (asynchronous, {"capacity"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, 0),
    "expandable": (expandable, {"capacity"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, 0),
    "cublas": (handle, {"capacity", "non_pytorch", "unclear"}, {}, 0),
    "graph_capture": (captured, {"capacity"}, {}, 0),
    "nccl": (collective, {"non_pytorch", "capacity"}, {"NCCL_DEBUG": "WARN"}, 0),
    "nccl_two_ranks": (two_ranks, {"not_oom"}, {"NCCL_DEBUG": "WARN"}, 2),
    "two_ranks": (crowded, {"other_process"}, {}, 2),
    "out_of_range": (out_of_range, {"not_oom"}, {}, 0),
}


def jax_case():
    """JAX's allocator, where JAX is installed with its GPU."""
    import jax
    import jax.numpy as numpy

    total = jax.devices("gpu")[0].memory_stats()["bytes_limit"]
    return [numpy.zeros(total // 8, dtype=numpy.uint8).block_until_ready() for _ in range(16)]


# -------------------------------------------------------------------------------------------------------------- parts


def filled(torch):
    """Tensors that leave nothing of the card."""
    kept = []
    for size in (GIB, 64 * MIB, 20 * MIB, 2 * MIB):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return kept


@contextlib.contextmanager
def another(share):
    """Another process that holds a share of the card; with 1.0 all that it can get."""
    holder = subprocess.Popen([sys.executable, HERE, "--hold", str(share)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    try:
        yield
    finally:
        holder.stdin.close()
        holder.wait()


def hold(share):
    import torch

    if share < 1.0:
        kept = torch.empty(int(share * torch.cuda.get_device_properties(0).total_memory), dtype=torch.uint8, device="cuda")
    else:
        kept = filled(torch)
    torch.cuda.synchronize()
    print("held", flush=True)
    sys.stdin.read()
    del kept


def steady(seconds):
    """A training loop that stays as it is, for whoever watches."""
    import torch

    width = 4096
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(16)]).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    end, step = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        loss = model(torch.randn(8192, width, device="cuda", dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def train(batch, accumulation):
    """A trainer whose every sample takes a twentieth of the card."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    print(f"batch {batch}, accumulation {accumulation}", flush=True)
    width = 1024
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, 1)).to("cuda")
    rows = total // 20 // (3 * width * 4)
    for step in range(1, 4):
        for _ in range(accumulation):
            loss = model(torch.randn(batch, rows, width, device="cuda")).square().mean() / accumulation
            loss.backward()
        model.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, memory_allocated {torch.cuda.max_memory_allocated() / MIB:.1f} MiB", flush=True)


def one_case(name):
    """Runs a case when its turn has come."""
    if name == "jax":
        jax_case()
        return
    import torch

    if "RANK" not in os.environ:
        sys.stdin.readline()
    total = torch.cuda.get_device_properties(0).total_memory if name != "no_context" else 0
    function, _, _, _ = CASES[name]
    function(torch, total)
    print("this case did not fail", flush=True)


# ----------------------------------------------------------------------------------------------------------------- all


def started(name, log):
    """The process of a case, which waits for its turn; ranks are started when it has come."""
    _, _, variables, ranks = CASES[name]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, HERE, "--case", name]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **variables}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def finished(process):
    """Lets a process run; one that does not end is ended with all that it started."""
    with contextlib.suppress(OSError):
        process.stdin.write(b"\n")
        process.stdin.close()
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "timeout"


def diagnosed(cinch, log, answer):
    """The causes that `cinch diagnose` finds in a log."""
    done = subprocess.run([cinch, "diagnose", "--json", str(log)], capture_output=True, text=True)
    answer.write_text(done.stdout)
    if done.returncode not in (0, 4):
        return [f"exit code {done.returncode}"]
    return [failure["cause"] for failure in json.loads(done.stdout)["failures"]]


def provoke(names, output, cinch):
    logs, answers = output / "logs", output / "diagnosis"
    logs.mkdir(parents=True, exist_ok=True)
    answers.mkdir(exist_ok=True)
    files = {name: open(logs / f"{name}.log", "wb") for name in names}
    waiting = {name: started(name, files[name]) for name in names if name in CASES and not CASES[name][3]}
    rows, wrong = [], 0
    for name in names:
        start = time.monotonic()
        if name in waiting:
            code = finished(waiting[name])
        elif name in CASES:
            code = finished(started(name, files[name]))
        else:
            code = subprocess.run([sys.executable, HERE, "--case", name], stdout=files[name], stderr=subprocess.STDOUT).returncode
        files[name].close()
        expected = CASES[name][1] if name in CASES else {"capacity"}
        found = diagnosed(cinch, logs / f"{name}.log", answers / f"{name}.json") if cinch else ["not asked"]
        is_right = not cinch or bool(found) and set(found) <= expected
        wrong += not is_right
        rows.append((name, code, f"{time.monotonic() - start:.1f}", " or ".join(sorted(expected)), ", ".join(found) or "nothing", "" if is_right else "differs"))
        print("  ".join(f"{str(cell):<{width}}" for cell, width in zip(rows[-1], (16, 8, 6, 34, 30, 8))), flush=True)
    table = ["| case | exit code | seconds | expected | found | |", "|---|---|---|---|---|---|"]
    table += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    (output / "table.md").write_text("\n".join(table) + "\n")
    return wrong


def watch(output, cinch, scratch):
    """`cinch monitor` beside a PyTorch and a cinch run, and `cinch run --retry` of a PyTorch script.

    The run's own files, which are large, go to `scratch`.
    """
    output = output / "watch"
    output.mkdir(parents=True, exist_ok=True)
    python = [sys.executable, HERE]
    device = ["--device", "cuda", "--precision", "bf16"]

    def told(name, command, seconds=120, expected=(0,)):
        start = time.monotonic()
        with open(output / f"{name}.txt", "wb") as file:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, timeout=seconds)
        is_right = done.returncode in expected
        print(f"{name:<16}  {done.returncode:<4}  {time.monotonic() - start:.1f} s  {'' if is_right else 'differs'}", flush=True)
        return not is_right

    recording = output / "monitor.jsonl"
    trainer = subprocess.Popen([*python, "--steady", "24"], stdin=subprocess.DEVNULL, stdout=open(output / "pytorch.log", "wb"), stderr=subprocess.STDOUT)
    wrong = told("data", [cinch, "data", "synth", str(scratch / "data")])
    own = [cinch, "train", "--model", "gpt2", "--tokenizer", "bytes", "--data-dir", str(scratch / "data"), "--cache-dir", str(scratch / "cache")]
    own += [*device, "--batch-size", "8", "--grad-accum", "1", "--seq-len", "1024", "--max-steps", "100000", "--log-steps", "10"]
    own += ["--output-dir", str(scratch / "run"), "-q"]
    trained = subprocess.Popen(own, stdin=subprocess.DEVNULL, stdout=open(output / "cinch.log", "wb"), stderr=subprocess.STDOUT)
    recorder = subprocess.Popen([cinch, "monitor", "--json", "--interval", "0.5", "--record", str(recording)], stdin=subprocess.DEVNULL, stdout=open(output / "lines.jsonl", "wb"), stderr=subprocess.STDOUT)
    time.sleep(18)
    wrong += told("once", [cinch, "monitor", "--once"])
    wrong += told("once_json", [cinch, "monitor", "--once", "--json"])
    wrong += told("once_run", [cinch, "monitor", "--once", "--run", str(scratch / "run")])
    wrong += told("follow", [cinch, "monitor", "--once", "--json", "--pid", str(trainer.pid)])
    for process in (trained, recorder):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    trainer.wait(60)
    wrong += told("replay", [cinch, "monitor", "--once", "--replay", str(recording)])
    wrong += told("report", [cinch, "report", str(recording), "--output", str(output / "monitor.html")])
    wrong += told("run_report", [cinch, "report", str(scratch / "run"), "--output", str(output / "run.html")])
    retry = [cinch, "run", "--retry", "6", "--effective-batch", "64", "--record", str(output / "retry.jsonl"), "--report", str(output / "retry.json"), "--interval", "0.5"]
    wrong += told("retry", [*retry, "--", *python, "--train", "{batch}", "{accum}"])
    wrong += told("no_retry", [cinch, "run", "--report", str(output / "alone.json"), "--", *python, "--train", "64", "1"], expected=(1,))
    wrong += told("retry_report", [cinch, "report", str(output / "retry.jsonl"), "--output", str(output / "retry.html")])
    with contextlib.suppress(OSError, ValueError, KeyError):
        story = json.loads((output / "retry.json").read_text())
        tried = [(attempt["batch"], attempt["end"]) for attempt in story["attempts"]]
        print(f"retry: {tried}, batch {story['batch']} × {story['accumulation']}")
        wrong += story["attempts"][-1]["end"] != "success"
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; all where none is named")
    parser.add_argument("--output", default=os.environ.get("OUT", "real_ooms"))
    parser.add_argument("--cinch", help="the binary that is asked for causes")
    parser.add_argument("--watch", action="store_true", help="monitor and run instead of cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--steady", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--train", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        return one_case(arguments.case)
    if arguments.hold:
        return hold(arguments.hold)
    if arguments.steady:
        return steady(arguments.steady)
    if arguments.train:
        return train(*arguments.train)
    output = pathlib.Path(arguments.output)
    if arguments.watch:
        if not arguments.cinch:
            parser.error("--watch needs --cinch")
        with tempfile.TemporaryDirectory() as scratch:
            wrong = watch(output, arguments.cinch, pathlib.Path(scratch))
        sys.exit(1 if wrong else 0)
    unknown = [name for name in arguments.names if name not in CASES and name != "jax"]
    if unknown:
        parser.error(f"no case {unknown[0]}; there are {', '.join(CASES)} and jax")
    names = arguments.names or list(CASES)
    if not arguments.names:
        has_jax = subprocess.run([sys.executable, "-c", "import jax; jax.devices('gpu')"], capture_output=True).returncode == 0
        names += ["jax"] if has_jax else []
    wrong = provoke(names, output, arguments.cinch)
    print(f"{len(names)} cases, {wrong} differ; what was printed is in {output}/logs")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
