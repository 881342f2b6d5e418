#!/usr/bin/env python3
"""Per-rank plans beside published runs, and predicted scaling of three models.

    benchmarks/world.py --cinch target/release/cinch > benchmarks/DATE-world.md

Needs no GPU: everything is planned and predicted. The published figures are typed in with where
they are from; nothing of them is an input of a plan.
"""

import argparse
import json
import subprocess
import sys

TITAN = "torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md`"
GIST = "DeepSpeed 0.14.2 on 8 A800, gist chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a"

LLAMA8 = "--model meta-llama/Llama-3.1-8B --gpu \"H100 SXM5\" --safety-margin 0 --precision bf16 --shard fsdp --seq-len 8192 --batch-size 2 --grad-accum 1"
LLAMA7 = "--model meta-llama/Llama-2-7b-hf --gpu \"A100 SXM4 80GB\" --safety-margin 0 --link 200 --precision bf16 --world 8 --seq-len 4096"
LLAMA13 = "--model meta-llama/Llama-2-13b-hf --gpu \"A100 SXM4 80GB\" --safety-margin 0 --precision bf16 --world 8 --seq-len 4096"

# What was published: title, source, GiB of a GPU, tokens a second of a GPU; and the plans beside it.
PUBLISHED = [
    ("Llama-3.1-8B, FSDP, selective recomputation, eager, 8 H100", TITAN, 82.4, 5762, [
        f"{LLAMA8} --world 8 --checkpointing none", f"{LLAMA8} --world 8 --checkpointing full"]),
    ("the same with torch.compile", TITAN, 77.0, 6667, []),
    ("the same with torch.compile, 128 H100", TITAN, 62.0, 6514, [
        f"{LLAMA8} --world 128 --nodes 16 --checkpointing none"]),
    ("LLaMA-7B, ZeRO-2, 1 × 8 of 4096 tokens", GIST, 44.8, 2729, [
        f"{LLAMA7} --shard zero2 --batch-size 1 --grad-accum 8 --checkpointing none"]),
    ("LLaMA-7B, ZeRO-2, 1 × 8, checkpointing", GIST, 23.5, 2145, [
        f"{LLAMA7} --shard zero2 --batch-size 1 --grad-accum 8 --checkpointing full"]),
    ("LLaMA-7B, ZeRO-2, 4 × 2, checkpointing", GIST, 38.6, 2401, [
        f"{LLAMA7} --shard zero2 --batch-size 4 --grad-accum 2 --checkpointing full"]),
    ("LLaMA-7B, ZeRO-3, 2 × 4", GIST, 75.7, 2534, [
        f"{LLAMA7} --shard zero3 --batch-size 2 --grad-accum 4 --checkpointing none"]),
    ("LLaMA-7B, ZeRO-3, 2 × 4, checkpointing", GIST, 20.4, 2278, [
        f"{LLAMA7} --shard zero3 --batch-size 2 --grad-accum 4 --checkpointing full"]),
    ("LLaMA-7B, ZeRO-3, 8 × 1, checkpointing", GIST, 39.1, 2422, [
        f"{LLAMA7} --shard zero3 --batch-size 8 --grad-accum 1 --checkpointing full"]),
    ("Llama-2-13B, FSDP, batch 4 (length not stated), reserved memory", "meta-llama/llama-cookbook, issue 25", 48.0, None, [
        f"{LLAMA13} --shard fsdp --batch-size 4 --grad-accum 1 --checkpointing full",
        f"{LLAMA13} --shard zero2 --batch-size 1 --grad-accum 1 --checkpointing full",
        f"{LLAMA13} --shard zero1 --batch-size 1 --grad-accum 1 --checkpointing full"]),
]

SCALED = [
    ("GPT-2 of 124M", "--model gpt2 --gpu \"A100 SXM4 80GB\" --precision bf16 --seq-len 1024 --batch-size 16 --grad-accum 1 --checkpointing none", ["none", "zero1", "zero3"]),
    ("Llama-3.1-8B", "--model meta-llama/Llama-3.1-8B --gpu \"H100 SXM5\" --precision bf16 --seq-len 8192 --batch-size 2 --grad-accum 1 --checkpointing full", ["zero1", "zero2", "zero3"]),
    ("Llama-3.1-70B", "--model meta-llama/Llama-3.1-70B --gpu \"H100 SXM5\" --precision bf16 --seq-len 8192 --batch-size 1 --grad-accum 1 --checkpointing full", ["zero3"]),
]


def cinch(binary, command):
    run = subprocess.run(f"{binary} {command} --json", shell=True, capture_output=True, text=True)
    if not run.stdout:
        sys.exit(f"{command}: {run.stderr}")
    return json.loads(run.stdout)


def gib(count):
    return f"{count / 2**30:.1f}"


def published(binary):
    print("| run | published GiB | planned GiB | published tokens/s | predicted tokens/s |\n|---|---|---|---|---|")
    commands = []
    for title, source, memory, rate, plans in PUBLISHED:
        print(f"| {title} ({source}) | {memory} | | {rate or ''} | |")
        for command in plans:
            commands.append(command)
            answer = cinch(binary, f"plan {command}")
            short = command.split(" --shard ")[1] if "--shard" in command else command
            if not answer.get("fits", True) and "world" not in answer:
                print(f"| `--shard {short}` | | {gib(answer['needed_bytes'])}, does not fit | | |")
                continue
            world = answer["world"]
            speed = world["speed"]
            rate = speed["tokens_per_second_per_rank"]
            print(f"| `--shard {short}` | | {gib(world['bytes_per_rank'])} | | {rate:,.0f} |")
    print("\nCommands, each after `cinch plan`:\n\n```")
    print("\n".join(commands) + "\n```")


def scaling(binary):
    for title, command, shards in SCALED:
        print(f"\n### {title}\n\n`cinch plan {command} --shard … --scaling 1024`\n")
        rows = {}
        for shard in shards:
            answer = cinch(binary, f"plan {command} --shard {shard} --scaling 1024")
            for row in answer["scaling"]:
                rows.setdefault(row["ranks"], {})[shard] = row
        heads = "".join(f" {shard} GiB | efficiency | waits for | hidden |" for shard in shards)
        print(f"| GPUs |{heads}\n|---|{'---|' * 4 * len(shards)}")
        for ranks, of in rows.items():
            cells = ""
            for shard in shards:
                row = of[shard]
                mark = "" if row["fits"] in (None, True) else " (does not fit)"
                speed = row["speed"]
                cells += f" {gib(row['bytes_per_rank'])}{mark} | {100 * speed['efficiency']:.1f} % | {row['waits_for']} | {100 * speed['hidden_seconds'] / max(speed['network_seconds'], 1e-9):.0f} % |"
            print(f"| {ranks} |{cells}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cinch", default="target/release/cinch")
    binary = parser.parse_args().cinch
    print("## Published runs\n")
    published(binary)
    print("\n## Scaling")
    scaling(binary)


if __name__ == "__main__":
    main()
