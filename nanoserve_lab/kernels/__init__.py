"""The decode step's products and reads for a CPU, compiled by Numba when they are first called.

Each says what PyTorch's own operations say, but for low bits. They are operators of torch's dispatcher, so that a
recording of a step holds them as it holds any other.
"""

from nanoserve_lab.kernels.attention import paged_attention
from nanoserve_lab.kernels.elementwise import argmax, place, rms_norm, rotate, swiglu
from nanoserve_lab.kernels.jit import ELEMENTS
from nanoserve_lab.kernels.products import linear

__all__ = ["ELEMENTS", "argmax", "linear", "paged_attention", "place", "rms_norm", "rotate", "swiglu"]
