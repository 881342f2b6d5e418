"""Tries `with rehearsed():` around a loop of one's own, as a stranger would.

    python benchmarks/within.py --cinch target/release/cinch --python PYTHON

PYTHON is one with PyTorch for CUDA; no GPU is needed. Prints what each way of starting the loop says, and ends with 1 where
that is not what it should.
"""
import argparse
import os
import subprocess
import sys
import tempfile

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--cinch", default="target/release/cinch")
arguments.add_argument("--python", default=sys.executable)
arguments = arguments.parse_args()

LOOP = """
import sys
import torch
from cinch_rehearse import rehearsed

width, stop = {width}, {stop}
device = "cuda" if {chooses} and torch.cuda.is_available() else "cpu"
inside = device == "cuda"
model = torch.nn.Linear(64, width if inside else 64).to(device)
optimizer = torch.optim.AdamW(model.parameters())
with rehearsed(gpu="RTX 4090", stop=stop) as rehearsal:
    assert "transformers" not in sys.modules
    for _ in range({steps}):
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("went on")
"""
SMALL, LARGE = 64, 1 << 26

# What is tried, how it is started, the loop's settings, and what must be said and whether the loop goes on.
CASES = [
    ("fits", "file", {}, "fits RTX 4090", True),
    ("does not fit", "file", {"width": LARGE}, "will run out of memory at", True),
    ("is stopped", "file", {"width": LARGE, "stop": True}, "will run out of memory at", False),
    ("from -c", "-c", {}, "fits RTX 4090", True),
    ("from standard input", "-", {}, "not rehearsed: the program was read from standard input", True),
    ("never uses the card", "file", {"chooses": False}, "not rehearsed: the script did not use the card", True),
    ("makes no step", "file", {"steps": 0}, "not rehearsed: the script came to its end without a step", True),
]
failed = 0
with tempfile.TemporaryDirectory() as folder:
    cinch = os.path.abspath(arguments.cinch)
    with open(os.path.join(folder, "cinch_rehearse.py"), "w") as module:
        subprocess.run([cinch, "rehearse", "--script"], stdout=module, check=True)
    for name, start, settings, said, goes_on in CASES:
        loop = LOOP.format(**{"width": SMALL, "stop": False, "chooses": True, "steps": 3, **settings})
        with open(os.path.join(folder, "train.py"), "w") as script:
            script.write(loop)
        command = {"file": ["train.py"], "-c": ["-c", loop], "-": ["-"]}[start]
        environment = {**os.environ, "CINCH": cinch, "PYTHONPATH": folder}
        done = subprocess.run([arguments.python, *command], input=loop if start == "-" else "", cwd=folder, env=environment, capture_output=True, text=True)
        is_right = said in done.stderr and ("went on" in done.stdout) == goes_on
        failed += not is_right
        lines = [line for line in done.stderr.splitlines() if "cinch:" in line] or done.stderr.splitlines()[-1:]
        print(f"{'ok' if is_right else 'WRONG':<6} {name:<22} {lines[0] if lines else ''}", flush=True)
sys.exit(1 if failed else 0)
