"""The Prometheus endpoint of a host, served by its worker for short work (`metrics` in `fleet.yaml`)."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Iterable, Iterator

from prometheus_client import start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from fleet import metrics
from fleet.config import FleetConfig
from fleet.context import Fleet
from tasks.runtime import loop, run

log = logging.getLogger(__name__)

#: Seconds that Redis has to answer a scrape: shorter than Prometheus waits for it (10 s by default).
SCRAPE_S = 4.0


class Endpoint(Collector):
    """What a scrape gets: the counters of this process, and what Redis says just now."""

    def __init__(self, host: str) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Without Redis, those that need it are missing."""
        yield from metrics.REGISTRY.collect()
        yield from metrics.load_metrics(self._host, _load())

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is, is known only when it is asked for."""
        return []


def _load() -> metrics.Load | None:
    reading = loop().start(metrics.read_load)
    try:
        return reading.result(SCRAPE_S)
    except (RedisError, OSError, concurrent.futures.TimeoutError) as error:
        reading.cancel()
        log.warning("a scrape got no answer from Redis: %s", error or type(error).__name__)
        return None


def serve_metrics() -> None:
    """Serve `/metrics`, if the configuration names a port. One that is taken costs the metrics, not the worker."""
    config, host = run(_configured)
    if not config.metrics.port:
        return
    metrics.begin_at_zero(config, host)
    try:
        start_http_server(config.metrics.port, config.metrics.address, Endpoint(host))
    except OSError as error:
        log.warning("no metrics on %s port %d: %s", config.metrics.address, config.metrics.port, error)


async def _configured(fleet: Fleet) -> tuple[FleetConfig, str]:
    return fleet.config, fleet.host
