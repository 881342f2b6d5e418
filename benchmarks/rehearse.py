"""Rehearses every case of a folder and compares with what a card used.

    python benchmarks/rehearse.py FOLDER --cinch target/release/cinch --python PYTHON [--gpu H200] [NAME …]

FOLDER has `train.py`, `cases.json` (a list of objects with a `name`) and `truth.jsonl` (one measured case a line:
`name`, `peak_allocated`, `peak_reserved`, `device_used`). PYTHON is one with PyTorch for CUDA; no GPU is needed. Each
case is `cinch rehearse --gpu GPU --report R.json -- PYTHON train.py NAME`. Prints a table and whether it meets its goals;
ends with 1 where it does not.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("folder")
arguments.add_argument("names", nargs="*", help="cases; all where none is named")
arguments.add_argument("--cinch", default="target/release/cinch")
arguments.add_argument("--python", default=sys.executable)
arguments.add_argument("--gpu", default="H200")
arguments.add_argument("--timeout", type=int, default=300)
arguments = arguments.parse_intermixed_args()

folder = os.path.abspath(arguments.folder)
with open(os.path.join(folder, "truth.jsonl")) as file:
    truth = {row["name"]: row for row in map(json.loads, file)}
with open(os.path.join(folder, "cases.json")) as file:
    names = arguments.names or [case["name"] for case in json.load(file)]


def rehearse(name):
    """The report of a case, and how long it took, by the clock and by the processors; `None` where it fails."""
    with tempfile.TemporaryDirectory() as home:
        report = os.path.join(home, "report.json")
        command = [arguments.cinch, "rehearse", "--quiet", "--gpu", arguments.gpu, "--timeout", str(arguments.timeout), "--report", report]
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*command, "--", arguments.python, os.path.join(folder, "train.py"), name], capture_output=True, text=True)
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        # What the processors did for it: the rest is waiting for others on the same machine.
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode != 0 or not os.path.exists(report):
            return None, seconds, busy, (done.stderr.strip().splitlines() or ["no message"])[-1]
        with open(report) as file:
            return json.load(file), seconds, busy, ""


print(f"{'case':<44} {'allocated':>10} {'reserved':>10} {'device':>10} {'safe':>6} {'certain':>8} {'host':>8} {'time':>7} {'busy':>7}")
errors = {"allocated": [], "reserved": [], "device": []}
problems = []
for name in names:
    report, seconds, busy, message = rehearse(name)
    if report is None:
        problems.append(f"{name} fails: {message}")
        print(f"{name:<44} fails after {seconds:.1f} s: {message}", flush=True)
        continue
    memory, measured = report["memory"], truth[name]
    of = lambda key, known: memory[key] / measured[known] - 1
    found = {"allocated": of("allocated_bytes", "peak_allocated"), "reserved": of("reserved_bytes", "peak_reserved"), "device": of("device_bytes", "device_used")}
    for key, error in found.items():
        errors[key].append(error)
    is_safe = memory["safe_bytes"] >= measured["device_used"]
    if not is_safe:
        problems.append(f"{name}: the safe figure is under the card's")
    if report["certain"] and max(map(abs, found.values())) > 0.02:
        problems.append(f"{name} is called certain, and is off by more than 2 %")
    if seconds > 15:
        problems.append(f"{name} took {seconds:.0f} s, of which the processors worked {busy:.0f}")
    shown = [f"{100 * found[key]:>+9.2f}%" for key in ("allocated", "reserved", "device")]
    print(f"{name:<44} {' '.join(shown)} {'yes' if is_safe else 'NO':>6} {'yes' if report['certain'] else 'no':>8} {memory['host_bytes'] / 1e9:>5.2f} GB {seconds:>5.1f} s {busy:>5.1f} s", flush=True)
for key, median, worst in (("allocated", 0.001, 0.03), ("reserved", 0.003, 0.06), ("device", None, 0.06)):
    sizes = [abs(error) for error in errors[key]] or [1.0]
    middle, most = statistics.median(sizes), max(sizes)
    print(f"{key}: median {100 * middle:.2f} %, worst {100 * most:.2f} %")
    if most > worst or median is not None and middle > median:
        problems.append(f"{key} misses its goal")
for problem in problems:
    print("-", problem)
sys.exit(1 if problems else 0)
