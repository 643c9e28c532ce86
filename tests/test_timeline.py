"""The picture of a recording in time."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from figure_frames import launches
from test_figures import crowded
from torch import Tensor, nn

from nanoserve_lab.bench.provenance import with_provenance
from nanoserve_lab.figures import FigureError, recording_in_time
from nanoserve_lab.figures.style import THEMES, Picture
from nanoserve_lab.recorders import Recording, tape_recorder


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.softmax(-1)


def recorded(layers: int) -> Recording:
    return tape_recorder(Stack(layers), (torch.randn(2, 8),))


def blocks(picture: Picture) -> list[tuple[float, float]]:
    """Start and end of every block."""
    (collection,) = picture.axes[0].collections
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in collection.get_paths()]


def texts(picture: Picture) -> list[str]:
    return [text.get_text() for text in picture.axes[0].texts if text.get_text()]


@pytest.mark.parametrize("theme", THEMES)
def test_a_recording_without_times_is_equally_wide(theme: str) -> None:
    picture = recording_in_time(with_provenance(recorded(2).launches()), theme=theme)
    assert crowded(picture) == []
    starts = [start for start, _ in blocks(picture)]
    assert starts == list(range(9)), "two layers of mm, relu, mm, add, and the softmax"
    assert "equally wide" in picture.alt
    assert "9 operations" in picture.alt
    assert texts(picture)[-2:] == ["layers.0", "layers.1"]
    assert texts(picture)[:4] == ["mm", "relu", "mm", "add"]


def test_a_timed_recording_is_as_wide_as_its_times() -> None:
    frame = with_provenance(recorded(2).launches(repeats=3))
    picture = recording_in_time(frame)
    assert crowded(picture) == []
    ends = frame.seconds.cumsum() * 1e3
    assert [start for start, _ in blocks(picture)] == pytest.approx([0.0, *ends[:-1]])
    assert picture.axes[0].get_xlim()[1] == pytest.approx(ends.iloc[-1])


@pytest.mark.parametrize("layers", [1, 60])
def test_many_launches_become_one_block_a_layer_and_kind(layers: int) -> None:
    frame = with_provenance(recorded(layers).launches())
    picture = recording_in_time(frame)
    assert crowded(picture) == []
    if layers == 1:
        assert len(blocks(picture)) == len(frame) == 5
        return
    assert len(frame) == 241
    # A layer's two products, its relu and add; then the softmax.
    assert len(blocks(picture)) == 60 * 2 + 1
    assert texts(picture) == [str(number) for number in range(0, 60, 5)]
    read = picture.axes[1].patches[0].get_data().values
    assert read.sum() == frame.bytes_read.sum()


def test_bytes_are_those_of_the_frame() -> None:
    frame = launches()
    picture = recording_in_time(frame)
    read, written = (patch.get_data().values.tolist() for patch in picture.axes[1].patches)
    assert read == frame.bytes_read.tolist()
    assert written == frame.bytes_written.tolist()


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (launches().assign(kind="nrm"), "recording_in_time: unknown kind 'nrm'"),
        (launches().drop(columns="bytes_read"), "recording_in_time: no column bytes_read"),
        (launches().assign(seconds=[math.nan] + [1.0] * 23), "missing everywhere, or nowhere"),
        (launches().assign(seconds=0.0), "not all zero"),
        (launches().iloc[:0], "has no rows|no rows"),
    ],
)
def test_a_frame_that_cannot_be_shown_is_refused(frame: pd.DataFrame, message: str) -> None:
    with pytest.raises((FigureError, ValueError), match=message):
        recording_in_time(frame)
