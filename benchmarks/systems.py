#!/usr/bin/env python3
"""The other four systems on one GPU or on the CPU: plain PyTorch and cinch, one after the other, in one run.

    cargo build --release
    python benchmarks/systems.py --models MODELS.py --cinch target/release/cinch [--only mu,gsa] [--device cpu]

MODELS.py has the PyTorch versions: a function `build(case, device, dtype)` that returns the model,
a function for a batch, one for the loss of a batch, and the parameters that are trained. Weights and
tokens are random; nothing is downloaded. Every measurement is a process of its own. PyTorch runs
under autocast with a fused AdamW; its memory is what the allocator reserved, cinch's is the arena,
and beside it is what the driver says less the plan.

On the CPU both compute in fp32 on all cores. PyTorch's memory is the most that was resident, less
what was before the model; activations are what is beyond 16 bytes for each trained parameter.
"""

import argparse
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys

# What PyTorch builds, how it computes, and the same for cinch.
CASES = {
    "gsa": (
        dict(family="gsa", batch=2, seq=1024, ckpt=True),
        "bfloat16",
        "--model gsa --batch-size 2 --seq-len 1024 --precision bf16",
    ),
    "mu": (
        dict(family="mu", batch=32, seq=512),
        "float16",
        "--model mu --batch-size 32 --seq-len 512 --precision fp16",
    ),
    "embedder": (
        dict(family="naics", batch=45, seq=512, n_negatives=24),
        "float16",
        "--model naics --batch-size 45 --negatives 24 --precision fp16 --checkpointing full",
    ),
    "mamba": (
        dict(family="mamba", size="small", batch=8, seq=1024),
        "bfloat16",
        "--model mamba --model-size small --batch-size 8 --seq-len 1024 --precision bf16",
    ),
}

# What two cores run in seconds.
CPU_CASES = {
    "gsa": (dict(family="gsa", batch=1, seq=256, ckpt=False), "--model gsa --batch-size 1 --seq-len 256"),
    "mu": (dict(family="mu", batch=4, seq=256), "--model mu --batch-size 4 --seq-len 256"),
}
# A weight, its gradient and two moments in fp32.
STATE = 16


def load(models, what, device):
    """The PyTorch version."""
    import torch

    # What it imports may lie beside it.
    sys.path.insert(0, str(pathlib.Path(models).resolve().parent))
    spec = importlib.util.spec_from_file_location("systems", models)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build(what, torch.device(device), torch.float32)


def measure_torch_on_cpu(models, case, steps):
    import resource
    import time

    import torch

    peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = peak()
    _, batch, loss_of, trained = load(models, CPU_CASES[case][0], "cpu")
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    times = []
    for step in range(1 + steps):
        tokens = batch()
        start = time.perf_counter()
        loss_of(tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step > 0:
            times.append(1e3 * (time.perf_counter() - start))
    taken = peak() - before
    states = STATE * sum(parameter.numel() for parameter in trained)
    activations = (taken - states) / 2**30
    print(json.dumps(dict(milliseconds=statistics.median(times), gib=taken / 2**30, activations=activations)))


def measure_torch(models, case, steps):
    import torch

    what, dtype, _ = CASES[case]
    _, batch, loss_of, trained = load(models, what, "cuda")
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    times = []
    for step in range(1 + steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        tokens = batch()
        start.record()
        with torch.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = loss_of(tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        if step > 0:
            times.append(start.elapsed_time(end))
    reserved = torch.cuda.max_memory_reserved() / 2**30
    print(json.dumps(dict(milliseconds=statistics.median(times), gib=reserved)))


def measure_cinch(program, case, steps):
    line = f"{program} profile --device cuda --grad-accum 1 --steps {steps} --json {CASES[case][2]}"
    ran = subprocess.run(line.split(), capture_output=True, text=True)
    if ran.returncode:
        return dict(failed=ran.stderr.strip().splitlines()[-1:])
    answer = json.loads(ran.stdout)
    return dict(
        milliseconds=1e3 * answer["measured_seconds"],
        predicted=1e3 * answer["predicted_seconds"],
        gib=answer["planned"]["arena_bytes"] / 2**30,
        driver_less_plan_mib=(answer["device_memory_difference"] or 0) / 2**20,
    )


def measure_cinch_on_cpu(program, case, steps):
    settings = f"--device cpu --precision fp32 --grad-accum 1 --checkpointing none --json {CPU_CASES[case][1]}"
    answers = []
    for command in ["plan", f"profile --steps {steps}"]:
        ran = subprocess.run(f"{program} {command} {settings}".split(), capture_output=True, text=True)
        if ran.returncode:
            return dict(failed=ran.stderr.strip().splitlines()[-1:])
        answers.append(json.loads(ran.stdout))
    plan, profile = answers
    arena = profile["planned"]["arena_bytes"]
    return dict(
        milliseconds=1e3 * profile["measured_seconds"],
        predicted=1e3 * profile["predicted_seconds"],
        gib=arena / 2**30,
        activations=(arena - STATE * plan["parameters"]) / 2**30,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cinch", default="target/release/cinch")
    parser.add_argument("--models", required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    if arguments.torch:
        measure = measure_torch_on_cpu if on_cpu else measure_torch
        return measure(arguments.models, arguments.torch, arguments.steps)
    cases = arguments.only.split(",") if arguments.only else CPU_CASES if on_cpu else CASES
    for case in cases:
        measure = measure_cinch_on_cpu if on_cpu else measure_cinch
        ours = measure(arguments.cinch, case, arguments.steps)
        print(f"cinch, {case}: {ours}", flush=True)
        line = [sys.executable, __file__, "--models", arguments.models, "--device", arguments.device]
        line += ["--torch", case, "--steps", "2"]
        ran = subprocess.run(line, capture_output=True, text=True)
        last = (ran.stdout.strip().splitlines() or ["{}"])[-1]
        theirs = json.loads(last) if ran.returncode == 0 else dict(failed=ran.stderr[-300:])
        print(f"PyTorch, {case}: {theirs}", flush=True)
        if "failed" not in ours and "failed" not in theirs:
            faster = theirs["milliseconds"] / ours["milliseconds"]
            print(f"{case}: {faster:.1f} times as fast in {ours['gib'] / theirs['gib']:.3f} of the memory")
            if on_cpu:
                print(f"{case}: {ours['activations'] / theirs['activations']:.3f} of the activations")


if __name__ == "__main__":
    main()
