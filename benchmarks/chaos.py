#!/usr/bin/env python3
"""Kills cinch at random moments, fills its disk, and looks whether anything is lost.

    cargo build --release
    python3 benchmarks/chaos.py --cinch target/release/cinch --kills 1000 --seed 1

A kill is a SIGKILL at a random moment of a run, or as soon as a file appears beside the user's. Disks are full in three
ways: a write beyond a limit fails (RLIMIT_FSIZE), it ends the process (SIGXFSZ), or a small tmpfs has no space left; the
last needs root, also that of `unshare -rm`, and is left out where nothing can be mounted.

What must hold after each of them, or it is a loss:
  train, save, resume   every checkpoint that has its name is whole by its checksums; the run that goes on ends with the
                        weights, states and metrics of one that was left alone, bit for bit, and leaves nothing else
  apply, undo           every file has the bytes from before or those from after; undoing until there is nothing left to
                        undo gives the bytes from before, and no other file is left
  cache                 the next run ends well, with the tokens that a run left alone has, and nothing else in the cache
  all                   no panic, and nothing written outside of the folders that were named
Exits with 1 if anything was lost. Needs Linux and nothing but Python.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

MODEL = """--model mamba --model-size tiny --set model.d_model=16 --set model.n_layers=1 --set model.d_state=4
    --tokenizer bytes --batch-size 2 --grad-accum 1 --seq-len 32 --warmup-steps 5 --threads 1 -q""".split()
STEPS = 40
RUN = f"""--max-steps {STEPS} --eval-steps 10 --log-steps 1 --save-total-limit 2 --set training.eval_batches=1""".split()
SAVE_STEPS = {"train": "10", "save": "1"}

# A run of PyTorch with DeepSpeed's file in a folder of its own, and one of cinch's.
APPLIED = {
    "run.yaml": "# my run\nmodel:\n  type: mamba\n  size: tiny   # fits\nvram:\n  batch_size: 1      # was too small\n"
    "  gradient_accumulation_steps: 16\n  use_fp16: true\n",
    "args.yaml": "model_name_or_path: gpt2\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 16\n"
    "max_seq_length: 128\nbf16: true\noutput_dir: out\ndeepspeed: ds/zero.json\n",
    "ds/zero.json": '{\n  "train_micro_batch_size_per_gpu": 1,\n  "gradient_accumulation_steps": 16,\n'
    '  "train_batch_size": 16,\n  "bf16": {"enabled": true},\n  "zero_optimization": {"stage": 0}\n}\n',
}
# Which files an application to one changes.
CHANGED = {"run.yaml": ["run.yaml"], "args.yaml": ["args.yaml", "ds/zero.json"]}

SMALL_DISK = 24 << 20
KINDS = ["kills", "failed writes", "ended by a write", "full disks"]


class Loss(Exception):
    """Something that must hold and does not."""


class Outcome:
    def __init__(self, process, errors, seconds, kind):
        self.code = process.returncode
        self.errors = errors
        self.seconds = seconds
        self.kind = kind

    @property
    def was_killed(self):
        return self.code in (-signal.SIGKILL, -signal.SIGXFSZ)


class Sandbox:
    """A folder in which the program has a place for everything and no reason to leave."""

    def __init__(self, cinch, root):
        self.cinch = cinch
        self.root = root
        self.work = root / "work"
        self.cache = root / "cache"
        self.elsewhere = root / "elsewhere"
        for folder in (self.work, self.cache, self.elsewhere):
            folder.mkdir(parents=True)
        self.cache.chmod(0o700)
        self.environment = {
            "PATH": os.environ.get("PATH", ""),
            "CINCH_CACHE": str(self.cache),
            "CUDA_VISIBLE_DEVICES": "",
        }
        for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HUB_CACHE"):
            self.environment[name] = str(self.elsewhere)

    def start(self, arguments, limit=None, ends=False):
        def prepare():
            if limit is not None:
                # Ignored signals stay ignored in the program that is started: its writes fail.
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL if ends else signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        return subprocess.Popen(
            [self.cinch, *arguments],
            cwd=self.work,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,
        )

    def finish(self, process, start, kind=None):
        errors = process.stderr.read().decode(errors="replace")
        process.wait()
        outcome = Outcome(process, errors, time.monotonic() - start, kind)
        if "panicked" in errors:
            raise Loss(f"a panic: {errors}")
        if outcome.code < 0 and not outcome.was_killed:
            raise Loss(f"ended by signal {-outcome.code}: {errors}")
        left = [path for path in self.elsewhere.iterdir()]
        left += [path for path in self.root.iterdir() if path.name not in ("work", "cache", "elsewhere")]
        if left:
            raise Loss(f"written outside: {left}")
        return outcome

    def run(self, arguments):
        """Runs the program and leaves it alone."""
        start = time.monotonic()
        return self.finish(self.start(arguments), start)

    def succeed(self, arguments):
        outcome = self.run(arguments)
        if outcome.code != 0:
            raise Loss(f"`{' '.join(arguments)}` ended with {outcome.code}: {outcome.errors}")
        return outcome


class Chaos:
    """The one who disturbs: kinds of disturbance, moments, and a count of them."""

    def __init__(self, seed, tables):
        self.random = random.Random(seed)
        self.counts = tables

    def disturb(self, sandbox, phase, arguments, typical, watched=None, sizes=(1, 200_000), small=False):
        kinds = ["kill"] * 8 + ["fails", "ends"] + (["full"] * 2 if small else [])
        kind = self.random.choice(kinds)
        start = time.monotonic()
        if kind == "kill":
            outcome = self.kill(sandbox, arguments, typical, watched)
            self.counts[phase]["kills"] += outcome.code == -signal.SIGKILL
            self.counts[phase]["ended before"] += outcome.code != -signal.SIGKILL
            return outcome
        limit = int(sizes[0] * (sizes[1] / sizes[0]) ** self.random.random())
        if kind in ("fails", "ends"):
            process = sandbox.start(arguments, limit, kind == "ends")
            outcome = sandbox.finish(process, start, kind)
            self.counts[phase]["failed writes" if kind == "fails" else "ended by a write"] += outcome.code != 0
            return outcome
        ballast = sandbox.root / "work" / "ballast"
        free = os.statvfs(sandbox.root)
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - limit))
        try:
            outcome = sandbox.finish(sandbox.start(arguments), start, kind)
        finally:
            ballast.unlink()
        self.counts[phase]["full disks"] += outcome.code != 0
        return outcome

    def kill(self, sandbox, arguments, typical, watched):
        process = sandbox.start(arguments)
        start = time.monotonic()
        if watched is not None and self.random.random() < 0.7:
            # Most of the time is thinking: wait until it writes, and kill while it does.
            before = {folder: sorted(os.listdir(folder)) for folder in watched}
            while process.poll() is None and all(sorted(os.listdir(folder)) == before[folder] for folder in watched):
                pass
            end = time.monotonic() + self.random.random() ** 2 * typical * 0.3
            while time.monotonic() < end and process.poll() is None:
                pass
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.random.uniform(0, 1.05 * typical))
        process.kill()
        return sandbox.finish(process, start, "kill")


def contents(folder):
    """Every file below a folder, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_whole(run):
    """A checkpoint that has its name has every file that its checksums list, unchanged."""
    for folder in sorted(run.glob("checkpoints/step-*")):
        try:
            files = json.loads((folder / "checksums.json").read_bytes())["files"]
            for name, digest in files.items():
                data = (folder / name).read_bytes()
                if len(data) != digest["bytes"] or hashlib.sha256(data).hexdigest() != digest["sha256"]:
                    raise Loss(f"{folder.name}/{name} is not what its checksum says")
        except (OSError, ValueError, KeyError) as problem:
            raise Loss(f"{folder.name} is not whole: {problem}") from problem


