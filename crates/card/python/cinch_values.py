"""True values for small tensors on a card that computes nothing.

The card's memory is real address space of this process, so that a small tensor on the card can be looked at as a tensor
on the host. After every op whose inputs have true values, the same op is run on the host and its result written where
the card's result is. What comes from weights or large tensors has no true value; reading it follows a stated policy:

- a condition is false, an integer is 0, a float is 1; gradients are finite, and nothing is NaN or infinite;
- a mask selects everything, and all values are distinct, where that decides a shape.

Every such read is noted with its line, and whether it decided anything.
"""
import contextlib
import ctypes
import functools
import os
import sys
import threading
import warnings

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

LARGEST = 4 << 20  # bytes of a tensor whose values are followed: what the card copies for real
COMPUTED = 128 << 10  # bytes of a result in floats that is computed: what decides shapes is smaller, or made of integers
LARGE_ON_HOST = 4 << 20  # initial values of larger tensors on the host are not drawn: weights are never real

# Where a value comes from: computed, of a run in which nothing is NaN or infinite, drawn at random as the card would
# with other numbers, or assumed.
EXACT, HEALTHY, DRAWN, ASSUMED = 1, 2, 3, 4

_aten = torch.ops.aten
_RANDOM = {"rand", "randn", "randint", "randperm", "normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like"}
_INITIAL = {"normal_", "uniform_", "random_", "erfinv_", "mul_", "add_", "sub_", "div_", "clamp_", "fill_", "zero_", "log_normal_", "exponential_", "copy_"}
_DRAWN_IN_PLACE = {"normal_", "uniform_", "random_", "log_normal_", "exponential_"}
_FINITE = {"isnan": False, "isinf": False, "isfinite": True}
_SHAPED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount"}
_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_STANDARD = os.path.join(os.path.dirname(os.path.abspath(os.__file__)), "")


def _find_following():
    """The card's library is told which modes are ours: PyTorch asks it whether there are others."""
    try:
        return ctypes.PyDLL(None).cinch_card_following
    except AttributeError:
        return lambda change: None


_following = _find_following()


def _places():
    """The line of the user's own that led here, and the innermost line outside of PyTorch."""
    frame, inner, own = sys._getframe(1), None, None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH, "<")):
            place = f"{name}:{frame.f_lineno}"
            inner = inner or place
            if "site-packages" not in name and "dist-packages" not in name and not name.startswith(sys.base_prefix):
                own = place
                break
        frame = frame.f_back
    return own or inner or "?", inner or "?"


class Reads:
    """What the script read of the card, by line and kind."""

    def __init__(self):
        self.found, self.lock = {}, threading.Lock()
        self.only_kept = threading.local()

    @contextlib.contextmanager
    def kept(self):
        """While something is read in order to be kept, as in a checkpoint: nothing hangs on it."""
        self.only_kept.depth = getattr(self.only_kept, "depth", 0) + 1
        try:
            yield
        finally:
            self.only_kept.depth -= 1

    def note(self, kind, value, decides):
        if getattr(self.only_kept, "depth", 0):
            return
        line, inner = _places()
        with self.lock:
            read = self.found.setdefault((line, inner, kind), {"line": line, "within": inner, "what": kind, "taken_as": str(value), "count": 0, "decides": False})
            read["count"] += 1
            read["decides"] |= decides


reads = Reads()


def _binary(name):
    def operate(self, *other):
        result = getattr(float, name)(self, *other)
        return Number(result) if isinstance(result, float) else result

    return operate


def _deciding(name):
    def decide(self, *other):
        # PyTorch's optimizers only choose between numbers, such as the larger of two step sizes, and what writes JSON
        # asks a number whether it is infinite.
        place = sys._getframe(1).f_code.co_filename
        is_standard = place.startswith(_STANDARD) and "-packages" not in place
        if not is_standard and not place.startswith(_OPTIMIZERS):
            reads.note("number compared", float(self), True)
        return getattr(float, name)(self, *other)

    return decide


class Number(float):
    """A number nobody computed: it may be printed and calculated with, and says so when something hangs on it."""

    for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__", "__abs__", "__pow__"):
        locals()[_name] = _binary(_name)
    for _name in ("__bool__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__int__"):
        locals()[_name] = _deciding(_name)
    __hash__ = float.__hash__

    def __reduce__(self):
        return (float, (float(self),))


