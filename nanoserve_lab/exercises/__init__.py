"""Checkers for the lessons' exercises, a module a lesson: each runs what the reader wrote and says what is off."""

from nanoserve_lab.exercises.decode_step import check_crossing, check_launches

__all__ = ["check_crossing", "check_launches"]
