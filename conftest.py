"""How the notebooks are run by ``pytest --nbval``. Without that option nothing here has an effect on the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nbval.plugin import IPyNbCell

#: Seconds between two messages of a kernel before a cell counts as hung (nbval's own 5 s are short on a busy machine).
OUTPUT_TIMEOUT_S = 120


def pytest_configure(config: pytest.Config) -> None:
    # A kernel inherits the environment; with a backend set there, the inline figures of a lesson stay away.
    os.environ.pop("MPLBACKEND", None)
    # nbval opens the file relative to the current folder, and pytest may be started in any.
    sanitize = Path(config.option.nbval_sanitize_with)
    if not sanitize.exists():
        config.option.nbval_sanitize_with = str(config.rootpath / sanitize)
    # A kernel named python3 may also be some other environment's, registered for the user.
    if not config.option.nbval_kernel_name:
        config.option.nbval_current_env = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, IPyNbCell):
            item.output_timeout = OUTPUT_TIMEOUT_S


def pytest_collection_finish(session: pytest.Session) -> None:
    """The default model, before the first lesson runs: no cell waits for a download."""
    lessons = any(isinstance(item, IPyNbCell) for item in session.items)
    if not lessons or session.config.option.collectonly:
        return
    from nanoserve_lab.model.config import CheckpointError
    from nanoserve_lab.model.fetch import fetch_default_model

    try:
        fetch_default_model()
    except CheckpointError as error:
        pytest.exit(f"the notebooks need the default model. {error}\nThe package alone: pytest tests", returncode=1)
