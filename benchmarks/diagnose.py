"""Times `cinch diagnose` on a gigabyte of each kind of lines: python benchmarks/diagnose.py [CINCH]"""
import os, subprocess, sys, time

CINCH = sys.argv[1] if len(sys.argv) > 1 else "target/release/cinch"
SIZE = 1 << 30
SITE = "/home/user/miniconda3/envs/llm/lib/python3.11/site-packages"
FRAMES = [("transformers/trainer.py", 2245, "train", "return inner_training_loop("),
          ("transformers/trainer.py", 2560, "_inner_training_loop", "tr_loss_step = self.training_step(model, inputs, num_items_in_batch)"),
          ("torch/nn/modules/module.py", 1751, "_wrapped_call_impl", "return self._call_impl(*args, **kwargs)"),
          ("torch/nn/modules/module.py", 1762, "_call_impl", "return forward_call(*args, **kwargs)"),
          ("torch/nn/modules/linear.py", 125, "forward", "return F.linear(input, self.weight, self.bias)")]
# Sixty-four that differ, so that each is read.
TRACEBACK = ["".join([f"[rank{number % 8}]: Traceback (most recent call last):\n",
                      *[f'[rank{number % 8}]:   File "{SITE}/{file}", line {line}, in {function}\n[rank{number % 8}]:     {code}\n' for file, line, function, code in FRAMES],
                      f"[rank{number % 8}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {number}.25 GiB. GPU 0 has a total capacity of 139.72 GiB of which 2.64 GiB is free. "
                      f"Including non-PyTorch memory, this process has 136.90 GiB memory in use. Of the allocated memory {136 - number}.25 GiB is allocated by PyTorch, and {number}.81 MiB is "
                      "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"]).encode()
             for number in range(64)]
KINDS = {
    "step lines": [b"{'loss': 1.2345, 'grad_norm': 0.812, 'learning_rate': 2e-05, 'epoch': 1.23}\n",
                   b"step: 1234  loss:  1.2345  memory: 40.51GiB(50.01%)  tps: 5,000  mfu: 38.1%\n",
                   b"INFO 05-11 14:10:52 trainer.py:123] an ordinary line about the dataset and the tokenizer\n"],
    "one line without end": [b"x" * 4096],
    "only messages": [b"CUDA out of memory. Tried to allocate\n"],
    "tracebacks": TRACEBACK,
    "only frames": [b'  File "/a/b/trainer.py", line 12, in evaluate\n'],
    "only escapes": [b"\x1b[31m\x1b[0m" * 8 + b"\n"],
    "only prefixes": [b"[rank1]: (pid=7) [rank2]: 2024-05-11 14:10:52 killed\n"],
    "broken words": [b"a line that is as long as a terminal is wide and ends with CUDA out of mem\n", b"ory and begins again with\n"],
}
for name, lines in KINDS.items():
    block = b"".join(lines)
    block *= max(1, (1 << 20) // len(block))
    start, before = time.time(), os.times()
    process = subprocess.Popen([CINCH, "diagnose", "--json", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    for _ in range(SIZE // len(block)):
        process.stdin.write(block)
    process.stdin.close()
    code = process.wait()
    after = os.times()
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{name:24} {time.time() - start:6.1f} s  {processor:6.1f} s of a core  exit code {code}", flush=True)
