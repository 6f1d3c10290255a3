"""An embedded platform for each test process; every test has a session of its own there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.sandbox.platform_server import RunningPlatform, running_platform
from tests.wire.stage import Sandbox, on_stage

#: What a test's conditions are set back to.
FAIR_WEATHER = {
    "latency_ms": 0.0,
    "list_lag_ms": 0.0,
    "max_page": 1000,
    "item_cap_bytes": 64 * 1024,
    "faults": [],
    "created_at": "iso",
    "object_types": True,
}


@pytest.fixture(scope="session")
def shared_platform(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    with running_platform(tmp_path_factory.mktemp("platform")) as platform:
        yield platform


@pytest.fixture
def sandbox(shared_platform: RunningPlatform) -> Iterator[Sandbox]:
    """The platform's own endpoints, on a good day at the beginning of each test."""
    sandbox = Sandbox(shared_platform)
    sandbox.conditions(**FAIR_WEATHER)
    sandbox.set_revision(phase="draft", status="ready")
    yield sandbox
    sandbox.close()


@pytest.fixture
def play(sandbox: Sandbox, redis_url: str, tmp_path: Path) -> Callable[..., Any]:
    """Play a scene on a stage of its own."""
    return lambda scene, prefix="", signing_key=None: on_stage(sandbox, redis_url, tmp_path, scene, prefix, signing_key)