class _Form:
    """What an op's schema says, worked out once."""

    __slots__ = ("name", "writes", "is_view", "is_random", "is_followed", "is_collective")

    def __init__(self, func):
        schema = func._schema
        self.name = schema.name.split("::")[-1]
        self.is_collective = schema.name.startswith("c10d::")
        self.writes = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.is_view = not self.writes and any(r.alias_info is not None for r in schema.returns)
        self.is_random = self.name in _RANDOM or torch.Tag.nondeterministic_seeded in func.tags
        self.is_followed = schema.name.startswith("aten::") and not self.name.startswith(("_cudnn", "cudnn", "_fused_", "empty", "_foreach_norm", "new_empty"))


def _tensors(values, found):
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _tensors(value, found)
    return found


def _on_host(tensor):
    """The same memory as a tensor on the host."""
    storage = tensor.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype).set_(whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_within(tensor, limit):
    """Whether the memory under a tensor is no more than this. PyTorch adds gradients in place only where their storage has
    no object in Python, which asking for it makes: of large tensors it is not asked for."""
    base = tensor._base
    return (tensor if base is None else base).nbytes <= limit and tensor.untyped_storage().nbytes() <= limit


def _is_computed(tensor):
    """Whether a result of this size is computed. Ids, positions and masks decide more than floats, and few ops make them."""
    return _is_within(tensor, COMPUTED if tensor.is_floating_point() or tensor.is_complex() else LARGEST)


def _address(tensor):
    """Where the memory under a tensor begins."""
    return tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()


def _mapped(value, change):
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return value


class Values(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.states = {}  # of the card's memory by address: where its values come from, and a reference to the storage that has it
        self.unreal = set()  # storages on the host whose values were not drawn
        self.forms = {}
        self.read = threading.local()  # whether the last number that was read in this thread is one that nobody computed

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __enter__(self):
        result = super().__enter__()
        _following(1)
        return result

    def __exit__(self, *error):
        _following(-1)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for kind in types:
            if kind is not torch.Tensor and kind is not torch.nn.Parameter and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                # Tensors without memory have no values; of others the tensors inside are followed.
                return func(*args, **kwargs) if kind.__name__ in ("FakeTensor", "FunctionalTensor") else NotImplemented
        form = self.forms.get(func)
        if form is None:
            form = self.forms[func] = _Form(func)
        if form.is_view and not form.is_collective:
            result = func(*args, **kwargs)
            if form.name == "lift_fresh" and result.is_cuda and _is_within(result, LARGEST):
                # A tensor of the script's own numbers: the card has copied them, out of this mode's sight.
                self.set(result, EXACT)
            return result
        inputs = _tensors(args, [])
        if kwargs:
            _tensors(kwargs.values(), inputs)
        name = form.name
        if name == "_local_scalar_dense":
            return self.scalar(func, inputs[0])
        if self.unreal or name in _DRAWN_IN_PLACE:
            done, result = self.on_host(func, form, args, kwargs, inputs)
            if done:
                return result
        if name in _SHAPED or name == "index":
            if any(t.is_cuda for t in inputs):
                result = self.shaped(func, form, args, kwargs, inputs)
                if result is not NotImplemented:
                    return result
        elif name == "equal" and inputs[0].is_cuda:
            return self.equal(func, args, inputs)
        if form.is_collective:
            return self.collective(func, args, kwargs, inputs)
        state = self.followed(form, inputs)
        result = func(*args, **kwargs)
        outputs = _tensors((result,), [])
        for i, key in form.writes:
            written = args[i] if i < len(args) else kwargs.get(key)
            if written is not None:
                _tensors((written,), outputs)
        self.note(func, form, args, kwargs, inputs, outputs, state)
        return result

    # ---- the card's tensors

    def collective(self, func, args, kwargs, inputs):
        """Every rank is taken to have what this one has; the card has copied it."""
        known = [self.get(t) for t in inputs if t.is_cuda and self.get(t)]
        result = func(*args, **kwargs)
        alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
        for tensor in inputs:
            if tensor.is_cuda and known and _is_within(tensor, LARGEST):
                self.set(tensor, max(max(known), EXACT if alone else ASSUMED))
            elif tensor.is_cuda:
                self.drop(tensor)
        return result

    def followed(self, form, inputs):
        """Where a result's values come from; 0 where they are not had."""
        if not form.is_followed:
            return 0
        state = EXACT
        for tensor in inputs:
            if tensor.is_cuda:
                known = self.get(tensor)
                if not known:
                    # What is overwritten whole needs no value before.
                    if len(form.writes) == 1 and tensor is inputs[0] and form.name in ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_") and tensor.is_contiguous() and tensor.nbytes <= LARGEST and _is_within(tensor, tensor.nbytes):
                        continue
                    return 0
                state = max(state, known)
            elif self.unreal and tensor.untyped_storage().data_ptr() in self.unreal:
                return 0
        return max(state, DRAWN) if form.is_random else state

    def note(self, func, form, args, kwargs, inputs, outputs, state):
        on_card = [t for t in outputs if t.is_cuda]
        if not on_card:
            self.to_host(form, inputs, outputs)
            return
        if form.name in _FINITE and not state and on_card[0].nbytes <= LARGEST:
            self.set(on_card[0], HEALTHY)
            _on_host(on_card[0]).fill_(_FINITE[form.name])
            return
        if form.name == "_amp_foreach_non_finite_check_and_unscale_":
            self.set(args[1], ASSUMED)
            for tensor in args[0]:
                self.drop(tensor)
            return
        if state and form.is_random and form.name not in _RANDOM:
            state = 0
        if state and all(_is_computed(t) for t in on_card) and self.compute(func, form, args, kwargs, outputs, inputs):
            for tensor in on_card:
                self.set(tensor, state)
            return
        for tensor in on_card:
            self.drop(tensor)

    def get(self, tensor):
        if tensor.numel() == 0:
            return EXACT
        found = self.states.get(_address(tensor))
        return found[0] if found and not found[1].expired() else 0

    def set(self, tensor, state):
        self.states[_address(tensor)] = (state, StorageWeakRef(tensor.untyped_storage()), tensor.dtype.is_floating_point)
        if len(self.states) > 20_000:
            self.states = {name: found for name, found in self.states.items() if not found[1].expired()}

    def drop(self, tensor):
        if self.states:
            self.states.pop(_address(tensor), None)

    def after_backward(self):
        """What the backward wrote was not followed: no number that was there before is relied on."""
        self.states = {name: found for name, found in self.states.items() if not found[2] and not found[1].expired()}

    def compute(self, func, form, args, kwargs, outputs, inputs):
        """Runs an op again on the host, into the card's memory."""
        if any(t.is_cuda and not _is_within(t, LARGEST) for t in inputs):
            return False
        if form.name == "copy_" or form.name == "_to_copy" and any(not t.is_cuda for t in inputs):
            if all(t.is_contiguous() and o.is_contiguous() and t.dtype == o.dtype for t in inputs for o in outputs) and not all(t.is_cuda for t in inputs):
                return True  # the card has made this copy itself
        try:
            host = lambda t: _on_host(t) if t.is_cuda else t
            arguments = [_mapped(a, host) for a in args]
            named = {k: _mapped(v, host) for k, v in kwargs.items()}
            if named.get("device") is not None:
                named["device"] = torch.device("cpu")
            named.pop("pin_memory", None)
            if form.name in ("copy_",) and form.writes:
                arguments[0].copy_(arguments[1])
                return True
            if form.is_random:
                named.pop("generator", None)
                with torch.random.fork_rng(devices=[]):
                    result = func(*arguments, **named)
            else:
                result = func(*arguments, **named)
            if not form.writes:
                for to, value in zip(outputs, _tensors((result,), [])):
                    _on_host(to).copy_(value)
            return True
        except Exception:
            return False

    def to_host(self, form, inputs, outputs):
        """Copies from the card to the host, and what becomes of them there."""
        unknown = [t for t in inputs if t.is_cuda and not self.get(t)]
        if not unknown:
            if self.unreal and not form.writes:
                for tensor in outputs:
                    self.unreal.discard(tensor.untyped_storage().data_ptr())
            return
        tensor = unknown[0]
        if tensor.nbytes <= LARGEST and tensor.numel() > 0:
            decides = not tensor.dtype.is_floating_point
            reads.note(f"{tuple(tensor.shape)} {str(tensor.dtype)[6:]} copied to the host", 0, decides)
            for to in outputs:
                if not to.is_cuda and to.nbytes <= LARGEST:
                    to.fill_(1.0 if to.dtype.is_floating_point else 0)

    def scalar(self, func, tensor):
        pointer = tensor.untyped_storage().data_ptr()
        state = self.get(tensor) if tensor.is_cuda else (0 if pointer in self.unreal else EXACT)
        if state == EXACT:
            return func(tensor)
        if state:
            value = func(tensor)
            kind = "value drawn at random" if state == DRAWN else "whether values are finite"
        else:
            value = 1.0 if tensor.dtype.is_floating_point else False if tensor.dtype == torch.bool else 0
            kind = {torch.bool: "condition"}.get(tensor.dtype, "number" if tensor.dtype.is_floating_point else "integer")
        is_float = isinstance(value, float)
        # Numbers as large as this are seeds: no shape is.
        is_seed = state == DRAWN and abs(value) >= 1 << 40
        reads.note(kind, value, not (is_float or is_seed) and state != HEALTHY)
        self.read.is_unknown = is_float
        return value

    def equal(self, func, args, inputs):
        states = [self.get(t) for t in inputs]
        if all(states):
            value = func(*[_on_host(t) for t in inputs])
            if max(states) > HEALTHY:
                reads.note("whether tensors are equal", value, True)
            return value
        reads.note("whether tensors are equal", True, True)
        return True

    def shaped(self, func, form, args, kwargs, inputs):
        """Ops whose result's shape hangs on values: the card cannot tell it."""
        if form.name == "index":
            indices = [i for i in args[1] if i is not None]
            deciding = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
            if not deciding:
                return NotImplemented
        elif form.name == "repeat_interleave" and (kwargs.get("output_size") is not None or len(args) > 1 and not isinstance(args[1], torch.Tensor)):
            return NotImplemented
        elif form.name == "masked_select":
            deciding = [args[1]]
        else:
            deciding = inputs[:1]
        states = [self.get(t) for t in deciding]
        device = inputs[0].device
        everything = not all(states) or not all(_is_within(t, LARGEST) for t in deciding)
        if everything or max(states) > HEALTHY:
            reads.note(f"how much {form.name} finds", "everything" if everything else "as drawn", True)
        try:
            if everything:
                standing = lambda t: torch.ones(t.shape, dtype=t.dtype) if any(t is d for d in deciding) else torch.empty(t.shape, dtype=t.dtype, device="meta") if form.name in ("index", "masked_select") else torch.ones(t.shape, dtype=t.dtype)
                if form.name == "_unique2":
                    count = inputs[0].numel()
                    shapes = [((count,), inputs[0].dtype), (inputs[0].shape, torch.int64), ((count,), torch.int64)]
                    return tuple(torch.empty(s, dtype=d, device=device) for s, d in shapes)
                if form.name == "index":
                    shape = list(args[0].shape)
                    mask = deciding[0]
                    if len(indices) == 1 and args[1][0] is mask:
                        return torch.empty([mask.numel()] + shape[mask.dim():], dtype=args[0].dtype, device=device)
                    return NotImplemented
                if form.name == "masked_select":
                    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
                    return torch.empty([int(torch.Size(shape).numel())], dtype=args[0].dtype, device=device)
                result = func(*[_mapped(a, standing) for a in args], **{k: _mapped(v, standing) for k, v in kwargs.items()})
                return _mapped(result, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
            host = lambda t: _on_host(t) if t.is_cuda and _is_within(t, LARGEST) else t
            if form.name in ("index", "masked_select") and not self.get(inputs[0]):
                mask = _on_host(deciding[0])
                if form.name == "masked_select":
                    mask = mask.expand(torch.broadcast_shapes(args[0].shape, mask.shape))
                count = int(mask.sum())
                shape = [count] + list(args[0].shape[mask.dim():]) if form.name == "index" else [count]
                return torch.empty(shape, dtype=args[0].dtype, device=device)
            result = func(*[_mapped(a, host) for a in args], **{k: _mapped(v, host) for k, v in kwargs.items()})

            def placed(tensor):
                to = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                if to.nbytes and to.nbytes <= LARGEST:
                    _on_host(to).copy_(tensor)
                    self.set(to, max(states))
                return to

            return _mapped(result, placed)
        except Exception:
            return NotImplemented

    # ---- large tensors on the host

    def on_host(self, func, form, args, kwargs, inputs):
        """Skips drawing initial values of large tensors, and what is done to them afterwards on the host."""
        if not inputs or inputs[0].is_cuda:
            return False, None
        first = inputs[0]
        pointer = first.untyped_storage().data_ptr()
        is_unreal = pointer in self.unreal
        if form.name in _DRAWN_IN_PLACE and first.nbytes >= LARGE_ON_HOST and first.device.type == "cpu":
            self.unreal.add(pointer)
            return True, first
        if is_unreal and form.name in _INITIAL:
            if form.name == "copy_" and len(inputs) > 1 and (inputs[1].is_cuda or inputs[1].untyped_storage().data_ptr() not in self.unreal):
                return False, None
            return True, first
        if form.name == "copy_" and len(inputs) > 1 and not inputs[1].is_cuda and inputs[1].untyped_storage().data_ptr() in self.unreal:
            self.unreal.add(pointer)
            return True, first
        if is_unreal and form.name in ("clone", "_to_copy") and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            result = torch.empty_like(first, dtype=kwargs.get("dtype") or first.dtype)
            self.unreal.add(result.untyped_storage().data_ptr())
            return True, result
        return False, None


values = Values()


def count_in_backward():
    """The backward of indexing by a mask counts what the mask selects, where the mode is off: the op that counts is
    replaced on the card, for every thread."""
    library = torch.library.Library("aten", "IMPL")
    form = _Form(_aten.nonzero.default)

    def nonzero(mask):
        return values.shaped(_aten.nonzero.default, form, (mask,), {}, [mask])

    with warnings.catch_warnings():
        # PyTorch warns of every kernel that is replaced.
        warnings.simplefilter("ignore")
        library.impl("nonzero", nonzero, "CUDA")
    # It is replaced as long as this lives.
    values.library = library


def mark_numbers():
    """Has `Tensor.item` give a `Number` where nobody computed it: what comes through PyTorch's dispatcher is a plain
    float by then, and whether the script goes by it could not be told."""
    item = torch.Tensor.item

    @functools.wraps(item)
    def item_followed(tensor):
        values.read.is_unknown = False
        value = item(tensor)
        if type(value) is float and values.read.is_unknown:
            return Number(value)
        return value

    torch.Tensor.item = item_followed


def leave_backward_alone():
    """Takes the mode away while autograd runs backward: Python objects of gradients would keep it from adding in place,
    and it would use more memory than without us. What a checkpoint runs again is a forward, and followed."""
    import torch.autograd
    import torch.utils.checkpoint as checkpoint

    run = torch.autograd.graph._engine_run_backward

    def run_unfollowed(*args, **kwargs):
        is_ours = torch._C._len_torch_dispatch_stack() > 0 and torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is values
        if not is_ours:
            return run(*args, **kwargs)
        _pop_mode()
        _following(-1)
        try:
            return run(*args, **kwargs)
        finally:
            _push_mode(values)
            _following(1)
            values.after_backward()

    torch.autograd.graph._engine_run_backward = run_unfollowed
    for module in (torch.autograd, sys.modules.get("torch.autograd.function")):
        if getattr(module, "_engine_run_backward", None) is run:
            module._engine_run_backward = run_unfollowed
    hook = getattr(checkpoint, "_recomputation_hook", None)
    if hook is not None:

        class Followed(hook):
            def __enter__(self):
                values.__enter__()
                return super().__enter__()

            def __exit__(self, *error):
                try:
                    return super().__exit__(*error)
                finally:
                    values.__exit__(*error)

        checkpoint._recomputation_hook = Followed
    backward = checkpoint.CheckpointFunction.backward

    def backward_followed(*args):
        with values:
            return backward(*args)

    checkpoint.CheckpointFunction.backward = staticmethod(backward_followed)
