"""Who keeps a storage alive: the Python objects that hold a tensor over it, by name."""

from __future__ import annotations

import gc
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve_lab.recorders.operations import storage_of

#: How many holders are followed upwards from a tensor to somebody with a name.
_DEPTH = 24
_FOLLOWED = (dict, list, tuple, types.CellType, nn.Module)
_NAMELESS = (types.FrameType, types.ModuleType, type)
_OWN = __name__.rpartition(".")[0]


def owners_of(tensors: Sequence[Tensor]) -> list[set[str]]:
    """For each tensor the names of what keeps its storage, this folder's own objects aside.

    A name is a path from a module (``Transformer.layers.0.attn.qkv.weight``), an object (``KVPool.data``), a module's
    global, or a function's variable. A variable of a function that is running has none.
    """
    wanted = {storage_of(t): index for index, t in enumerate(tensors)}
    over: list[tuple[Tensor, int]] = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor) and _has_storage(candidate) and storage_of(candidate) in wanted:
            over.append((candidate, wanted[storage_of(candidate)]))
    holders = _Holders([tensor for tensor, _ in over])
    found: list[set[str]] = [set() for _ in tensors]
    for tensor, index in over:
        found[index].update(holders.names(tensor, ""))
    return found


def _has_storage(tensor: Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not wrapped and (tensor.is_mkldnn or tensor.layout == torch.strided)


class _Holders:
    """What refers to some objects, and to their holders; found level by level, as each look visits all objects."""

    def __init__(self, objects: list[Any]) -> None:
        self._of: dict[int, list[Any]] = defaultdict(list)
        level, seen = objects, {id(thing) for thing in objects}
        for _ in range(_DEPTH):
            if not level:
                break
            ids = {id(thing) for thing in level}
            above: list[Any] = []
            # What this search itself holds leads nowhere.
            ours = {id(lst) for lst in (objects, level, above, *self._of.values())}
            for holder in gc.get_referrers(*level):
                if isinstance(holder, _NAMELESS) or id(holder) in ours:
                    continue
                for held in gc.get_referents(holder):
                    if id(held) in ids:
                        self._of[id(held)].append(holder)
                if id(holder) not in seen and isinstance(holder, _FOLLOWED) and not _is_globals(holder):
                    seen.add(id(holder))
                    above.append(holder)
            level = above

    def names(self, held: Any, path: str, through: frozenset[int] = frozenset()) -> Iterator[str]:
        """Names of what leads to ``held``; ``path`` is what follows from there, ``through`` what it came through."""
        if id(held) in through or len(through) > _DEPTH:
            return
        through |= {id(held)}
        for holder in self._of[id(held)]:
            if isinstance(holder, dict):
                for key in [key for key, value in holder.items() if value is held]:
                    yield from self._in_dict(holder, key, path, through)
            elif isinstance(holder, list | tuple):
                for at in [at for at, value in enumerate(holder) if value is held]:
                    yield from self.names(holder, f"[{at}]{path}", through)
            elif isinstance(holder, types.CellType):
                yield from self._in_cell(holder, path)
            elif not _is_own(holder):
                for key in [key for key, value in getattr(holder, "__dict__", {}).items() if value is held]:
                    yield f"{type(holder).__name__}.{key}{path}"

    def _in_dict(self, holder: dict[Any, Any], key: Any, path: str, through: frozenset[int]) -> Iterator[str]:
        if _is_globals(holder):
            yield f"{holder['__name__']}.{key}{path}"
            return
        above = self._of[id(holder)]
        # A module's tensors and submodules are two dictionaries below it.
        inner = [d for d in above if isinstance(d, dict) and any(d.get(name) is holder for name in _MODULE_DICTS)]
        modules = [m for d in inner for m in self._of[id(d)] if isinstance(m, nn.Module)]
        objects = [o for o in above if getattr(o, "__dict__", None) is holder]
        for module in modules:
            yield self._of_module(module, f".{key}{path}")
        for owner in objects:
            if not _is_own(owner):
                yield f"{type(owner).__name__}.{key}{path}"
        if not modules and not objects:
            yield from self.names(holder, f"[{key!r}]{path}", through)

    def _of_module(self, module: nn.Module, path: str) -> str:
        """From an outermost module down to ``module``, then ``path``."""
        for children in [holder for holder in self._of[id(module)] if isinstance(holder, dict)]:
            for inner in self._of[id(children)]:
                if not isinstance(inner, dict) or inner.get("_modules") is not children:
                    continue
                key = next(key for key, value in children.items() if value is module)
                for parent in self._of[id(inner)]:
                    if isinstance(parent, nn.Module) and parent is not module:
                        return self._of_module(parent, f".{key}{path}")
        return f"{type(module).__name__}{path}"

    def _in_cell(self, cell: types.CellType, path: str) -> Iterator[str]:
        for closure in self._of[id(cell)]:
            for function in self._of[id(closure)] if isinstance(closure, tuple) else ():
                if isinstance(function, types.FunctionType) and not _is_own(function):
                    name = function.__code__.co_freevars[closure.index(cell)]
                    yield f"{function.__qualname__}'s variable {name}{path}"


_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


def _is_globals(thing: Any) -> bool:
    return isinstance(thing, dict) and "__name__" in thing and "__loader__" in thing


def _is_own(thing: Any) -> bool:
    module: str | None = thing.__module__ if isinstance(thing, types.FunctionType) else type(thing).__module__
    return module is not None and module.startswith(_OWN)
