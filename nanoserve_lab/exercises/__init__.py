"""Checkers for the lessons' exercises, a module a lesson: each runs what the reader wrote and says what is off."""

from nanoserve_lab.exercises.bucketing import check_fit, check_multiple
from nanoserve_lab.exercises.decode_plan import check_gather, check_is_stale, check_write_slot
from nanoserve_lab.exercises.decode_step import check_crossing, check_launches
from nanoserve_lab.exercises.graph_breaks import check_graphs, check_grown
from nanoserve_lab.exercises.graph_capture import check_agrees, check_record
from nanoserve_lab.exercises.persistent_inputs import check_reaches, check_write, four_steps
from nanoserve_lab.exercises.pool_and_breakeven import check_order, check_worth
from nanoserve_lab.exercises.slot_table import check_bytes, check_move

__all__ = [
    "check_agrees",
    "check_bytes",
    "check_crossing",
    "check_fit",
    "check_gather",
    "check_graphs",
    "check_grown",
    "check_is_stale",
    "check_launches",
    "check_move",
    "check_multiple",
    "check_order",
    "check_reaches",
    "check_record",
    "check_worth",
    "check_write",
    "check_write_slot",
    "four_steps",
]
