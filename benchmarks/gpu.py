#!/usr/bin/env python3
"""A training step on one GPU: PyTorch and cinch, one after the other, in one run.

    cargo build --release
    python benchmarks/gpu.py --cinch target/release/cinch --out gpu.json

Prints a table with ratios and writes every number to a JSON file, case by case, so that an
interrupted run keeps what it has. Needs Python 3.11, torch and transformers, and no network:
weights and tokens are random. Compiling takes longest; --quick leaves it out.

Every measurement is a process of its own, so that the two never hold the card's memory at the
same time and no case inherits the allocator of the one before. This process touches no GPU.

What is compared: the same model with the same dropout, bf16 arithmetic with fp32 weights, one
AdamW step with clipping. PyTorch's times are between CUDA events, without waiting in between, so
that its launches may run ahead; cinch's are by the clock, with tokens copied in and the loss read
back in every step. PyTorch's memory is the peak of the whole process, what the card must have.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

GIB = 1 << 30
VOCABULARY = 50257
# As cinch's defaults: what a user of the guides has.
RATE, BETAS, EPSILON, DECAY, CLIP, DROPOUT = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 0.1
# A case that takes longer is reported as failed, and the others still run.
LIMIT_SECONDS = 150


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    model: str
    size: str
    batch: int
    seq_len: int
    # How PyTorch runs it: eager, compiled, or not at all (None: over 20 s a step).
    torch: str | None = "eager"
    recompute: bool = False
    warm_up: int = 3
    steps: int = 10
    # Left out by --quick: compiling takes a minute.
    slow: bool = False


CASES = [
    Case("mamba-small", "Mamba small", "mamba", "small", 8, 1024, warm_up=1, steps=2),
    Case("mamba-medium", "Mamba medium", "mamba", "medium", 8, 2048, torch=None),
    Case("gpt2", "GPT-2 124M", "gpt2", "gpt2", 32, 1024),
    Case("gpt2-compiled", "GPT-2 124M, torch.compile", "gpt2", "gpt2", 32, 1024,
         torch="compiled", slow=True),
    Case("gpt2-recompute", "GPT-2 124M, full recompute", "gpt2", "gpt2", 8, 1024, recompute=True),
    Case("gpt2-medium", "GPT-2 medium", "gpt2", "medium", 4, 1024),
]  # fmt: skip

# name: (width, layers)
MAMBA_SIZES = {"small": (512, 8), "medium": (768, 12)}
# name: (width, layers, heads)
GPT2_SIZES = {"gpt2": (768, 12, 12), "medium": (1024, 24, 16)}


# ---------------------------------------------------------------- PyTorch, in a child process


def mamba(size, seq_len):
    """The guide's Mamba as one writes it down: a Python loop over time, no kernel of its own."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    state, expand = 16, 2
    width, layers = MAMBA_SIZES[size]

    class Scan(nn.Module):
        """h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t,  y_t = ⟨h_t, C_t⟩ + D x_t"""

        def __init__(self, inner):
            super().__init__()
            self.rank = math.ceil(inner / 16)
            self.x_proj = nn.Linear(inner, self.rank + 2 * state, bias=False)
            self.dt_proj = nn.Linear(self.rank, inner)
            self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
            self.D = nn.Parameter(torch.ones(inner))

        def forward(self, x):
            batch, length, inner = x.shape
            delta, b, c = self.x_proj(x).split([self.rank, state, state], -1)
            delta = F.softplus(self.dt_proj(delta))
            a = -torch.exp(self.A_log)
            h = torch.zeros(batch, inner, state, device=x.device)
            outputs = []
            for t in range(length):
                # Ā = exp(ΔA) and B̄ = ΔB first, as the discretisation is usually written.
                # Autograd keeps Ā, B̄, h, and h again in bf16: 14 bytes an element.
                step = delta[:, t, :, None]
                a_bar = torch.exp(step * a)
                b_bar = step * b[:, t, None, :]
                h = a_bar * h + b_bar * x[:, t, :, None]
                outputs.append(torch.einsum("bdn,bn->bd", h, c[:, t]))
            return torch.stack(outputs, 1) + x * self.D

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            inner = expand * width
            self.norm = nn.LayerNorm(width)
            self.in_proj = nn.Linear(width, 2 * inner, bias=False)
            self.scan = Scan(inner)
            self.out_proj = nn.Linear(inner, width, bias=False)

        def forward(self, x):
            gate, u = self.in_proj(self.norm(x)).chunk(2, -1)
            branch = self.out_proj(F.silu(gate) * self.scan(u))
            return x + F.dropout(branch, DROPOUT, self.training)

    class Mamba(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.positions = nn.Embedding(seq_len, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            for module in self.modules():
                if isinstance(module, nn.Linear | nn.Embedding):
                    nn.init.normal_(module.weight, std=0.02)

        def forward(self, tokens, targets):
            places = torch.arange(tokens.shape[1], device=tokens.device)
            x = self.embedding(tokens) + self.positions(places)
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Mamba()


def gpt2(size, seq_len, recompute):
    """The model of transformers, with PyTorch's fused attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, heads = GPT2_SIZES[size]
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=seq_len, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=DROPOUT, embd_pdrop=DROPOUT, attn_pdrop=DROPOUT,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build(case):
    """The module, and its loss as a function of tokens and targets."""
    import torch

    if case.model == "mamba":
        module = mamba(case.size, case.seq_len)
    else:
        module = gpt2(case.size, case.seq_len, case.recompute)
    run = torch.compile(module) if case.torch == "compiled" else module
    if case.model == "mamba":
        return module, run
    # transformers shifts the labels itself: one target fewer in a sequence, nothing in time.
    return module, lambda tokens, targets: run(input_ids=tokens, labels=targets).loss


def train_steps(module, loss_of, tokens, targets, fused):
    """An endless series of training steps, each giving its loss, which stays on the device."""
    import torch

    implementation = {"fused": True} if fused else {"foreach": True}
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, **implementation
    )
    while True:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def measure_torch(case):
    """One case in PyTorch: what the child process prints."""
    import torch

    torch.manual_seed(0)
    # On the card from the start: building on the host would only take longer.
    with torch.device("cuda"):
        module, loss_of = build(case)
    module.train()
    shape = (case.batch, case.seq_len)
    tokens, targets = torch.randint(0, VOCABULARY, (2, *shape), device="cuda")
    steps = train_steps(module, loss_of, tokens, targets, fused=case.torch == "compiled")

    started = time.perf_counter()
    for _ in range(case.warm_up):
        loss = next(steps)
    torch.cuda.synchronize()
    warm_up_seconds = time.perf_counter() - started

    events = [torch.cuda.Event(enable_timing=True) for _ in range(case.steps + 1)]
    events[0].record()
    for event in events[1:]:
        loss = next(steps)
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]

    free, total = torch.cuda.mem_get_info()
    seconds = statistics.median(times)
    return {
        "step_seconds": seconds,
        "step_seconds_all": times,
        "tokens_per_second": case.batch * case.seq_len / seconds,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
        "warm_up_seconds": warm_up_seconds,
        "loss": loss.item(),
        "parameters": sum(p.numel() for p in module.parameters()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


# ---------------------------------------------------------------- the two, from the parent


def run_child(command, environment=None):
    """Runs a command whose last line, or whole output, is JSON; an error is a result too."""
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took over {LIMIT_SECONDS} s"}
    except OSError as error:
        return {"error": f"{command[0]}: {error}"}
    if child.returncode != 0:
        return {"error": child.stderr.strip()[-2000:] or f"exit code {child.returncode}"}
    # Libraries may print before the result, which starts at the last line that opens an object.
    lines = child.stdout.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("{")]
    try:
        return json.loads("\n".join(lines[starts[-1] :]))
    except (IndexError, ValueError) as error:
        return {"error": f"printed no JSON ({error}): {child.stdout[-500:]}"}


def run_torch(case):
    command = [sys.executable, __file__, "--torch-case", json.dumps(asdict(case))]
    # Some library code asks the hub for files that nobody needs.
    return run_child(command, {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})


def cinch_command(cinch, case, steps):
    return [
        str(cinch), "bench", "--device", "cuda", "--precision", "bf16",
        "--model", case.model, "--model-size", case.size,
        "--batch-size", str(case.batch), "--grad-accum", "1", "--seq-len", str(case.seq_len),
        "--checkpointing", "full" if case.recompute else "none",
        "--steps", str(steps), "--json",
    ]  # fmt: skip


def ratio(above, below):
    """None where a reading is missing."""
    return above / below if above is not None and below else None


def derive(pytorch, cinch):
    """Ratios, and the floor: useful operations at the matrix rate that this run measured."""
    floor = ratio(cinch.get("useful_flops"), cinch.get("gemm_flops_per_second"))
    seconds = pytorch.get("step_seconds"), cinch.get("step_seconds")
    used = pytorch.get("device_used_bytes"), cinch.get("device_used_bytes")
    return {
        "times_faster": ratio(*seconds),
        "times_less_memory": ratio(pytorch.get("reserved_bytes"), cinch.get("arena_bytes")),
        "times_less_device_memory": ratio(*used),
        "floor_seconds": floor,
        "pytorch_over_floor": ratio(seconds[0], floor),
        "cinch_over_floor": ratio(seconds[1], floor),
        "cinch_over_predicted": ratio(seconds[1], cinch.get("predicted_seconds")),
    }


# ---------------------------------------------------------------- table

DASH = "–"


def number(value, scale=1.0, digits=1, suffix=""):
    """A reading; one that is missing is a dash, never a crash."""
    return DASH if value is None else f"{value * scale:.{digits}f}{suffix}"


def row(result):
    p, c, d = result["pytorch"], result["cinch"], result["derived"]
    case = result["case"]
    return [
        f"{case['title']}, B={case['batch']} T={case['seq_len']}",
        number(p.get("step_seconds"), 1e3),
        number(c.get("step_seconds"), 1e3, 2),
        number(d.get("times_faster"), suffix="×"),
        number(p.get("reserved_bytes"), 1 / GIB),
        number(c.get("arena_bytes"), 1 / GIB, 2),
        number(d.get("times_less_memory"), suffix="×"),
        number(p.get("device_used_bytes"), 1 / GIB),
        number(c.get("device_used_bytes"), 1 / GIB, 2),
        number(p.get("tokens_per_second"), 1e-3),
        number(c.get("tokens_per_second"), 1e-3),
        number(c.get("predicted_seconds"), 1e3, 2),
        number(d.get("floor_seconds"), 1e3, 2),
        number(d.get("cinch_over_floor"), suffix="×"),
        number(c.get("share_of_gemm"), 100, suffix=" %"),
    ]


HEADER = [
    "bf16", "PyTorch ms", "cinch ms", "faster", "PyTorch reserved GiB", "cinch arena GiB", "less",
    "driver: PyTorch GiB", "driver: cinch GiB", "PyTorch k tokens/s", "cinch k tokens/s",
    "predicted ms", "floor ms", "cinch / floor", "share of matrix rate",
]  # fmt: skip


def table(results):
    """Markdown with columns that line up, so that it reads in a terminal as well."""
    rows = [HEADER, *map(row, results)]
    widths = [max(map(len, column)) for column in zip(*rows)]

    def line(cells):
        first, *rest = zip(cells, widths)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(rows[0]), line(rule), *map(line, rows[1:])])


# ---------------------------------------------------------------- command line


def arguments():
    parser = argparse.ArgumentParser(
        description="A training step on one GPU: PyTorch and cinch in one run."
    )
    default = Path(__file__).resolve().parent.parent / "target/release/cinch"
    parser.add_argument(
        "--cinch",
        type=lambda path: Path(path).resolve(),
        default=default,
        help="the binary [%(default)s]",
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="[%(default)s]")
    names = ",".join(case.name for case in CASES)
    parser.add_argument("--cases", default=None, metavar="A,B", help=f"some of {names}")
    parser.add_argument(
        "--quick", action="store_true", help="without torch.compile, and with fewer steps"
    )
    # One case in this process: how the script starts itself.
    parser.add_argument("--torch-case", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    known = {case.name: case for case in CASES}
    asked = given.cases.split(",") if given.cases else list(known)
    for name in asked:
        if name not in known:
            parser.error(f"no case `{name}`; there are {names}")
    # A slow case that was asked for by name runs all the same.
    given.chosen = [
        known[name] for name in asked if given.cases or not (given.quick and known[name].slow)
    ]
    return given


def main():
    given = arguments()
    if given.torch_case is not None:
        print(json.dumps(measure_torch(Case(**json.loads(given.torch_case)))))
        return 0
    steps = 5 if given.quick else 20
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "results": [],
    }
    for case in given.chosen:
        if given.quick:
            case = replace(case, steps=max(1, case.steps // 3))
        pytorch = {}
        if case.torch is not None:
            print(f"{case.title}: PyTorch, {case.torch}", file=sys.stderr, flush=True)
            pytorch = run_torch(case)
        print(f"{case.title}: cinch", file=sys.stderr, flush=True)
        command = cinch_command(given.cinch, case, steps)
        cinch = run_child(command)
        result = {
            "case": asdict(case),
            "cinch_command": command,
            "pytorch": pytorch,
            "cinch": cinch,
            "derived": derive(pytorch, cinch),
        }
        report["results"].append(result)
        given.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report["results"]))
    failed = [
        f"{result['case']['title']}, {side}: {result[side]['error']}"
        for result in report["results"]
        for side in ("pytorch", "cinch")
        if "error" in result[side]
    ]
    for message in failed:
        print(message, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
