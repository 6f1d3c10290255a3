"""The protocol that every agent adapter speaks, and the registry of adapters.

An adapter maps one vendor's events to `fleet.events` and holds no fleet logic: no items, no Redis, no platform.
"""

from __future__ import annotations

from importlib import import_module

from fleet.events import Agent

#: Agent type (`agent.type` of the envelope) → "module:class". Imported when first used: SDKs are slow to import.
ADAPTERS: dict[str, str] = {
    "claude_code": "agents.claude_code:ClaudeCode",
    "scripted": "agents.scripted:Scripted",
}


def load(agent_type: str) -> Agent:
    """Return the adapter for `agent_type`.

    Raises:
        KeyError: no adapter has that name.
        ImportError: the adapter's SDK is not installed.
    """
    module, _, name = ADAPTERS[agent_type].partition(":")
    adapter: Agent = getattr(import_module(module), name)()
    return adapter
