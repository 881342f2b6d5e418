"""Records what PyTorch's allocator does, for `cinch plan --snapshot FILE`.

    import cinch_recorder as memory
    memory.start()                           # before the model is built
    try:
        for batch in batches:                # three steps are enough
            memory.step(batch_size=len(batch))
            ...                              # forward, backward, optimizer
    finally:
        memory.save("run.jsonl")             # also if memory runs out

If the last of three steps has another batch size, cinch can tell what any other batch would
take: the first step also makes the optimizer's states, so that two are not enough. PyTorch 2.1
or later; nothing else is imported. The file holds sizes, addresses, and names of files and
functions of your code, no data.
"""
import json
import os
import time

import torch

_ENTRIES = 1_000_000  # events kept; older ones are dropped
_FRAMES = 96  # innermost Python frames kept of each stack: your own lie below the libraries'
_marks = []


def start(max_entries=_ENTRIES, device=None):
    """Begins to record. Call it before the model is built to see everything."""
    torch.cuda.init()
    if device is not None:
        torch.cuda.set_device(device)
    record = torch.cuda.memory._record_memory_history
    try:
        record(max_entries=max_entries, stacks="python")
        _let_recomputation_end(max_entries)
    except TypeError:  # versions without `stacks`
        record(max_entries=max_entries)
    _marks.clear()
    start.max_entries = max_entries


def _let_recomputation_end(max_entries):
    """Leaves out the stacks of frees while a checkpoint computes again.

    It ends that by an exception, which PyTorch 2.11 clears when memory is freed on its way and a
    stack is taken: "returned NULL without setting an exception". What is freed there is freed in
    a backward, and that is what an event without a stack is taken for.
    """
    import torch.utils.checkpoint as checkpoint

    hook = getattr(checkpoint, "_recomputation_hook", None)
    if not isinstance(hook, type) or hasattr(hook, "cinch_depth"):
        return
    record = torch.cuda.memory._record_memory_history

    class Recomputation(hook):
        cinch_depth = 0

        def __enter__(self):
            Recomputation.cinch_depth += 1
            record(context="alloc", max_entries=max_entries, stacks="python")
            return super().__enter__()

        def __exit__(self, *error):
            try:
                return super().__exit__(*error)
            finally:
                Recomputation.cinch_depth -= 1
                if not Recomputation.cinch_depth:
                    record(context="all", max_entries=max_entries, stacks="python")

    checkpoint._recomputation_hook = Recomputation


def step(batch_size=None, name="step"):
    """Marks the start of a step."""
    mark = {"mark": name, "time_us": time.time_ns() // 1000}
    if batch_size is not None:
        mark["batch"] = int(batch_size)
    _marks.append(mark)


def _place(frame):
    return f"{frame.get('filename', '')}:{frame.get('line', 0)}:{frame.get('name', '')}"


def save(path="run.jsonl", device=None):
    """Writes one JSON object a line: header, marks, stacks, segments, events."""
    torch.cuda.synchronize()
    if device is None:
        device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    snapshot = torch.cuda.memory._snapshot()
    traces = snapshot.get("device_traces") or []
    events = traces[device] if device < len(traces) else []
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    header = {
        "cinch_snapshot": 1,
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name(device),
        "device_total": total,
        "device_used": total - free,
        "settings": settings,
        "complete": len(events) < getattr(start, "max_entries", _ENTRIES),
    }
    stacks = {}
    temporary = f"{path}.part"
    with open(temporary, "w", encoding="utf-8", errors="replace") as file:

        def line(value):
            json.dump(value, file, separators=(",", ":"))
            file.write("\n")

        def stack_of(item):
            frames = item.get("frames")
            if not frames:
                return None
            key = tuple(_place(frame) for frame in frames[:_FRAMES])
            if key not in stacks:
                stacks[key] = len(stacks)
                line({"stack": stacks[key], "frames": key})
            return stacks[key]

        line(header)
        for mark in _marks:
            line(mark)
        for segment in snapshot["segments"]:
            if segment.get("device", 0) != device:
                continue
            pool = segment.get("segment_pool_id") or (0, 0)
            line({
                "segment": segment["address"],
                "size": segment["total_size"],
                "stream": segment.get("stream", 0),
                "pool": segment["segment_type"],
                "private": (pool[0] << 32) ^ pool[1],
                "expandable": bool(segment.get("is_expandable", False)),
                "blocks": [
                    [block["size"], block.get("requested_size", block["size"]), block["state"], stack_of(block)]
                    for block in segment["blocks"]
                ],
            })
        for event in events:
            record = {"action": event["action"], "size": event.get("size", 0)}
            # Where memory ran out, PyTorch says what was free and not where.
            place = "device_free" if "device_free" in event else "addr"
            record[place] = event.get(place, 0)
            if event.get("stream"):
                record["stream"] = event["stream"]
            if event.get("time_us"):
                record["time_us"] = event["time_us"]
            stack = stack_of(event)
            if stack is not None:
                record["stack"] = stack
            line(record)
    os.replace(temporary, path)
    print(f"{path}: {len(events)} events, {len(stacks)} stacks")
