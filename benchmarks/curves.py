#!/usr/bin/env python3
"""The same learning: 300 steps on real text from the same weights and batches, cinch and PyTorch.

    cargo build --release
    python benchmarks/curves.py --cinch target/release/cinch --device cuda --out curves [--only gpt2]

GPT-2 124M is trained whole, by the rates that nanoGPT trains it with, and a Qwen2 of 0.5B parameters
by adapters of rank 16 on all seven layers of a block. The text is the source of Python's own library, in GPT-2's tokens. cinch trains by
`cinch train`; its first weights, its token file, its rates and the order of its windows are what
PyTorch gets. PyTorch has fp32 weights under autocast for what it trains, and bf16 ones for what
is frozen, as cinch has. The answer is the largest distance of the two losses, each a mean over 20
steps, in percent; and, of each of the two, its distance from a third run: PyTorch in fp32 (products
of tf32), where nothing between two layers is rounded to bf16. `--in-bf16-alone` leaves that out;
`--twice` runs PyTorch in bf16 once more and tells how far it is from itself, because its attention adds
in another order every time. `--tiny` is for a processor: small models, in fp32, without the third run.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sysconfig

WINDOW = 20
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 16, 32
# The rate at the end of so many steps of warm-up. nanoGPT's is 6e-4 after 2,000, of which these are the
# first; that of adapters is their guide's.
GPT2_RATE, GPT2_WARMUP = 6e-4, 2000
ADAPTERS_RATE, ADAPTERS_WARMUP = 2e-4, 100
DECAY, BETAS, EPSILON, CLIP, SEED = 0.1, (0.9, 0.95), 1e-8, 1.0, 42
MASK = (1 << 64) - 1


def mix(value):
    """SplitMix64's output function, by which the order of windows is drawn."""
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


class Permutation:
    def __init__(self, length, seed):
        self.length = length
        self.half = max((max(length - 1, 0).bit_length() + 1) // 2, 1)
        state, self.keys = mix(seed), []
        for _ in range(10):
            state = mix(state)
            self.keys.append(state)

    def __call__(self, index):
        mask = (1 << self.half) - 1
        while True:
            left, right = index >> self.half, index & mask
            for key in self.keys:
                left, right = right, left ^ (mix(right ^ key) & mask)
            index = (left << self.half) | right
            if index < self.length:
                return index


def batches(cache, batch, length):
    """Tokens of the windows in the order in which cinch takes them: [batch, length + 1] a step."""
    import numpy
    import torch

    header = json.loads(next(cache.glob("*.json")).read_text())
    kind = {2: "<u2", 4: "<u4"}[header["bytes_per_token"]]
    tokens = numpy.fromfile(next(cache.glob("*.tokens")), kind).astype(numpy.int64)
    windows = (len(tokens) - 1) // length
    part = Permutation(windows, SEED)
    sample = 0
    while True:
        rows = []
        for _ in range(batch):
            epoch, place = divmod(sample, windows)
            at = part(Permutation(windows, mix(SEED) ^ epoch)(place)) * length
            rows.append(torch.from_numpy(tokens[at : at + length + 1]))
            sample += 1
        yield torch.stack(rows)


def run_cinch(program, model, folder, steps, more):
    line = [program, "train", *model, "--output-dir", folder, "--max-steps", steps, "--seed", SEED,
            "--grad-accum", 1, "--eval-steps", 0, "--save-steps", 0, "--log-steps", 1,
            "--val-split", 0, "--tokenizer", "gpt2", "--quiet",
            "--set", f"training.weight_decay={DECAY}", "--set", f"training.adam_beta1={BETAS[0]}",
            "--set", f"training.adam_beta2={BETAS[1]}",
            "--set", f"training.adam_epsilon={EPSILON}",
            "--set", f"training.max_grad_norm={CLIP}", *more]
    subprocess.run([str(word) for word in line], check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if "loss" in entry]


def rates(rate, warmup, steps):
    """Warm-up as far as a run of so many steps has it."""
    warm = min(warmup, steps)
    return ["--lr", rate * warm / warmup, "--warmup-steps", warm]


def first_checkpoint(program, model, folder, more):
    """What a run begins with: a step at a rate of next to nothing changes nothing."""
    run_cinch(program, model, folder, 1, [*more, "--lr", "1e-30", "--warmup-steps", 0])
    return next((folder / "checkpoints").iterdir())


def gpt2(shape, weights):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    d, layers, heads, positions = shape
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        n_embd=d, n_layer=layers, n_head=heads, n_positions=positions,
        embd_pdrop=0, resid_pdrop=0, attn_pdrop=0, attn_implementation="sdpa"))
    body = model.transformer
    pairs = [(body.wte.weight, "embedding.weight", False), (body.wpe.weight, "positions.weight", False),
             (body.ln_f.weight, "norm.weight", False), (body.ln_f.bias, "norm.bias", False)]
    for i, block in enumerate(body.h):
        for module, name in [(block.ln_1, "attention_norm"), (block.ln_2, "mlp_norm"),
                             (block.attn.c_attn, "attention.qkv"), (block.attn.c_proj, "attention.out"),
                             (block.mlp.c_fc, "mlp.up"), (block.mlp.c_proj, "mlp.down")]:
            turned = not name.endswith("norm")
            pairs += [(module.weight, f"blocks.{i}.{name}.weight", turned),
                      (module.bias, f"blocks.{i}.{name}.bias", False)]
    for parameter, name, turned in pairs:
        value = weights[name]
        parameter.data.copy_(value.t() if turned else value)
    return model


