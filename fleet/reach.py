"""What goes wrong between a terminal and the fleet's services, as errors of the catalogue, within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from fleet.errors import FleetError
from fleet.platform.client import PlatformClient
from fleet.platform.errors import AccessDeniedError, PlatformError, TransientError
from fleet.store import Store

#: Seconds that a service may take for its first answer; a person at a terminal waits for it.
FIRST_ANSWER_S = 3.0


@contextmanager
def platform_errors(url: str) -> Iterator[None]:
    """Raise what the platform at `url` says as an error of the catalogue.

    Raises:
        FleetError: `platform_unreachable`, `key_refused`, or `argument_invalid` for a request that it refuses.
    """
    try:
        yield
    except AccessDeniedError as error:
        raise FleetError("key_refused", f"the platform {url} answers {error}") from error
    except (TransientError, TimeoutError) as error:
        why = str(error) or f"{url} gave no answer within {FIRST_ANSWER_S:.0f} s"
        raise FleetError("platform_unreachable", why) from error
    except PlatformError as error:
        raise FleetError("argument_invalid", f"the platform {url} answers {error}") from error


@asynccontextmanager
async def redis_errors(url: str) -> AsyncIterator[None]:
    """Give Redis at `url` seconds for what the block asks, and raise what goes wrong as an error of the catalogue.

    Raises:
        FleetError: `redis_unreachable`.
    """
    try:
        async with asyncio.timeout(FIRST_ANSWER_S):
            yield
    except (RedisError, OSError) as error:
        why = "it gave no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise FleetError("redis_unreachable", f"Redis at {place(url)}: {why}") from error


async def check_platform(url: str, key: str) -> None:
    """Check that the platform answers and takes the key.

    Raises:
        FleetError: `platform_unreachable` or `key_refused`.
    """
    async with PlatformClient(url, key) as client:
        with platform_errors(url):
            async with asyncio.timeout(FIRST_ANSWER_S):
                await client.me()


async def check_redis(url: str) -> None:
    """Check that Redis answers.

    Raises:
        FleetError: `redis_unreachable`.
    """
    store = Store(url, "")
    try:
        async with redis_errors(url):
            await store.redis.ping()
    finally:
        await store.close()


def place(redis_url: str) -> str:
    """Return where a Redis is, without its credentials."""
    parts = urlsplit(redis_url)
    return parts.netloc.rpartition("@")[2] or parts.path
