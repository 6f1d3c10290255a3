"""`fleet.yaml` and the environment become one validated, frozen object.

A null or an empty string means "not set" everywhere: the key takes its default. The keys `polling`, `concurrency`,
`agents`, `sections`, `policy` and `attachments` mean what they mean in a `blobhub-worker` `config.yaml`, so such a
file works as it is.
"""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import SplitResult, urlsplit

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
from fleet.envelope import AgentBlock
from fleet.errors import ConfigError, ThreadFailedError
from fleet.events import Permissions
from fleet.yamlfile import read_yaml

#: Agent types that need no configuration. `scripted` exists only where the file has it.
_ALWAYS = ("claude_code", "codex")

#: Where the configuration is when neither an argument nor FLEET_CONFIG says so.
DEFAULT_FILE = Path("fleet.yaml")

#: Characters of a wrong value that an error shows.
SHOWN_VALUE = 80

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
        raise ValueError(f"unknown agent type; {_allowed(text, (*_ALWAYS, 'scripted'))}")
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


def _url(text: str) -> SplitResult | None:
    """Return the parts of a URL, None for what is none. urllib's own errors would quote the credentials."""
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises for a bad port
    except ValueError:
        return None
    return parts


def _platform_url(text: str) -> str:
    url = _url(text)
    if not url or url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc or url.query:
        raise ValueError("must be an http:// or https:// URL without credentials or a query")
    return text.rstrip("/")


def _redis_url(text: str) -> str:
    url = _url(text)
    if not url or not (url.hostname if url.scheme in {"redis", "rediss"} else url.scheme == "unix" and url.path):
        raise ValueError("must be a redis://, rediss:// or unix:// URL")
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
    """Where the BlobHub platform is."""

    url: Annotated[str, AfterValidator(_platform_url)] = "https://api.blobhub.io/v1"


class RedisConfig(_Group):
    """Where Redis is; without `url` the fleet embeds one. `namespace` begins every key."""

    url: Annotated[str, AfterValidator(_redis_url)] | None = Field(default=None, repr=False)
    namespace: Name = "fleet"


class PollingConfig(_Group):
    """How often the platform is asked, and how often threads are compared with the record (`resync_s`)."""

    interval_idle_ms: Milliseconds = 1500
    interval_active_ms: Milliseconds = 1000
    backoff_max_ms: Milliseconds = 30_000
    resync_s: Annotated[Seconds, Field(ge=0.1)] = 60


class ConcurrencyConfig(_Group):
    """Turns at once on one host, and in one work folder (0 = no limit)."""

    max_agents: Annotated[Int, Field(ge=1, le=256)] = 4
    per_work_folder: Annotated[Int, Field(ge=0, le=256)] = 0


class HostConfig(_Group):
    """A machine: the roots of its work folders; `max_agents` wins over `concurrency.max_agents`."""

    work_folders: tuple[Annotated[str, AfterValidator(_absolute)], ...]
    max_agents: Annotated[Int, Field(ge=1, le=256)] | None = None


class AgentConfig(_Group):
    """Settings of one agent type.

    `wait` and `hold_s` (seconds): whether and for how long an open prompt keeps the agent's process. `turn_retries`:
    protocol §3.7. `env` is added to the agent's environment. `script` belongs to the scripted agent alone; a relative
    one is resolved against the configuration's folder.
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
    """The machine owner's policy, which no thread can relax (protocol §4). `fleet.policy` reads `rules`."""

    allow_autonomous: Bool = True
    rules: tuple[dict[str, Any], ...] = ()


class AttachmentsConfig(_Group):
    """Where attachments are put, relative to the work folder, unless the thread says otherwise."""

    inbox: Annotated[str, AfterValidator(_inside)] = ".blobhub/inbox"


class ArtifactsConfig(_Group):
    """How artifacts are uploaded: as session objects (text alone) or as session files (current platform)."""

    upload: Literal["object", "file"] = "object"


