"""A conversation in a terminal: lines that are typed, a reply that is printed as it comes, and what Ctrl-C does."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from nanoserve_lab import Engine, SamplingParams
    from nanoserve_lab.model.tokenizer import Tokenizer

err = Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """A remark about the program, apart from the model's text."""
    err.print(Text(text, style="dim"))


def read_lines(interactive: bool) -> Iterator[str]:
    """Non-empty lines of stdin, stripped, with a prompt and line editing where stdin is a terminal."""
    if not interactive:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    if find_spec("readline"):
        import_module("readline")  # its import alone gives input() editing and a history
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            note("/quit or Ctrl-D leaves.")
            continue
        if line:
            yield line


def stream_reply(
    engine: Engine, tokenizer: Tokenizer, turn: list[dict[str, str]], params: SamplingParams, interactive: bool
) -> str:
    """Prints the reply to the conversation ``turn`` as it comes and returns what was printed."""
    pieces = []
    with hold_interrupts(interactive) as interrupted:
        stream = engine.stream(tokenizer.encode_chat(turn), params)
        for event in stream:
            print(event.text, end="", flush=True)
            pieces.append(event.text)
            if interrupted.is_set():
                stream.close()
                break
    print(flush=True)
    if interrupted.is_set():
        note("Stopped.")
    return "".join(pieces)


@contextmanager
def hold_interrupts(hold: bool) -> Iterator[threading.Event]:
    """While inside, the first Ctrl-C sets the event that is handed over; a second one interrupts as ever.

    A signal that arrives inside a step would otherwise leave the engine's tables half written.
    """
    interrupted = threading.Event()
    if not hold:
        yield interrupted
        return

    def on_interrupt(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
