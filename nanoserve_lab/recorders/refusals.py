"""What may not be recorded, and what to write instead.

Each check raises `RecordingRefused` for something that a replay could not do again, or would do with a value of the
time of recording. They know operations by their tags and schemas, and by name only where these say nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from nanoserve_lab.recorders.operations import Site, aten, same_generator, short_name, tensors_of, user_line
from nanoserve_lab.recorders.recording import RecordingRefused

_KEEP_ON_DEVICE = (
    "no Python runs in a replay, so nothing would look at the value again. Keep it in a tensor (torch.where, "
    "masked_fill, index_select), or ask for it after the replay"
)
_FIXED_SHAPE = (
    "a replay has the shapes of the recording. Use a mask of fixed shape (torch.where, masked_fill), or an operation "
    "with a size of its own (topk, nonzero_static)"
)
_WRITE_IN_PLACE = (
    "a replay would read the same values for ever. Allocate the tensor before recording and write into it before each "
    "replay (copy_), or fill it with an operation (torch.full, torch.arange)"
)
_SAME_STORAGE = (
    "a replay writes to the storages of the recording. Allocate with the final size before recording and write with "
    "copy_"
)
_REGISTER = (
    "its state would not be part of the recording. Hand it to the recorder (generators=(...)), or draw from the "
    "default one"
)
_ONE_ADDRESS = (
    "a replay would go on reading that one. Allocate the storage once, outside the step, and write into it in place "
    "(index_copy_, copy_)"
)

_VIEWING = torch.Tag.inplace_view
_DATA_DEPENDENT, _DYNAMIC = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_INDEX_PUTS = frozenset({"index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put"})
_MASKS = (torch.bool, torch.uint8)


def refuse(operation: Any, what: str, instead: str, site: Site | None = None, **facts: Any) -> NoReturn:
    """Raise for ``operation`` (or the name of a call), asked for at ``site`` (None: the line that is running now)."""
    site = site or user_line()
    raise RecordingRefused(
        f"{operation} {what}, at {site}: {instead}",
        operation=str(operation),
        line=site.line,
        source=site.source,
        path=site.path,
        **facts,
    )


def refuse_sync(call: Any) -> NoReturn:
    """Raise for a call that hands a value to Python."""
    refuse(call, "asks for a value on the host", _KEEP_ON_DEVICE)


def check_call(function: Any, name: str, kwargs: dict[str, Any]) -> None:
    """A call of torch's Python API, before it runs: pinned memory, and a tensor that changes its storage."""
    if name in ("pin_memory", "_pin_memory") or kwargs.get("pin_memory") is True:
        refuse(name, "pins host memory while recording", "allocate the pinned tensor before recording, and keep it")
    if function == Tensor.data.__set__:  # type: ignore[attr-defined]
        refuse("Tensor.data = ...", "puts another storage under a tensor", _SAME_STORAGE)


def check_operation(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generators: tuple[torch.Generator, ...]
) -> None:
    """An operation before it runs: syncs, host data, shapes that depend on values, generators, kinds of tensor."""
    name, tags = short_name(operation), operation.tags
    if _DATA_DEPENDENT in tags:
        refuse_sync(operation)
    if name == "_linalg_check_errors":
        refuse(
            operation, "looks on the host whether the factorization failed", "use the variant with _ex (inv_ex, ...)"
        )
    if name == "lift_fresh":
        refuse(operation, "turns host data into a tensor", _WRITE_IN_PLACE)
    if _DYNAMIC in tags and operation is not aten.index.Tensor:
        refuse(operation, "has an output whose shape depends on values", _FIXED_SHAPE)
    _check_masks(operation, name, args)
    if kwargs.get("pin_memory"):
        refuse(
            operation, "pins host memory while recording", "allocate the pinned tensor before recording, and keep it"
        )
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator) and not any(same_generator(value, g) for g in generators):
            refuse(operation, "draws from a generator that is not registered", _REGISTER)
    for tensor in tensors_of((args, kwargs)):
        _check_kind(operation, tensor)


def _check_masks(operation: Any, name: str, args: tuple[Any, ...]) -> None:
    if operation is not aten.index.Tensor and name not in _INDEX_PUTS:
        return
    indices = [index for index in args[1] if index is not None]
    if not any(index.dtype in _MASKS for index in indices):
        return
    # One mask and one value is masked_fill under another name.
    if operation is aten.index.Tensor or len(indices) > 1 or args[2].numel() != 1:
        refuse(f"{operation} with a mask", "picks as many elements as the mask has ones", _FIXED_SHAPE)


def _check_kind(operation: Any, tensor: Tensor) -> None:
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        refuse(operation, f"meets a {type(tensor).__name__}, which has a dispatch of its own", "use plain tensors")
    if (tensor.layout != torch.strided and not tensor.is_mkldnn) or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        refuse(operation, f"meets a tensor of kind {kind}", "use strided tensors")


def geometry(tensors: list[Tensor]) -> list[Any]:
    """Where and how each tensor lies; None for one without storage."""
    return [
        None
        if t.is_mkldnn or t.layout != torch.strided
        else (_address(t), t.untyped_storage().nbytes(), t.shape, t.stride())
        for t in tensors
    ]


def _address(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def check_result(operation: Any, inputs: list[Tensor], before: list[Any], result: Any) -> None:
    """An operation after it ran: arguments that moved or changed shape, values for the host, copies to the host."""
    after = geometry(inputs)
    # In-place views (t_, unsqueeze_) change a shape and no storage; they are as free as other views.
    seen = 2 if _VIEWING in operation.tags else 4
    for was, now in zip(before, after, strict=True):
        if was is not None and (now is None or was[:seen] != now[:seen]):
            refuse(operation, "changes the shape or the storage of its argument", _SAME_STORAGE)
    outputs = tensors_of(result)
    if operation.namespace != "aten" and any(str(r.type) not in _TENSOR_TYPES for r in operation._schema.returns):
        refuse_sync(operation)
    if any(t.is_cuda for t in inputs) and any(t.device.type == "cpu" for t in outputs):
        refuse_sync(operation)
    for tensor in outputs:
        _check_kind(operation, tensor)


_TENSOR_TYPES = frozenset({"Tensor", "List[Tensor]", "Tensor[]", "Optional[Tensor]", "Tensor?"})


def refuse_host_data(function: str, tensor: Tensor, site: Site) -> NoReturn:
    """Raise for an external tensor that nobody but the recording keeps."""
    refuse(
        function,
        f"reads a {tuple(tensor.shape)} {tensor.dtype} tensor that nobody keeps after the step: it was made from host "
        "data while recording, or its owner has put another tensor in its place, so that the address moves",
        _ONE_ADDRESS,
        site,
        addresses=(tensor.data_ptr(),),
    )
