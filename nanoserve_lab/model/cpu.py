"""A model whose forward runs on the CPU kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanoserve_lab.model.linear import Linear
from nanoserve_lab.model.transformer import MLP, Attention, RMSNorm, Transformer

_twins: WeakKeyDictionary[Transformer, Transformer] = WeakKeyDictionary()


def runs_on_kernels(model: Transformer) -> bool:
    """Whether the kernels can run ``model``: on the CPU, in a dtype that they know, with Numba installed.

    Warns where only Numba is missing.
    """
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    if find_spec("numba") is None:
        warnings.warn("numba is not installed: the CPU runs plain operations, slower. pip install numba", stacklevel=2)
        return False
    return True


def kernel_model(model: Transformer) -> Transformer:
    """``model`` with every product, norm, rotation, gate and write to the cache on `nanoserve_lab.kernels`.

    The two share their parameters; ``model`` itself stays as it is, and has one such twin however often it is asked
    for.
    """
    # Imported here: Numba is half a second and 70 MB, for engines on a CPU alone.
    from nanoserve_lab.kernels import linear, place, rms_norm, rotate, swiglu

    twin = _twins.get(model)
    if twin is None:
        twin = Transformer.from_state(model.config, model.state_dict())
        for module in twin.modules():
            if isinstance(module, Linear):
                module.kernel = linear
            elif isinstance(module, RMSNorm):
                module.kernel = rms_norm
            elif isinstance(module, Attention):
                module.rotate, module.place = rotate, place
            elif isinstance(module, MLP):
                module.swiglu = swiglu
        twin.head_kernel = linear
        _twins[model] = twin
    return twin


def kernel_argmax() -> Callable[[Tensor], Tensor]:
    """`nanoserve_lab.kernels.argmax`."""
    from nanoserve_lab.kernels import argmax

    return argmax
