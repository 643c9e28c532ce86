"""How a replay runs one operation so that the result lands in the storage that was recorded.

Each way is proved when it is chosen. That a Python binding dispatches to the very operation with the very arguments is
seen by a dispatch mode that runs nothing; that another way of computing gives the same bits is seen by computing once
more, into memory filled with other bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve_lab.recorders.node import Call
from nanoserve_lab.recorders.operations import aten, same_generator, short_name, tensors_of

#: Makes the call for given arguments, fresh outputs, and which of these are read later.
Make = Callable[[tuple[Any, ...], dict[str, Any], tuple[Tensor, ...], tuple[bool, ...]], Call]

_NAMESPACES: tuple[Any, ...] = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)
_COPY = torch._C.TensorBase.copy_
_FACTORY_OPTIONS = {"dtype", "layout", "device", "pin_memory"}
# They write running statistics that their schema does not admit to, so they are never computed twice.
_WRITE_UNDECLARED = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"}


def choose(
    operation: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: tuple[Tensor, ...],
    result: Any,
    generator: tuple[torch.Generator, Tensor] | None,
) -> Make:
    """The fastest proven way to replay ``operation(*args, **kwargs)``, which just returned ``result``.

    ``outputs`` are the tensors of ``result`` with storages of their own. ``generator`` is the generator that the
    operation drew from, with its state before that; it is left in the state that it has now.
    """
    prepare = getattr(operation, "prepare", None)
    if prepare is not None:
        # The operator says what it launches: a kernel, and parameters that hold addresses instead of tensors.
        return lambda args, kwargs, outputs, live: (*prepare(*args, **kwargs), {})
    with torch._C.DisableTorchFunction(), torch.inference_mode():
        plain = _binding(operation, args, kwargs, result) or operation._op
        if not outputs:
            return lambda args, kwargs, outputs, live: (plain, args, kwargs)
        copied = _copied(plain, [index for index, t in enumerate(tensors_of(result)) if any(t is o for o in outputs)])
        if not _may_run_twice(operation) or len(outputs) != len(tensors_of(result)):
            return copied
        if any(not _is_dense(t) for t in outputs):
            return copied
        for make in _direct_ways(operation, args, kwargs, outputs):
            with _drawing_again(generator):
                if _rehearse(make, args, kwargs, outputs):
                    return make
        return copied


def _may_run_twice(operation: Any) -> bool:
    # Only ATen's own pure functions are known to have no effect beside their result.
    schema = operation._schema
    return operation.namespace == "aten" and not schema.is_mutable and short_name(operation) not in _WRITE_UNDECLARED


def _direct_ways(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...]
) -> Iterator[Make]:
    """Ways that write into the recorded storage without another one, best first."""
    if operation in (aten.clone.default, aten._to_copy.default):
        yield lambda args, kwargs, outputs, live: (_COPY, (outputs[0], args[0]), {})
        return
    found = _out_overload(operation)
    if found is None:
        return
    overload, names = found
    drop = _FACTORY_OPTIONS - {argument.name for argument in overload._schema.arguments}

    def with_names(function: Callable[..., Any], as_tuple: bool) -> Make:
        def make(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...], live: Any) -> Call:
            kept = {key: value for key, value in kwargs.items() if key not in drop}
            if as_tuple:
                return function, args, kept | {"out": outputs if len(outputs) > 1 else outputs[0]}
            return function, args, kept | dict(zip(names, outputs, strict=True))

        return make

    direct = with_names(overload._op, as_tuple=False)
    _, expected_args, expected_kwargs = direct(args, kwargs, outputs, ())
    for function in _functions(operation.overloadpacket.__name__):
        make = with_names(function, as_tuple=True)
        answer = outputs if len(outputs) > 1 else outputs[0]
        if _dispatches(make(args, kwargs, outputs, ()), overload, expected_args, expected_kwargs, answer):
            yield make
            break
    yield direct


def _copied(function: Callable[..., Any], positions: list[int]) -> Make:
    """Run as it was and copy the results, those that are read later, into the recorded storages."""

    def make(args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...], live: Any) -> Call:
        targets = [(at, out) for at, out, read in zip(positions, outputs, live, strict=True) if read]
        if len(outputs) == 1 and targets:
            return _run_and_copy, (targets[0][1], function, args, kwargs), {}
        return _run_and_copy_some, (targets, function, args, kwargs), {}

    return make


def _run_and_copy(target: Tensor, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    result = function(*args, **kwargs)
    _COPY(target, result if isinstance(result, Tensor) else tensors_of(result)[0])


def _run_and_copy_some(targets: list[tuple[int, Tensor]], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    results = tensors_of(function(*args, **kwargs))
    for position, target in targets:
        _COPY(target, results[position])


@functools.cache
def _out_overload(operation: Any) -> tuple[Any, list[str]] | None:
    """The overload of ``operation`` that writes into tensors it is given, and the names of these."""
    wanted = {a.name: str(a.type) for a in operation._schema.arguments}
    packet = operation.overloadpacket
    for name in packet.overloads():
        try:
            overload = getattr(packet, name)
        except (RuntimeError, AttributeError):  # TorchScript's overloads, which the dispatcher does not have
            continue
        # A generated one computes as the plain overload does and copies, more slowly than it is done here.
        if torch.Tag.generated in overload.tags:
            continue
        arguments = overload._schema.arguments
        outs = [a.name for a in arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
        rest = {a.name: str(a.type) for a in arguments if a.name not in outs}
        fits = rest.items() <= wanted.items() and wanted.keys() - rest.keys() <= _FACTORY_OPTIONS
        if outs and fits and len(outs) == len(operation._schema.returns):
            return overload, outs
    return None


@functools.cache
def _functions(name: str) -> tuple[Callable[..., Any], ...]:
    """The Python bindings of that name."""
    return tuple(getattr(home, name) for home in _NAMESPACES if hasattr(home, name))


def _binding(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Callable[..., Any] | None:
    """The Python binding that dispatches to ``operation`` with these arguments, or None."""
    if operation.namespace != "aten":
        return None
    candidates = _functions(operation.overloadpacket.__name__)
    if operation is aten.index.Tensor:
        candidates = (_getitem,)
    for function in candidates:
        if _dispatches((function, args, kwargs), operation, args, kwargs, result):
            return function
    return None


def _getitem(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    return tensor[tuple(slice(None) if index is None else index for index in indices)]


class _Spy(TorchDispatchMode):
    """Writes down what is dispatched and runs none of it."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return self.answer


