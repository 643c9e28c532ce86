"""What may not be recorded is refused by name, with the line that asked for it, and leaves nothing switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, library

from nanoserve_lab.recorders import RecordingRefused, tape_recorder
from nanoserve_lab.unsound import Unsound

KEPT = np.ones(4, dtype=np.float32)


@library.custom_op("tape_test::peek", mutates_args=())
def peek(x: Tensor) -> float:
    return float(x.numel())


@library.custom_op("tape_test::looks", mutates_args=())
def looks(x: Tensor) -> Tensor:
    return x * x.sum().item()


CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), "asks for a value"),
    "tolist": (lambda x: x.tolist(), "Tensor.tolist"),
    "numpy": (lambda x: x.numpy(), "Tensor.numpy"),
    "array": (lambda x: np.asarray(x), "Tensor.__array__"),
    "cpu": (lambda x: x.cpu(), "Tensor.cpu"),
    "print": (lambda x: print(x), "Tensor.__"),
    "format": (lambda x: f"{x[0]:.2f}", "Tensor.__format__"),
    "bool": (lambda x: bool(x.sum() > 0), "Tensor.__bool__"),
    "branch": (lambda x: 1 if x[0] else 2, "Tensor.__bool__"),
    "int": (lambda x: int(x[0]), "Tensor.__int__"),
    "float": (lambda x: float(x[0]), "Tensor.__float__"),
    "range": (lambda x: [0 for _ in range(x.long()[0])], "Tensor.__index__"),
    "in": (lambda x: 3.0 in x, "Tensor.__contains__"),
    "dlpack": (lambda x: x.__dlpack__(), "Tensor.__dlpack__"),
    "equal": (lambda x: torch.equal(x, x), "aten.equal.default"),
    "allclose": (lambda x: torch.allclose(x, x), "aten.allclose.default"),
    "index by a tensor": (lambda x: x[x.argmax()], "item"),
    "inverse": (lambda x: torch.linalg.inv(x.view(2, 2)), "_linalg_check_errors"),
    "tensor": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "turns host data into a tensor"),
    "from_numpy": (lambda x: x + torch.from_numpy(KEPT), "turns host data into a tensor"),
    "as_tensor": (lambda x: x + torch.as_tensor(KEPT), "turns host data into a tensor"),
    "new_tensor": (lambda x: x + x.new_tensor([1.0]), "turns host data into a tensor"),
    "Tensor": (lambda x: x + torch.Tensor([1.0]), "turns host data into a tensor"),
    "index by a list": (lambda x: x[[0, 2]], "turns host data into a tensor"),
    "set from a list": (lambda x: x.__setitem__(slice(0, 2), torch.tensor([1.0, 2.0])), "turns host data"),
    "frombuffer": (lambda x: x + torch.frombuffer(bytearray(16), dtype=torch.float32), "nobody keeps after the step"),
    "from_dlpack": (lambda x: x + torch.from_dlpack(KEPT), "nobody keeps after the step"),
    "mask": (lambda x: x[x > 0], "aten.index.Tensor with a mask"),
    "masked write": (lambda x: x.index_put_((x > -9,), x.clone()), "with a mask"),
    "nonzero": (lambda x: x.nonzero(), "shape depends on values"),
    "masked_select": (lambda x: x.masked_select(x > 0), "shape depends on values"),
    "unique": (lambda x: x.unique(), "shape depends on values"),
    "repeat_interleave": (lambda x: x.repeat_interleave(torch.ones_like(x).long()), "shape depends on values"),
    "bincount": (lambda x: x.long().bincount(), "shape depends on values"),
    "generator": (lambda x: x + torch.rand(4, generator=torch.Generator()), "generator that is not registered"),
    "generator in place": (lambda x: x.normal_(generator=torch.Generator()), "generator that is not registered"),
    "seed": (lambda x: torch.manual_seed(7).initial_seed(), "manual_seed seeds a generator"),
    "pin_memory": (lambda x: x.pin_memory(), "pins host memory"),
    "pinned empty": (lambda x: torch.empty(3, pin_memory=True), "pins host memory"),
    "pinned like": (lambda x: torch.zeros_like(x, pin_memory=True), "pins host memory"),
    "resize": (lambda x: x.clone().resize_(100), "aten.resize_.default changes"),
    "set": (lambda x: x.clone().set_(torch.zeros(3)), "changes the shape or the storage"),
    "data": (lambda x: setattr(x.clone(), "data", torch.zeros(4)), "puts another storage under a tensor"),
    "out of no size": (lambda x: torch.add(x, x, out=torch.empty(0)), "aten.add.out changes"),
    "sparse": (lambda x: x.to_sparse(), "kind torch.sparse_coo|shape depends"),
    "custom value": (lambda x: x * peek(x), "tape_test.peek.default asks for a value"),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_refused_with_its_line(name: str) -> None:
    step, words = CASES[name]
    with pytest.raises(RecordingRefused, match=words) as caught:
        tape_recorder(step, (torch.arange(4.0),))
    refusal = caught.value
    assert isinstance(refusal, Unsound)
    assert "notebook 06_graph_capture" in str(refusal)
    assert refusal.facts["path"] == __file__
    assert __file__ not in str(refusal)
    assert f"line {refusal.facts['line']}" in str(refusal)
    if name != "seed":
        assert f'"{name}": ' in refusal.facts["source"]
    # Nothing is left on.
    assert not torch.is_inference_mode_enabled()
    assert torch.ones(2).sum().item() == 2.0
    assert tape_recorder(lambda x: x + 1, (torch.zeros(2),)).output.tolist() == [1.0, 1.0]


def test_a_refusal_that_the_step_swallows_counts() -> None:
    def step(x: Tensor) -> Tensor:
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x

    with pytest.raises(RecordingRefused, match="item"):
        tape_recorder(step, (torch.ones(2),))


def test_an_error_of_the_step_is_its_own() -> None:
    def step(x: Tensor) -> Tensor:
        x.add_(1)
        raise ZeroDivisionError

    x = torch.zeros(2)
    with pytest.raises(ZeroDivisionError):
        tape_recorder(step, (x,))
    assert x.tolist() == [1.0, 1.0]
    assert x.sum().item() == 2.0


def test_a_tensor_that_its_owner_replaces_is_named() -> None:
    class Cache:
        def __init__(self) -> None:
            self.keys = torch.zeros(1, 2)

        def update(self, k: Tensor) -> Tensor:
            self.keys = torch.cat([self.keys, k])
            return self.keys

    cache = Cache()
    address = cache.keys.data_ptr()
    with pytest.raises(RecordingRefused, match=r"aten.cat.default reads a \(1, 2\) .* address moves") as caught:
        tape_recorder(cache.update, (torch.ones(1, 2),))
    assert caught.value.facts["source"] == "self.keys = torch.cat([self.keys, k])"
    assert caught.value.facts["addresses"] == (address,)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.to("cpu").clone(),
        lambda x: torch.where(x > 1, x, 0.0),
        lambda x: x.clone().index_put_((x > 1,), torch.zeros(())),
        lambda x: torch.nonzero_static(x, size=2) + 0,
        lambda x: torch.linalg.inv_ex(x.view(2, 2) + 1)[0],
        lambda x: torch.scalar_tensor(2.0) * x,
        lambda x: x.clone().fill_(3.0),
        lambda x: looks(x),
        lambda x: x.argmax() + torch.zeros(()),
        lambda x: len(x) * x.shape[0] * x.dim() * x.numel() * x,
    ],
)  # fmt: skip
def test_not_refused(step: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(4.0)
    recording = tape_recorder(step, (x,))
    x.copy_(torch.tensor([3.0, 0.0, 2.0, 1.0]))
    recording.replay()
    assert torch.equal(recording.output, step(x))
