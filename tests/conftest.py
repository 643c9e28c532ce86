"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoserve_lab.model.fetch import fetch_default_model


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The folder of the default model, from the user's cache; fetched on a machine that does not have it yet."""
    return fetch_default_model()
