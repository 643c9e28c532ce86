"""Every registered figure as files: SVG and PNG, light and dark, with a manifest that says what they were made from."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import matplotlib as mpl
import PIL

from nanoserve_lab.bench.provenance import provenance_rows, write_files
from nanoserve_lab.figures import registry
from nanoserve_lab.figures.registry import FigureError, FigureFunction, data_folder, figure_names
from nanoserve_lab.figures.style import THEMES

__all__ = ["check_fresh", "export_figures", "figure_names"]

MANIFEST = "manifest.json"
FORMATS = ("svg", "png")


def export_figures(out: Path, only: str | None = None, data: Path | None = None) -> list[Path]:
    """Write all figures (or the one named ``only``) into ``out``, and return the paths, the manifest last.

    A figure NAME becomes ``NAME.light.svg``, ``NAME.dark.svg``, ``NAME.light.png`` and ``NAME.dark.png`` (200 dpi).
    ``data`` is the folder of the recorded CSVs (None: the repository's ``data/``). The same data gives the same bytes.
    An export of all figures also removes the files and entries of figures that are no longer registered. Raises
    `FigureError` for an unknown name, listing the names, and for data that is not there; nothing is written then.
    """
    specs = _chosen(only)
    entries: dict[str, Any] = {}
    contents: list[tuple[Path, bytes]] = []
    for spec in specs:
        files, entry = _export(spec, _folder(spec, data))
        entries[spec.name] = entry
        contents += [(out / name, content) for name, content in files.items()]
    old = _read_manifest(out)
    gone = [] if only else sorted(set(old) - set(registry.FIGURES))
    kept = {name: entry for name, entry in old.items() if name not in gone}
    manifest = dict(sorted({**kept, **entries}.items()))
    contents.append((out / MANIFEST, (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode("utf-8")))
    write_files(contents)
    for name in gone:
        for file in _file_names(name):
            (out / file).unlink(missing_ok=True)
    return [path for path, _ in contents]


def check_fresh(folder: Path, data: Path | None = None, only: str | None = None) -> list[str]:
    """What is stale among the exported figures in ``folder`` (or about the one named ``only``): one line each,
    beginning with the figure's name.

    Compared are the data's hash, caption and alternative text, the files with the manifest, and, where the renderer
    (Matplotlib, Pillow, platform) is the one of the export, the bytes of a fresh export. Empty when all are fresh.
    """
    _chosen(only)
    manifest = _read_manifest(folder)
    unknown = sorted(set(manifest) - set(registry.FIGURES)) if only is None else []
    stale = [f"{name}: no such figure is registered" for name in unknown]
    for name in [only] if only is not None else figure_names():
        if name not in manifest:
            stale.append(f"{name}: not exported")
            continue
        stale += [f"{name}: {problem}" for problem in _stale(registry.FIGURES[name], manifest[name], folder, data)]
    if only is not None:
        return stale
    known = {file for name in manifest for file in _file_names(name)}
    strays = sorted(p.name for p in folder.glob("*") if p.suffix in {".svg", ".png"} and p.name not in known)
    return stale + [f"{name.partition('.')[0]}: {name} is not in the manifest" for name in strays]


def _stale(spec: FigureFunction, entry: dict[str, Any], folder: Path, data: Path | None) -> list[str]:
    problems: list[str] = []
    for name in _file_names(spec.name):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif _sha256(path.read_bytes()) != entry["files"].get(name):
            problems.append(f"{name} is not the file that was exported")
    if problems:
        return problems
    try:
        where = _folder(spec, data)
        file = where / spec.data if spec.data else None
        if file and file.is_file() and _sha256(file.read_bytes()) != entry["data_sha256"]:
            return [f"its data {spec.data} changed after the export"]
        same_renderer = entry["renderer"] == _renderer()
        _, fresh = _export(spec, where, render=same_renderer)
    except (FigureError, ValueError) as error:
        return [str(error).removeprefix(f"{spec.name}: ")]
    words = [field for field in fresh if field not in ("files", "renderer") and fresh[field] != entry[field]]
    other = [name for name, digest in fresh["files"].items() if digest != entry["files"].get(name)]
    problems += [f"its {field} changed after the export" for field in words]
    problems += [f"{name} differs from a fresh export" for name in other]
    return problems


def _export(spec: FigureFunction, folder: Path, render: bool = True) -> tuple[dict[str, bytes], dict[str, Any]]:
    frame = spec.load(folder)
    files: dict[str, bytes] = {}
    for theme in THEMES:
        picture = spec(frame, theme=theme)
        about = {"Title": picture.caption, "Description": picture.alt}
        metadata = {"svg": {**about, "Date": None}, "png": {**about, "Software": None}}
        for form in FORMATS if render else ():
            files[f"{spec.name}.{theme}.{form}"] = picture.rendered(form, salt=spec.name, metadata=metadata[form])
    entry = {
        "caption": picture.caption,
        "alt": picture.alt,
        "data": spec.data,
        "data_sha256": None if spec.data is None else _sha256((folder / spec.data).read_bytes()),
        "provenance": [] if frame is None else provenance_rows(frame),
        "renderer": _renderer(),
        "files": {name: _sha256(content) for name, content in files.items()},
    }
    return files, entry


def _chosen(only: str | None) -> list[FigureFunction]:
    if only is not None and only not in registry.FIGURES:
        raise FigureError(f"no figure {only!r}; there are {', '.join(figure_names())}")
    return [registry.FIGURES[name] for name in figure_names() if only in (None, name)]


def _folder(spec: FigureFunction, data: Path | None) -> Path:
    # A diagram needs no data folder, and so can be exported from an installed package.
    return data if data is not None else Path() if spec.data is None else data_folder()


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise FigureError(f"{MANIFEST} is not valid JSON ({error}); remove it and export all figures") from None
    wanted = {"caption", "alt", "data", "data_sha256", "provenance", "renderer", "files"}
    if not isinstance(manifest, dict) or any(
        not name.isidentifier() or not isinstance(entry, dict) or wanted - set(entry)
        for name, entry in manifest.items()
    ):
        raise FigureError(f"{MANIFEST} is not a manifest of figures; remove it and export all figures")
    return manifest


def _renderer() -> dict[str, str]:
    return {
        "matplotlib": mpl.__version__,
        "pillow": PIL.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _file_names(name: str) -> list[str]:
    return [f"{name}.{theme}.{form}" for theme in THEMES for form in FORMATS]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
