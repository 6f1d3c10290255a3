"""`fleet up`, `fleet host`, `fleet beat` and `fleet platform`: the commands that run something."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from fleet.cli.options import config_option, found_config, make_console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet.config import FleetConfig
    from fleet.up import Plan

verbose_option = click.option("--verbose", is_flag=True, help="Show what the processes log, too.")


@click.command()
@config_option
@verbose_option
def up(config_file: Path | None, verbose: bool) -> int:
    """Run a whole fleet on this machine, until Ctrl-C.

    Beat, and two workers for every host of the configuration. Redis and the platform are embedded unless the
    environment or the configuration says where they are.
    """
    from fleet.local import announced
    from fleet.supervisor import Supervisor
    from fleet.up import planned

    console = make_console()
    with planned(config_file, os.environ) as plan:
        console.print(f"Starting {', '.join(plan.config.hosts)}; logs in {plan.logs}", soft_wrap=True, highlight=False)
        with announced(plan.home, plan.up):
            return Supervisor(plan.groups, plan.logs, verbose=verbose).run(on_ready=lambda: _say_up(plan))


def _say_up(plan: Plan) -> None:
    from fleet.reach import place

    config = plan.config
    rows = [
        ("platform", f"{config.platform.url}{' (embedded)' if plan.embeds_platform else ''}"),
        ("redis", f"{place(str(config.redis.url))}{' (embedded)' if plan.embeds_redis else ''}"),
        *(("section", f"{section.name}, session {section.session.session_id}") for section in config.sections),
        *(("host", f"{name}: {', '.join(host.work_folders)}") for name, host in config.hosts.items()),
        ("logs", str(plan.logs)),
    ]
    if not config.sections:
        rows.append(("section", "none is configured: the fleet serves nobody"))
    if plan.embeds_platform and os.environ.get("BLOBHUB_API_KEY"):
        rows.append(("note", "BLOBHUB_API_KEY is not used; for the real platform set BLOBHUB_API_URL too"))
    console = make_console()
    console.print("[bold green]The fleet is up.[/] Ctrl-C ends it.")
    for name, text in rows:
        console.print(f"  [bold]{name:9}[/]", end="")
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    console.print("In another terminal:")
    for line in (*shell_exports(plan.home), *hints(config)):
        console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)


def shell_exports(home: Path) -> list[str]:
    """Return the lines that let another terminal find the fleet in `home`: none where it would anyway."""
    import shlex
    import shutil

    from fleet.config import read_environment

    lines = []
    if read_environment({"FLEET_HOST": "any"}).home != home:
        lines.append(f"export FLEET_HOME={shlex.quote(str(home))}")
    programs = Path(sys.executable).parent
    if Path(shutil.which("celery") or "").parent != programs:
        lines.append(f'export PATH={shlex.quote(str(programs))}:"$PATH"')
    return lines


def hints(config: FleetConfig) -> Sequence[str]:
    """Return commands that are worth knowing."""
    session = config.sections[0].session.session_id if config.sections else "SESSION"
    return (
        "fleet status --watch",
        'fleet thread new ALIAS --work-folder DIR --message "..."',
        "fleet thread tail ALIAS",
        f"""celery -A fleet call fleet.activate --args '["{session}", "ALIAS"]' --kwargs '{{"force": true}}'""",
    )


@click.command()
@click.argument("name", required=False)
@click.option(
    "--only",
    type=click.Choice(["io", "turns"]),
    help="Become this one worker, which logs to stderr: for containers and init systems.",
)
@config_option
@verbose_option
def host(name: str | None, only: str | None, config_file: Path | None, verbose: bool) -> int:
    """Run the two workers of this machine, called NAME or FLEET_HOST, until Ctrl-C."""
    from fleet.config import read_environment
    from fleet.errors import ConfigError
    from fleet.machine import host_children
    from fleet.supervisor import Supervisor

    config, environ = found_config(config_file)
    if name:
        environ["FLEET_HOST"] = name
    environment = read_environment(environ)
    if environment.host not in config.hosts:
        known = ", ".join(config.hosts) or "none"
        raise ConfigError("host_unknown", f"{environment.host!r} is no host of the configuration; configured: {known}")
    shared = _checked(config, environ)
    shared["FLEET_HOME"] = str(environment.home)
    io, turns = host_children(config, shared, environment.host)
    if only:
        worker = {"io": io, "turns": turns}[only]
        # Without the child's own FLEET_READY_FILE: whoever starts the worker chooses where that is.
        _become(worker.argv, {**shared, "FLEET_HOST": environment.host})
    console = make_console()

    def say_up() -> None:
        console.print(f"[bold green]Host {environment.host} is up.[/] Ctrl-C ends it.", highlight=False)

    return Supervisor([[io, turns]], environment.home / "logs", verbose=verbose).run(on_ready=say_up)


@click.command()
@config_option
def beat(config_file: Path | None) -> None:
    """Run the scheduler, until Ctrl-C. A spare one on another machine does no harm."""
    from fleet.config import read_environment
    from fleet.machine import beat_command

    config, environ = found_config(config_file)
    shared = _checked(config, environ)
    home = read_environment(environ).home
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _become(beat_command(home), shared)


def _become(command: tuple[str, ...], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `command`: signals and the exit status are the command's own."""
    os.execve(command[0], command, environ)  # noqa: S606 - no shell is the point


def _checked(config: FleetConfig, environ: dict[str, str]) -> dict[str, str]:
    """Check that Redis and the platform can be used; return the environment of a process that uses them.

    Raises:
        FleetError: what is wrong.
    """
    import asyncio

    from fleet.credentials import api_key, signing_key
    from fleet.errors import ConfigError
    from fleet.reach import check_platform, check_redis

    if config.redis.url is None:
        raise ConfigError("config_invalid", "neither FLEET_REDIS_URL nor redis.url says where Redis is")
    key = api_key(environ, Path.home())
    signing_key(environ)
    asyncio.run(check_redis(config.redis.url))
    asyncio.run(check_platform(config.platform.url, key))
    return environ


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help="Folder for data and keys; default: FLEET_HOME/platform.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; 0 is any free one.")
def platform(data: Path | None, host: str, port: int) -> None:
    """Run the embedded platform alone, until Ctrl-C."""
    from fleet.config import read_environment
    from fleet.machine import free_port
    from fleet.sandbox import platform_server as server
    from fleet.up import write_key_files

    data = (data or read_environment(os.environ).home / "platform").absolute()
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    worker_key, person_key = write_key_files(data)
    port = port or free_port()
    lines = (
        f"export BLOBHUB_API_URL=http://127.0.0.1:{port}",
        f"export BLOBHUB_API_KEY_FILE={worker_key}",
        f"export FLEET_PERSON_API_KEY_FILE={person_key}",
        "# sections:",
        f"# - session: {{org_id: {server.ORG_ID}, blob_id: {server.BLOB_ID}, "
        f"revision_id: {server.REVISION_ID}, session_id: {server.SESSION_ID}}}",
    )
    click.echo("\n".join(lines))
    sys.stdout.flush()
    server.main.main(["--data", str(data), "--host", host, "--port", str(port)], standalone_mode=False)
