"""Where the package keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The folder for models and kernels: the environment variable ``NANOSERVE_LAB_CACHE``, else the user's cache
    folder."""
    chosen = os.environ.get("NANOSERVE_LAB_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else platformdirs.user_cache_path("nanoserve_lab")