def result_of(run):
    """What a finished run has, without what depends on the clock and the process."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("tokens_per_second", "step_seconds", "resident_bytes"):
            line.pop(name, None)
    last = run / "checkpoints" / f"step-{STEPS:08}"
    return {
        "weights": (last / "model.safetensors").read_bytes(),
        "optimizer states": (last / "optimizer.safetensors").read_bytes(),
        "metrics": lines,
        "checkpoints": sorted(path.name for path in (run / "checkpoints").iterdir()),
        "best": (run / "checkpoints" / "best.json").read_bytes(),
        # A run that begins again keeps the record of the one before it, as metrics.1.jsonl and so on.
        "files of the run": sorted({re.sub(r"\.\d+\.jsonl$", ".jsonl", path.name) for path in run.iterdir()}),
    }


class Training:
    """Runs that are killed, resumed, and killed again."""

    def __init__(self, sandbox):
        self.expected = {}
        self.typical = {}
        for phase in ("train", "save"):
            times = [sandbox.succeed(self.fresh(phase, f"whole-{phase}-{n}")).seconds for n in range(3)]
            self.typical[phase] = statistics.median(times)
            self.expected[phase] = result_of(sandbox.work / f"whole-{phase}-0")
        for run in sandbox.work.glob("whole-*"):
            shutil.rmtree(run)

    def fresh(self, phase, name):
        return ["train", *MODEL, *RUN, "--save-steps", SAVE_STEPS[phase], "--output-dir", name]

    def episode(self, phase, sandbox, chaos, small):
        run = sandbox.work / "run"
        resume = ["train", "--resume", "run", "--threads", "1", "-q"]
        outcome = None
        for _ in range(chaos.random.randint(2, 6)):
            has_checkpoint = any(run.glob("checkpoints/step-*"))
            arguments = resume if has_checkpoint else self.fresh(phase, "run")
            outcome = chaos.disturb(
                sandbox, "resume" if has_checkpoint else phase, arguments, self.typical[phase], small=small
            )
            check_whole(run)
            if outcome.code == 0:
                break
        if outcome.code != 0:
            has_checkpoint = any(run.glob("checkpoints/step-*"))
            sandbox.succeed(resume if has_checkpoint else self.fresh(phase, "run"))
        check_whole(run)
        for name, value in result_of(run).items():
            if value != self.expected[phase][name]:
                shown = "" if isinstance(value, bytes) else f": {value}, expected {self.expected[phase][name]}"
                raise Loss(f"a resumed run has other {name}{shown[:2000]}")
        shutil.rmtree(run)


class Applying:
    """`fit --apply` and `--undo` of files in one folder and in two."""

    def __init__(self, sandbox):
        self.typical = {}
        self.after = {}
        for file in CHANGED:
            folder = self.files(sandbox)
            times = []
            for _ in range(3):
                applied = sandbox.succeed(self.apply(file)).seconds
                self.after[file] = {name: (folder / name).read_bytes() for name in CHANGED[file]}
                times.append((applied, sandbox.succeed(self.undo(file)).seconds))
            self.typical[file] = {
                "apply": statistics.median(time for time, _ in times),
                "undo": statistics.median(time for _, time in times),
            }
            if any(self.after[file][name].decode() == APPLIED[name] for name in CHANGED[file]):
                raise Loss(f"an application to {file} changes too little to be tested")
            self.check_clean(folder)

    def apply(self, file):
        return ["fit", "--gpu-memory", "8", "--config", f"conf/{file}", "--apply", "--yes", "-q"]

    def undo(self, file):
        return ["fit", "--config", f"conf/{file}", "--undo", "-q"]

    def files(self, sandbox):
        folder = sandbox.work / "conf"
        shutil.rmtree(folder, ignore_errors=True)
        for name, text in APPLIED.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return folder

    def check_clean(self, folder):
        found = contents(folder)
        expected = {name: text.encode() for name, text in APPLIED.items()}
        if found != expected:
            raise Loss(f"after undoing: {found}, expected {expected}")

    def check_old_or_new(self, folder, file):
        for name, text in APPLIED.items():
            now = (folder / name).read_bytes()
            if now != text.encode() and now != self.after[file].get(name):
                raise Loss(f"{name} is neither as before nor as after: {now}")

    def episode(self, phase, sandbox, chaos, small):
        file = chaos.random.choice(list(CHANGED))
        folder = self.files(sandbox)
        if phase == "undo":
            sandbox.succeed(self.apply(file))
        for _ in range(chaos.random.randint(1, 3)):
            command = self.apply(file) if phase == "apply" else self.undo(file)
            # A page is the least that a full disk has or has not.
            chaos.disturb(
                sandbox, phase, command, self.typical[file][phase], [folder, folder / "ds"], (1, 3000), small
            )
            self.check_old_or_new(folder, file)
            if chaos.random.random() < 0.3:
                phase = "undo" if phase == "apply" else "apply"
        # What a killed application left, an undoing finds only where a record tells of it; the next
        # application to the folder clears the rest.
        if chaos.random.random() < 0.5:
            # One file as before and one as after do not agree: that may be refused, and undoing helps.
            outcome = sandbox.run(self.apply(file))
            if outcome.code != 0 and "nothing was written" not in outcome.errors:
                raise Loss(f"applying again ended with {outcome.code}: {outcome.errors}")
            self.check_old_or_new(folder, file)
        self.undo_all(sandbox, folder, file)
        if contents(folder) != {name: text.encode() for name, text in APPLIED.items()}:
            sandbox.succeed(self.apply(file))
            self.undo_all(sandbox, folder, file)
        self.check_clean(folder)

    def undo_all(self, sandbox, folder, file):
        for _ in range(12):
            outcome = sandbox.run(self.undo(file))
            if outcome.code == 2 and "nothing" in outcome.errors:
                break
            if outcome.code != 0:
                raise Loss(f"undoing ended with {outcome.code}: {outcome.errors}")
        else:
            raise Loss("there is always something to undo")
        for name, text in APPLIED.items():
            if (folder / name).read_bytes() != text.encode():
                raise Loss(f"undone, {name} is not as before")


class Caching:
    """A token cache that is being built."""

    def __init__(self, sandbox, data):
        self.data = data
        times = []
        for _ in range(3):
            self.clear(sandbox)
            times.append(sandbox.succeed(self.command()).seconds)
        self.typical = statistics.median(times)
        self.expected = contents(sandbox.cache)
        self.clear(sandbox)

    def command(self):
        length = ["--max-steps", "6", "--eval-steps", "0", "--save-steps", "0"]
        return ["train", *MODEL, *length, "--data-dir", str(self.data), "--output-dir", "cached"]

    def clear(self, sandbox):
        for folder in (sandbox.cache, sandbox.work / "cached"):
            if folder.exists():
                for path in folder.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def episode(self, phase, sandbox, chaos, small):
        self.clear(sandbox)
        shutil.rmtree(sandbox.work / "cached", ignore_errors=True)
        for _ in range(chaos.random.randint(1, 3)):
            chaos.disturb(
                sandbox, phase, self.command(), self.typical, [sandbox.cache], (1, 2 * self.data.stat().st_size), small
            )
            shutil.rmtree(sandbox.work / "cached", ignore_errors=True)
        sandbox.succeed(self.command())
        found = contents(sandbox.cache)
        if found != self.expected:
            raise Loss(f"the cache has {sorted(found)}, expected {sorted(self.expected)}, or other bytes in them")


def small_disk(folder):
    """Mounts a small tmpfs, where that is allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    return False


