#!/usr/bin/env python3
"""Reads training configs of other projects with cinch and compares what was read with the files' own keys.

    python benchmarks/configs.py --cinch target/release/cinch --axolotl DIR --llama-factory DIR --torchtune DIR

The folders are examples that the reader brings: axolotl's `examples`, LLaMA-Factory's `examples`, torchtune's
`recipes/configs`. Of every YAML or JSON file that describes a run, the model, micro batch, accumulation, length and rank
of the adapters are taken from the file by the few lines below, which know nothing of cinch, and compared with
`cinch plan FILE --json`. A file is
  predicted   where cinch gives a figure, and everything agrees;
  refused     where it exits with 2 and says why;
  wrong       where something differs, or it fails in another way.
Needs PyYAML.
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys

import yaml


def get(config, *path):
    for name in path:
        if not isinstance(config, dict) or name not in config:
            return None
        config = config[name]
    return config


def of_axolotl(config):
    has_adapter = config.get("adapter") in ("lora", "qlora")
    return {
        "model": config.get("base_model"),
        "batch_size": config.get("micro_batch_size"),
        "accumulation": config.get("gradient_accumulation_steps"),
        "seq_len": config.get("sequence_len"),
        "lora_rank": config.get("lora_r") if has_adapter else None,
        "adapters": has_adapter,
    }


def of_llama_factory(config):
    has_adapter = config.get("finetuning_type") == "lora" or get(config, "peft_config", "name") == "lora"
    return {
        "model": config.get("model_name_or_path") or config.get("model"),
        "batch_size": config.get("per_device_train_batch_size") or config.get("micro_batch_size"),
        "accumulation": config.get("gradient_accumulation_steps"),
        "seq_len": config.get("cutoff_len"),
        "lora_rank": (config.get("lora_rank") or get(config, "peft_config", "r")) if has_adapter else None,
        "adapters": has_adapter,
    }


def of_torchtune(config):
    component = get(config, "model", "_component_") or ""
    has_adapter = "lora" in component
    return {
        "model": None,  # named by a builder, not by an id
        "batch_size": config.get("batch_size"),
        "accumulation": config.get("gradient_accumulation_steps"),
        "seq_len": get(config, "tokenizer", "max_seq_len"),
        "lora_rank": get(config, "model", "lora_rank") if has_adapter else None,
        "adapters": has_adapter,
    }


def differences(own, answer):
    """What the file says and cinch read otherwise."""
    read = dict(answer["settings"], model=answer["model"])
    found = []
    for key, value in own.items():
        if key == "adapters" or value is None or value == "auto":
            continue
        if key == "lora_rank" and read.get(key) is None:
            found.append(f"{key}: the file says {value}, read as none")
        elif str(read.get(key)) != str(value):
            found.append(f"{key}: the file says {value}, read as {read.get(key)}")
    if not own["adapters"] and read.get("lora_rank") is not None:
        found.append(f"lora_rank: the file has no adapters, read as {read.get('lora_rank')}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cinch", default="target/release/cinch")
    parser.add_argument("--axolotl", type=pathlib.Path)
    parser.add_argument("--llama-factory", type=pathlib.Path)
    parser.add_argument("--torchtune", type=pathlib.Path)
    parser.add_argument("--list", action="store_true", help="print every file with its outcome")
    arguments = parser.parse_args()
    projects = [
        ("axolotl", arguments.axolotl, of_axolotl),
        ("LLaMA-Factory", arguments.llama_factory, of_llama_factory),
        ("torchtune", arguments.torchtune, of_torchtune),
    ]
    total = collections.Counter()
    reasons = collections.Counter()
    for name, folder, keys in projects:
        if folder is None:
            continue
        count = collections.Counter()
        files = sorted(p for p in folder.rglob("*") if p.suffix in (".yaml", ".yml", ".json") and p.is_file())
        for path in files:
            try:
                config = yaml.safe_load(path.read_text())
            except yaml.YAMLError:
                config = None
            if not isinstance(config, dict):
                count["no config"] += 1
                continue
            run = subprocess.run(
                [arguments.cinch, "plan", str(path), "--json"], capture_output=True, text=True, check=False
            )
            detail = ""
            if run.returncode == 0:
                wrong = differences(keys(config), json.loads(run.stdout))
                outcome = "wrong" if wrong else "predicted"
                detail = "; ".join(wrong)
            elif run.returncode == 2 and run.stderr.startswith("error: "):
                outcome = "refused"
                detail = run.stderr.splitlines()[0][len("error: "):]
                reasons[detail.replace(str(path), "FILE").split(": ", 1)[-1][:110]] += 1
            else:
                outcome = "wrong"
                detail = f"exit {run.returncode}: {run.stderr[:200]}"
            count[outcome] += 1
            if arguments.list or outcome == "wrong":
                print(f"{outcome:<10} {path.relative_to(folder)}  {detail}")
        print(f"{name}: {len(files)} files, " + ", ".join(f"{n} {what}" for what, n in sorted(count.items())))
        total.update(count)
    print("all: " + ", ".join(f"{n} {what}" for what, n in sorted(total.items())))
    print("\nwhy files were refused:")
    for reason, number in reasons.most_common():
        print(f"{number:5}  {reason}")
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
