"""Recorded numbers: CSV files whose every row says where it was measured, on what, and with which command."""

from __future__ import annotations

import csv
import datetime
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import torch

from nanoserve_lab.device import default_device, machine_name, triton_version

#: The columns that follow the measured ones in every recorded CSV, all text.
PROVENANCE = ("machine", "device", "torch", "triton", "commit", "command", "date")


class ProvenanceMissing(ValueError):
    """A frame or a CSV that does not say where its numbers come from. The message names it and what is missing."""


def repository_root() -> Path | None:
    """The repository this package runs from (it holds ``pyproject.toml`` and ``data/``), or None when installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / "data").is_dir() else None


def provenance(device: str | torch.device = "cpu", command: str | None = None) -> dict[str, str]:
    """One row of the `PROVENANCE` columns for numbers measured now on ``device``.

    ``device`` becomes ``"cpu"`` or the accelerator's own name; ``commit`` is the short hash, ``+dirty`` when anything
    but ``data/`` and ``figures/`` has changes, ``unknown`` outside git; ``command`` is what the reader would
    type (None: ``interactive``); ``date`` is the local ISO day. Raises what torch raises for a
    device that is not there.
    """
    device = torch.device(device)
    return {
        "machine": machine_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "triton": triton_version() or "none",
        "commit": _commit(),
        "command": command or "interactive",
        "date": datetime.date.today().isoformat(),
    }


def with_provenance(
    frame: pd.DataFrame, device: str | torch.device = "cpu", command: str | None = None
) -> pd.DataFrame:
    """A copy of ``frame`` with the `PROVENANCE` columns of this machine; a frame that has them all keeps its own."""
    if set(PROVENANCE) <= set(frame.columns):
        return frame.copy()
    return frame.assign(**provenance(device, command))


def provenance_rows(frame: pd.DataFrame, name: str = "frame") -> list[dict[str, str]]:
    """The distinct provenances in ``frame``, in order of appearance.

    Raises `ProvenanceMissing`, beginning with ``name``, for a frame without rows, without one of the columns, or with
    an empty value in one.
    """
    missing = [column for column in PROVENANCE if column not in frame.columns]
    if missing:
        raise ProvenanceMissing(
            f"{name}: no provenance column {', '.join(missing)}; add them with with_provenance(frame, device, command)"
        )
    if frame.empty:
        raise ProvenanceMissing(f"{name}: no rows")
    rows = frame[list(PROVENANCE)].drop_duplicates()
    for column in PROVENANCE:
        if rows[column].isna().any() or (rows[column].astype(str).str.strip() == "").any():
            raise ProvenanceMissing(f"{name}: provenance column {column} has an empty value")
    return [{column: str(row[column]) for column in PROVENANCE} for row in rows.to_dict("records")]


def provenance_line(frame: pd.DataFrame) -> str:
    """One line for a figure's corner, such as ``"AMD EPYC, 2 cores, 24 GB · torch 2.13.0 · 2026-11-29"``.

    An accelerator is named first; rows from several machines are joined by ``;``. Raises as `provenance_rows`.
    """
    lines = []
    for row in provenance_rows(frame):
        device = [] if row["device"] == "cpu" else [row["device"]]
        lines.append(" · ".join([*device, row["machine"], f"torch {row['torch'].partition('+')[0]}", row["date"]]))
    return "; ".join(dict.fromkeys(lines))


def write_csv(
    frame: pd.DataFrame, path: str | Path, device: str | torch.device = "cpu", command: str | None = None
) -> Path:
    """Write ``frame`` with its provenance columns (see `with_provenance`) to ``path``, and return the path.

    The same frame gives the same bytes: UTF-8, ``\\n``, floats that read back exactly, text in quotes, a missing number
    as ``nan``. The file is written aside and renamed. Raises `ProvenanceMissing` for a frame without rows.
    """
    path = Path(path)
    full = with_provenance(frame, device, command)
    provenance_rows(full, path.name)
    measured = [column for column in full.columns if column not in PROVENANCE]
    text = full[[*measured, *PROVENANCE]].to_csv(
        index=False, lineterminator="\n", na_rep="nan", quoting=csv.QUOTE_NONNUMERIC
    )
    write_files([(path, text.encode("utf-8"))])
    return path


def read_csv(path: str | Path) -> pd.DataFrame:
    """The recorded frame at ``path``; text is kept as written (``"None"`` and ``""`` stay text).

    Raises `FileNotFoundError`, or `ProvenanceMissing` naming the file, for a CSV without rows or provenance.
    """
    path = Path(path)
    try:
        # Read as text, typed below: pandas alone would read a commit 12e4567 as a number and a token "None" as nothing.
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except pd.errors.EmptyDataError:
        raise ProvenanceMissing(f"{path.name}: an empty file") from None
    provenance_rows(frame, path.name)
    return frame.assign(**{column: _typed(frame[column]) for column in frame.columns.difference(list(PROVENANCE))})


def machine_folder(device: str | torch.device | None = None) -> Path:
    """Where `bench all` keeps this machine's numbers: ``data/machines/NAME``, after its accelerator or else its
    processor. Below the current folder where the package runs without its repository."""
    row = provenance(default_device() if device is None else device)
    name = row["machine"] if row["device"] == "cpu" else row["device"]
    return (repository_root() or Path()) / "data" / "machines" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def recordings(name: str, data: Path | None = None) -> pd.DataFrame:
    """Every recording of the CSV ``name`` under ``data`` (None: the repository's), one below the other.

    A first column ``source`` says which: ``log`` (``data/log``, what the logs that the course follows print),
    ``recorded`` (``data`` itself) or a folder of ``data/machines``. A column that one of them lacks is NaN there.
    Raises `FileNotFoundError` where there is none.
    """
    root = repository_root() or Path()
    data = root / "data" if data is None else data
    places = {"log": data / "log", "recorded": data}
    places |= {folder.name: folder for folder in sorted((data / "machines").glob("*"))}
    frames = [
        read_csv(folder / name).assign(source=source) for source, folder in places.items() if (folder / name).is_file()
    ]
    if not frames:
        raise FileNotFoundError(f"{name}: not recorded in {data}, its log or its machines")
    joined = pd.concat(frames, ignore_index=True)
    return joined[["source", *joined.columns.drop("source")]]


def write_files(contents: Iterable[tuple[Path, bytes]]) -> None:
    """Write each file aside, then rename all of them into place: a failure while writing leaves every old file."""
    staged: list[tuple[Path, Path]] = []
    try:
        for path, content in contents:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            staged.append((Path(name), path))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o644)  # mkstemp's 0600 would follow the file into the repository
        for aside, path in staged:
            os.replace(aside, path)
    finally:
        for aside, _ in staged:
            aside.unlink(missing_ok=True)


def _typed(column: pd.Series) -> pd.Series:
    if column.isin(["True", "False"]).all():
        return column == "True"
    for kind in ("int64", "float64"):
        try:
            return column.astype(kind)
        except ValueError:
            continue
    return column


def _commit() -> str:
    root = repository_root()
    if root is None:
        return "unknown"
    try:
        commit = _git(root, "rev-parse", "--short=9", "--verify", "HEAD")
        # What benches wrote before this one is not the code that measures.
        changed = _git(root, "status", "--porcelain", "--", ".", ":(exclude)data", ":(exclude)figures")
        return f"{commit}+dirty" if changed else commit
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return result.stdout.strip()
