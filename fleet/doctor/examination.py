"""Everything that is looked at, and the looks at this machine itself: its folders and its agents."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fleet.doctor import services
from fleet.doctor.agents import agent_findings
from fleet.doctor.findings import Finding, Progress, of_error, side_by_side
from fleet.doctor.ground import CONFIGURATION, KEY, Ground, read_ground
from fleet.errors import CATALOGUE, FleetError
from fleet.redaction import Redactor, secrets_of
from fleet.sandbox.redis_server import find_redis_server

#: Seconds for the files that everything else follows from, and for all else, which is looked at together.
GROUND_S, LOOKS_S = 3.0, 8.0

Look = Callable[[], list[Finding]]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. `hangs`: a look is still under way, in a thread that may never end."""

    findings: tuple[Finding, ...]
    hangs: bool = False

    @property
    def ok(self) -> bool:
        """Whether there is no problem; warnings are none."""
        return all(finding.state != "problem" for finding in self.findings)


def examine(environ: Mapping[str, str], progress: Progress) -> Report:
    """Look at this machine, whose worker would run in `environ`. Takes 11 s at most."""
    first = side_by_side({CONFIGURATION: partial(read_ground, environ)}, GROUND_S, progress)[CONFIGURATION]
    if not first.done():
        detail = f"configuration, keys or FLEET_HOME could not be read within {GROUND_S:.0f} s"
        return Report((Finding(CONFIGURATION, "problem", detail, "look at the disk they are on"),), hangs=True)
    ground, findings = first.result()
    if ground is None:
        return Report(tuple(findings))
    futures = side_by_side(looks(ground), LOOKS_S, progress)
    for subject, future in futures.items():
        findings += outcome(subject, future)
    redactor = Redactor(secrets_of(ground.config, ground.key, ground.persons_key, ground.signing_key))
    # What services say about themselves is not ours, and may quote what they were sent.
    clean = (replace(finding, detail=redactor.text(finding.detail)) for finding in findings)
    return Report(tuple(clean), hangs=not all(future.done() for future in futures.values()))


def outcome(subject: str, future: Future[list[Finding]]) -> list[Finding]:
    """Return what a look found; that it hangs, or failed, is a finding too."""
    if not future.done():
        return [Finding(subject, "problem", f"no answer within {LOOKS_S:.0f} s", "look why it hangs")]
    try:
        return future.result()
    except FleetError as error:
        return [of_error(subject, error)]
    except Exception as error:
        return [
            Finding(subject, "problem", f"{type(error).__name__}: {error}", "report it: the doctor should know this")
        ]


def looks(ground: Ground) -> dict[str, Look]:
    """Return all that is looked at, by what it is, in the order of the report."""
    config = ground.config
    found: dict[str, Look] = {}
    if ground.key is not None:
        found[KEY] = _asking(partial(services.key_findings, ground, ground.key))
    if config.redis.url is None:
        found["Redis"] = _embedded_redis
    else:
        found["Redis"] = _asking(partial(services.redis_findings, ground))
    if ground.embeds_platform:
        found["platform"] = _embedded_platform
    else:
        found["platform"] = _asking(partial(services.platform_findings, ground))
    for section in config.sections if ground.key is not None else ():
        found[f"section {section.name}"] = _asking(partial(services.section_findings, ground, section))
    for root in dict.fromkeys(root for host in ground.serving for root in config.hosts[host].work_folders):
        found[f"root {root}"] = partial(root_findings, root)
    for agent_type, settings in config.agents.items() if ground.serving else ():
        found[f"agent {agent_type}"] = partial(agent_findings, agent_type, settings, ground.environ)
    return found


def _asking(ask: Callable[[], Coroutine[Any, Any, list[Finding]]]) -> Look:
    return lambda: asyncio.run(ask())


def _embedded_redis() -> list[Finding]:
    return [Finding("Redis", "ok", f"none is configured; `fleet up` brings its own, {find_redis_server()}")]


def _embedded_platform() -> list[Finding]:
    detail = "neither a platform nor a key is configured; `fleet up` brings a platform of its own"
    return [Finding("platform", "ok", detail)]


def root_findings(root: str) -> list[Finding]:
    """Look at a root of this host's work folders."""
    return list(_root(f"root {root}", Path(root)))


def _root(subject: str, root: Path) -> Iterator[Finding]:
    try:
        real = root.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or "leads in a circle"
        yield Finding(subject, "problem", f"can't be used: {why}", "create it, or correct hosts.NAME.work_folders")
        return
    leads = "" if real == root else f"; really {real}"
    if not real.is_dir():
        yield Finding(subject, "problem", f"is no directory{leads}", "correct hosts.NAME.work_folders")
    elif not os.access(real, os.R_OK | os.X_OK):
        yield Finding(subject, "problem", f"can't be read{leads}", CATALOGUE["WORK_FOLDER_NOT_READABLE"].remedy)
    else:
        yield Finding(subject, "ok", f"is a directory, and readable{leads}")
