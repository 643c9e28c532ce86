"""Day 49: the decode step's forward as one compiled graph, and the counts that show that it is one."""

from __future__ import annotations

import linecache
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from nanoserve_lab.unsound import Unsound

Forward = Callable[..., Tensor]


class GraphBroken(Unsound):
    """The forward does not compile to one graph. ``breaks`` says where, as far as the compiler got."""

    lesson: ClassVar[str] = "01_graph_breaks"

    def __init__(self, message: str, breaks: Sequence[GraphBreak] = (), **facts: Any) -> None:
        super().__init__(message, **facts)
        self.breaks = list(breaks)


@dataclass(frozen=True)
class GraphBreak:
    """A line that the compiler cannot trace: the reason in its words, the line's number and text, and the file."""

    reason: str
    line: int
    source: str
    path: str = field(repr=False)

    def __str__(self) -> str:
        return f"line {self.line}, `{self.source}`: {self.reason}"


class Compiler(Protocol):
    """The seam: turns ``forward`` into a compiled function and calls ``on_graph`` with every graph it makes.

    With ``dynamic`` None the compiler itself decides which sizes may change; False makes a graph for every shape.
    """

    def __call__(self, forward: Forward, on_graph: Callable[[Any], None], dynamic: bool | None) -> Forward: ...


def torch_compiler(forward: Forward, on_graph: Callable[[Any], None], dynamic: bool | None) -> Forward:
    """Full graphs through inductor, which needs a C++ compiler on the CPU and triton on a GPU."""
    return _counted("inductor", forward, on_graph, dynamic)


def eager_compiler(forward: Forward, on_graph: Callable[[Any], None], dynamic: bool | None) -> Forward:
    """Full graphs that run operation by operation: the same graphs, breaks and guards, no speed, no C++ compiler."""
    return _counted("eager", forward, on_graph, dynamic)


def _counted(name: str, forward: Forward, on_graph: Callable[[Any], None], dynamic: bool | None) -> Forward:
    lower = torch._dynamo.lookup_backend(name)

    def backend(graph: Any, examples: Any) -> Any:
        on_graph(graph)
        return lower(graph, examples)

    compiled: Forward = torch.compile(forward, fullgraph=True, dynamic=dynamic, backend=backend)
    return compiled


class CompiledDecode:
    """``forward`` compiled at first sight, and counted.

    ``graphs`` counts the graphs made. A size of 1 always has a graph of its own, so the arguments' *kind* is where they
    have a 1; ``kinds`` are those seen, and a forward whose other sizes are dynamic needs one graph for each.
    ``recompiles`` are the guards that failed when a graph was made for a kind that had one already. With ``dynamic``
    False every shape gets a graph of its own.
    """

    def __init__(self, forward: Forward, compiler: Compiler = torch_compiler, *, dynamic: bool = True) -> None:
        self.forward, self.dynamic = forward, dynamic
        self.graphs = 0
        self.kinds: set[tuple[tuple[bool, ...], ...]] = set()
        self.breaks: list[GraphBreak] = []
        self.recompiles: list[str] = []
        self._compiled = compiler(_with_own_code(forward), self._on_graph, None if dynamic else False)

    def _on_graph(self, graph: Any) -> None:
        self.graphs += 1
        self.breaks += _host_reads(graph)

    def __call__(self, *args: Any) -> Tensor:
        """What ``forward`` returns.

        Raises `GraphBroken` where it is not one graph: it cannot be traced as a whole (then nothing has run), reads a
        tensor's value back to the host, or is compiled more often than the compiler allows.
        """
        kind = tuple(tuple(size == 1 for size in arg.shape) for arg in args if isinstance(arg, Tensor))
        known, before = kind in self.kinds, self.graphs
        if not known and self.dynamic:
            args = tuple(_marked_dynamic(arg) for arg in args)
        try:
            with quiet():
                result = self._compiled(*args)
        except torch._dynamo.exc.Unsupported as error:
            self.breaks = [_break_of(str(error.msg), error.real_stack)]
            raise GraphBroken(f"forward: {self.breaks[0]}", self.breaks) from None
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            limit = torch._dynamo.config.recompile_limit
            raise GraphBroken(
                f"forward: compiled {self.graphs} times and a graph is still missing, the compiler's limit is {limit}; "
                f"the last guard that failed: {self.recompiles[-1] if self.recompiles else 'none'}"
            ) from None
        self.kinds.add(kind)
        if self.breaks:
            raise GraphBroken(f"forward: {self.breaks[0]}", self.breaks)
        if known and self.graphs > before:
            self.recompiles.append(_last_recompile_reason())
        return result


