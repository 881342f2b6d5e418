#!/usr/bin/env python3
"""Trains four models on one, two and four CPU ranks at each shard level and compares losses and weights with one rank.

    cargo build --release
    python3 benchmarks/ranks_alike.py --cinch target/release/cinch

Mamba, GPT-2, adapters on a LLaMA, and the text embedder, all with dropout and clipping, 50 steps of the same effective batch.
The first three are cut by accumulation; the embedder's experts are balanced over what runs at a time, so its micro batch is
cut. The last line of each model is a run that is stopped twice and gone on with on another number of ranks.
Prints the greatest relative difference of a loss, and of a weight in units of the largest one of its tensor. Exits with 1
where a loss is off by more than 1e-4. Needs nothing but Python.
"""

import argparse
import array
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

STEPS, ROWS = 50, 8
LEVELS = ["ddp", "zero1", "zero2", "zero3"]
LIMIT = 1e-4
SHARED = f"""--lr 1e-3 --threads 1 --log-steps 1 --eval-steps 0 --save-steps 0 --set training.max_grad_norm=0.5
    --set training.warmup_steps=5 -q""".split()
TEXT = "--tokenizer bytes --seq-len 32 --set model.vocab_size=257 --set model.max_seq_len=64".split()
MODELS = {
    "Mamba": "--model mamba --set model.d_model=32 --set model.n_layers=2 --set model.dropout=0.1".split() + TEXT,
    "GPT-2": "--model gpt2 --set model.d_model=32 --set model.n_heads=4 --set model.n_layers=2 --set model.dropout=0.1".split()
    + TEXT,
    "LoRA": "--model decoder --tokenizer bytes --seq-len 32 --lora-rank 4 --lora-dropout 0.1 --weights initial".split(),
    "embedder": """--model naics --set model.d_model=16 --set model.n_heads=2 --set model.n_layers=1 --set model.d_ffn=24
        --set model.d_expert=16 --set model.adapter_rank=2 --set model.adapter_dropout=0.1 --set model.dropout=0.1
        --set model.vocab_size=257 --set model.max_seq_len=24 --set model.title_length=12 --negatives 4
        --set model.text_chunk=4 --tokenizer bytes --seq-len 24 --set data.cluster_epoch=2 --data-dir codes.jsonl""".split(),
}
DECODER = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def cut(model, ranks):
    """The same effective batch on so many ranks."""
    micro = ROWS // ranks if model == "embedder" else 2
    return ["--batch-size", str(micro), "--grad-accum", str(ROWS // ranks // micro)]


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def weights(folder):
    """The tensors of the last checkpoint, all in single precision."""
    data = (folder / "checkpoints" / f"step-{STEPS:08}" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, tensor in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            tensors[name] = array.array("f", data[8 + length + first : 8 + length + last])
    return tensors


def apart(found, wanted):
    """The greatest relative difference of losses, and of weights."""
    found_losses, wanted_losses = losses(found), losses(wanted)
    if not len(found_losses) == len(wanted_losses) == STEPS:
        raise SystemExit(f"{found.name}: {len(found_losses)} losses of {STEPS}")
    of_losses = max(abs(a - b) / abs(b) for a, b in zip(found_losses, wanted_losses))
    of_weights, mine, theirs = 0.0, weights(found), weights(wanted)
    if mine.keys() != theirs.keys():
        raise SystemExit(f"{found.name}: other tensors")
    for name, values in theirs.items():
        largest = max(map(abs, values))
        of_weights = max(of_weights, max(abs(a - b) for a, b in zip(mine[name], values)) / (largest or 1.0))
    return of_losses, of_weights


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cinch", default="target/release/cinch")
    arguments.add_argument("--model", choices=MODELS, action="append", help="these only")
    arguments = arguments.parse_args()
    cinch = str(pathlib.Path(arguments.cinch).resolve())
    worst = 0.0
    print("| model | ranks | shard | losses off by | weights off by |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        home = pathlib.Path(home)
        (home / "decoder").mkdir()
        (home / "decoder" / "config.json").write_text(json.dumps(DECODER))
        environment = {**os.environ, "CINCH_CACHE": str(home / "cache"), "CUDA_VISIBLE_DEVICES": ""}

        def run(*command):
            done = subprocess.run([cinch, *command], cwd=home, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"cinch {' '.join(command)}\n{done.stderr}")

        def train(ranks, *command):
            run(*(["launch", "--ranks", str(ranks), "--"] if ranks > 1 else []), "train", *command)

        run("data", "taxonomy", "codes.jsonl", "--sectors", "6", "--children", "2", "--digits", "4")
        for model in arguments.model or MODELS:
            words = MODELS[model] + SHARED

            def tell(ranks, level, name):
                nonlocal worst
                of_losses, of_weights = apart(home / name, home / alone)
                worst = max(worst, of_losses)
                print(f"| {model} | {ranks} | {level} | {of_losses:.1e} | {of_weights:.1e} |", flush=True)

            alone = f"{model}-alone"
            train(1, *words, *cut(model, 1), "--max-steps", str(STEPS), "--output-dir", alone)
            for ranks in [2, 4]:
                for level in LEVELS:
                    name = f"{model}-{ranks}-{level}"
                    world = ["--shard", level, "--output-dir", name, "--max-steps", str(STEPS)]
                    train(ranks, *words, *cut(model, ranks), *world)
                    tell(ranks, level, name)
            # With a learning rate that does not depend on how many steps there are.
            constant = ["--set", "training.schedule=constant"]
            name, stops = f"{model}-moved", [(4, "zero3", 20), (2, "zero1", 35), (1, "ddp", STEPS)]
            for index, (ranks, level, last) in enumerate(stops):
                begin = ["--resume", name, "--threads", "1", "-q"] if index else [*words, *constant, "--output-dir", name]
                train(ranks, *begin, *cut(model, ranks), "--shard", level, "--max-steps", str(last))
            alone = f"{model}-constant"
            train(1, *words, *constant, *cut(model, 1), "--max-steps", str(STEPS), "--output-dir", alone)
            tell("4, 2, 1", "zero3, zero1, none", name)
    print(f"losses off by {worst:.1e} at most")
    sys.exit(1 if worst > LIMIT else 0)


if __name__ == "__main__":
    main()
