"""What files and environment say: the ground on which everything else is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fleet.config import DEFAULT_FILE, FleetConfig, load_config, read_environment
from fleet.credentials import CREDENTIALS_FILE, api_key, person_key, signing_key
from fleet.doctor.findings import Finding, of_error
from fleet.errors import CATALOGUE, ConfigError
from fleet.local import effective_environment, running

CONFIGURATION, KEY, PERSONS_KEY, SIGNING_KEY = "configuration", "API key", "person's key", "signing key"

#: Mode bits that let the group or others at a file.
_EXPOSED = 0o077


@dataclass(frozen=True, slots=True)
class Ground:
    """What is known without asking anybody.

    Parameters:
        serving: names of the hosts that this machine is.
        key, persons_key, signing_key: None where there is none, or none that can be used.
        key_source: where the key comes from.
    """

    environ: Mapping[str, str] = field(repr=False)
    config: FleetConfig
    serving: tuple[str, ...]
    key: str | None = field(repr=False)
    key_source: str
    persons_key: str | None = field(repr=False)
    signing_key: str | None = field(repr=False)

    @property
    def has_default_platform(self) -> bool:
        """Whether nobody says where the platform is."""
        return "url" not in self.config.platform.model_fields_set

    @property
    def embeds_platform(self) -> bool:
        """Whether this is a machine for `fleet up` that brings its own platform, with keys of its own."""
        return self.has_default_platform and self.key is None and self.config.redis.url is None


def read_ground(environ: Mapping[str, str]) -> tuple[Ground | None, list[Finding]]:
    """Read configuration, environment and keys. Without a configuration there is no ground."""
    home = Path.home()
    try:
        env = effective_environment(environ)
        config = load_config(None, env)
    except ConfigError as error:
        return None, [of_error(CONFIGURATION, error)]
    serving, host = _serving(config, env)
    key, no_key = _read(KEY, partial(api_key, env, home))
    persons_key, no_persons_key = _read(PERSONS_KEY, partial(person_key, env))
    signing, no_signing_key = _read(SIGNING_KEY, partial(signing_key, env))
    ground = Ground(env, config, serving, key, _source(env, home), persons_key, signing)
    findings = [
        _configuration(config, env, ground),
        host,
        _credentials_file(home),
        None if ground.embeds_platform else no_key,
        no_persons_key,
        no_signing_key or _signing(signing),
    ]
    return ground, [finding for finding in findings if finding is not None]


def _configuration(config: FleetConfig, env: Mapping[str, str], ground: Ground) -> Finding:
    file = env.get("FLEET_CONFIG") or DEFAULT_FILE
    detail = f"{file}: hosts {', '.join(config.hosts)}; sections {', '.join(s.name for s in config.sections) or 'none'}"
    if config.sections or ground.embeds_platform:
        return Finding(CONFIGURATION, "ok", detail)
    return Finding(CONFIGURATION, "warning", f"{detail}: the fleet serves nobody", "add the session to `sections`")


def _serving(config: FleetConfig, env: Mapping[str, str]) -> tuple[tuple[str, ...], Finding]:
    environment = read_environment(env)
    up = running(environment.home)
    if up is not None and up.config == env.get("FLEET_CONFIG"):
        return tuple(config.hosts), Finding("this machine", "ok", f"`fleet up` runs all hosts, in {environment.home}")
    if environment.host in config.hosts:
        return (environment.host,), Finding("this machine", "ok", f"is host {environment.host}")
    detail = f"is called {environment.host}, which is no host of the configuration: {', '.join(config.hosts)}"
    return (), Finding("this machine", "problem", detail, CATALOGUE["host_unknown"].remedy)


def _read(subject: str, read: Callable[[], str | None]) -> tuple[str | None, Finding | None]:
    """Read a key; one that is needed and missing, or can't be used, is a finding."""
    try:
        return read(), None
    except ConfigError as error:
        return None, of_error(subject, error)


def _signing(key: str | None) -> Finding:
    if key is None:
        return Finding(SIGNING_KEY, "ok", "none is set: whoever can write to Redis is trusted, on all machines alike")
    return Finding(SIGNING_KEY, "ok", "is set; all machines of the fleet need the same")


def _source(env: Mapping[str, str], home: Path) -> str:
    """Return where `fleet.credentials.api_key` takes the key from."""
    if env.get("BLOBHUB_API_KEY"):
        return "BLOBHUB_API_KEY"
    if file := env.get("BLOBHUB_API_KEY_FILE"):
        return f"BLOBHUB_API_KEY_FILE, {file}"
    return str(home / CREDENTIALS_FILE)


def _credentials_file(home: Path) -> Finding | None:
    """Return who can read the credentials file, when there is one, also where its key is not used."""
    file = home / CREDENTIALS_FILE
    try:
        mode = file.stat().st_mode & 0o777
    except OSError:
        return None
    if mode & _EXPOSED:
        return Finding(
            "credentials file", "problem", f"{file} has mode {mode:o}: others can read it", f"chmod 600 {file}"
        )
    return Finding("credentials file", "ok", f"{file} is for its owner alone")
