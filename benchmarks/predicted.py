"""Predicted against measured step times: each of the five systems at three sizes of its own.

    python3 benchmarks/predicted.py --cinch target/release/cinch [--device cpu] [--runs 3] [--system mu]

A prediction takes the rates of the processor that are measured between the same steps, so a busy machine slows down both.
Each size is run several times; its ratio is the median over the runs, and a system's error the median over its sizes.
Ends with 1 where a system is off by more than 15 %.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

LIMIT = 0.15

# None of these sizes is one that the costs of ops were fitted to.
SIZES = {
    "mamba": [
        "--model mamba --model-size small --batch-size 3 --seq-len 192",
        "--model mamba --model-size medium --batch-size 1 --seq-len 96",
        "--model mamba --set model.d_model=320 --set model.n_layers=10 --batch-size 2 --seq-len 320",
    ],
    "gsa": [
        "--model gsa --model-size 512m-low-memory --batch-size 3 --seq-len 192",
        "--model gsa --set model.d_model=320 --set model.n_layers=5 --set model.vocab_size=12000 --batch-size 1 --seq-len 768",
        "--model gsa --set model.d_model=512 --set model.n_layers=3 --set model.vocab_size=24000 --batch-size 4 --seq-len 160",
    ],
    "qwen": [
        "--model {folder}/narrow --lora-rank 32 --batch-size 3 --seq-len 224",
        "--model {folder}/narrow --batch-size 1 --seq-len 384",
        "--model {folder}/wide --lora-rank 24 --batch-size 1 --seq-len 320 --checkpointing full",
    ],
    "mu": [
        "--model mu --batch-size 3 --seq-len 192",
        "--model mu --set model.n_layers=8 --batch-size 2 --seq-len 384",
        "--model mu --set model.n_layers=16 --set model.vocab_size=16000 --batch-size 5 --seq-len 160",
    ],
    "embedder": [
        "--model naics --set model.n_layers=4 --negatives 3 --batch-size 1 --seq-len 256",
        "--model naics --set model.n_layers=2 --set model.d_model=256 --set model.n_heads=8 --set model.d_ffn=1024 --negatives 5 --batch-size 2 --seq-len 96",
        "--model naics --negatives 2 --batch-size 1 --seq-len 128 --checkpointing full",
    ],
}

# On a GPU, none of them a row of the tables of measured steps.
GPU_SIZES = {
    "mamba": [
        "--model mamba --model-size small --batch-size 16 --seq-len 512 --precision bf16",
        "--model mamba --model-size medium-lite --batch-size 4 --seq-len 1024 --precision bf16",
        "--model mamba --set model.d_model=384 --set model.n_layers=6 --batch-size 4 --seq-len 768 --precision fp16",
    ],
    "gsa": [
        "--model gsa --model-size 512m-low-memory --batch-size 4 --seq-len 512 --precision bf16",
        "--model gsa --model-size 512m-low-memory --batch-size 1 --seq-len 4096 --precision bf16",
        "--model gsa --set model.d_model=768 --set model.n_layers=6 --set model.vocab_size=32000 --batch-size 8 --seq-len 768 --precision fp16",
    ],
    "qwen": [
        "--model qwen2.5-0.5b --lora-rank 16 --batch-size 4 --seq-len 1024 --precision bf16 --checkpointing none",
        "--model qwen2.5-1.5b --lora-rank 64 --batch-size 2 --seq-len 768 --precision bf16 --checkpointing full",
        "--model qwen2.5-0.5b --batch-size 2 --seq-len 2048 --precision bf16 --checkpointing none",
    ],
    "mu": [
        "--model mu --batch-size 16 --seq-len 256 --precision fp16",
        "--model mu --set model.n_layers=12 --batch-size 64 --seq-len 512 --precision bf16",
        "--model mu --set model.n_layers=12 --set model.vocab_size=8000 --batch-size 128 --seq-len 128 --precision fp16",
    ],
    "embedder": [
        "--model naics --negatives 8 --batch-size 16 --precision fp16 --checkpointing full",
        "--model naics --negatives 4 --batch-size 32 --seq-len 256 --precision bf16 --checkpointing full",
        "--model naics --set model.n_layers=3 --negatives 12 --batch-size 8 --seq-len 128 --precision fp16 --checkpointing none",
    ],
}

# Decoders of Qwen2's form: width, layers, heads, key heads, feed-forward.
DECODERS = {"narrow": (512, 6, 8, 2, 1536), "wide": (896, 4, 14, 2, 4864)}


def write_decoders(folder):
    for name, (width, layers, heads, key_heads, feed_forward) in DECODERS.items():
        model = pathlib.Path(folder, name)
        model.mkdir()
        config = {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads,
            "intermediate_size": feed_forward,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        }
        (model / "config.json").write_text(json.dumps(config))


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
    with tempfile.TemporaryDirectory() as folder:
        write_decoders(folder)
        far = measure(arguments, folder)
    if far:
        sys.exit(f"off by more than {100 * LIMIT:.0f} %: {', '.join(far)}")


def measure(arguments, folder):
    """Prints the table; the systems that are too far off."""
    far = []
    print("| system | setting | measured | predicted | predicted / measured |\n|---|---|---|---|---|")
    systems = GPU_SIZES if arguments.device == "cuda" else SIZES
    for system, sizes in systems.items():
        if arguments.system not in (None, system):
            continue
        errors = []
        for settings in sizes:
            line = settings.format(folder=folder)
            runs = [bench(arguments.cinch, arguments.device, arguments.steps, line) for _ in range(arguments.runs)]
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
    return far


main()
