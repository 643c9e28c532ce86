"""The parts of an engine, put together as its configuration says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve_lab.buckets import BucketSet
from nanoserve_lab.cache.paged import PagedCache
from nanoserve_lab.cache.pool import KVPool, OutOfBlocks, block_bytes
from nanoserve_lab.captured import CapturedDecode, StepParts, check_capture_ready
from nanoserve_lab.compiled import CompiledDecode, Compiler
from nanoserve_lab.device import free_memory
from nanoserve_lab.engine import sampling
from nanoserve_lab.engine.config import EngineConfig
from nanoserve_lab.engine.forward import DecodeForward
from nanoserve_lab.inputs import DecodeInputs
from nanoserve_lab.model.cpu import kernel_argmax, kernel_model, runs_on_kernels
from nanoserve_lab.model.transformer import Transformer
from nanoserve_lab.plan import Planner
from nanoserve_lab.recorders import Recorder
from nanoserve_lab.slots import SlotTable


@dataclass(frozen=True)
class EngineParts:
    """What an engine drives: the model (on the CPU's kernels, or as it was handed in), the K/V cache, the planner, the
    decode step with or without recordings, what finds each row's likeliest token, and the days' parts that are switched
    on."""

    model: Transformer
    cache: PagedCache
    planner: Planner
    decode_graphs: CapturedDecode
    argmax: Callable[[Tensor], Tensor]
    table: SlotTable | None
    buckets: BucketSet | None
    inputs: DecodeInputs | None


def build_parts(model: Transformer, config: EngineConfig, compiler: Compiler, recorder: Recorder) -> EngineParts:
    """The parts of an engine for ``model``. Raises as `Engine.build` does."""
    if config.capture_decode:
        check_capture_ready(config)
    device, limit = model.device, model.config.max_position
    max_context = min(config.max_context or limit, limit)
    num_blocks = config.num_blocks or _blocks_that_fit(model, config, max_context)
    pool = KVPool(model.config, num_blocks, config.block_size, model.dtype, device)
    max_context = min(max_context, pool.allocator.capacity * config.block_size)
    table = SlotTable(config.max_rows, max_context, device) if config.slot_table else None
    buckets = BucketSet(config.max_rows, max_context, config.width_multiple) if config.bucket_decode else None
    inputs = DecodeInputs(config.max_rows, device) if config.persist_inputs else None
    cache = PagedCache(pool, config.max_rows, max_context, table)

    kernels = config.optimize_cpu and runs_on_kernels(model)
    prefilling = kernel_model(model) if kernels else model
    argmax = kernel_argmax() if kernels else sampling.argmax
    # The compiler sees the plain operations, which it can join; the kernels would be opaque to it.
    decoding = DecodeForward(model, pool, False) if config.compile_decode else DecodeForward(prefilling, pool, kernels)
    compiled = CompiledDecode(decoding, compiler) if config.compile_decode else None
    decode_graphs = CapturedDecode(compiled or decoding)
    if config.capture_decode and inputs is not None and table is not None and buckets is not None:
        parts = StepParts(cache, inputs, table, buckets, decoding.addresses(inputs, table), compiled)
        logits = torch.empty(config.max_rows, model.config.vocab_size, dtype=model.dtype, device=device)
        decode_graphs = CapturedDecode(
            compiled or decoding, recorder, parts, logits, decoding.clear_sink, config.strict
        )
    return EngineParts(
        prefilling, cache, Planner(cache, table, buckets, inputs), decode_graphs, argmax, table, buckets, inputs
    )


def _blocks_that_fit(model: Transformer, config: EngineConfig, max_context: int) -> int:
    """Blocks for all rows at full context and the sink, or as many as the allowed share of free memory holds."""
    wanted = config.max_rows * -(-max_context // config.block_size) + 1
    size = block_bytes(model.config, config.block_size, model.dtype)
    allowed = int(free_memory(model.device) * config.memory_fraction) // size
    if allowed < 2:
        raise OutOfBlocks(
            f"{config.memory_fraction:.0%} of the free memory on {model.device} holds {allowed} K/V blocks of {size:,} "
            "bytes; the sink and one more are the least. Free some memory, or set num_blocks or a smaller block_size"
        )
    return min(wanted, allowed)
