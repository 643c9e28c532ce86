"""The sizes and switches of an engine, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Sizes of an engine.

    ``max_rows`` sequences decode together; a sequence holds at most ``max_context`` tokens (None: what the model was
    trained for). The K/V pool has ``num_blocks`` blocks of ``block_size`` tokens, the sink included; None takes what
    all rows at full context need, or ``memory_fraction`` of the free memory where that is less. A step computes at
    most ``max_step_tokens`` tokens: one for each decoding row, and the rest of prompts, long ones in chunks. A sampled
    token is read back ``readback_lag`` steps later. With ``optimize_cpu`` a model on the CPU runs on kernels of
    its own (`nanoserve_lab.kernels`), which say the same but for low bits.

    The days of the course, one by one: ``slot_table`` makes the read rectangle a window (off: gathered in every step);
    ``compile_decode`` compiles the decode forward; ``bucket_decode`` pads every step to a shape of a closed set whose
    widths are multiples of ``width_multiple``; ``persist_inputs`` writes the inputs in place; ``capture_decode``
    records the step of each shape when it is first seen and replays it after that. With ``strict`` every gate looks at
    every step, which costs a synchronisation on a device, and nothing is passed over in silence.
    """

    max_rows: int = 8
    max_context: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float = 0.5
    max_step_tokens: int = 1024
    readback_lag: int = 2
    optimize_cpu: bool = True
    slot_table: bool = True
    compile_decode: bool = False
    bucket_decode: bool = False
    width_multiple: int = 128
    persist_inputs: bool = False
    capture_decode: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_context", "block_size", "width_multiple"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: wanted 1 or more, got {value}")
        if self.max_step_tokens <= self.max_rows:
            raise ValueError(
                f"max_step_tokens: wanted more than max_rows ({self.max_rows}), so that a step of full rows still "
                f"prefills, got {self.max_step_tokens}"
            )
        if self.bucket_decode and not self.slot_table:
            raise ValueError(
                "bucket_decode: a padded rectangle is a window on the slot table; it needs slot_table=True"
            )
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction: wanted above 0 and at most 1, got {self.memory_fraction}")


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was built, and its state now.

    ``finished`` counts by reason, cancelled requests among them. ``prefill_tokens`` counts the tokens of all prompts
    and chunks (``prefill_chunks``), ``recomputed_tokens`` those of them that had been computed before a
    ``preemption``. ``decode_rows`` is the sum of the rows over all decode steps, and ``overshoot_tokens`` were decoded
    after a stop that the host had not read yet, and thrown away. ``padded_rows`` is the sum of the rows that buckets
    added; ``captures`` and ``replays`` count recorded shapes and their replays, ``eager_steps`` the decode steps that
    were not replayed, by reason; ``graphs`` counts the compiled graphs of the decode forward and ``recompiles`` those
    of them made for arguments that had one.
    """

    waiting: int
    running: int
    free_blocks: int
    total_blocks: int
    submitted: int
    finished: dict[str, int]
    steps: int
    prefill_tokens: int
    prefill_chunks: int
    preemptions: int
    recomputed_tokens: int
    decode_steps: int
    decode_rows: int
    overshoot_tokens: int
    padded_rows: int
    captures: int
    replays: int
    eager_steps: dict[str, int]
    graphs: int
    recompiles: int
