"""The protocol that every agent adapter speaks, and the registry of adapters.

An adapter maps one vendor's events to `fleet.events` and holds no fleet logic: no items, no Redis, no platform.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from fleet.events import Agent

#: Agent type (`agent.type` of the envelope) → "module:class". Imported when first used: SDKs are slow to import.
ADAPTERS: dict[str, str] = {
    "claude_code": "agents.claude_code:ClaudeCode",
    "codex": "agents.codex:Codex",
    "scripted": "agents.scripted:Scripted",
}

#: Agent type → the package that brings its CLI. An agent that is not listed needs none.
BUNDLES: dict[str, str] = {"claude_code": "claude_agent_sdk", "codex": "codex_cli_bin"}


def has_bundled_cli(agent_type: str) -> bool:
    """Whether an agent runs here without a configured executable."""
    return agent_type not in BUNDLES or find_spec(BUNDLES[agent_type]) is not None


def load(agent_type: str) -> Agent:
    """Return the adapter for `agent_type`.

    Raises:
        KeyError: no adapter has that name.
        ImportError: the adapter's SDK is not installed.
    """
    module, _, name = ADAPTERS[agent_type].partition(":")
    adapter: Agent = getattr(import_module(module), name)()
    return adapter
