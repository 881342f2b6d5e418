"""Scripts that behave badly, rehearsed: what they leave behind, and what is said of them.

    python benchmarks/hostile.py --cinch target/release/cinch --python PYTHON

PYTHON is one with PyTorch for CUDA; no GPU is needed. Each script is a few lines. Looked at are the exit code, the
report, and whether a process or a folder of the rehearsal is left. Ends with 1 where anything is amiss. The scripts that
need no PyTorch are in `crates/cli/tests/rehearse.rs`.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("names", nargs="*", help="scripts, such as 'hangs'; all where none is named")
arguments.add_argument("--cinch", default="target/release/cinch")
arguments.add_argument("--python", default=sys.executable)
arguments = arguments.parse_intermixed_args()

BEGIN = "import os, sys, time, ctypes, threading, torch\nm = torch.nn.Linear(512, 512).cuda(); o = torch.optim.SGD(m.parameters(), lr=1e-3)\ndef step(n=64):\n    m(torch.randn(n, 512, device='cuda')).sum().backward(); o.step(); o.zero_grad()\nstep()\nprint('ready', os.getpid(), flush=True)\n"
FULL = "kept = []\ntry:\n    while True: kept.append(torch.empty(1 << 30, dtype=torch.uint8, device='cuda'))\nexcept torch.cuda.OutOfMemoryError: pass\n"
# Name, script, flags, exit code, what the report has to say.
SCRIPTS = [
    ("ends well", "step()\n", "", 0, lambda r: r["certain"] and r["steps"] == 2),
    ("raises", "raise ValueError('mine')\n", "", 1, lambda r: r["memory"]["allocated_bytes"] > 0),
    ("aborts", "os.abort()\n", "", 134, lambda r: r["memory"]["device_bytes"] > 0 and not r["certain"]),
    ("reads address 0", "ctypes.string_at(0)\n", "", 139, lambda r: r["memory"]["device_bytes"] > 0),
    ("leaves by the back door", "os._exit(3)\n", "", 3, lambda r: r["memory"]["device_bytes"] > 0),
    ("hangs", "while True: time.sleep(1)\n", "--timeout 30", 124, lambda r: r["ended"] == "timed out" and r["memory"]["allocated_bytes"] > 0),
    ("hangs and does not listen", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)\n", "--timeout 30", 124, lambda r: r["memory"]["device_bytes"] > 0),
    ("runs on", "while True: step()\n", "--until-step 50", 0, lambda r: r["steps"] == 50),
    ("is interrupted", "while True: time.sleep(1)\n", "", 130, lambda r: r["ended"] == "interrupted"),
    ("forks and waits", "p = os.fork()\nif p == 0: os._exit(0)\nos.waitpid(p, 0); step()\n", "", 0, lambda r: r["steps"] == 2),
    ("forks and leaves the child", "if os.fork() == 0:\n    os.setsid(); time.sleep(600)\nstep()\n", "", 0, lambda r: r["steps"] == 2),
    ("has many threads", "def work():\n    for _ in range(5): torch.randn(256, 256, device='cuda') @ torch.randn(256, 256, device='cuda')\nts = [threading.Thread(target=work) for _ in range(32)]\n[t.start() for t in ts]; [t.join() for t in ts]; step()\n", "", 0, lambda r: r["steps"] == 2),
    ("fills the card and goes on", FULL + "del kept; torch.cuda.empty_cache(); step()\n", "", 0, lambda r: r["steps"] == 2 and not r["fits"]),
    ("fills the card", FULL.replace("pass", "raise"), "", 1, lambda r: r["ran_out_of_memory"] and not r["fits"]),
    ("frees wrongly", "f = ctypes.CDLL(None).cudaFree\nf.argtypes = [ctypes.c_void_p]\nprint(f(m.weight.data_ptr() + 512), f(12345), ctypes.CDLL(None).cudaGetLastError()); step()\n", "", 0, lambda r: r["wrong_frees"] > 0),
    ("asks for too much", "torch.empty(1 << 50, dtype=torch.uint8, device='cuda')\n", "", 1, lambda r: r["ran_out_of_memory"]),
    ("resets the peaks", "torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()\n", "", 0, lambda r: r["memory"]["allocated_bytes"] > 1 << 30),
    ("starts programs", "import subprocess\nsubprocess.run([sys.executable, '-c', 'import torch; print(torch.zeros(4, device=\"cuda\").sum().item())'], check=True); step()\n", "", 0, lambda r: r["steps"] == 2),
]

amiss = 0
for name, script, flags, code, says in SCRIPTS:
    if arguments.names and name not in arguments.names:
        continue
    with tempfile.TemporaryDirectory() as home:
        report = os.path.join(home, "r.json")
        path = os.path.join(home, "script.py")
        with open(path, "w") as file:
            file.write(BEGIN + script)
        command = [arguments.cinch, "rehearse", "--gpu", "RTX 4090", "--report", report, *flags.split(), "--", arguments.python, path]
        environment = dict(os.environ, CINCH_CACHE=os.path.join(home, "cache"), CINCH_MARK=home)
        start = time.monotonic()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if name == "is interrupted":
            for line in process.stdout:
                if line.startswith("ready"):
                    break
            process.send_signal(signal.SIGINT)
        output = process.communicate()[0]
        wrong = []
        if process.returncode != code:
            wrong.append(f"exit code {process.returncode}, not {code}")
        try:
            with open(report) as file:
                if not says(json.load(file)):
                    wrong.append("the report says something else")
        except (OSError, ValueError, KeyError) as error:
            wrong.append(f"the report: {error!r}")
        cache = os.path.join(home, "cache")
        left = [entry for entry in (os.listdir(cache) if os.path.isdir(cache) else []) if entry.startswith("rehearsal-")]
        if left:
            wrong.append(f"folders are left: {left}")
        for number in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{number}/environ", "rb") as file:
                    if f"CINCH_MARK={home}".encode() in file.read():
                        wrong.append(f"process {number} is left")
            except OSError:
                pass
        amiss += bool(wrong)
        print(f"{name:<30} {'; '.join(wrong) or 'as it should'} ({time.monotonic() - start:.0f} s)", flush=True)
        if wrong:
            print("    " + "\n    ".join(output.strip().splitlines()[-6:]), flush=True)
sys.exit(1 if amiss else 0)
