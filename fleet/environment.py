"""The environment of an agent: built from what is allowed, so that nothing of the fleet's own gets into it."""

from __future__ import annotations

from collections.abc import Mapping

#: Variables of the worker that an agent gets. Keys of model providers come from `agents.TYPE.env`.
ALLOWED = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TERM",
        "TMPDIR",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
    }
)
#: Beginnings of further allowed names.
ALLOWED_PREFIXES = ("LC_", "XDG_")


def agent_environment(worker: Mapping[str, str], configured: Mapping[str, str]) -> dict[str, str]:
    """Return an agent's whole environment: what is allowed of the worker's, and `agents.TYPE.env` over it."""
    allowed = {name: value for name, value in worker.items() if name in ALLOWED or name.startswith(ALLOWED_PREFIXES)}
    return allowed | dict(configured)