def _dispatches(call: Call, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> bool:
    """Whether ``call`` arrives at the dispatcher as ``operation(*args, **kwargs)`` and as nothing else."""
    function, its_args, its_kwargs = call
    try:
        with _Spy(answer) as spy:
            function(*its_args, **its_kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # the binding does not take these arguments
    if len(spy.seen) != 1 or spy.seen[0][0] is not operation:
        return False
    _, seen_args, seen_kwargs = spy.seen[0]
    here, there = _by_name(operation, args, kwargs), _by_name(operation, seen_args, seen_kwargs)
    return here.keys() == there.keys() and all(_same(here[name], there[name]) for name in here)


def _by_name(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = operation._schema.arguments
    named = {a.name: a.default_value for a in arguments}
    return named | {a.name: value for a, value in zip(arguments, args, strict=False)} | kwargs


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    if isinstance(one, torch.Generator):
        return same_generator(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (one == other or one != one)


@contextmanager
def _drawing_again(generator: tuple[torch.Generator, Tensor] | None) -> Iterator[None]:
    """Inside, the generator draws once more what it drew; afterwards it is where it was."""
    if generator is None:
        yield
        return
    source, before = generator
    after = source.get_state()
    source.set_state(before)
    try:
        yield
    finally:
        source.set_state(after)


def _rehearse(make: Make, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Tensor, ...]) -> bool:
    """Whether the call gives the bits of ``outputs``, in other storages of the same strides."""
    scratch = tuple(_poisoned(t) for t in outputs)
    before = [(t.data_ptr(), t.shape, t.stride()) for t in scratch]
    function, its_args, its_kwargs = make(args, kwargs, scratch, (True,) * len(outputs))
    try:
        function(*its_args, **its_kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # no such overload for these dtypes or layouts
    if before != [(t.data_ptr(), t.shape, t.stride()) for t in scratch]:
        return False
    return all(map(same_bits, scratch, outputs))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the storage, each once, in some order."""
    if tensor.is_mkldnn or tensor.layout != torch.strided or tensor.storage_offset() != 0:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _poisoned(like: Tensor) -> Tensor:
    raw = torch.full((like.nbytes,), 0xA5, dtype=torch.uint8, device=like.device)
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(raw.untyped_storage(), 0, like.shape, like.stride())


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes, NaN and the sign of zero included.

    On the meta device, which has no bytes, dtype and shape.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_meta:
        return True
    one, other = one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    words = _WORDS[one.dtype.itemsize]
    return torch.equal(one.view(words), other.view(words))