class Adapted:
    """Puts adapters of fp32 beside the frozen layers of a model."""

    @staticmethod
    def put(model, adapters):
        import torch

        class Layer(torch.nn.Module):
            def __init__(self, base, down, up):
                super().__init__()
                self.base = base
                self.down, self.up = torch.nn.Parameter(down.float()), torch.nn.Parameter(up.float())

            def forward(self, x):
                low = torch.nn.functional.linear(x, self.down)
                return self.base(x) + ALPHA / RANK * torch.nn.functional.linear(low, self.up)

        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for path, module in list(model.named_modules()):
            for name, child in list(module.named_children()):
                if name in LAYERS:
                    key = f"base_model.model.{path}.{name}"
                    down, up = adapters[f"{key}.lora_A.weight"], adapters[f"{key}.lora_B.weight"]
                    setattr(module, name, Layer(child, down, up))
        return model


def run_torch(model, source, lines, device, bf16):
    import copy

    import torch

    model = copy.deepcopy(model)
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    # As in cinch: biases, norms and the like do not decay.
    groups = [dict(params=[p for p in trained if p.dim() > 1], weight_decay=DECAY),
              dict(params=[p for p in trained if p.dim() < 2], weight_decay=0.0)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=BETAS, eps=EPSILON)
    losses = []
    for entry, rows in zip(lines, source):
        for group in optimizer.param_groups:
            group["lr"] = entry["learning_rate"]
        rows = rows.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def run_fp32(model, source, lines, device):
    """The same without half precision: what is frozen is the same numbers."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    losses = run_torch(model.float(), source, lines, device, False)
    torch.backends.cuda.matmul.allow_tf32 = False
    return losses


def apart(ours, theirs):
    """The largest distance of two curves in percent."""
    return max(100 * abs(x - y) / y for x, y in zip(smooth(ours), smooth(theirs)))


def smooth(losses):
    return [sum(losses[i - WINDOW + 1 : i + 1]) / WINDOW for i in range(WINDOW - 1, len(losses))]


def picture(path, curves):
    """Two panels of two curves each; the distance is told below."""
    width, height, margin = 460, 300, 46
    parts = []
    for panel, (title, ours, theirs, distance) in enumerate(curves):
        low, high = min(ours + theirs), max(ours + theirs)
        left = panel * (width + 20) + margin

        def points(values):
            return " ".join(
                f"{left + (width - margin) * i / (len(values) - 1):.1f},"
                f"{40 + (height - 90) * (high - v) / (high - low):.1f}"
                for i, v in enumerate(values))

        parts += [
            f'<text x="{left}" y="24" font-weight="bold">{title}</text>',
            f'<text x="{left - 8}" y="44" text-anchor="end">{high:.2f}</text>',
            f'<text x="{left - 8}" y="{height - 46}" text-anchor="end">{low:.2f}</text>',
            f'<polyline points="{points(theirs)}" fill="none" stroke="#d08000" stroke-width="5" opacity="0.5"/>',
            f'<polyline points="{points(ours)}" fill="none" stroke="#003070" stroke-width="1.4"/>',
            f'<text x="{left}" y="{height - 14}">steps {WINDOW} to {len(ours) + WINDOW - 1}; thin: cinch, '
            f'wide: PyTorch; at most {distance:.3f} % apart</text>',
        ]
    total = len(curves) * (width + 20)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{total}" height="{height}" fill="white"/>' + "".join(parts) + "</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cinch", default="target/release/cinch")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=["gpt2", "qwen"])
    parser.add_argument("--in-bf16-alone", action="store_true")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("curves"))
    arguments = parser.parse_args()
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.backends.cuda.matmul.allow_tf32 = False
    out = arguments.out
    out.mkdir()
    bf16, tiny = not arguments.tiny, arguments.tiny
    text, cache = out / "text", out / "cache"
    text.mkdir()
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-s]*/*.py")):
        if "packages" not in path.parts[-2] and path.parts[-2] != "idlelib":
            shutil.copy(path, text / f"{path.parts[-2]}.{path.name}")
    length = 64 if tiny else 1024
    common = ["--data-dir", text, "--cache-dir", cache, "--seq-len", length,
              "--device", arguments.device, "--precision", "bf16" if bf16 else "fp32",
              "--checkpointing", "none"]
    curves, answers = {}, {}

    def compare(title, model, lines, batch):
        def source():
            return batches(cache, batch, length)

        device = arguments.device
        curves[title] = dict(
            cinch=[entry["loss"] for entry in lines],
            torch=run_torch(model, source(), lines, device, bf16))
        if arguments.twice:
            curves[title]["torch again"] = run_torch(model, source(), lines, device, bf16)
        if bf16 and not arguments.in_bf16_alone:
            curves[title]["fp32"] = run_fp32(model, source(), lines, device)

    def train_gpt2():
        shape = (64, 2, 4, 64) if tiny else (768, 12, 12, 1024)
        keys = ["d_model", "n_layers", "n_heads", "max_seq_len"]
        batch = 4 if tiny else 32
        model = ["--model", "gpt2", "--set", "model.dropout=0", "--batch-size", batch, *common]
        model += [word for key, value in zip(keys, shape) for word in ("--set", f"model.{key}={value}")]
        first = first_checkpoint(arguments.cinch, model, out / "gpt2-first", [])
        lines = run_cinch(arguments.cinch, model, out / "gpt2", arguments.steps,
                          rates(GPT2_RATE, GPT2_WARMUP, arguments.steps))
        module = gpt2(shape, load_file(first / "model.safetensors"))
        compare("GPT-2, all weights", module, lines, batch)

    def train_adapters():
        sizes = (64, 2, 4, 2, 128) if tiny else (896, 24, 14, 2, 4864)
        torch.manual_seed(1)
        config = Qwen2Config(
            vocab_size=50304 if tiny else 151936, hidden_size=sizes[0], num_hidden_layers=sizes[1],
            num_attention_heads=sizes[2], num_key_value_heads=sizes[3], intermediate_size=sizes[4],
            max_position_embeddings=4096, rope_theta=1e6, tie_word_embeddings=True)
        base = AutoModelForCausalLM.from_config(config)
        base.to(torch.bfloat16 if bf16 else torch.float32).save_pretrained(out / "qwen")
        adapters = ["--lora-rank", RANK, "--set", f"lora.alpha={ALPHA}", "--set", "lora.dropout=0"]
        batch = 4 if tiny else 8
        model = ["--model", out / "qwen", "--batch-size", batch, *common]
        first_checkpoint(arguments.cinch, model, out / "lora-first", adapters)
        lines = run_cinch(arguments.cinch, model, out / "lora", arguments.steps,
                          [*adapters, *rates(ADAPTERS_RATE, ADAPTERS_WARMUP, arguments.steps)])
        base = Adapted.put(base, load_file(out / "lora-first" / "adapter" / "adapter_model.safetensors"))
        compare("Qwen2 of 0.5B, adapters", base, lines, batch)

    if arguments.only != "qwen":
        train_gpt2()
    if arguments.only != "gpt2":
        train_adapters()

    shown = []
    for title, runs in curves.items():
        ours, theirs = runs["cinch"], runs["torch"]
        a, b = smooth(ours), smooth(theirs)
        shown.append((title, a, b, apart(ours, theirs)))
        answers[title] = dict(
            first=[ours[0], theirs[0]], last=[a[-1], b[-1]], percent_apart=apart(ours, theirs))
        if "torch again" in runs:
            again = runs["torch again"]
            answers[title]["percent_from_torch_again"] = {
                who: apart(runs[who], again) for who in ("cinch", "torch")}
        if "fp32" in runs:
            answers[title]["percent_from_fp32"] = {
                who: apart(runs[who], runs["fp32"]) for who in ("cinch", "torch")}
    picture(out / "curves.svg", shown)
    (out / "curves.json").write_text(json.dumps(curves))
    print(json.dumps(answers, indent=1))


if __name__ == "__main__":
    main()
