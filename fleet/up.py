"""A whole fleet on one machine: what the configuration and the environment don't bring is embedded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from fleet.config import DEFAULT_FILE, FleetConfig, SectionConfig, SessionConfig, load_config, read_environment
from fleet.credentials import api_key, signing_key
from fleet.local import Up, claimed, without_keys, write_private
from fleet.machine import beat_child, child_environment, free_port, host_children, module_child
from fleet.reach import check_platform, check_redis
from fleet.sandbox.redis_server import INHERITED, answers, find_redis_server, prepare_redis
from fleet.supervisor import Child

#: Name of the section that the embedded platform brings.
SECTION = "demo"


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet that is ready to be started.

    Parameters:
        config: in force, with the URLs of what is embedded.
        groups: the children, for a supervisor.
        environ: what all children share.
    """

    config: FleetConfig
    up: Up
    home: Path
    groups: list[list[Child]]
    environ: Mapping[str, str] = field(repr=False)
    embeds_redis: bool
    embeds_platform: bool

    @property
    def logs(self) -> Path:
        """The folder of the children's logs."""
        return self.home / "logs"


@contextmanager
def planned(file: Path | None, environ: Mapping[str, str]) -> Iterator[Plan]:
    """Check everything, then hold the FLEET_HOME of `environ` and what is to be started, while the block runs.

    Nothing is started here, and nothing written before all checks have passed.

    Raises:
        FleetError: `config_*`, `key_*`, `signing_key_invalid`, `credentials_exposed`, `redis_*`,
            `platform_unreachable`; `argument_invalid` when a fleet is up there.
    """
    source = (file or Path(environ.get("FLEET_CONFIG") or DEFAULT_FILE)).expanduser().absolute()
    config = load_config(source, environ)
    home = read_environment(environ).home
    embeds_redis = config.redis.url is None
    embeds_platform = "url" not in config.platform.model_fields_set
    _check(config, source, environ, embeds_redis=embeds_redis, embeds_platform=embeds_platform)
    with ExitStack() as stack:
        stack.enter_context(claimed(home))
        servers: list[Child] = []
        if embeds_redis:
            child, config = _embedded_redis(config, home, environ)
            stack.callback(os.close, child.pass_fds[0])
            servers.append(child)
        config_file, worker_key, person_key = source, None, None
        if embeds_platform:
            child, config, worker_key, person_key = _embedded_platform(config, home, environ)
            servers.append(child)
            config_file = _effective(config, source, home)
        shared = child_environment(config, config_file, home, environ, worker_key_file=worker_key)
        up = Up(
            pid=os.getpid(),
            source=str(source),
            config=str(config_file),
            platform_url=config.platform.url,
            redis_url=str(config.redis.url),
            worker_key_file=str(worker_key) if worker_key else None,
            person_key_file=str(person_key) if person_key else None,
        )
        groups = [servers, *_workers(config, shared, home)]
        yield Plan(config, up, home, groups, shared, embeds_redis, embeds_platform)


def _check(
    config: FleetConfig, source: Path, environ: Mapping[str, str], *, embeds_redis: bool, embeds_platform: bool
) -> None:
    signing_key(environ)
    if embeds_redis:
        find_redis_server()
    else:
        asyncio.run(check_redis(str(config.redis.url)))
    if not embeds_platform:
        asyncio.run(check_platform(config.platform.url, api_key(environ, Path.home())))


def _workers(config: FleetConfig, environ: Mapping[str, str], home: Path) -> list[list[Child]]:
    """Return beat and the workers for short work, then those for turns, which so are the first to end."""
    short, turns = [beat_child(environ, home)], []
    for host in config.hosts:
        own_home = home / "hosts" / host
        io, long = host_children(config, {**environ, "FLEET_HOME": str(own_home)}, host)
        short.append(io)
        turns.append(long)
    return [short, turns]


def _embedded_redis(config: FleetConfig, home: Path, environ: Mapping[str, str]) -> tuple[Child, FleetConfig]:
    prepared = prepare_redis(home / "redis")
    inherited = {name: environ[name] for name in INHERITED if name in environ}
    child = Child("redis", prepared.argv, inherited, ready=lambda: answers(prepared.url), pass_fds=(prepared.lock_fd,))
    return child, config.model_copy(update={"redis": config.redis.model_copy(update={"url": prepared.url})})


def _embedded_platform(
    config: FleetConfig, home: Path, environ: Mapping[str, str]
) -> tuple[Child, FleetConfig, Path, Path]:
    """Return the platform, the configuration that uses it, and the files of the worker's and the person's key."""
    # Only here: the server's own modules take longer to import than all the rest.
    from fleet.sandbox import platform_server as server

    data = home / "platform"
    port = free_port()
    data.mkdir(mode=0o700, exist_ok=True)
    worker_key, person_key = write_key_files(data)
    arguments = ("--data", str(data), "--port", str(port))
    child = module_child("platform", server.__name__, arguments, without_keys(environ), data)
    session = SessionConfig(
        org_id=server.ORG_ID, blob_id=server.BLOB_ID, revision_id=server.REVISION_ID, session_id=server.SESSION_ID
    )
    changes = {
        "platform": config.platform.model_copy(update={"url": f"http://127.0.0.1:{port}"}),
        "sections": config.sections or (SectionConfig(name=SECTION, session=session),),
    }
    return child, config.model_copy(update=changes), worker_key, person_key


def write_key_files(data: Path) -> tuple[Path, Path]:
    """Write the keys of the embedded platform in `data` to a file each: the worker's and the person's."""
    from fleet.sandbox.platform_server import load_keys

    keys = load_keys(data)
    files = data / "worker.key", data / "person.key"
    for file, key in zip(files, (keys.worker, keys.person), strict=True):
        write_private(file, f"{key}\n")
    return files


def _effective(config: FleetConfig, source: Path, home: Path) -> Path:
    """Write the configuration in force to a file of its own."""
    file = home / "fleet.yaml"
    text = yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False)
    write_private(file, f"# {source} with the parts that `fleet up` brought; written anew by each start.\n{text}")
    return file
