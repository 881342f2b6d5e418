"""Times `cinch diagnose` on a gigabyte of each kind of lines: python benchmarks/diagnose.py [CINCH]"""
import subprocess, sys, time

CINCH = sys.argv[1] if len(sys.argv) > 1 else "target/release/cinch"
SIZE = 1 << 30
KINDS = {
    "step lines": [b"{'loss': 1.2345, 'grad_norm': 0.812, 'learning_rate': 2e-05, 'epoch': 1.23}\n",
                   b"step: 1234  loss:  1.2345  memory: 40.51GiB(50.01%)  tps: 5,000  mfu: 38.1%\n",
                   b"INFO 05-11 14:10:52 trainer.py:123] an ordinary line about the dataset and the tokenizer\n"],
    "one line without end": [b"x" * 4096],
    "only messages": [b"CUDA out of memory. Tried to allocate\n"],
    "only frames": [b'  File "/a/b/trainer.py", line 12, in evaluate\n'],
    "only escapes": [b"\x1b[31m\x1b[0m" * 8 + b"\n"],
    "only prefixes": [b"[rank1]: (pid=7) [rank2]: 2024-05-11 14:10:52 killed\n"],
    "broken words": [b"a line that is as long as a terminal is wide and ends with CUDA out of mem\n", b"ory and begins again with\n"],
}
for name, lines in KINDS.items():
    block = b"".join(lines)
    block *= (1 << 20) // len(block)
    start = time.time()
    process = subprocess.Popen([CINCH, "diagnose", "--json", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    for _ in range(SIZE // len(block)):
        process.stdin.write(block)
    process.stdin.close()
    code = process.wait()
    print(f"{name:24} {time.time() - start:6.1f} s  exit code {code}")
