"""Cases under torch.compile: what a card uses for them, and what a rehearsal says.

    python benchmarks/compiled.py FOLDER --measure OUT.jsonl            on a GPU: all cases at once, about a minute
    python benchmarks/compiled.py FOLDER --compare OUT.jsonl --cinch target/release/cinch [--gpu H200]
    python benchmarks/compiled.py FOLDER --case NAME                    one case, as both of them run it

FOLDER is that of `rehearse.py`. Cases are measured at the same time, each in a process of its own, because compiling
takes most of their time; so only what PyTorch counts for its own process is compared, and not the card's use. Without
OUT.jsonl, `--compare -` prints what the rehearsals say.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

CASES = ("mlp-8x8192-b512-fused", "roberta-base-b32-t128-classify", "vit_b_16-b64-224-amp_bf16-adamw", "opt-125m-b20-t512", "resnet50-b64-224-amp_bf16-sgdm")
# The line of train.py before which the model is complete.
BEFORE = "params = [p for p in model"

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("folder")
arguments.add_argument("names", nargs="*", help="cases; all five where none is named")
arguments.add_argument("--case")
arguments.add_argument("--measure")
arguments.add_argument("--compare")
arguments.add_argument("--cinch", default="target/release/cinch")
arguments.add_argument("--gpu", default="H200")
arguments.add_argument("--timeout", type=int, default=600)
arguments = arguments.parse_intermixed_args()
folder = os.path.abspath(arguments.folder)
names = arguments.names or CASES


def run_case(name):
    path = os.path.join(folder, "train.py")
    with open(path) as file:
        text = file.read()
    if text.count(BEFORE) != 1:
        sys.exit(f"{path} has not the one line `{BEFORE}…` before which its model is compiled")
    text = text.replace(BEFORE, "model = torch.compile(model)\n" + BEFORE)
    sys.argv = ["train.py", name]
    exec(compile(text, path, "exec"), {"__name__": "__main__", "__file__": path})


def command(name):
    return [sys.executable, os.path.abspath(__file__), folder, "--case", name]


def measure(out):
    start = time.monotonic()
    running = []
    for name in names:
        # Caches of their own: what another case has compiled would be found by some and not by others.
        home = tempfile.TemporaryDirectory()
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=home.name, TRITON_CACHE_DIR=os.path.join(home.name, "triton"))
        running.append((name, home, subprocess.Popen(command(name), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)))
    failed = False
    with open(out, "w") as file:
        for name, _home, process in running:
            output, errors = process.communicate()
            lines = output.strip().splitlines()
            if process.returncode != 0 or not lines:
                failed = True
                print(name, "fails:", (errors.strip().splitlines() or ["no message"])[-1], flush=True)
                continue
            row = json.loads(lines[-1])
            file.write(json.dumps({key: row[key] for key in ("name", "peak_allocated", "peak_reserved")}) + "\n")
            print(row, flush=True)
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(1 if failed else 0)


def compare(measured):
    truth = {}
    if measured != "-":
        with open(measured) as file:
            truth = {row["name"]: row for row in map(json.loads, file)}
    print(f"{'case':<44} {'allocated':>12} {'reserved':>12} {'certain':>8} {'time':>7}")
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as home:
            report = os.path.join(home, "report.json")
            start = time.monotonic()
            asked = [arguments.cinch, "rehearse", "--quiet", "--gpu", arguments.gpu, "--timeout", str(arguments.timeout), "--report", report]
            environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=home, TRITON_CACHE_DIR=os.path.join(home, "triton"))
            done = subprocess.run([*asked, "--", *command(name)], env=environment, capture_output=True, text=True)
            seconds = time.monotonic() - start
            if done.returncode != 0:
                failed = True
                print(f"{name:<44} fails after {seconds:.0f} s: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
                continue
            with open(report) as file:
                found = json.load(file)
        shown = []
        for key, known in (("allocated_bytes", "peak_allocated"), ("reserved_bytes", "peak_reserved")):
            bytes = found["memory"][key]
            shown.append(f"{100 * (bytes / truth[name][known] - 1):>+11.2f}%" if name in truth else f"{bytes / (1 << 20):>8.0f} MiB")
        print(f"{name:<44} {' '.join(shown)} {'yes' if found['certain'] else 'no':>8} {seconds:>5.1f} s", flush=True)
    sys.exit(1 if failed else 0)


if arguments.case:
    run_case(arguments.case)
elif arguments.measure:
    measure(arguments.measure)
elif arguments.compare:
    compare(arguments.compare)
else:
    sys.exit("one of --measure, --compare and --case is needed")
