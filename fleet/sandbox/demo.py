"""The stage of `fleet demo`: two repositories, the script of each agent, and the configuration of two hosts."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from fleet.envelope import Artifacts
from fleet.machine import free_port, module_child
from fleet.supervisor import Child

#: How often the demo's fleet looks at its section, in ms: what people watch should not lag.
INTERVAL_MS = 400
#: Seconds one git command may take.
GIT_TIMEOUT_S = 30

#: Commits with a name of their own, and nothing of this machine's git configuration.
_GIT_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "Demo",
    "GIT_AUTHOR_EMAIL": "demo@fleet.test",
    "GIT_COMMITTER_NAME": "Demo",
    "GIT_COMMITTER_EMAIL": "demo@fleet.test",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


@dataclass(frozen=True, slots=True)
class Story:
    """One thread of the demo: who does what, where."""

    host: str
    agent: str
    alias: str
    message: str
    repository: Path
    artifacts: Artifacts


@dataclass(frozen=True, slots=True)
class Stage:
    """What is ready to be played. `servers` must run before the fleet."""

    config: Path
    stories: tuple[Story, ...]
    servers: tuple[Child, ...]


def claude_executable() -> Path | None:
    """Return the CLI that comes with the Claude Code SDK; None where it is not installed."""
    sdk = importlib.util.find_spec("claude_agent_sdk")
    for folder in (sdk and sdk.submodule_search_locations) or ():
        bundled = Path(folder) / "_bundled" / "claude"
        if os.access(bundled, os.X_OK):
            return bundled
    return None


def build(folder: Path, environ: Mapping[str, str], claude: Path | None) -> Stage:
    """Make repositories, scripts and configuration in `folder`.

    `claude` is the real Claude Code; None: the scripted agent plays both stories.

    Raises:
        OSError: git is not there, or a file can't be written.
        subprocess.CalledProcessError: git refuses.
    """
    for host, commits in _data("repositories.yaml").items():
        _make_repository(folder / host / "repository", commits)
    stories = (
        Story(
            host="alpha",
            agent="claude_code" if claude else "scripted",
            alias="demo/durations",
            message="The tests of durations.py fail. Find out why, repair it, and put a short report into .out/fix.",
            repository=folder / "alpha" / "repository",
            artifacts=Artifacts("demo/durations/artifacts/", ".out/fix"),
        ),
        Story(
            host="beta",
            agent="scripted",
            alias="demo/changelog",
            message="Write the changelog entry for 1.4, and put an announcement into .out/release.",
            repository=folder / "beta" / "repository",
            artifacts=Artifacts("demo/changelog/artifacts/", ".out/release"),
        ),
    )
    script = _write(folder / "scripted.yaml", _data("scripted.yaml"))
    agents: dict[str, Any] = {"scripted": {"script": str(script), "permissions": "autonomous"}}
    servers: tuple[Child, ...] = ()
    if claude:
        model, url = _model(folder, stories[0].repository, environ)
        servers = (model,)
        agents["claude_code"] = _claude_settings(claude, folder / "agent", url, environ)
    config = {
        "hosts": {story.host: {"work_folders": [str(story.repository)], "max_agents": 1} for story in stories},
        "polling": {"interval_idle_ms": INTERVAL_MS, "interval_active_ms": INTERVAL_MS},
        "agents": agents,
    }
    return Stage(_write(folder / "fleet.yaml", config), stories, servers)


def changes(repository: Path) -> str:
    """Return `git diff --stat` of what was changed since the last commit."""
    return _git(repository, "diff", "--stat").rstrip()


def _make_repository(folder: Path, commits: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    _git(folder, "init", "-q")
    for commit in commits:
        for name, text in commit["files"].items():
            (folder / name).write_text(text, encoding="utf-8")
        _git(folder, "add", "--all")
        _git(folder, "commit", "-q", "-m", commit["message"])


def _git(folder: Path, *arguments: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=inherited | _GIT_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=GIT_TIMEOUT_S,
        check=True,
    )
    return done.stdout


def _model(folder: Path, repository: Path, environ: Mapping[str, str]) -> tuple[Child, str]:
    """Return the stand-in for the model's API and its URL."""
    script = _write(folder / "model.yaml", _filled(_data("model.yaml"), str(repository)))
    port = free_port()
    arguments = ("--script", str(script), "--port", str(port))
    return module_child("model", "fleet.sandbox.model_api", arguments, environ, folder), f"http://127.0.0.1:{port}"


def _claude_settings(claude: Path, home: Path, url: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return settings with which Claude Code talks to the stand-in alone and writes nowhere but into `home`."""
    home.mkdir(mode=0o700)
    # The tests that the agent runs are run by the Python that runs this.
    path = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', os.defpath)}"
    env = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "rehearsed",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "2",
        "CLAUDE_CODE_TMPDIR": str(home),
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "PATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(home),
        "no_proxy": "127.0.0.1",
    }
    return {"executable": str(claude), "permissions": "autonomous", "env": env}


def _data(name: str) -> Any:
    return yaml.safe_load(files("fleet.sandbox").joinpath("demo_files", name).read_text(encoding="utf-8"))


def _filled(value: Any, repository: str) -> Any:
    """Return `value` with the repository's path in place of `$repo`."""
    if isinstance(value, str):
        return value.replace("$repo", repository)
    if isinstance(value, list):
        return [_filled(each, repository) for each in value]
    if isinstance(value, dict):
        return {name: _filled(each, repository) for name, each in value.items()}
    return value


def _write(file: Path, content: Any) -> Path:
    file.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return file
