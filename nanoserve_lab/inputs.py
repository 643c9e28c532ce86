"""Day 53: the step's four inputs, allocated once and written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve_lab.plan import DecodePlan
from nanoserve_lab.unsound import Unsound

IntArray = NDArray[np.int64]
Shape = tuple[int, int]


class InputsUnsound(Unsound):
    """An input that is not at its address, or a witness that shares the storage it should witness."""

    lesson: ClassVar[str] = "05_persistent_inputs"


class InputBuffer:
    """An int64 tensor ``[max_rows, *tail]`` on ``device`` that is written in place and handed out as windows.

    The host writes into a staging mirror through its NumPy view, which allocates nothing, and one copy takes the mirror
    to the device. On CUDA the mirror is pinned and an event guards it while its copy is under way; on the CPU the
    mirror is the buffer. The buffer starts as zeros, so that nothing has to be initialised: 0 is a token, a position
    and, as the sink, a slot that a row may write and any column may read. As a context length it is legal too, in that
    it reaches no other row: a row of length 0 attends to nothing, and its own logits are NaN in the plain read. The
    planner gives padded rows length 1, which `buckets.check_pad_inert` asks for. ``writes`` and ``cells`` count what
    was written.
    """

    def __init__(self, max_rows: int, *tail: int, device: torch.device | str = "cpu") -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows: wanted 1 or more, got {max_rows}")
        self.max_rows = max_rows
        self.buffer = torch.zeros(max_rows, *tail, dtype=torch.int64, device=device)
        self.writes = self.cells = 0
        self._row_cells = self.buffer[0].numel()
        cuda = self.buffer.device.type == "cuda"
        self._mirror = torch.zeros(max_rows * self._row_cells, dtype=torch.int64, pin_memory=True) if cuda else None
        host = self.buffer.view(-1) if self._mirror is None else self._mirror
        self._host: IntArray = host.numpy()
        self._sent = torch.cuda.Event() if cuda else None
        self._windows: dict[int, Tensor] = {}

    def window(self, rows: int) -> Tensor:
        """The first ``rows`` rows, ``[rows, *tail]``: the buffer's storage at the buffer's address, the same tensor
        each time. Raises `InputsUnsound` where the buffer has fewer."""
        window = self._windows.get(rows)
        if window is None:
            if not 1 <= rows <= self.max_rows:
                raise InputsUnsound(f"window: {rows} rows of a buffer of {self.max_rows}")
            window = self._windows[rows] = self.buffer[:rows]
        return window

    def write(self, values: Sequence[int] | IntArray | Tensor, window: int | None = None) -> Tensor:
        """Write ``values``, one for each cell of the first rows, and return the window over them.

        A list or array goes through the mirror; a tensor, which is on the device already, straight in. ``window`` rows
        (None: as many as were written) may go past what was written: those keep what the buffer held last, which only
        an input whose stale values do no harm may do. Raises `InputsUnsound`, writing nothing, where the rows do not
        fit.
        """
        count = values.numel() if isinstance(values, Tensor) else len(values)
        rows = count // self._row_cells
        covered = rows if window is None else window
        if count % self._row_cells or rows > covered:
            raise InputsUnsound(f"write: {count} values into a window of {covered} rows of {self._row_cells}")
        view = self.window(covered)
        self.writes += 1
        self.cells += count
        if isinstance(values, Tensor):
            self.window(rows).view(-1).copy_(values.view(-1), non_blocking=True)
        elif self._mirror is None or self._sent is None:
            self._host[:count] = values
        else:
            self._sent.synchronize()  # the copy of the last write reads the mirror until then
            self._host[:count] = values
            self.window(rows).view(-1).copy_(self._mirror[:count], non_blocking=True)
            self._sent.record()
        return view


class DecodeInputs:
    """The four input tensors of a decode step: ``input_ids`` and ``positions`` ``[max_rows, 1]``, ``write_slots`` and
    ``context_lens`` ``[max_rows]``. One set serves every shape: a row's place does not depend on the shape."""

    def __init__(self, max_rows: int, device: torch.device | str = "cpu") -> None:
        self.max_rows = max_rows
        self.input_ids = InputBuffer(max_rows, 1, device=device)
        self.positions = InputBuffer(max_rows, 1, device=device)
        self.write_slots = InputBuffer(max_rows, device=device)
        self.context_lens = InputBuffer(max_rows, device=device)

    @property
    def buffers(self) -> dict[str, InputBuffer]:
        """The buffers by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, InputBuffer)}


def input_cells(rows: int, inputs: int = 4) -> int:
    """Cells of one set of input buffers."""
    return rows * inputs


def input_bytes(rows: int, inputs: int = 4, itemsize: int = 8) -> int:
    """Bytes of one set of input buffers."""
    return input_cells(rows, inputs) * itemsize


def fresh_allocations(steps: int, tensors: int = 3) -> int:
    """Tensors that ``steps`` steps allocate where each builds ``tensors`` of its inputs anew."""
    return steps * tensors


def fresh_cells(rows: int, steps: int, tensors: int = 3) -> int:
    """Cells of the tensors of `fresh_allocations`, of ``rows`` each."""
    return rows * fresh_allocations(steps, tensors)


def per_shape_bytes(shapes: Iterable[Shape], inputs: int = 4, itemsize: int = 8) -> int:
    """Bytes of a set of input buffers for every shape ``(rows, width)``."""
    return sum(input_bytes(rows, inputs, itemsize) for rows, _ in shapes)


def sharing_ratio(shapes: Iterable[Shape], max_rows: int) -> float:
    """How many times the bytes of the one set of ``max_rows`` a set for every shape would take."""
    return per_shape_bytes(shapes) / input_bytes(max_rows)


class Addresses:
    """Where named tensors lie now, read again each time from whoever holds them.

    ``add`` names a tensor by a function that fetches it. A tensor without storage (oneDNN's packed weights) is its own
    address.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._fetch: list[Callable[[], Tensor]] = []

    def add(self, name: str, fetch: Callable[[], Tensor]) -> None:
        """Follow the tensor that ``fetch`` returns under ``name``."""
        self.names.append(name)
        self._fetch.append(fetch)

    def add_module(self, name: str, module: torch.nn.Module) -> None:
        """Follow every parameter and buffer of ``module``."""
        for path, part in module.named_modules():
            for tensors in (part._parameters, part._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        self.add(f"{name} {path}.{key}".replace(" .", " "), partial(tensors.__getitem__, key))

    def read(self) -> tuple[int, ...]:
        """The addresses, in the order of ``names``."""
        # Without a call of Python's for each: a replay asks for some hundreds.
        tensors = [fetch() for fetch in self._fetch]
        return tuple([id(tensor) if tensor.is_mkldnn else tensor.data_ptr() for tensor in tensors])


def check_addresses_stable(names: Sequence[str], recorded: Sequence[int], now: Sequence[int]) -> None:
    """Every tensor is where it was when the step was recorded. Reads addresses only. Raises `InputsUnsound`."""
    if tuple(recorded) == tuple(now):
        return
    moved = [i for i, (old, new) in enumerate(zip(recorded, now, strict=True)) if old != new]
    more = f" (and {len(moved) - 1} more)" if len(moved) > 1 else ""
    raise InputsUnsound(
        f"{names[moved[0]]}{more}: moved since the step was recorded; a replay would go on reading the old storage",
        recorded=recorded[moved[0]],
        now=now[moved[0]],
    )


def check_plan_inputs_persistent(plan: DecodePlan, inputs: DecodeInputs) -> None:
    """The plan's positions, write slots and lengths are windows of the buffers. Reads addresses only.

    Raises `InputsUnsound`.
    """
    for name in ("positions", "write_slots", "context_lens"):
        _check_window(name, getattr(plan, name), getattr(inputs, name), len(plan.rows))


def check_step_inputs_persistent(plan: DecodePlan, input_ids: Tensor, inputs: DecodeInputs) -> None:
    """`check_plan_inputs_persistent`, and the same of ``input_ids``."""
    check_plan_inputs_persistent(plan, inputs)
    _check_window("input_ids", input_ids, inputs.input_ids, len(plan.rows))


def _check_window(name: str, tensor: Tensor, buffer: InputBuffer, rows: int) -> None:
    wanted = buffer.buffer
    if tensor.data_ptr() != wanted.data_ptr():
        raise InputsUnsound(
            f"{name}: a tensor of its own, wanted a window of the input buffer; a replay would read the buffer instead",
            address=tensor.data_ptr(),
            buffer=wanted.data_ptr(),
        )
    if tensor.shape != (rows, *wanted.shape[1:]) or tensor.stride() != wanted.stride():
        raise InputsUnsound(
            f"{name}: shape {tuple(tensor.shape)}, wanted the first {rows} rows of the buffer "
            f"{tuple(wanted.shape)} as they lie there"
        )


def check_inputs_fit(inputs: DecodeInputs, rows: int) -> None:
    """A step of ``rows`` rows fits into the buffers. Raises `InputsUnsound`."""
    for name, buffer in inputs.buffers.items():
        if rows > buffer.max_rows:
            raise InputsUnsound(f"{name}: a step of {rows} rows, the buffer has {buffer.max_rows}")


def check_one_set_covers(inputs: DecodeInputs, shapes: Iterable[Shape]) -> None:
    """Every shape ``(rows, width)`` is a window of the one set of buffers. Raises `InputsUnsound`."""
    for rows, _ in shapes:
        check_inputs_fit(inputs, rows)


def check_snapshots_present(plan: DecodePlan) -> None:
    """A plan whose tensors are shared storage has witnesses of its own, one for each row. Raises `InputsUnsound`."""
    for name in ("context_snapshot", "write_snapshot"):
        snapshot = getattr(plan, name)
        if snapshot is None:
            raise InputsUnsound(
                f"{name}: missing; the plan's tensors are buffers that the next step writes through, so without a copy "
                "of what they said no gate can tell that the plan is old"
            )
        if len(snapshot) != len(plan.rows):
            raise InputsUnsound(f"{name}: {len(snapshot)} values for {len(plan.rows)} rows")
