"""`fleet.yaml` and the environment become one validated, frozen object.

A null or an empty string means "not set" everywhere: the key takes its default. The keys `polling`, `concurrency`,
`agents`, `sections`, `policy` and `attachments` mean what they mean in a `blobhub-worker` `config.yaml`, so such a
file works as it is.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fleet.aliases import is_alias_prefix, is_id
from fleet.config_errors import allowed, joined, keys, problems, shown
from fleet.envelope import AgentBlock
from fleet.errors import ConfigError, ThreadFailedError
from fleet.events import Permissions
from fleet.urls import platform_url, redis_url
from fleet.yamlfile import read_yaml

#: Agent types that need no configuration. `scripted` exists only where the file has it.
_ALWAYS = ("claude_code", "codex")

#: Where the configuration is when neither an argument nor FLEET_CONFIG says so.
DEFAULT_FILE = Path("fleet.yaml")

#: Environment variable → the key that it overrides.
_OVERRIDES: dict[str, tuple[str, str]] = {"BLOBHUB_API_URL": ("platform", "url"), "FLEET_REDIS_URL": ("redis", "url")}

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("must be 1 to 64 of A-Z, a-z, 0-9, _ and -")
    return text


def _agent_type(text: str) -> str:
    if text not in (*_ALWAYS, "scripted"):
        raise ValueError(f"unknown agent type; {allowed(text, (*_ALWAYS, 'scripted'))}")
    return text


def _variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        raise ValueError("must be the name of an environment variable: A-Z, a-z, 0-9 and _")
    return text


def _variable_value(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL")
    return text


def _label(text: str) -> str:
    if len(text) > 128 or not text.isprintable():
        raise ValueError("must be at most 128 printable characters")
    return text


def _platform_id(text: str) -> str:
    if not is_id(text):
        raise ValueError("must be 1 to 128 of A-Z, a-z, 0-9, ., _ and -")
    return text


def _session_prefix(text: str) -> str:
    if not is_alias_prefix(text):
        raise ValueError("must be the beginning of an alias: segments of A-Z, a-z, 0-9, ., _, @ and -, separated by /")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError("must be an absolute path")
    return text


def _inside(text: str) -> str:
    if text.startswith("/") or ".." in text.split("/") or "\0" in text:
        raise ValueError("must be a path relative to the work folder, without ..")
    return text


Name = Annotated[str, AfterValidator(_name)]
PlatformId = Annotated[str, AfterValidator(_platform_id)]
#: YAML's `true` would otherwise pass as 1, and "4" as 4.
Int = Annotated[int, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Milliseconds = Annotated[int, Field(strict=True, ge=50, le=3_600_000)]
#: Up to a day.
Seconds = Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)]


class _Group(BaseModel):
    """A mapping of the file with a fixed set of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_empty(cls, data: object) -> object:
        if data is None:
            return {}
        if not isinstance(data, Mapping):
            return data
        return {k: v for k, v in data.items() if k not in cls.model_fields or (v is not None and v != "")}


class PlatformConfig(_Group):
    """Where the BlobHub platform is.

    Attributes:
        url: its API. `fleet up` embeds a platform when neither this key nor BLOBHUB_API_URL is set.
    """

    url: Annotated[str, AfterValidator(platform_url)] = "https://api.blobhub.io/v1"


class RedisConfig(_Group):
    """Where Redis is. `fleet up` embeds one when neither `url` nor FLEET_REDIS_URL is set.

    Attributes:
        url: `redis://`, `rediss://` (TLS), `unix://`, `sentinel://` or `sentinels://` (TLS), with the password in it.
        namespace: beginning of every key and queue name; fleets that share a Redis need different ones.
    """

    url: Annotated[str, AfterValidator(redis_url)] | None = Field(default=None, repr=False)
    namespace: Name = "fleet"


class PollingConfig(_Group):
    """How often the platform is asked.

    Attributes:
        interval_idle_ms: ms between two looks at a section in which nothing is under way.
        interval_active_ms: the same while a thread has something under way; more than 1000 counts as 1000.
        backoff_max_ms: ms of the longest pause while the platform does not answer.
        resync_s: seconds between two comparisons of all threads with what the fleet knows of them.
    """

    interval_idle_ms: Milliseconds = 1500
    interval_active_ms: Milliseconds = 1000
    backoff_max_ms: Milliseconds = 30_000
    resync_s: Annotated[Seconds, Field(ge=0.1)] = 60


