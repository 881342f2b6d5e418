"""Predicted against measured step times: each of the five systems at three sizes of its own.

    python3 benchmarks/predicted.py --cinch target/release/cinch [--device cpu] [--runs 3] [--system mu]

A prediction takes the rates of the processor that are measured between the same steps, so a busy machine slows down both.
Each size is run several times; its ratio is the median over the runs, and a system's error the median over its sizes.
Ends with 1 where a system is off by more than 15 %.
"""
import argparse
import json
import statistics
import subprocess
import sys

LIMIT = 0.15

# None of these sizes is one that `cinch bench --all` runs, by which shares of rates were chosen.
SIZES = {
    "mamba": [
        "--model mamba --model-size small --batch-size 2 --seq-len 128",
        "--model mamba --model-size medium-lite --batch-size 1 --seq-len 128",
        "--model mamba --set model.d_model=256 --set model.n_layers=6 --batch-size 4 --seq-len 192",
    ],
    "gsa": [
        "--model gsa --model-size 512m-low-memory --batch-size 2 --seq-len 128",
        "--model gsa --set model.d_model=256 --set model.n_layers=4 --set model.vocab_size=8000 --batch-size 2 --seq-len 512",
        "--model gsa --set model.d_model=384 --set model.n_layers=6 --set model.vocab_size=32000 --batch-size 1 --seq-len 384",
    ],
    "qwen": [
        "--model qwen2.5-0.5b --lora-rank 16 --batch-size 2 --seq-len 96",
        "--model qwen2.5-0.5b --set model.n_layers=8 --lora-rank 64 --batch-size 1 --seq-len 512",
        "--model qwen2.5-0.5b --set model.n_layers=6 --lora-rank 8 --batch-size 4 --seq-len 128 --checkpointing full",
    ],
    "mu": [
        "--model mu --batch-size 2 --seq-len 128",
        "--model mu --set model.n_layers=6 --batch-size 4 --seq-len 512",
        "--model mu --set model.n_layers=12 --set model.vocab_size=8000 --batch-size 8 --seq-len 128",
    ],
    "embedder": [
        "--model naics --set model.n_layers=2 --negatives 4 --batch-size 2 --seq-len 128",
        "--model naics --set model.n_layers=3 --set model.d_model=192 --set model.d_ffn=768 --negatives 2 --batch-size 2 --seq-len 256",
        "--model naics --negatives 1 --batch-size 1 --seq-len 192 --checkpointing full",
    ],
}


def bench(cinch, device, steps, settings):
    line = [cinch, "bench", "--json", "--device", device, "--grad-accum", "1", "--steps", str(steps), *settings.split()]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)}\n{done.stderr}")
    return json.loads(done.stdout)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--cinch", default="target/release/cinch")
    arguments.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=4)
    arguments.add_argument("--system", choices=list(SIZES))
    arguments = arguments.parse_args()
    far = []
    print("| system | setting | measured | predicted | predicted / measured |\n|---|---|---|---|---|")
    for system, sizes in SIZES.items():
        if arguments.system not in (None, system):
            continue
        errors = []
        for settings in sizes:
            runs = [bench(arguments.cinch, arguments.device, arguments.steps, settings) for _ in range(arguments.runs)]
            ratios = [run["predicted_seconds"] / run["step_seconds"] for run in runs]
            ratio = statistics.median(ratios)
            measured = statistics.median(run["step_seconds"] for run in runs)
            predicted = statistics.median(run["predicted_seconds"] for run in runs)
            errors.append(abs(ratio - 1))
            print(f"| {system} | `{settings}` | {measured:.3f} s | {predicted:.3f} s | {ratio:.2f} |", flush=True)
        error = statistics.median(errors)
        if error > LIMIT:
            far.append(system)
        print(f"| {system} | median error | | | {100 * error:.0f} % |", flush=True)
    if far:
        sys.exit(f"off by more than {100 * LIMIT:.0f} %: {', '.join(far)}")


main()
