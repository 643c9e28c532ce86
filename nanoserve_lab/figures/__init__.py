"""The course's figures: one function a figure, and the export that keeps the committed ones fresh."""

from nanoserve_lab.figures.breakeven import pool_and_breakeven
from nanoserve_lab.figures.buckets import padded_rectangle, padding_against_graphs, shapes_over_run
from nanoserve_lab.figures.captured import captured_decode_replay
from nanoserve_lab.figures.charts import bytes_against_bandwidth, deferred_readback, launches_by_kind
from nanoserve_lab.figures.diagrams import decode_step_path
from nanoserve_lab.figures.export import check_fresh, export_figures
from nanoserve_lab.figures.graphs import compiled_step, graphs_against_steps
from nanoserve_lab.figures.inputs import allocations_over_steps, persistent_decode_inputs
from nanoserve_lab.figures.plans import graphs_by_addressing, plan_between
from nanoserve_lab.figures.pool import breakeven_curve, pool_by_multiple, pool_priced
from nanoserve_lab.figures.recordings import captures_over_steps
from nanoserve_lab.figures.registry import FigureError, data_folder, figure_names
from nanoserve_lab.figures.strips import step_strip
from nanoserve_lab.figures.style import style
from nanoserve_lab.figures.timeline import recording_in_time
from nanoserve_lab.figures.windows import finished_row, planning_time

__all__ = [
    "FigureError",
    "allocations_over_steps",
    "breakeven_curve",
    "bytes_against_bandwidth",
    "captured_decode_replay",
    "captures_over_steps",
    "check_fresh",
    "compiled_step",
    "data_folder",
    "decode_step_path",
    "deferred_readback",
    "export_figures",
    "figure_names",
    "finished_row",
    "graphs_against_steps",
    "graphs_by_addressing",
    "launches_by_kind",
    "padded_rectangle",
    "padding_against_graphs",
    "persistent_decode_inputs",
    "plan_between",
    "planning_time",
    "pool_and_breakeven",
    "pool_by_multiple",
    "pool_priced",
    "recording_in_time",
    "shapes_over_run",
    "step_strip",
    "style",
]