class ConcurrencyConfig(_Group):
    """How many turns run at once.

    Attributes:
        max_agents: on one host.
        per_work_folder: in one work folder; 0 is no limit. Turns above it wait in line.
    """

    max_agents: Annotated[Int, Field(ge=1, le=256)] = 4
    per_work_folder: Annotated[Int, Field(ge=0, le=256)] = 0


class HostConfig(_Group):
    """A machine, under the name that its FLEET_HOST has.

    Attributes:
        work_folders: roots, as absolute paths. A thread's work folder belongs to the host with the longest match.
        max_agents: wins over `concurrency.max_agents`.
    """

    work_folders: tuple[Annotated[str, AfterValidator(_absolute)], ...]
    max_agents: Annotated[Int, Field(ge=1, le=256)] | None = None


class AgentConfig(_Group):
    """Settings of an agent type (`claude_code`, `codex`, `scripted`), for threads that do not say otherwise.

    Attributes:
        executable: a path, or a name on PATH; without it the CLI that the agent's package brings.
        model: passed through; empty leaves it to the agent.
        effort: passed through; empty leaves it to the agent.
        permissions: what the agent may do without asking.
        wait: whether an open question keeps the agent's process (`held`) or ends the turn at once (`parked`).
        hold_s: seconds for which a question is held before it is parked.
        turn_retries: how often a turn is resumed when the model's service fails for a moment (protocol §3.7).
        env: added to the agent's environment; the place for keys of model providers.
        script: what the scripted agent plays, and belongs to it alone. Relative to the folder of the configuration.
    """

    executable: str = ""
    model: str = ""
    effort: str = ""
    permissions: Permissions = "approval"
    wait: Literal["held", "parked"] = "held"
    hold_s: Seconds = 60
    turn_retries: Annotated[Int, Field(ge=0, le=20)] = 3
    env: dict[Annotated[str, AfterValidator(_variable)], Annotated[str, AfterValidator(_variable_value)]] = Field(
        default_factory=dict, repr=False
    )
    script: Path | None = None

    @field_validator("script", mode="after")
    @classmethod
    def _beside_the_configuration(cls, script: Path | None, info: ValidationInfo) -> Path | None:
        return info.context["folder"] / script if script and info.context else script


class PolicyConfig(_Group):
    """The machine owner's policy, which no thread can relax (protocol §4).

    Attributes:
        allow_autonomous: whether threads may have the permissions `autonomous`.
        rules: tried before a thread's own; docs/policy.md has their keys.
    """

    allow_autonomous: Bool = True
    rules: tuple[dict[str, Any], ...] = ()


class AttachmentsConfig(_Group):
    """Files that people attach to their messages.

    Attributes:
        inbox: where they are put, relative to the work folder, unless the thread says otherwise.
    """

    inbox: Annotated[str, AfterValidator(_inside)] = ".blobhub/inbox"


class ArtifactsConfig(_Group):
    """Files that a turn publishes.

    Attributes:
        upload: as session objects (text, 5 MiB less 64 KiB) or as session files (any, 4 MiB; needs a current platform).
    """

    upload: Literal["object", "file"] = "object"


class ItemsConfig(_Group):
    """Bounds of what is said (protocol §4, budget).

    Attributes:
        budget_bytes: of JSON in one thread item; longer ones are excerpted, and whole in `thread.log` alone.
        log_bytes: of a `thread.log` before it is rotated; three rotated ones are kept.
    """

    budget_bytes: Annotated[Int, Field(ge=8192, le=5 * 1024 * 1024)] = 350_000
    log_bytes: Annotated[Int, Field(ge=64 * 1024)] = 64 * 1024 * 1024


class TurnsConfig(_Group):
    """How turns are held, interrupted and ended.

    Attributes:
        lease_s: seconds without a renewal after which a turn counts as crashed.
        shutdown_grace_s: seconds that running turns get when a worker ends, before they are interrupted.
        attempts: interrupted attempts of one turn after which its thread fails with `AGENT_CRASHED`.
        stop_grace_s: seconds between SIGTERM and SIGKILL for an agent and all that it started.
    """

    lease_s: Annotated[Seconds, Field(ge=0.2)] = 15
    shutdown_grace_s: Seconds = 20
    attempts: Annotated[Int, Field(ge=1, le=100)] = 3
    stop_grace_s: Annotated[Seconds, Field(le=10)] = 0.3


