"""The part of a rehearsal that runs in the script's process: follows values, marks phases, ends after a step, and writes
what PyTorch used when the process ends."""
import atexit
import ctypes
import functools
import json
import os
import re
import sys
import threading
import time

_FOLDER = os.environ.get("CINCH_REHEARSAL")
_UNTIL = int(os.environ.get("CINCH_REHEARSAL_UNTIL") or 0)
_EVENTS = 1_000_000


class Phases:
    """What the script was doing when: names with the time they began, in microseconds since 1970."""

    def __init__(self):
        self.marks = [("load", time.time_ns() // 1000)]
        self.steps = 0
        # Where the allocator keeps no record: how to read its counters, and the highest up to the end of each phase.
        self.counters = None
        self.highest = {}

    def enter(self, name):
        if self.marks[-1][0] != name:
            self.note()
            self.marks.append((name, time.time_ns() // 1000))

    def note(self):
        if self.counters:
            self.highest[self.marks[-1][0]] = self.counters()

    def without_record(self):
        self.note()
        return [{"name": name, "allocated_bytes": allocated, "reserved_bytes": reserved} for name, (allocated, reserved) in self.highest.items()]

    def training(self):
        return "first step" if self.steps == 0 else "later steps"


phases = Phases()


def begin(after_import):
    import torch

    global _AfterImport
    _AfterImport = after_import

    if not hasattr(torch._C, "_cuda_init"):
        _write({"torch": torch.__version__, "cuda": None, "pid": os.getpid(), "used_cuda": False})
        return
    _tell_architectures(torch)
    from cinch_values import count_in_backward, leave_backward_alone, mark_numbers, values

    values.__enter__()
    count_in_backward()
    leave_backward_alone()
    mark_numbers()
    run = threading.Thread.run

    @functools.wraps(run)
    def run_followed(thread):
        with values:
            run(thread)

    threading.Thread.run = run_followed
    _follow_phases(torch)
    torch.cuda._lazy_call(functools.partial(_record, torch))
    _stand_in_for_other_ranks(torch)
    atexit.register(_finish, torch)


def _tell_architectures(torch):
    """The card's library is told which architectures PyTorch was compiled for."""
    try:
        has_code = ctypes.PyDLL(None).cinch_card_has_code
        flags = torch._C._cuda_getArchFlags() or ""
    except AttributeError:
        return
    for kind, number in re.findall(r"(sm|compute)_(\d+)", flags):
        has_code(int(number), kind == "compute")


def _record(torch):
    # Stacks take most of the time, and only some answers need them.
    context = "all" if os.environ.get("CINCH_REHEARSAL_TRACE") else None
    try:
        torch.cuda.memory._record_memory_history(context=context, max_entries=_EVENTS, stacks="python")
        if context:
            import cinch_recorder

            cinch_recorder._let_recomputation_end(_EVENTS)
    except TypeError:
        torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
    except RuntimeError:
        # `backend:cudaMallocAsync` has no record, only counters.
        def counters():
            stats = torch.cuda.memory_stats()
            return stats.get("allocated_bytes.all.peak", 0), stats.get("reserved_bytes.all.peak", 0)

        phases.counters = counters


def _follow_phases(torch):
    module = torch.nn.modules.module

    def first_forward(*_):
        handle.remove()
        phases.enter("first step")

    handle = module.register_module_forward_pre_hook(first_forward)
    counts = {}

    def after_step(optimizer, *_):
        counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
        phases.steps = max(counts.values())
        phases.enter("later steps")
        if _UNTIL and phases.steps >= _UNTIL:
            raise SystemExit(0)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(after_step)
    train = torch.nn.Module.train

    @functools.wraps(train)
    def train_followed(self, mode=True):
        if phases.steps:
            phases.enter("later steps" if mode else "evaluation")
        return train(self, mode)

    torch.nn.Module.train = train_followed
    from cinch_values import reads

    def saving(save):
        @functools.wraps(save)
        def save_followed(*args, **kwargs):
            before = phases.marks[-1][0]
            phases.enter("saving")
            try:
                with reads.kept():
                    return save(*args, **kwargs)
            finally:
                phases.enter(before)

        return save_followed

    torch.save = saving(torch.save)
    scaler = torch.amp.GradScaler
    state = scaler.state_dict

    @functools.wraps(state)
    def state_followed(self):
        with reads.kept():
            return state(self)

    scaler.state_dict = state_followed
    _after_import("safetensors.torch", lambda module: [setattr(module, name, saving(getattr(module, name))) for name in ("save", "save_file", "save_model")])


def _after_import(name, then):
    """Does something with a module once it is imported; at once where it has been."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


def _stand_in_for_other_ranks(torch):
    """With `--world N` one rank runs; what it would hear of the others when groups are made, it is told here."""
    if int(os.environ.get("CINCH_REHEARSAL_WORLD") or 0) < 2 or not torch.distributed.is_available():
        return
    import torch.distributed as dist

    class Alone(dist.Store):
        """A store in which everybody has already said what this rank waits for."""

        def __init__(self):
            super().__init__()
            self.values = {}

        def set(self, key, value):
            self.values[key] = value if isinstance(value, bytes) else str(value).encode()

        def get(self, key):
            return self.values.get(key, b"\1" * 128)

        def add(self, key, amount):
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return max(int(self.values[key]), dist.get_world_size() if dist.is_initialized() else 1)

        def check(self, keys):
            # Nobody has raised an alarm, for which PyTorch's watchdog looks every second.
            return all(key in self.values or not key.endswith(("exception_dump", "remote_error")) for key in keys)

        def wait(self, keys, timeout=None):
            return None

        def num_keys(self):
            return len(self.values)

        def delete_key(self, key):
            return self.values.pop(key, None) is not None

        def compare_set(self, key, expected, desired):
            self.values.setdefault(key, desired if isinstance(desired, bytes) else str(desired).encode())
            return self.values[key]

        def clone(self):
            return self

    begin_group = dist.init_process_group
    c10d = dist.distributed_c10d

    @functools.wraps(begin_group)
    def alone(backend=None, *args, **kwargs):
        kwargs.pop("init_method", None)
        # PyTorch's threads go on asking a store that Python has forgotten, unless it is kept.
        alone.store = kwargs["store"] = kwargs.get("store") or Alone()
        kwargs["rank"] = int(os.environ["RANK"])
        kwargs["world_size"] = int(os.environ["WORLD_SIZE"])
        return begin_group(backend or "nccl", **{k: v for k, v in kwargs.items()})

    c10d._store_based_barrier = lambda *_, **__: None
    dist.init_process_group = c10d.init_process_group = alone


_ALLOCATED = {"alloc": 1, "free_completed": -1}
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def _peaks(events, stats):
    """Most bytes allocated and reserved in each phase, from the allocator's own record. Of a long run that has only the
    end, before which there was what the end's counters say more than it."""
    marks = phases.marks + [("", 1 << 62)]
    found, order, index = {}, [], 0
    before = lambda counter, signs: stats.get(counter, 0) - sum(signs.get(e["action"], 0) * e["size"] for e in events)
    is_whole = len(events) < _EVENTS
    allocated = 0 if is_whole else before("allocated_bytes.all.current", _ALLOCATED)
    reserved = 0 if is_whole else before("reserved_bytes.all.current", _RESERVED)
    for event in events:
        moment = event.get("time_us") or 0
        while moment >= marks[index + 1][1]:
            index += 1
        name = marks[index][0]
        if name not in found:
            found[name] = [allocated, reserved]
            order.append(name)
        action, size = event["action"], event["size"]
        allocated += _ALLOCATED.get(action, 0) * size
        reserved += _RESERVED.get(action, 0) * size
        peak = found[name]
        peak[0] = max(peak[0], allocated)
        peak[1] = max(peak[1], reserved)
    return [{"name": name, "allocated_bytes": found[name][0], "reserved_bytes": found[name][1]} for name in order]


def _finish(torch):
    from cinch_values import reads, values

    try:
        values.__exit__(None, None, None)
    except Exception:
        pass
    result = {"torch": torch.__version__, "cuda": torch.version.cuda, "steps": phases.steps, "until": _UNTIL, "pid": os.getpid(), "used_cuda": torch.cuda.is_initialized(), "tries_engines": bool(torch.backends.cudnn.benchmark), "reads": list(reads.found.values())}
    try:
        import resource

        result["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    except ImportError:
        pass
    if torch.cuda.is_initialized():
        counts = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
        device = max(range(len(counts)), key=lambda i: counts[i].get("reserved_bytes.all.peak", 0))
        stats = counts[device]
        snapshot = torch.cuda.memory._snapshot() if not phases.counters else {}
        traces = snapshot.get("device_traces") or []
        events = traces[device] if device < len(traces) else []
        try:
            result["phases"] = phases.without_record() if phases.counters else _peaks(events, stats)
        except Exception as error:
            result["phases"] = []
            result["problem"] = repr(error)
        result["complete"] = len(events) < _EVENTS
        result["device"] = device
        # The script may have set PyTorch's peaks back; the record has not.
        of_phases = lambda key: max([phase[key] for phase in result["phases"]], default=0)
        result["allocated_bytes"] = max(stats.get("allocated_bytes.all.peak", 0), of_phases("allocated_bytes"))
        result["reserved_bytes"] = max(stats.get("reserved_bytes.all.peak", 0), of_phases("reserved_bytes"))
        result["retries"] = stats.get("num_alloc_retries", 0)
        result["out_of_memory"] = stats.get("num_ooms", 0)
        if os.environ.get("CINCH_REHEARSAL_TRACE") and not phases.counters:
            _write_trace(torch, snapshot, device)
    _write(result)


def _write(result):
    path = os.path.join(_FOLDER, f"script-{os.getpid()}.json")
    with open(path + ".part", "w", encoding="utf-8", errors="replace") as file:
        json.dump(result, file)
    os.replace(path + ".part", path)


def _write_trace(torch, snapshot, device):
    import contextlib
    import io

    import cinch_recorder

    # Frames of this folder stand between the script's line and its op.
    here = os.path.dirname(os.path.abspath(__file__))
    for events in list(snapshot.get("device_traces") or []) + [segment["blocks"] for segment in snapshot["segments"]]:
        for event in events:
            if event.get("frames"):
                event["frames"] = [frame for frame in event["frames"] if not frame["filename"].startswith(here)]
    torch.cuda.memory._snapshot = lambda *_: snapshot
    cinch_recorder._marks.extend({"mark": "step" if "step" in name else name, "time_us": moment} for name, moment in phases.marks if name != "load")
    cinch_recorder.start.max_entries = _EVENTS
    with contextlib.redirect_stdout(io.StringIO()):
        cinch_recorder.save(os.path.join(_FOLDER, f"trace-{os.getpid()}.jsonl"), device)
