"""Rehearses a script before its first step, and says where it would run out of memory.

For transformers' Trainer and what is made of it:

    from cinch_rehearse import RehearseCallback
    trainer = Trainer(..., callbacks=[RehearseCallback()])

For a loop of one's own:

    from cinch_rehearse import rehearsed
    with rehearsed(steps=2):
        for batch in loader: ...

The script is started once more by `cinch rehearse`, on a card that is not there, up to the steps that are asked for; with
the callback, an evaluation follows them. It then goes on as if nothing had been. `cinch` is looked for on the PATH, or
under the name in CINCH. Written by `cinch rehearse --script`.
"""
import json
import os
import subprocess
import sys
import tempfile

_INSIDE = "CINCH_REHEARSAL"
_TRAIN, _EVALUATE = "CINCH_REHEARSE_TRAIN_BATCH", "CINCH_REHEARSE_EVALUATION_BATCH"
# Batches of an evaluation that are rehearsed: the second finds what the first has left.
_EVALUATED = 3


class WillRunOut(MemoryError):
    """What the rehearsal found, where it was asked to stop the script."""


def is_rehearsal():
    return bool(os.environ.get(_INSIDE))


def _is_first():
    """One process of several speaks."""
    return int(os.environ.get("RANK") or 0) == 0


def _card(gpu):
    if gpu:
        return gpu
    import torch

    if not torch.cuda.is_available():
        raise ValueError("there is no card whose name could be taken: name one, as in gpu=\"RTX 4090\"")
    return torch.cuda.get_device_name().removeprefix("NVIDIA ")


def _gib(size):
    return f"{size / (1 << 30):.1f} GiB"


def _cannot_start_again():
    """Why this program cannot be started once more as it was; `None` where it can."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return "this is an interactive session: put the loop into a script"
    if not (file and os.path.isfile(file)) and "-c" not in sys.orig_argv:
        return "the program was read from standard input: put it into a file"
    return None


def _rehearse(gpu, steps, timeout, changed=None):
    """The report of a rehearsal of this very command; `None` and the reason where there is none."""
    reason = _cannot_start_again()
    if reason:
        return None, reason
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        command = [os.environ.get("CINCH") or "cinch", "rehearse", "--quiet", "--gpu", gpu, "--report", report, "--timeout", str(timeout)]
        if steps:
            command += ["--until-step", str(steps)]
        world = int(os.environ.get("WORLD_SIZE") or 1)
        if world > 1:
            command += ["--world", str(world), "--rank", os.environ.get("RANK") or "0"]
        environment = dict(os.environ, **{name: str(value) for name, value in (changed or {}).items()})
        try:
            done = subprocess.run([*command, "--", *sys.orig_argv], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        except OSError as error:
            return None, f"`{command[0]}` cannot be started: {error}"
        try:
            with open(report, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return None, (done.stderr.strip().splitlines() or ["no message"])[-1]
    if not found["ran_out_of_memory"] and found["ended"] != {"code": 0}:
        return None, f"the script did not come to its steps: {_ended(found, done)}"
    if not found["torch"] or not found["phases"]:
        return None, "the script did not use the card: does it choose its device by torch.cuda.is_available()?"
    if not found["steps"] and not found["ran_out_of_memory"]:
        return None, "the script came to its end without a step of an optimizer"
    return found, ""


def _ended(found, done):
    """How it ended, with what it said last."""
    how = found["ended"]
    if isinstance(how, dict):
        how = " ".join(f"{key} {value}" for key, value in how.items())
    said = [line for line in done.stdout.splitlines() + done.stderr.split("rehearsal on ")[0].splitlines() if line.strip()]
    return f"{how}: {said[-1].strip()}" if said else how


def _short(found):
    """By how many bytes it does not fit."""
    memory, card = found["memory"], found["card"]["memory_bytes"]
    missing = max(memory["device_bytes"] + found.get("refused_bytes", 0), memory["safe_bytes"]) - card
    return max(missing, 0)


def _phase(found):
    """Where the most is needed: the last where it ran out, else the highest."""
    phases = found["phases"] or [{"name": "load", "reserved_bytes": 0}]
    if found["ran_out_of_memory"]:
        return phases[-1]["name"]
    return max(phases, key=lambda phase: phase["reserved_bytes"])["name"]


def _verdict(found, gpu):
    # That it was cut off is what is being told.
    doubts = [doubt for doubt in found["doubts"] if not (found["ran_out_of_memory"] and "come to its end" in doubt)]
    sure = " (not certain: " + "; ".join(doubts) + ")" if doubts else ""
    if found["fits"]:
        return f"cinch: fits {gpu}: {_gib(found['memory']['safe_bytes'])} with a margin, of {_gib(found['card']['memory_bytes'])}{sure}"
    kind = "will run out of memory" if found["ran_out_of_memory"] else "fits only without a margin"
    return f"cinch: this {kind} at {_phase(found)}, by {_gib(_short(found))}{sure}"


def _say(text, stop):
    print(text, file=sys.stderr, flush=True)
    if stop:
        raise WillRunOut(text)


class rehearsed:
    """A context in which nothing is changed; before it, the script is rehearsed up to its first optimizer steps."""

    def __init__(self, steps=2, gpu=None, stop=False, timeout=600):
        self.steps, self.gpu, self.stop, self.timeout = steps, gpu, stop, timeout
        self.report = None

    def __enter__(self):
        if not is_rehearsal() and _is_first():
            gpu = _card(self.gpu)
            self.report, reason = _rehearse(gpu, self.steps, self.timeout)
            if self.report is None:
                print(f"cinch: not rehearsed: {reason}", file=sys.stderr, flush=True)
            else:
                _say(_verdict(self.report, gpu), self.stop and not self.report["fits"])
        return self

    def __exit__(self, *error):
        return False


def __getattr__(name):
    """`RehearseCallback` is made when it is asked for: a loop of one's own need not load transformers."""
    if name != "RehearseCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _callback()
    return made


