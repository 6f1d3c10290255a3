"""Find the API keys. A key is returned to the caller and shown to nobody: no error quotes one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fleet.errors import ConfigError
from fleet.signing import KEY_MIN_BYTES
from fleet.yamlfile import read_yaml

#: Where `blobhub login` keeps profiles, below a user's home.
CREDENTIALS_FILE = Path(".blobhub/credentials.yaml")

#: Mode bits that let the group or others at a file.
_EXPOSED = 0o077

#: A key goes into an HTTP header, so it is visible ASCII.
_KEY = re.compile(r"[\x21-\x7e]+")


def api_key(env: Mapping[str, str], home: Path) -> str:
    """Return the worker's key: BLOBHUB_API_KEY, else the file of BLOBHUB_API_KEY_FILE, else a profile of `home`.

    `home` is the user's home folder. The profile is BLOBHUB_PROFILE, else what the file's `default` names, else the one
    called `default`.

    Raises:
        ConfigError: `key_missing`, `credentials_exposed` or `config_invalid`.
    """
    key = _from_environment(env, "BLOBHUB_API_KEY")
    return key if key is not None else _from_profile(home / CREDENTIALS_FILE, env.get("BLOBHUB_PROFILE") or None)


def person_key(env: Mapping[str, str]) -> str | None:
    """Return a person's key, FLEET_PERSON_API_KEY or the file of FLEET_PERSON_API_KEY_FILE; None when neither is set.

    What is posted with the worker's key is the worker's own echo and never reaches an agent (protocol §3, self-filter),
    so a person who posts needs another.

    Raises:
        ConfigError: `key_missing` or `config_invalid`.
    """
    return _from_environment(env, "FLEET_PERSON_API_KEY")


def signing_key(env: Mapping[str, str]) -> str | None:
    """Return the fleet's signing key, FLEET_SIGNING_KEY or the file of FLEET_SIGNING_KEY_FILE; None: nothing is signed.

    Raises:
        ConfigError: `signing_key_invalid`.
    """
    try:
        key = _from_environment(env, "FLEET_SIGNING_KEY")
    except ConfigError as error:
        raise ConfigError("signing_key_invalid", error.detail) from None
    if key is not None and len(key) < KEY_MIN_BYTES:
        raise ConfigError(
            "signing_key_invalid", f"the signing key has {len(key)} characters, {KEY_MIN_BYTES} are the least"
        )
    return key


def _from_environment(env: Mapping[str, str], variable: str) -> str | None:
    if env.get(variable):
        return _checked(env[variable], variable)
    file_variable = f"{variable}_FILE"
    if not env.get(file_variable):
        return None
    file = Path(env[file_variable])
    try:
        # No look at its mode: container runtimes mount secrets readable by all.
        text = file.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError("key_missing", f"{file_variable}: {file} can't be read: {error.strerror}") from None
    return _checked(text, f"{file_variable}: {file}")


def _from_profile(file: Path, wanted: str | None) -> str:
    try:
        mode = file.stat().st_mode
    except OSError:
        raise ConfigError("key_missing", f"neither BLOBHUB_API_KEY nor {file} is there") from None
    if mode & _EXPOSED:
        raise ConfigError("credentials_exposed", f"{file} has mode {mode & 0o777:o}")
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise ConfigError("config_invalid", f"{file}: must be a mapping of profiles")
    profiles = content["profiles"] if isinstance(content.get("profiles"), dict) else content
    name = wanted or (content["default"] if isinstance(content.get("default"), str) else "default")
    profile = profiles.get(name)
    key = profile.get("api_key") if isinstance(profile, dict) else None
    # A name out of the file is not quoted: who misread the format has written a key there.
    source = f"{file}: profile {wanted!r}" if wanted else f"{file}: the default profile"
    if not isinstance(key, str):
        raise ConfigError("key_missing", f"{source} has no api_key")
    return _checked(key, source)


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not key:
        raise ConfigError("key_missing", f"{source} is empty")
    if not _KEY.fullmatch(key):
        raise ConfigError("config_invalid", f"{source} has a character that no key has")
    return key
