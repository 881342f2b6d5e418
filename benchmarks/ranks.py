#!/usr/bin/env python3
"""Kills a random rank of several at a random moment, again and again, and looks whether anything is lost.

    cargo build --release
    python3 benchmarks/ranks.py --cinch target/release/cinch --kills 50 --seed 1

Each time a run of 2, 3 or 4 CPU ranks with a random shard level is started by `cinch launch`, or gone on with from its
newest checkpoint, and one of its processes (the launcher too) is killed by SIGKILL. What must hold, or it is a loss:
  every checkpoint that has its name is whole by its checksums
  all other processes of the run have ended within the stated time, and the launcher has ended with an error
  the run that goes on, on another number of ranks, ends with the losses of one that was left alone on one rank (to 1e-4)
Exits with 1 if anything was lost. Needs Linux and nothing but Python.
"""

import argparse
import hashlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

STEPS = 60
MODEL = f"""train --set model.d_model=32 --set model.n_layers=2 --set model.vocab_size=257 --set model.max_seq_len=64
    --tokenizer bytes --seq-len 32 --lr 1e-3 --threads 1 --log-steps 1 --save-steps 5 --eval-steps 20
    --set training.eval_batches=3 --set model.dropout=0.1 --save-total-limit 2 --max-steps {STEPS} -q""".split()
LEVELS = ["ddp", "zero1", "zero2", "zero3"]
# A closed connection is found at once; the launcher gives the others ten seconds to end.
LIMIT = 30.0


def cut(ranks):
    """The same effective batch of 24 rows, cut over ranks."""
    return ["--batch-size", "2", "--grad-accum", str(12 // ranks)]


def command(cinch, ranks, level, folder, resume):
    if resume:
        train = ["train", "--resume", str(folder), "--shard", level, "--threads", "1", "-q"]
    else:
        train = MODEL + cut(ranks) + ["--shard", level, "--output-dir", str(folder)]
    return [cinch, "launch", "--ranks", str(ranks), "--", *train]


def children(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def is_gone(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rsplit(")", 1)[1].split()[0] == "Z"


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line.get("loss", line.get("validation_loss")) for line in map(json.loads, lines)]


def newest(folder):
    checkpoints = folder / "checkpoints"
    names = sorted(checkpoints.glob("step-*")) if checkpoints.is_dir() else []
    return names[-1] if names else None


def digest(data, part_bytes):
    """The hash of a file; of one that ranks have written together, that of the hashes of its parts."""
    if part_bytes is None:
        return hashlib.sha256(data).hexdigest()
    parts = (data[first : first + part_bytes] for first in range(0, len(data), part_bytes))
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def damaged(folder):
    """What is wrong with the checkpoints that have their names, if anything."""
    for checkpoint in (folder / "checkpoints").glob("step-*"):
        try:
            files = json.loads((checkpoint / "checksums.json").read_text())["files"]
            for name, file in files.items():
                data = (checkpoint / name).read_bytes()
                if digest(data, file.get("part_bytes")) != file["sha256"]:
                    return f"{checkpoint.name}/{name} is damaged"
        except OSError as error:
            return str(error)
    return None


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cinch", default="target/release/cinch")
    arguments.add_argument("--kills", type=int, default=50)
    arguments.add_argument("--seed", type=int, default=1)
    arguments = arguments.parse_args()
    cinch = str(pathlib.Path(arguments.cinch).resolve())
    draw = random.Random(arguments.seed)
    lost, waited, killed = [], [], 0
    with tempfile.TemporaryDirectory() as home:
        home = pathlib.Path(home)
        environment = {**os.environ, "CINCH_CACHE": str(home / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        alone = [cinch, *MODEL, *cut(1), "--output-dir", str(home / "alone")]
        subprocess.run(alone, check=True, env=environment, stdout=subprocess.DEVNULL)
        expected = losses(home / "alone")
        run = 0
        while killed < arguments.kills:
            folder = home / f"run-{run}"
            run += 1
            course = []
            for attempt in range(100):
                ranks, level = draw.choice([2, 3, 4]), draw.choice(LEVELS)
                resume = newest(folder) is not None
                if folder.exists() and not resume:
                    subprocess.run(["rm", "-rf", str(folder)], check=True)
                child = subprocess.Popen(
                    command(cinch, ranks, level, folder, resume),
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                last = attempt == 4 or killed >= arguments.kills
                if last:
                    _, said = child.communicate()
                    course.append(f"{ranks} {level} to the end")
                    if child.returncode != 0:
                        lost.append(f"run {run}: {course}: {said}")
                    break
                time.sleep(draw.uniform(0.05, 2.0))
                processes = children(child.pid)
                victims = [child.pid, *processes]
                if child.poll() is not None or not processes:
                    child.communicate()
                    course.append(f"{ranks} {level} was faster")
                    if child.returncode == 0:
                        break
                    continue
                victim = draw.choice(victims)
                who = "launcher" if victim == child.pid else f"rank {processes.index(victim)}"
                begun = time.monotonic()
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                killed += 1
                course.append(f"{ranks} {level}, {who}")
                _, said = child.communicate()
                while not all(map(is_gone, processes)) and time.monotonic() - begun < LIMIT:
                    time.sleep(0.01)
                took = time.monotonic() - begun
                waited.append(took)
                if not all(map(is_gone, processes)):
                    lost.append(f"run {run}: {course}: a process is left after {took:.1f} s")
                if child.returncode == 0:
                    course.append("it was done")
                wrong = damaged(folder)
                if wrong:
                    lost.append(f"run {run}: {course}: {wrong}")
            found = losses(folder)
            apart = [abs(a - b) / abs(b) for a, b in zip(found, expected)]
            if len(found) != len(expected) or max(apart) > 1e-4:
                lost.append(f"run {run}: {course}: {len(found)} losses of {len(expected)}, off by {max(apart):.2e}")
            print(f"run {run}: {'; '.join(course)}: losses off by {max(apart):.1e}", flush=True)
    print(f"{killed} kills in {run} runs, {len(lost)} losses; all processes gone after {max(waited, default=0):.1f} s at most")
    for one in lost:
        print("LOST:", one)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
