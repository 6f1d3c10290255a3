"""One fleet for all tests of a file: each test has threads and folders of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet.sandbox.redis_server import start_redis
from tests.fleet.harness import FleetUnderTest, fleet_under_test


@pytest.fixture(scope="module")
def fleet(no_process_left: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    """A running fleet: two hosts, one section."""
    base = tmp_path_factory.mktemp("fleet")
    with start_redis(base / "redis") as redis, fleet_under_test(base, redis) as running:
        yield running