def show(counts, losses):
    columns = [*KINDS, "losses"]
    print("| phase | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    total = collections.Counter()
    for phase in ("train", "save", "resume", "apply", "undo", "cache"):
        row = collections.Counter(counts[phase])
        row["losses"] = sum(1 for where, _ in losses if where == phase)
        total.update(row)
        print(f"| {phase} | " + " | ".join(str(row[name]) for name in columns) + " |")
    print("| all | " + " | ".join(str(total[name]) for name in columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cinch", default="target/release/cinch")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help="where the sandbox is made [default: the system's temporary folder]")
    arguments = parser.parse_args()
    start = time.monotonic()
    root = pathlib.Path(tempfile.mkdtemp(prefix="chaos-", dir=arguments.folder))
    cinch = str(pathlib.Path(arguments.cinch).resolve())
    counts = collections.defaultdict(collections.Counter)
    chaos = Chaos(arguments.seed, counts)
    data = root / "text.txt"
    words = random.Random(0)
    data.write_text("\n".join(" ".join(words.choices("arena plan step tensor node".split(), k=12)) for _ in range(40_000)))
    has_small = small_disk(root / "small")
    print("a small tmpfs is filled" if has_small else "no tmpfs can be mounted: disks are full by limits only", flush=True)
    losses = []
    try:
        sandboxes = [Sandbox(cinch, root / "sandbox")]
        training, applying, caching = Training(sandboxes[0]), Applying(sandboxes[0]), Caching(sandboxes[0], data)
        if has_small:
            sandboxes.append(Sandbox(cinch, root / "small" / "sandbox"))
        episodes = {"train": training, "save": training, "apply": applying, "undo": applying, "cache": caching}
        with contextlib.suppress(KeyboardInterrupt):
            while sum(count["kills"] for count in counts.values()) < arguments.kills:
                # The phase with the fewest kills is next; resuming follows from the others.
                phase = min(episodes, key=lambda name: (counts[name]["kills"], chaos.random.random()))
                small = has_small and chaos.random.random() < 0.2
                sandbox = sandboxes[small]
                try:
                    episodes[phase].episode(phase, sandbox, chaos, small)
                except Loss as loss:
                    losses.append((phase, str(loss)))
                    kept = root / f"loss-{len(losses)}"
                    shutil.copytree(sandbox.root, kept, symlinks=True)
                    print(f"LOSS in {phase}: {loss}\n  kept in {kept}", flush=True)
                    if len(losses) >= 10:
                        break
                    for folder in (sandbox.work, sandbox.cache, sandbox.elsewhere):
                        for path in folder.iterdir():
                            shutil.rmtree(path) if path.is_dir() else path.unlink()
        show(counts, losses)
        before = sum(count["ended before"] for count in counts.values())
        print(f"\n{before} runs ended before they were killed; {time.monotonic() - start:.0f} s, seed {arguments.seed}")
    finally:
        if has_small:
            subprocess.run(["umount", str(root / "small")], check=False)
        if not losses:
            shutil.rmtree(root, ignore_errors=True)
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())