def _callback():
    from transformers import TrainerCallback

    class RehearseCallback(TrainerCallback):
        """Rehearses steps and evaluation before the first step; where they do not fit, finds the smallest change that does:
        a smaller batch of evaluation, or a smaller one of training with the effective batch kept."""

        def __init__(self, steps=2, gpu=None, stop=False, timeout=600):
            self.steps, self.gpu, self.stop, self.timeout = steps, gpu, stop, timeout
            self.report = None
            self.evaluated = 0

        def on_init_end(self, args, state, control, **kwargs):
            if not is_rehearsal():
                return
            train, evaluation = os.environ.get(_TRAIN), os.environ.get(_EVALUATE)
            if train:
                args.gradient_accumulation_steps *= max(args.per_device_train_batch_size // int(train), 1)
                args.per_device_train_batch_size = int(train)
            if evaluation:
                args.per_device_eval_batch_size = int(evaluation)

        def on_train_begin(self, args, state, control, **kwargs):
            if is_rehearsal() or not _is_first():
                return
            gpu = _card(self.gpu)
            self.report, reason = _rehearse(gpu, 0, self.timeout)
            if self.report is None:
                print(f"cinch: not rehearsed: {reason}", file=sys.stderr, flush=True)
                return
            text = _verdict(self.report, gpu)
            if not self.report["fits"]:
                text += "; " + self._smallest_change(gpu, args)
            _say(text, self.stop and not self.report["fits"])

        def _smallest_change(self, gpu, args):
            train, evaluation = args.per_device_train_batch_size, args.per_device_eval_batch_size
            is_evaluation = _phase(self.report) == "evaluation"
            first, name = (evaluation, _EVALUATE) if is_evaluation else (train, _TRAIN)
            batch = first
            while batch > 1:
                batch //= 2
                # Accumulation keeps the effective batch only where it is cut into equal parts.
                if not is_evaluation and first % batch:
                    continue
                found, _ = _rehearse(gpu, 0, self.timeout, {name: batch})
                if found is not None and found["fits"]:
                    if is_evaluation:
                        return f"smallest change: per_device_eval_batch_size={batch} instead of {first}"
                    steps = args.gradient_accumulation_steps * (first // batch)
                    return f"smallest change: per_device_train_batch_size={batch} and gradient_accumulation_steps={steps}, which keep the effective batch"
            return "no smaller batch fits: gradient_checkpointing=True, or a smaller model"

        def on_step_end(self, args, state, control, **kwargs):
            if is_rehearsal() and state.global_step >= self.steps:
                if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
                    control.should_evaluate = True
                control.should_save = False
                control.should_training_stop = True

        def on_prediction_step(self, args, state, control, **kwargs):
            if is_rehearsal():
                self.evaluated += 1
                if self.evaluated >= _EVALUATED:
                    raise SystemExit(0)

    return RehearseCallback