class MetricsConfig(_Group):
    """The Prometheus endpoint of each host, `http://ADDRESS:PORT/metrics`. It asks nobody for a password.

    Attributes:
        port: where the host's worker for short work serves it; 0 is nowhere.
        address: on which it listens.
    """

    port: Annotated[Int, Field(ge=0, le=65_535)] = 0
    address: str = "127.0.0.1"


class LogsConfig(_Group):
    """How the workers and the scheduler log.

    Attributes:
        format: `json` is an object per line, `text` is for people; `auto` is `json` where the log goes into a pipe or a
            socket, as in containers and under systemd, and `text` on a terminal and in a file.
    """

    format: Literal["auto", "json", "text"] = "auto"


class SessionConfig(_Group):
    """One session, or the part of it whose aliases begin with `session_prefix`.

    Attributes:
        org_id: of the organisation that owns the blob.
        blob_id: of the blob that has the revision.
        revision_id: an id or `default`; a draft or a managed revision.
        session_id: an id or an alias.
        session_prefix: sections that share a session need prefixes of which none begins with another.
    """

    org_id: PlatformId
    blob_id: PlatformId
    revision_id: PlatformId
    session_id: PlatformId
    session_prefix: Annotated[str, AfterValidator(_session_prefix)] = ""


class SectionConfig(_Group):
    """A session that the fleet serves.

    Attributes:
        session: where it is on the platform.
        name: what commands and logs call it, up to 128 characters; default: the session's id.
        job_type: the only one there is.
    """

    session: SessionConfig
    name: Annotated[str, AfterValidator(_label)] = Field(default_factory=lambda known: known["session"].session_id)
    job_type: Literal["session_agent_harness"] = "session_agent_harness"


class FleetConfig(_Group):
    """The whole configuration.

    `agents` always has `claude_code` and `codex`, and has `scripted` only when the file does.
    """

    platform: PlatformConfig = PlatformConfig()
    redis: RedisConfig = RedisConfig()
    polling: PollingConfig = PollingConfig()
    concurrency: ConcurrencyConfig = ConcurrencyConfig()
    turns: TurnsConfig = TurnsConfig()
    hosts: dict[Name, HostConfig] = Field(default_factory=dict)
    agents: dict[Annotated[str, AfterValidator(_agent_type)], AgentConfig] = Field(
        default_factory=dict, validate_default=True
    )
    policy: PolicyConfig = PolicyConfig()
    attachments: AttachmentsConfig = AttachmentsConfig()
    artifacts: ArtifactsConfig = ArtifactsConfig()
    items: ItemsConfig = ItemsConfig()
    metrics: MetricsConfig = MetricsConfig()
    logs: LogsConfig = LogsConfig()
    sections: tuple[SectionConfig, ...] = ()

    @field_validator("agents", mode="after")
    @classmethod
    def _with_the_usual_agents(cls, agents: dict[str, AgentConfig]) -> dict[str, AgentConfig]:
        return {agent_type: AgentConfig() for agent_type in _ALWAYS} | agents


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment alone says about this machine."""

    home: Path
    host: str
    redis_url: str | None = field(default=None, repr=False)
    api_url: str | None = None


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """A thread's agent after all tiers were merged. `permissions` may still be a word that no agent knows."""

    type: str
    executable: str
    model: str
    effort: str
    permissions: str


