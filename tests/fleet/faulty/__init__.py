"""Workers whose task messages go astray and whose clocks are wrong, as the file says that `Faults` writes.

This folder is on the PYTHONPATH of the processes under test: each of them imports `sitecustomize` when it starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.sandbox.redis_server import start_redis
from tests.fleet.faulty.sitecustomize import FAULTS
from tests.fleet.harness import FleetUnderTest, fleet_under_test


class Faults:
    """What is wrong in the processes of a fleet: they look at the file again and again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._now: dict[str, Any] = {}
        self.set()

    def set(self, **changes: Any) -> None:
        """Change what is wrong: `mode`, `seed`, `visibility_s` and `clocks`, see `sitecustomize`."""
        self._now |= changes
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(self._now))
        new.replace(self._file)

    def done(self, what: str) -> int:
        """How often a fault was done to a message: a `mode`, or `TASK again`, delivered as not acknowledged in time."""
        log = self._file.with_suffix(".log")
        return log.read_text().splitlines().count(what) if log.exists() else 0


@contextmanager
def faulty_fleet(base: Path, **faults: Any) -> Iterator[tuple[FleetUnderTest, Faults]]:
    """Run a fleet with faults from its first moment on."""
    file = base / "faults.json"
    inflicted = Faults(file)
    inflicted.set(**faults)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch, start_redis(base / "redis") as server:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv(FAULTS, str(file))
        with fleet_under_test(base, server) as fleet:
            yield fleet, inflicted
