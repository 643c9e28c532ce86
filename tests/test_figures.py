"""The figures: what each shows and refuses, that no text is cut off or covered, that the committed ones are fresh."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest
from figure_frames import FRAMES, WHERE, launches, limits, readback
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from nanoserve_lab.bench.provenance import ProvenanceMissing, repository_root, write_csv
from nanoserve_lab.figures import (
    FigureError,
    bytes_against_bandwidth,
    check_fresh,
    decode_step_path,
    deferred_readback,
    export_figures,
    figure_names,
    launches_by_kind,
    registry,
    step_strip,
    style,
)
from nanoserve_lab.figures import export as export_module
from nanoserve_lab.figures.style import PALETTES, THEMES, Palette, Picture, contrast, printable

REPO = Path(__file__).parents[1]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a small recorded CSV for every figure."""
    folder = tmp_path / "data"
    for name, make in FRAMES.items():
        file, frame = registry.FIGURES[name].data, make()
        if file is not None and frame is not None:
            write_csv(frame, folder / file)
    return folder


@pytest.fixture
def two(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of two quick figures: ``bar`` of decode-floor.csv, and ``word`` without data."""
    monkeypatch.setattr(registry, "FIGURES", {})

    def alt(frame: pd.DataFrame) -> str:
        return f"A bar, {frame['step_s'].iloc[0]} s high."

    @registry.figure(name="bar", data="decode-floor.csv", caption="A bar.", alt=alt, size=(3, 2))
    def bar(picture: Picture, frame: pd.DataFrame, palette: Palette) -> None:
        if frame["step_s"].iloc[0] <= 0:
            raise FigureError("bar: step_s must be positive")
        picture.subplots().bar([0], frame["step_s"], color=palette.accent, hatch="//")

    @registry.figure(name="word", data=None, caption="A word.", alt="The word 'word'.", size=(3, 2))
    def word(picture: Picture, frame: None, palette: Palette) -> None:
        picture.text(0.5, 0.5, "word", color=palette.ink)


def crowded(picture: Picture) -> list[str]:
    """What is wrong with the texts of ``picture``: cut off at the edge, or two that cover each other."""
    canvas = FigureCanvasAgg(picture)
    with style(picture.theme):
        canvas.draw()
    renderer, texts = canvas.get_renderer(), list(picture.texts)
    for axes in picture.axes:
        texts += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high and t.label1.get_visible()]
    shown = [t for t in texts if isinstance(t, Text) and t.get_visible() and t.get_text().strip()]
    boxes = [(t.get_text(), Text.get_window_extent(t, renderer)) for t in shown]
    page = picture.bbox
    problems = [
        f"cut off: {text!r}"
        for text, box in boxes
        if box.x0 < page.x0 or box.y0 < page.y0 or box.x1 > page.x1 or box.y1 > page.y1
    ]
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1:
            problems.append(f"{first!r} covers {second!r}")
    return problems


def test_every_figure_has_a_frame_here() -> None:
    assert sorted(FRAMES) == figure_names()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", sorted(FRAMES))
def test_nothing_is_cut_off_or_covered(name: str, theme: str) -> None:
    spec = registry.FIGURES[name]
    assert crowded(spec(FRAMES[name](), theme=theme)) == []
    root = repository_root()
    if root and spec.data and (root / "data" / spec.data).is_file():
        assert crowded(spec(spec.load(root / "data"), theme=theme)) == []


def test_crowded_sees_what_it_looks_for() -> None:
    picture = Picture(figsize=(2, 1))
    picture.text(0.1, 0.5, "one")
    picture.text(0.12, 0.5, "two")
    picture.text(0.95, 0.1, "over the edge")
    assert crowded(picture) == ["cut off: 'over the edge'", "'one' covers 'two'"]


@pytest.mark.parametrize("bandwidth", [8.0, 40.0, 4000.0])
@pytest.mark.parametrize("host_us", [0.5, 5.0, 60.0])
def test_bandwidth_labels_find_room(bandwidth: float, host_us: float) -> None:
    host_s = 700 * host_us * 1e-6
    step = 1.2 * max(538e6 / bandwidth / 1e9, host_s)
    frame = limits(bandwidth_gb_s=bandwidth, host_s_per_launch=host_us * 1e-6, step_s=step)
    picture = bytes_against_bandwidth(frame)
    assert crowded(picture) == []
    (axes,) = picture.axes
    for text, line in itertools.product(axes.texts, axes.lines):
        box = text.get_window_extent()
        ends = axes.transData.transform(np.asarray(line.get_xydata()))
        points = np.concatenate([np.linspace(a, b, 50) for a, b in itertools.pairwise(ends)] or [ends])
        assert not box.count_contains(points), text.get_text()


@pytest.mark.parametrize("layers", [1, 30, 80])
def test_strip_of_few_and_many_layers(layers: int) -> None:
    assert crowded(step_strip(launches(layers))) == []


def test_alternative_texts_hold_the_numbers_of_the_frame() -> None:
    assert "matmul 5" in launches_by_kind(launches()).alt
    assert "24 in all" in launches_by_kind(launches()).alt
    assert "24 blocks" in step_strip(launches()).alt
    assert "at 154 GB/s" in bytes_against_bandwidth(limits()).alt
    alt = deferred_readback(readback()).alt
    assert "Request A samples 4 tokens, all kept" in alt
    assert "Request B samples 3 tokens, 2 of them dropped after its stop" in alt


def test_bars_are_counts_and_milliseconds() -> None:
    left, right = launches_by_kind(launches()).axes
    kinds = [label.get_text() for label in left.get_yticklabels()]
    counts, times = (
        dict(zip(kinds, [bar.get_width() for bar in axes.containers[0]], strict=True)) for axes in (left, right)
    )
    assert counts["matmul"] == 5
    assert times["matmul"] == pytest.approx((150 + 180 + 151 + 181 + 900) * 1e-3)


@pytest.mark.parametrize(
    ("spec", "frame", "message"),
    [
        (launches_by_kind, launches().drop(columns="kind"), "launches_by_kind: no column kind; saw order, op"),
        (launches_by_kind, launches().replace({"kind": {"norm": "nrm"}}), "unknown kind 'nrm'; wanted matmul,"),
        (launches_by_kind, launches().assign(seconds=0.0), "seconds must not be negative, and not all zero"),
        (step_strip, launches().assign(module="x"), "step_strip: no module names a layer"),
        (step_strip, launches().assign(op=None), "step_strip: a missing value in column op"),
        (bytes_against_bandwidth, pd.concat([limits(), limits()]), "wanted one row, saw 2"),
        (bytes_against_bandwidth, limits(step_s=0), "step_s must be positive, saw 0"),
        (deferred_readback, readback().assign(row="A"), "wanted the rows A and B, saw A"),
        (deferred_readback, readback(lag=-1), "read before the step that samples it"),
        (decode_step_path, limits(), "decode_step_path: wanted no data, saw some"),
        (step_strip, None, "step_strip: wanted a frame, saw none"),
    ],
)
def test_a_frame_that_cannot_be_shown_is_refused(spec: Any, frame: pd.DataFrame | None, message: str) -> None:
    with pytest.raises(FigureError, match=message):
        spec(frame)


def test_a_frame_must_say_where_it_was_measured() -> None:
    with pytest.raises(ProvenanceMissing, match="no provenance column machine"):
        bytes_against_bandwidth(limits().drop(columns=list(WHERE)))


def test_a_figure_shows_itself_once_with_its_alt_text() -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    picture = bytes_against_bandwidth(limits())
    shell = InteractiveShell.instance()
    try:
        with capture_output() as captured:
            formats, _ = shell.display_formatter.format(picture)  # type: ignore[union-attr]
    finally:
        InteractiveShell.clear_instance()
    assert formats == {}, "shown by itself, so not a second time"
    (shown,) = captured.outputs
    assert set(shown.data) == {"image/png", "text/plain"}
    image = Image.open(io.BytesIO(base64.b64decode(shown.data["image/png"])))
    assert image.size == (1050, 570)
    assert shown.data["text/plain"] == "<Picture size 700x380 with 1 Axes>"
    assert shown.metadata["image/png"] == {"width": 700, "alt": picture.alt, "caption": picture.caption}


def test_colours_can_be_read_and_told_apart() -> None:
    # Machado, Oliveira, Fernandes 2009: how the colours look without red, green or blue cones (linear RGB).
    seen_by = {
        "all cones": np.eye(3),
        "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
        "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    }
    for theme, palette in PALETTES.items():
        for name in ("ink", "muted", "accent", "warn"):
            for behind in (palette.paper, palette.memory, palette.launch):
                assert contrast(getattr(palette, name), behind) >= 4.5, (theme, name, behind)
        for family, colour in palette.families.items():
            assert contrast(colour, palette.paper) >= 3, (theme, family)
            assert contrast(palette.text_on(colour), colour) >= 4.5, (theme, family)
        for eyes, matrix in seen_by.items():
            lab = {family: _lab(colour, np.array(matrix)) for family, colour in palette.families.items()}
            for first, second in itertools.combinations(lab, 2):
                assert np.linalg.norm(lab[first] - lab[second]) > 15, (theme, eyes, first, second)


def _lab(colour: str, matrix: np.ndarray) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(matrix @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_token_text_is_shown_as_one_line_of_glyphs() -> None:
    assert printable(" a\r\nb\t界") == "␣a↵b→\ufffd"


def test_the_same_data_gives_the_same_bytes(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hatches, clip paths, collections and computed layouts: what Matplotlib names by hashes. The committed figures,
    # below, compare a run of another process with this one.
    chosen = ("deferred_readback", "launches_by_kind", "step_strip")
    monkeypatch.setattr(registry, "FIGURES", {name: registry.FIGURES[name] for name in chosen})
    one, other = tmp_path / "one", tmp_path / "other"
    first = export_figures(one, data=data)
    assert [p.name for p in first] == [p.name for p in export_figures(other, data=data)]
    assert {p.name for p in one.iterdir()} == {p.name for p in first}
    assert len(first) == 4 * len(figure_names()) + 1
    for path in first:
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def test_the_manifest_is_complete(two: None, data: Path, tmp_path: Path) -> None:
    export_figures(tmp_path / "out", data=data)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert list(manifest) == ["bar", "word"]
    files = {name: entry.pop("files") for name, entry in manifest.items()}
    for name, digests in files.items():
        assert set(digests) == {f"{name}.{theme}.{form}" for theme in THEMES for form in ("svg", "png")}
        for file, digest in digests.items():
            assert digest == hashlib.sha256((tmp_path / "out" / file).read_bytes()).hexdigest()
    renderer = manifest["bar"].pop("renderer")
    assert renderer["matplotlib"] == matplotlib.__version__
    assert manifest["word"].pop("renderer") == renderer
    assert manifest["bar"] == {
        "caption": "A bar.",
        "alt": "A bar, 0.032 s high.",
        "data": "decode-floor.csv",
        "data_sha256": hashlib.sha256((data / "decode-floor.csv").read_bytes()).hexdigest(),
        "provenance": [WHERE],
    }
    assert manifest["word"] == {
        "caption": "A word.",
        "alt": "The word 'word'.",
        "data": None,
        "data_sha256": None,
        "provenance": [],
    }


def test_only_one_figure_and_an_unknown_name(two: None, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_figures(out, data=data)
    before = json.loads((out / "manifest.json").read_text())
    paths = export_figures(out, only="word")
    assert len(paths) == 5
    assert json.loads((out / "manifest.json").read_text()) == before
    with pytest.raises(FigureError, match="no figure 'nope'; there are bar, word"):
        export_figures(out, only="nope")


def test_what_is_stale_is_named(two: None, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    export_figures(out, data=data)
    assert check_fresh(out, data) == []

    write_csv(limits(step_s=0.04), data / "decode-floor.csv")
    assert check_fresh(out, data) == ["bar: its data decode-floor.csv changed after the export"]
    (data / "decode-floor.csv").unlink()
    assert "its data decode-floor.csv is not recorded yet" in check_fresh(out, data)[0]
    write_csv(limits(), data / "decode-floor.csv")

    with monkeypatch.context() as patch:
        patch.setattr(registry.FIGURES["word"], "alt", "another")
        # The words are inside the files too, as their description.
        assert "word: its alt changed after the export" in check_fresh(out, data)
    with monkeypatch.context() as patch:
        patch.setattr(registry.FIGURES["word"], "draw", lambda picture, data, palette: None)
        stale = check_fresh(out, data)
        assert len(stale) == 4
        assert stale[0] == "word: word.light.svg differs from a fresh export"
        # Another Matplotlib draws other bytes; that alone makes nothing stale.
        patch.setattr(export_module, "_renderer", lambda: {"matplotlib": "3.10.0"})
        assert check_fresh(out, data) == []
    with monkeypatch.context() as patch:
        patch.setitem(registry.FIGURES, "new", registry.FIGURES["word"])
        assert check_fresh(out, data) == ["new: not exported"]

    edited = out / "word.dark.svg"
    original = edited.read_bytes()
    edited.write_bytes(original + b" ")
    assert check_fresh(out, data) == [f"word: {edited.name} is not the file that was exported"]
    edited.unlink()
    assert check_fresh(out, data) == [f"word: {edited.name} is missing"]
    edited.write_bytes(original)
    (out / "old.light.png").write_bytes(b"")
    assert check_fresh(out, data) == ["old: old.light.png is not in the manifest"]


def test_a_figure_that_left_the_registry(two: None, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_figures(out, data=data)
    del registry.FIGURES["bar"]
    assert check_fresh(out, data) == ["bar: no such figure is registered"]
    export_figures(out, data=data)
    assert check_fresh(out, data) == []
    assert not list(out.glob("bar*"))


def test_a_failed_export_leaves_the_old_files(two: None, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_figures(out, data=data)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    write_csv(limits(step_s=-1.0), data / "decode-floor.csv")
    with pytest.raises(FigureError, match="step_s must be positive"):
        export_figures(out, data=data)
    (data / "decode-floor.csv").unlink()
    with pytest.raises(FigureError, match=r"bar: its data decode-floor\.csv is not recorded yet"):
        export_figures(out, data=data)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_registering_asks_for_the_words(two: None) -> None:
    with pytest.raises(TypeError, match="alt"):
        registry.figure(name="a", data=None, caption="c")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="figure a: the alt is empty"):
        registry.figure(name="a", data=None, caption="c", alt=" ")
    with pytest.raises(ValueError, match="registered twice"):
        registry.figure(name="word", data=None, caption="c", alt="a")
    with pytest.raises(ValueError, match=r"wanted an identifier, saw '\.\./a'"):
        registry.figure(name="../a", data=None, caption="c", alt="a")
    late = registry.figure(name="a", data=None, caption="c", alt=lambda _: " ")(lambda picture, data, palette: None)
    with pytest.raises(FigureError, match="a: the alt is empty"):
        late()


def test_an_installed_package_has_no_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "repository_root", lambda: None)
    with pytest.raises(FigureError, match="--data DIR"):
        export_figures(tmp_path, only="step_strip")
    assert len(export_figures(tmp_path, only="decode_step_path")) == 5


def test_a_broken_manifest_is_named(two: None, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(FigureError, match=r"manifest\.json is not valid JSON"):
        export_figures(tmp_path, only="word")
    (tmp_path / "manifest.json").write_text('{"a": {}}')
    with pytest.raises(FigureError, match="not a manifest of figures"):
        check_fresh(tmp_path)


def test_the_committed_figures_are_fresh() -> None:
    assert check_fresh(REPO / "figures") == []
