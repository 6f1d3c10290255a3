"""The reference of the configuration as a Markdown page, written from the models of `fleet.config`.

A model's docstring gives the words: its first line is about the group, its section `Attributes:` about the keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fleet.config import FleetConfig

Schema = Mapping[str, Any]

#: Variable → what it says. Those that other programs set for the fleet's processes are not here.
VARIABLES = {
    "FLEET_CONFIG": "the configuration file; default `./fleet.yaml`. The option `--config` wins",
    "FLEET_HOST": "this machine's name, one of `hosts`; default: the host name up to its first dot",
    "FLEET_HOME": "the state folder: logs, checkpoints, what is embedded; default `~/.blobhub-fleet`",
    "FLEET_REDIS_URL": "wins over `redis.url`",
    "BLOBHUB_API_URL": "wins over `platform.url`",
    "BLOBHUB_API_KEY": "the worker's API key",
    "BLOBHUB_API_KEY_FILE": "a file with the worker's API key, where BLOBHUB_API_KEY is not set",
    "BLOBHUB_PROFILE": "the profile in `~/.blobhub/credentials.yaml` that has the key, where neither of them is set",
    "FLEET_PERSON_API_KEY": "a person's API key, for the `fleet thread` commands",
    "FLEET_PERSON_API_KEY_FILE": "a file with a person's API key, where FLEET_PERSON_API_KEY is not set",
    "FLEET_SIGNING_KEY": "[the signing key](security.md#the-signing-key), the same for all processes of the fleet",
    "FLEET_SIGNING_KEY_FILE": "a file with the signing key, where FLEET_SIGNING_KEY is not set",
    "FLEET_READY_FILE": "a file that a worker touches with each heartbeat, for health checks",
    "NO_COLOR": "no colours, whatever its value",
}

_HEAD = """\
# Configuration reference

Written by `fleet config reference`; edit the docstrings in `fleet/config.py` instead.

One file, `fleet.yaml`, is the same on all machines. What differs from machine to machine is in the environment. Only
`sections` is needed, and `hosts` where there are several machines:

```yaml
hosts:
  alpha: {work_folders: [/srv/repos]}
sections:
  - session: {org_id: ORG, blob_id: BLOB, revision_id: default, session_id: SESSION}
```

- A null or an empty text means "not set": the key takes its default.
- An unknown key or a wrong value is an [error](troubleshooting.md#config_invalid) that names file, key and remedy.
- Without `hosts` the file describes a single machine, this one, which owns every folder.
- It is read when a process starts. `fleet config show` prints what is in force, without secrets.
"""


def reference() -> str:
    """Return the page."""
    schema = FleetConfig.model_json_schema()
    groups = "".join(_group(schema["$defs"], name, described) for name, described in schema["properties"].items())
    rows = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in VARIABLES.items())
    return f"{_HEAD}{groups}\n## Environment\n\n| variable | |\n| --- | --- |\n{rows}"


def _group(models: Schema, path: str, described: Schema) -> str:
    """Return the section of a group, and those of the groups within it."""
    if "additionalProperties" in described:
        path, described = f"{path}.{'TYPE' if path == 'agents' else 'NAME'}", described["additionalProperties"]
    elif "items" in described:
        path, described = f"{path}[]", described["items"]
    model = models[described["$ref"].rpartition("/")[2]]
    about, words = _words(model["description"])
    rows, inner = "", ""
    for key, value in model["properties"].items():
        if "$ref" in value:
            kind, default = "a mapping, see below", ""
            inner += _group(models, f"{path}.{key}", value)
        else:
            kind, default = _kind(value), _default(value)
        required = "required" if key in model.get("required", ()) else default
        rows += f"| `{key}` | {kind} | {required} | {words[key]} |\n"
    return f"\n## `{path}`\n\n{about}\n\n| key | value | default | |\n| --- | --- | --- | --- |\n{rows}{inner}"


def _words(docstring: str) -> tuple[str, dict[str, str]]:
    """Return what a model's docstring says of the group, and of each key, with links to the other pages."""
    linked = re.sub(r"docs/([a-z-]+\.md)", r"[\1](\1)", docstring)
    linked = re.sub(r"protocol §[\d.]+", r"[\g<0>](protocol.md)", linked)
    about, _, attributes = linked.partition("\n\nAttributes:\n")
    lines = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE)
    return about, {key: re.sub(r"\s+", " ", text).removesuffix(".") for key, text in lines}


def _kind(value: Schema) -> str:
    """Return in words which values a key takes."""
    if "anyOf" in value:
        return _kind(value["anyOf"][0])
    if words := value.get("enum", [value["const"]] if "const" in value else []):
        return ", ".join(f"`{word}`" for word in words)
    match value["type"]:
        case "integer":
            return f"whole number{_range(value)}"
        case "number":
            return f"number{_range(value)}"
        case "boolean":
            return "`true`, `false`"
        case "array":
            return "list of mappings" if value["items"]["type"] == "object" else "list of paths"
        case "object":
            return "mapping of names to texts"
        case _:
            return "path" if value.get("format") == "path" else "text"


def _range(value: Schema) -> str:
    least, most = value.get("minimum"), value.get("maximum")
    return f", {least:,} to {most:,}" if most is not None else f", {least:,} or more"


def _default(value: Schema) -> str:
    default = value.get("default")
    if default in (None, "", []):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"
