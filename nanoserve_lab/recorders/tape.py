"""A CUDA graph's semantics without a GPU: the operations of a step, written down with their storages and run again.

While the step runs, a dispatch mode sees every ATen operation below autograd, and a function mode the calls that never
become one (``tolist``, ``bool``). A replay runs those operations on those storages and none of the step's Python.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.module_tracker import ModuleTracker

from nanoserve_lab.recorders import refusals
from nanoserve_lab.recorders.arena import Arena, Lifetime
from nanoserve_lab.recorders.calls import Make, choose
from nanoserve_lab.recorders.lifetimes import Allocate, Free, Lifetimes, allocation
from nanoserve_lab.recorders.node import External, Node
from nanoserve_lab.recorders.operations import (
    SYNC_METHODS,
    Site,
    aten,
    is_empty,
    storage_of,
    tensors_of,
    user_line,
    writes,
    written_arguments,
)
from nanoserve_lab.recorders.recording import Recording, RecordingRefused
from nanoserve_lab.recorders.watching import OperationWatch, deepest, uncompiled

_Args = tuple[Any, ...]


def tape_recorder(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    pool: Arena | None = None,
    *,
    arena: bool = False,
    generators: Sequence[torch.Generator] = (),
) -> Recording:
    """Run ``step(*args)`` once under ``inference_mode`` and write down its operations.

    As a CUDA graph, a replay reads its inputs at their recorded addresses, writes the output in place, and knows every
    Python value, shape and branch as it was when recorded. Recording really runs the step: what it writes in place is
    written, and a random operation draws. Random operations draw anew in each replay, from the default generator or one
    of ``generators``. A function compiled by ``torch.compile`` is recorded as it would run uncompiled. A custom
    operator is one operation, run whole in each replay, whatever its own body asks the host for. The fast path of
    torch's attention modules stands aside for every function mode, so their general path is what is recorded.

    With ``arena`` the intermediates share memory once their last reader has run, as in a graph's pool: what one holds
    after a replay is what the last of its bytes' users left there. Outputs, and whatever the step keeps hold of, have
    storage of their own. ``pool`` is the arena of an earlier recording (its `Recording.pool`), for recordings that are
    not replayed at the same time; without ``arena`` it is handed on unused.

    Raises `RecordingRefused` where the step asks for a value on the host, makes tensors from host data, has shapes that
    depend on values, draws from a generator that is not registered, pins memory, moves or resizes a storage, or
    meets tensors that are not plain ones. Then nothing stays switched on, and the tensors hold what the step had
    written to them before it was refused.
    """
    device = next((tensor.device for tensor in tensors_of(args)), None)
    tape = _Tape((torch.default_generator, *torch.cuda.default_generators, *generators), device)
    seeds = [generator.initial_seed() for generator in tape.generators]
    with ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode())
        contexts.enter_context(uncompiled())
        contexts.enter_context(tape.modules)
        contexts.enter_context(_Calls(tape))
        contexts.enter_context(_Operations(tape))
        output = step(*args)
    if tape.refusal is not None:
        # The step may have caught it; what was recorded since is not the step that was asked for.
        raise tape.refusal
    if seeds != [generator.initial_seed() for generator in tape.generators]:
        site = Site(step.__code__.co_filename, step.__code__.co_firstlineno, "") if hasattr(step, "__code__") else None
        refusals.refuse("manual_seed", "seeds a generator while recording", "seed it before the replay", site)
    tape.check_owners()
    pool = Arena() if pool is None else pool
    memory = tape.lifetimes(output)
    nodes = tape.finish(pool if arena else None)
    return Recording(_replayer(nodes), output, pool, nodes, tape.externals(args), memory)


def _replayer(nodes: tuple[Node, ...]) -> Callable[[], None]:
    # The replay holds the nodes, and they the tensors: a prepared launch knows those by their addresses alone.
    calls = [node.call for node in nodes]
    devices = {tensor.device.type for node in nodes for tensor in (*node.inputs, *node.outputs)}

    def replay() -> None:
        remaining = iter(calls)
        with torch.inference_mode(), _no_autocast(devices):
            try:
                for function, args, kwargs in remaining:
                    function(*args, **kwargs)
            except Exception as error:
                node = nodes[len(calls) - length_hint(remaining) - 1]
                error.add_note(f"in a replay of {node.operation}, recorded at {node.site}")
                raise

    return replay


def _no_autocast(devices: set[str]) -> AbstractContextManager[Any]:
    # Casts were recorded; a replay inside somebody's autocast does not add others.
    for device in devices:
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, enabled=False)
    return nullcontext()


@dataclass
class _Entry:
    """A node before the fate of its outputs is known."""

    operation: Any
    args: _Args
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    make: Make
    module: str
    site: Site

    @property
    def inputs(self) -> list[Tensor]:
        return tensors_of((self.args, self.kwargs))


class _Tape:
    """The operations so far, and tensors of the tape's own over every storage that they touched.

    The step's tensor objects are not kept: their owner may put other storage under one, and what still keeps a storage
    alive after the step shows in the number of its users.
    """

    def __init__(self, generators: tuple[torch.Generator, ...], device: torch.device | None) -> None:
        self.entries: list[_Entry] = []
        self.events: list[Allocate | Free] = []
        self.generators, self.device = generators, device
        self.modules = ModuleTracker()
        self.refusal: RecordingRefused | None = None
        self.number_in_setitem = False
        self._made: set[int] = set()
        self._alive: dict[int, int] = {}
        self._births = 0
        self._constants: set[int] = set()
        self._own: dict[Any, Tensor] = {}
        self._of_storage: dict[int, list[Tensor]] = {}

    def own(self, tensor: Tensor) -> Tensor:
        """The tape's own tensor where and as ``tensor`` is."""
        if tensor.is_mkldnn:
            self._of_storage.setdefault(id(tensor), [tensor])
            return tensor
        storage = storage_of(tensor)
        flags = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), *flags)
        if key not in self._own:
            self._own[key] = _over(tensor, tensor.untyped_storage(), tensor.storage_offset())
            self._of_storage.setdefault(storage, []).append(self._own[key])
        return self._own[key]

    def run(self, operation: Any, args: _Args, kwargs: dict[str, Any]) -> Any:
        """Run an operation of the step, and write it down if a replay has to."""
        if operation is aten.lift_fresh.default and self.number_in_setitem and args[0].dim() == 0:
            return self._keep_constant(operation(*args, **kwargs))
        refusals.check_operation(operation, args, kwargs, self.generators)
        inputs = tensors_of((args, kwargs))
        with torch._C.DisableTorchFunction():
            self._note_deaths()
            before = refusals.geometry(inputs)
            drawn = self._drawn_from(operation, inputs, kwargs)
        result = operation(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            refusals.check_result(operation, inputs, before, result)
            self._write(operation, args, kwargs, result, drawn)
        return result

    def _keep_constant(self, number: Tensor) -> Tensor:
        """The number of ``x[i] = 2.0``, which a GPU would have as an argument of the kernel."""
        with torch._C.DisableTorchFunction():
            self.own(number)
            self._made.add(storage_of(number))
            self._constants.add(storage_of(number))
        return number

    def _write(self, operation: Any, args: _Args, kwargs: dict[str, Any], result: Any, drawn: Any) -> None:
        known = {storage_of(t) for t in tensors_of((args, kwargs))}
        fresh = tuple(t for t in tensors_of(result) if storage_of(t) not in known)
        for tensor in fresh:
            self._note_birth(str(operation), self.own(tensor))
        if is_empty(operation) or not (fresh or writes(operation) or not operation._schema.returns):
            return  # memory, a view, or a question about a shape
        args, kwargs, answer = tree_map_only(Tensor, self.own, (args, kwargs, result))
        outputs = tuple(map(self.own, fresh))
        make = choose(operation, args, kwargs, outputs, answer, drawn)
        module = deepest(self.modules.parents)
        self.entries.append(_Entry(operation, args, kwargs, outputs, make, module, user_line()))

    def _note_birth(self, operation: str, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        counts = not tensor.is_mkldnn and self.device in (None, tensor.device) and tensor.untyped_storage().nbytes()
        if storage not in self._made and counts:
            self._alive[storage] = self._births
            self._births += 1
            self.events.append(allocation(self._alive[storage], operation, tensor))
        self._made.add(storage)

    def _note_deaths(self) -> None:
        for storage in [s for s in self._alive if not self._is_held(self._of_storage[s][0])]:
            self.events.append(Free(self._alive.pop(storage)))

    def lifetimes(self, output: Any) -> Lifetimes:
        """What the step, which returned ``output``, allocated and freed."""
        self._note_deaths()
        outputs = {storage_of(t) for t in tensors_of(output)} & self._alive.keys()
        if len(outputs) < len(self._alive):
            gc.collect()
            self._note_deaths()
        return Lifetimes(tuple(self.events), frozenset(self._alive[storage] for storage in outputs))

    def _drawn_from(self, operation: Any, inputs: list[Tensor], kwargs: dict[str, Any]) -> Any:
        """The generator that a random operation draws from and its state, where that can be drawn from twice."""
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return None
        generator = kwargs.get("generator") or torch.default_generator
        return generator, generator.get_state()

    def check_owners(self) -> None:
        """Refuse a storage that came from outside and that only the tape keeps alive."""
        for entry in self.entries:
            for tensor in entry.inputs:
                if not tensor.is_mkldnn and storage_of(tensor) not in self._made and not self._is_held(tensor):
                    refusals.refuse_host_data(str(entry.operation), tensor, entry.site)

    def _is_held(self, tensor: Tensor) -> bool:
        """Whether anything but the tape uses the tensor's storage."""
        storage = tensor.untyped_storage()
        own = len(self._of_storage[storage._cdata]) + 1  # the handle of the line above
        return torch._C._storage_Use_Count(storage._cdata) > own

    def externals(self, args: _Args) -> tuple[External, ...]:
        """The storages that operations touch and that none of them made."""
        roles = {storage_of(t): f"args[{i}]" for i, arg in reversed([*enumerate(args)]) for t in tensors_of(arg)}
        written = {storage_of(t) for e in self.entries for t in written_arguments(e.operation, e.args, e.kwargs)}
        found: dict[int, External] = {}
        for entry in self.entries:
            for tensor in entry.inputs:
                storage = storage_of(tensor)
                if storage not in self._made and storage not in found:
                    found[storage] = External(tensor, roles.get(storage, "captured"), storage in written)
        return tuple(found.values())

    def finish(self, arena: Arena | None) -> tuple[Node, ...]:
        """The nodes, with intermediates moved into ``arena`` if there is one."""
        held = {s for s in self._made if s in self._constants or self._is_held(self._of_storage[s][0])}
        last: dict[int, int] = {}
        for index, entry in enumerate(self.entries):
            last |= {storage_of(t): index for t in entry.inputs}
        moved = {} if arena is None else self._move(arena, held, last)
        nodes = []
        for index, entry in enumerate(self.entries):
            read = tuple(storage_of(t) in held or last.get(storage_of(t), -1) > index for t in entry.outputs)
            new = functools.partial(tree_map_only, Tensor, lambda t: moved.get(id(t), t))
            args, kwargs, outputs = new(entry.args), new(entry.kwargs), new(entry.outputs)
            call = entry.make(args, kwargs, outputs, read)
            nodes.append(Node(entry.operation, args, kwargs, outputs, call, entry.module, entry.site))
        return tuple(nodes)

    def _move(self, arena: Arena, held: set[int], last: dict[int, int]) -> dict[int, Tensor]:
        """The arena's tensor for each of the tape's own that is nobody else's, by the id of the latter."""
        first: dict[int, int] = {}
        for index, entry in reversed([*enumerate(self.entries)]):
            first |= {storage_of(t): index for t in (*entry.inputs, *entry.outputs)}
        storages = [s for s in first if s in self._made and s not in held and self._can_move(s, arena.device)]
        sizes = {s: self._of_storage[s][0].untyped_storage().nbytes() for s in storages}
        lifetimes = [Lifetime(sizes[s], first[s], last.get(s, first[s])) for s in storages]
        moved = {}
        for storage, (segment, start) in zip(storages, arena.place(lifetimes), strict=True):
            for tensor in self._of_storage[storage]:
                offset = start // tensor.dtype.itemsize + tensor.storage_offset()
                moved[id(tensor)] = _over(tensor, segment.untyped_storage(), offset)
        return moved

    def _can_move(self, storage: int, device: torch.device) -> bool:
        return all(
            t.device == device and not (t.is_mkldnn or t.is_conj() or t.is_neg()) for t in self._of_storage[storage]
        )


def _over(like: Tensor, storage: torch.UntypedStorage, offset: Any) -> Tensor:
    if like.is_conj() or like.is_neg():
        return like.data
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, offset, like.shape, like.stride())


class _Operations(OperationWatch):
    """Hands every operation to the tape."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._tape.run(func, args, kwargs)
        except RecordingRefused as refusal:
            self._tape.refusal = self._tape.refusal or refusal
            raise


class _Calls(TorchFunctionMode):
    """Sees torch's Python API, for the calls that hand out values without a dispatch."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        try:
            if name in SYNC_METHODS:
                refusals.refuse_sync(f"Tensor.{name}" if name.startswith("_") else f"Tensor.{name}()")
            refusals.check_call(func, name, kwargs)
        except RecordingRefused as refusal:
            self._tape.refusal = self._tape.refusal or refusal
            raise
        if name == "__setitem__" and not isinstance(args[2], Tensor):
            self._tape.number_in_setitem = True
            try:
                return func(*args, **kwargs)
            finally:
                self._tape.number_in_setitem = False
        return func(*args, **kwargs)
