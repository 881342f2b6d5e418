#!/usr/bin/env python3
"""Fine-tuning on one GPU: PyTorch and cinch, one after the other, in one run.

    cargo build --release
    python benchmarks/finetune.py --cinch target/release/cinch

Qwen2.5-7B with adapters of rank 128 on all seven layers of a block, one row of 1,536 tokens, and
the whole of Qwen2.5-0.5B, eight rows of 1,024. Weights and tokens are random; nothing is
downloaded. Every measurement is a process of its own. PyTorch has bf16 weights, adapters and
moments, and fused attention; its memory is what the allocator reserved. cinch has fp32 masters and
moments of what it trains where nothing else is said; its memory is the arena.
"""

import argparse
import json
import statistics
import subprocess
import sys

SHAPES = {
    "qwen2.5-7b": dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "qwen2.5-0.5b": dict(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ),
}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "lora": ("qwen2.5-7b", 1, 1536, 128),
    "full": ("qwen2.5-0.5b", 8, 1024, None),
}


def with_adapters(model, rank):
    import torch
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            like = dict(device=base.weight.device, dtype=base.weight.dtype, bias=False)
            self.base = base
            self.down = nn.Linear(base.in_features, rank, **like)
            self.up = nn.Linear(rank, base.out_features, **like)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + 2.0 * self.up(self.down(x))

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in LAYERS and isinstance(child, nn.Linear):
                setattr(module, name, Adapted(child))
    return model


def measure_torch(case, compiled, recompute, steps):
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    name, batch, length, rank = CASES[case]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[name]))
    model.train()
    model.config.use_cache = False
    if rank:
        model = with_adapters(model, rank)
    if recompute:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        if rank:
            model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    forward = torch.compile(model) if compiled else model
    tokens = torch.randint(0, SHAPES[name]["vocab_size"], (batch, length), device="cuda")
    times = []
    for step in range(3 + steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        forward(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        torch.cuda.synchronize()
        if step >= 3:
            times.append(start.elapsed_time(end))
    reserved = torch.cuda.max_memory_reserved() / 2**30
    print(json.dumps(dict(milliseconds=statistics.median(times), gib=reserved)))


def measure_cinch(program, case, more, steps):
    name, batch, length, rank = CASES[case]
    line = [program, "bench", "--model", name, "--device", "cuda", "--precision", "bf16",
            "--batch-size", batch, "--grad-accum", 1, "--seq-len", length, "--steps", steps,
            "--json", *more]
    if rank and "--lora-rank" not in more:
        line += ["--lora-rank", rank]
    ran = subprocess.run([str(word) for word in line], capture_output=True, text=True)
    if ran.returncode:
        return dict(failed=ran.stderr.strip().splitlines()[-1:])
    answer = json.loads(ran.stdout)
    return dict(
        milliseconds=1e3 * answer["step_seconds"],
        gib=answer["arena_bytes"] / 2**30,
        driver_gib=(answer["device_used_bytes"] or 0) / 2**30,
        predicted=1e3 * (answer["predicted_seconds"] or 0),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cinch", default="target/release/cinch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--torch", help=argparse.SUPPRESS)
    parser.add_argument("--without-compiled", action="store_true")
    parser.add_argument("--only", choices=list(CASES))
    arguments = parser.parse_args()
    if arguments.torch:
        case, how, recompute = arguments.torch.split(",")
        return measure_torch(case, how == "compiled", recompute == "1", arguments.steps)
    rows = []
    quantised = ["--lora-rank", "16", "--quantization", "4bit",
                 "--set", "lora.double_quantization=true", "--checkpointing", "full"]
    as_theirs = ["--master-weights", "false", "--optimizer-states", "weights"]
    hosted = ["--checkpointing", "26", "--offload-activations", "12", "--set", "vram.loss_chunk=768"]
    for case, title, more in [
        ("lora", "7B, adapters", ["--checkpointing", "none"]),
        ("lora", "7B, adapters, recomputed", ["--checkpointing", "full"]),
        ("lora", "7B, adapters, 26 blocks recomputed, activations of 12 in host memory", hosted),
        ("lora", "7B, four bits, rank 16, recomputed", quantised),
        ("full", "0.5B, whole", ["--checkpointing", "none"]),
        ("full", "0.5B, whole, bf16 weights and moments", ["--checkpointing", "none", *as_theirs]),
    ]:
        if arguments.only not in (None, case):
            continue
        rows.append((f"cinch, {title}", measure_cinch(arguments.cinch, case, more, arguments.steps)))
        print(rows[-1], flush=True)
    hows = [("lora", "eager", 0), ("full", "eager", 0)]
    if not arguments.without_compiled:
        hows += [("lora", "compiled", 0), ("lora", "compiled", 1), ("full", "compiled", 0)]
    for case, how, recompute in hows:
        if arguments.only not in (None, case):
            continue
        line = [sys.executable, __file__, "--torch", f"{case},{how},{recompute}", "--steps",
                str(arguments.steps)]
        ran = subprocess.run(line, capture_output=True, text=True)
        last = (ran.stdout.strip().splitlines() or ["{}"])[-1]
        result = json.loads(last) if ran.returncode == 0 else dict(failed=ran.stderr[-300:])
        title = f"PyTorch {how}, {case}" + (", recomputed" if recompute else "")
        rows.append((title, result))
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