def check_single_graph(decode: CompiledDecode) -> None:
    """The forward has run and is one graph, one more for each kind of size 1: no break and no recompile.

    Raises `GraphBroken`.
    """
    if decode.breaks:
        raise GraphBroken(f"forward: {decode.breaks[0]}", decode.breaks)
    if decode.recompiles:
        raise GraphBroken(f"forward: {_counted_graphs(decode)}; the last guard that failed: {decode.recompiles[-1]}")
    if decode.graphs != len(decode.kinds) or not decode.graphs:
        raise GraphBroken(f"forward: {_counted_graphs(decode)}, wanted one for each kind")


def _counted_graphs(decode: CompiledDecode) -> str:
    graphs, kinds = decode.graphs, len(decode.kinds)
    return (
        f"{graphs} {'graph' if graphs == 1 else 'graphs'} for {kinds} {'kind' if kinds == 1 else 'kinds'} of arguments"
    )


def find_breaks(forward: Callable[..., Any], *args: Any) -> list[GraphBreak]:
    """The graph breaks of ``forward``, in order. Runs it, piece by piece, with whatever side effects it has.

    A break inside a loop makes the compiler give the whole function up; then that break is the only one named.
    """
    torch._dynamo.reset()
    with quiet():
        found = torch._dynamo.explain(forward)(*args)
        breaks = [_break_of(reason.reason, reason.user_stack) for reason in found.break_reasons if reason.graph_break]
        if not breaks and found.graph_count == 0:
            try:
                torch.compile(forward, backend="eager", fullgraph=True)(*args)
            except torch._dynamo.exc.Unsupported as error:
                breaks = [_break_of(str(error.msg), error.real_stack)]
    torch._dynamo.reset()
    return list(dict.fromkeys(breaks))


def count_graphs(forward: Callable[..., Any], *args: Any) -> int:
    """How many graphs the compiler makes of one call of ``forward``: the pieces between its breaks. Runs it."""
    graphs = 0

    def backend(graph: Any, examples: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    with quiet():
        torch.compile(forward, backend=backend)(*args)
    torch._dynamo.reset()
    return graphs


@contextmanager
def quiet() -> Iterator[None]:
    """The compiler's advice on breaks and recompiles is not printed: the same facts are counted here."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch.fx.experimental.symbolic_shapes")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _with_own_code(forward: Forward) -> Forward:
    """``forward`` under a copy of its code object: the compiler keeps graphs, and counts towards its limit, by that
    object, and two decoders of one function must not share them."""
    method: Any = forward if isinstance(forward, FunctionType | MethodType) else type(forward).__call__.__get__(forward)
    function = method.__func__ if isinstance(method, MethodType) else method
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, method.__self__) if isinstance(method, MethodType) else copy


def _host_reads(graph: Any) -> list[GraphBreak]:
    """The lines of ``graph`` that hand a tensor's value to Python: full graphs hold them, recordings cannot."""
    breaks = []
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target in ("item", "tolist"):
            lines = re.findall(r'File "(.*)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
            path, line, source = lines[-1] if lines else ("", "0", node.target)
            breaks.append(GraphBreak("the host waits for a tensor's value", int(line), source.strip(), path))
    return breaks


def _marked_dynamic(arg: Any) -> Any:
    """An alias of a tensor whose sizes may all change; anything else as it is.

    Without the mark two sizes that happen to be equal in the first call would be taken for one size.
    """
    if not isinstance(arg, Tensor):
        return arg
    alias = arg.detach()
    for axis, size in enumerate(alias.shape):
        if size > 1:
            torch._dynamo.maybe_mark_dynamic(alias, axis)
    return alias


def _break_of(reason: str, stack: Any) -> GraphBreak:
    frame = stack[-1] if stack else None
    text = reason.partition("\n")[0].strip()
    explained = [line.partition("Explanation:")[2].strip() for line in reason.splitlines() if "Explanation:" in line]
    if explained:
        text = f"{text}: {explained[0]}"
    if frame is None:
        return GraphBreak(text, 0, "", "")
    source = (frame.line or linecache.getline(frame.filename, frame.lineno)).strip()
    return GraphBreak(text, frame.lineno, source, frame.filename)


def _last_recompile_reason() -> str:
    """The guard that the newest recompilation failed on: its expression, without the compiler's notes and paths."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    reason = (metrics[-1].recompile_reason if metrics else None) or "unknown guard"
    guard = reason.splitlines()[0].partition("  #")[0].strip()
    return guard.partition(": ")[2] or guard
