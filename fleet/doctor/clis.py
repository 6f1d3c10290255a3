"""The agents' command lines on this machine: where each is, and whether its version is a tested one.

What is tested is what the fleet's own extras ask for (`pyproject.toml`); no agent is imported here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

#: Seconds that `--version` may take; the CLIs need a fifth of one on an idle machine.
VERSION_TIMEOUT_S = 5.0

#: The fleet's own distribution, whose extras name the packages of the agents.
FLEET = "blobhub-fleet"

_VERSION = re.compile(r"\b\d+\.\d+\.\d+\b")


@dataclass(frozen=True, slots=True)
class Package:
    """The package that brings an agent's CLI: its name, the extra to install it with, and the CLI's place in it.

    `is_sdk`: the adapter speaks through the package, and needs it also where another executable is configured. Else the
    package is the CLI alone, and has its version.
    """

    name: str
    extra: str
    cli: re.Pattern[str]
    is_sdk: bool


#: Agent type → its package. An agent that is not listed needs none.
PACKAGES: dict[str, Package] = {
    "claude_code": Package("claude-agent-sdk", "claude", re.compile(r"claude_agent_sdk/_bundled/claude"), is_sdk=True),
    "codex": Package("openai-codex-cli-bin", "codex", re.compile(r"codex_cli_bin/bin/codex"), is_sdk=False),
}


class CliError(Exception):
    """A CLI can't be used; the message says why."""


def installed_version(package: Package) -> str | None:
    """Return the version of a package that is installed here; None when it is not."""
    found = _distribution(package.name)
    return found.version if found else None


def bundled(package: Package) -> Path | None:
    """Return the CLI that an installed package brings."""
    found = _distribution(package.name)
    for file in (found and found.files) or ():
        if package.cli.fullmatch(file.as_posix()):
            return Path(str(file.locate()))
    return None


def tested(package: Package) -> SpecifierSet:
    """Return the versions of a package that the fleet's extra asks for; any, where the fleet does not say."""
    fleet = _distribution(FLEET)
    requirements = map(Requirement, (fleet and fleet.requires) or ())
    return next((each.specifier for each in requirements if each.name == package.name), SpecifierSet())


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def version_of(executable: str, env: Mapping[str, str]) -> str:
    """Return what an executable says to `--version`, such as 2.1.332.

    Raises:
        CliError: it is not there, can't be started, does not answer in time, or names no version.
    """
    path = shutil.which(executable, path=env.get("PATH"))
    if path is None:
        raise CliError(f"{executable} is not on PATH, or no executable file")
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                [path, "--version"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )
        except OSError as error:
            raise CliError(f"{path} can't be started: {error.strerror}") from error
        try:
            status = child.wait(VERSION_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CliError(f"{path} --version gave no answer within {VERSION_TIMEOUT_S:.0f} s") from None
        finally:
            _end(child)
        output.seek(0)
        found = _VERSION.search(output.read(4096).decode("utf-8", "replace"))
    if status != 0 or found is None:
        raise CliError(f"{path} --version names no version (status {status})")
    return found[0]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what is left of a child and of all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