def load_config(path: Path | None, env: Mapping[str, str]) -> FleetConfig:
    """Read `path`, else the file of FLEET_CONFIG, else `./fleet.yaml`.

    BLOBHUB_API_URL and FLEET_REDIS_URL win over the file. A file without `hosts` describes a single machine, this one,
    which owns every folder.

    Raises:
        ConfigError: `config_not_found`, or `config_invalid` with one line per wrong key.
    """
    file = path or Path(env.get("FLEET_CONFIG") or DEFAULT_FILE).expanduser()
    data = read_yaml(file)
    if not isinstance(data, dict):
        raise ConfigError(
            "config_invalid", f"{file}: is {shown(data)}, must be a mapping of {joined(keys(FleetConfig))}"
        )
    sources = _override(data, env)
    if not data.get("hosts"):
        data["hosts"] = {read_environment(env).host: {"work_folders": ["/"]}}
    try:
        config = FleetConfig.model_validate(data, context={"folder": file.absolute().parent})
    except ValidationError as error:
        lines = list(problems(error, FleetConfig, str(file), sources))
    else:
        lines = [f"{file}: {problem}" for problem in _contradictions(config)]
    if lines:
        raise ConfigError("config_invalid", "\n".join(lines))
    return config


def read_environment(env: Mapping[str, str]) -> Environment:
    """Read FLEET_HOME, FLEET_HOST, FLEET_REDIS_URL and BLOBHUB_API_URL.

    Raises:
        ConfigError: `config_invalid` when this machine's name can't be the name of a host.
    """
    host = env.get("FLEET_HOST") or socket.gethostname().partition(".")[0]
    if not _NAME.fullmatch(host):
        raise ConfigError(
            "config_invalid", f"environment: FLEET_HOST: is {shown(host)}, must be 1 to 64 of A-Z, a-z, 0-9, _ and -"
        )
    return Environment(
        home=Path(env.get("FLEET_HOME") or "~/.blobhub-fleet").expanduser().absolute(),
        host=host,
        redis_url=env.get("FLEET_REDIS_URL") or None,
        api_url=env.get("BLOBHUB_API_URL") or None,
    )


def resolve_agent_settings(agent: AgentBlock, config: FleetConfig) -> AgentSettings:
    """Merge, per field, the thread's `agent` block, the configuration and the defaults (protocol §2).

    Raises:
        ThreadFailedError: `AGENT_TYPE_UNSUPPORTED`.
    """
    configured = config.agents.get(agent.type)
    if configured is None:
        raise ThreadFailedError(
            "AGENT_TYPE_UNSUPPORTED", f"agent.type is {shown(agent.type)}; supported: {joined(config.agents)}"
        )
    return AgentSettings(
        type=agent.type,
        executable=agent.executable or configured.executable,
        model=agent.model or configured.model,
        effort=agent.effort or configured.effort,
        permissions=agent.permissions or configured.permissions,
    )


def _override(data: dict[Any, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Put the environment's values into `data`. Returns which dotted key came from which variable."""
    sources = {}
    for variable, (group, key) in _OVERRIDES.items():
        values = data.get(group) or {}
        if env.get(variable) and isinstance(values, dict):
            data[group] = {**values, key: env[variable]}
            sources[f"{group}.{key}"] = variable
    return sources


def _policy_problems(config: FleetConfig) -> Iterator[str]:
    """Check the words of the machine owner's rules. The parser of commands is imported only where there are rules."""
    from fleet.policy import parse_rules

    try:
        parse_rules(config.policy.rules, "worker")
    except ThreadFailedError as error:
        yield f"policy.rules: {error.detail}"


def _contradictions(config: FleetConfig) -> Iterator[str]:
    """Say what is wrong between keys that are right one by one."""
    for agent_type, agent in config.agents.items():
        if agent_type == "scripted" and not agent.script:
            yield "agents.scripted.script: is missing, the scripted agent plays a script"
        if agent_type != "scripted" and agent.script:
            yield f"agents.{agent_type}.script: only agents.scripted has a script"
    if config.policy.rules:
        yield from _policy_problems(config)
    for (i, one), (j, other) in combinations(enumerate(config.sections), 2):
        if one.name == other.name:
            yield f"sections[{j}].name: {other.name!r} is the name of sections[{i}] too; names must differ"
        if one.session.session_id == other.session.session_id:
            prefixes = (one.session.session_prefix, other.session.session_prefix)
            if prefixes[0].startswith(prefixes[1]) or prefixes[1].startswith(prefixes[0]):
                yield (
                    f"sections[{j}].session: section {other.name!r} (prefix {prefixes[1]!r}) and section {one.name!r} "
                    f"(prefix {prefixes[0]!r}) overlap in session {one.session.session_id}; "
                    "no thread may belong to two sections"
                )