class ItemsConfig(_Group):
    """Bytes of `json.dumps(item)` that one thread item may have (protocol §4, budget), and of a `thread.log`."""

    budget_bytes: Annotated[Int, Field(ge=8192, le=5 * 1024 * 1024)] = 350_000
    log_bytes: Annotated[Int, Field(ge=64 * 1024)] = 64 * 1024 * 1024


class TurnsConfig(_Group):
    """A turn's lease, grace at shutdown, attempts, and the grace of its agent between SIGTERM and SIGKILL."""

    lease_s: Annotated[Seconds, Field(ge=0.2)] = 15
    shutdown_grace_s: Seconds = 20
    attempts: Annotated[Int, Field(ge=1, le=100)] = 3
    stop_grace_s: Annotated[Seconds, Field(le=10)] = 0.3


class SessionConfig(_Group):
    """One session, or the part of it whose aliases begin with `session_prefix`."""

    org_id: PlatformId
    blob_id: PlatformId
    revision_id: PlatformId
    session_id: PlatformId
    session_prefix: Annotated[str, AfterValidator(_session_prefix)] = ""


class SectionConfig(_Group):
    """A session that the fleet serves. Without a `name` it is called by its session's id."""

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
            "config_invalid", f"{file}: is {_shown(data)}, must be a mapping of {_joined(_keys(FleetConfig))}"
        )
    sources = _override(data, env)
    if not data.get("hosts"):
        data["hosts"] = {read_environment(env).host: {"work_folders": ["/"]}}
    try:
        config = FleetConfig.model_validate(data, context={"folder": file.absolute().parent})
    except ValidationError as error:
        lines = list(_lines(error, str(file), sources))
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
            "config_invalid", f"environment: FLEET_HOST: is {_shown(host)}, must be 1 to 64 of A-Z, a-z, 0-9, _ and -"
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
            "AGENT_TYPE_UNSUPPORTED", f"agent.type is {_shown(agent.type)}; supported: {_joined(config.agents)}"
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


def _lines(error: ValidationError, file: str, sources: Mapping[str, str]) -> Iterator[str]:
    """Say each error in one line: where, which key, what is wrong with which value, what is allowed."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":  # follows from another error of the same section
            continue
        loc = detail["loc"]
        variable = sources.get(_dotted(loc))
        where = f"environment: {variable}" if variable else f"{file}: {_dotted(loc)}"
        yield f"{where}: {_what_is_wrong(detail['type'], detail['msg'], loc, detail['input'])}"


def _what_is_wrong(kind: str, message: str, loc: tuple[int | str, ...], value: object) -> str:
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return f"unknown key; {_allowed(str(loc[-1]), _keys(_group_at(loc[:-1])))}"
    if kind == "invalid_key":
        return "is no string; quote the key"
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    message = re.sub(r"a valid (tuple|list)", "a list", re.sub(r"a valid dictionary.*", "a mapping", message))
    # A key is already named by its place; an agent's variables and Redis's URL hold secrets.
    hidden = "[key]" in loc or "env" in loc or loc == ("redis", "url")
    return message if hidden else f"is {_shown(value)}, {message}"


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part != "[key]")
    return text.removeprefix(".").replace("\n", "\\n")


def _group_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the group that a place in the file belongs to, such as `("hosts", "alpha")`."""
    group: type[BaseModel] = FleetConfig
    for part in loc:
        if part in group.model_fields:
            annotation = group.model_fields[str(part)].annotation
            candidates = (annotation, *get_args(annotation))
            group = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), group)
    return group


def _keys(group: type[BaseModel]) -> list[str]:
    return list(group.model_fields)


def _allowed(word: str, words: Iterable[str]) -> str:
    """Return the allowed words, led by the one that was probably meant."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"allowed: {_joined(words)}"


def _joined(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _shown(value: object) -> str:
    """Return a wrong value for an error: short, on one line, without a URL's credentials and query."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)[:SHOWN_VALUE]
    text = re.sub(r"^([a-z+]+://)?.*@", r"\1***@", value, flags=re.DOTALL)
    text = re.sub(r"\?.*", "?***", text, flags=re.DOTALL) if "://" in text else text
    return repr(text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}…")


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
