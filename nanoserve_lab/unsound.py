"""The one base of every gate's exception."""

from __future__ import annotations

from typing import Any, ClassVar


class Unsound(RuntimeError):
    """A gate's refusal: something that a compiled, bucketed or recorded step relies on does not hold.

    Each day's module has one subclass, raised by that module alone, so that the type points at the day. The message
    says which buffer, shape or step it is about and the value seen and wanted, and ends with the notebook that explains
    it (``lesson``). What differs from run to run, such as addresses and file paths, is in ``facts``, so that the text
    is the same everywhere.
    """

    lesson: ClassVar[str]

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(f"{message}. See notebook {self.lesson}")
        self.facts = facts
