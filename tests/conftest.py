"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoserve_lab.engine import EngineConfig
from nanoserve_lab.model.fetch import fetch_default_model

#: A configuration that names one of these is what its test wants.
SWITCHES = frozenset({"slot_table", "compile_decode", "bucket_decode", "persist_inputs", "capture_decode"})
RECORDED = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True, "width_multiple": 16}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "both_ways: run with the decode step eager, and again with it recorded and replayed"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("both_ways") and metafunc.cls is None:
        metafunc.fixturenames.append("decode_step")
        metafunc.parametrize("decode_step", ["eager", "recorded"], indirect=True)


@pytest.fixture
def decode_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """``"eager"``, or ``"recorded"``: then every engine records whose test leaves the switches of the days alone."""
    made = EngineConfig.__init__

    def recording(self: EngineConfig, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **(kwargs if SWITCHES & kwargs.keys() else RECORDED | kwargs))

    if request.param == "recorded":
        monkeypatch.setattr(EngineConfig, "__init__", recording)
    return request.param


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The folder of the default model, from the user's cache; fetched on a machine that does not have it yet."""
    return fetch_default_model()
