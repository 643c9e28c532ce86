"""The course's figures: one function a figure, and the export that keeps the committed ones fresh."""

from nanoserve_lab.figures.charts import bytes_against_bandwidth, deferred_readback, launches_by_kind
from nanoserve_lab.figures.diagrams import decode_step_path
from nanoserve_lab.figures.export import check_fresh, export_figures
from nanoserve_lab.figures.registry import FigureError, data_folder, figure_names
from nanoserve_lab.figures.strips import step_strip
from nanoserve_lab.figures.style import style

__all__ = [
    "FigureError",
    "bytes_against_bandwidth",
    "check_fresh",
    "data_folder",
    "decode_step_path",
    "deferred_readback",
    "export_figures",
    "figure_names",
    "launches_by_kind",
    "step_strip",
    "style",
]
