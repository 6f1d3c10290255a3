"""`fleet policy …`: what a policy would make of a call, without an agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fleet.cli.options import json_option, make_console
from fleet.cli.text import plain

#: What a decision looks like on a terminal.
STYLES = {"allow": "green", "deny": "red", "ask": "yellow"}


@click.group()
def policy() -> None:
    """Try policies out."""


@policy.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("calls", nargs=-1, required=True, metavar="CALL...")
@click.option("--agent", default="claude_code", show_default=True, help="Type of the agent whose tools are called.")
@click.option("--work-folder", type=click.Path(path_type=Path), default=Path(), help="Default: this folder.")
@click.option("--outbox", type=click.Path(path_type=Path), help="The artifacts' source, below the work folder.")
@click.option("--owner", type=click.Path(path_type=Path), help="A fleet.yaml whose own rules come first.")
@json_option
def test(
    file: Path,
    calls: tuple[str, ...],
    agent: str,
    work_folder: Path,
    outbox: Path | None,
    owner: Path | None,
    as_json: bool,
) -> None:
    """Judge each CALL by the policy in FILE, with the rule that decides.

    FILE is a thread's policy block as YAML or JSON. A CALL is a tool and its command or path, such as
    "Bash git push" or "Write ../x", or the tool with its whole input as JSON: 'Edit {"file_path": "a"}'.
    """
    from fleet.config import load_config
    from fleet.policy import explain, parse_policy
    from fleet.yamlfile import read_yaml

    rules = load_config(owner, {}).policy.rules if owner else ()
    parsed = parse_policy(read_yaml(file), rules)
    folder = work_folder.resolve()
    found = []
    for text in calls:
        verdict, lines = explain(parsed, agent, _call(agent, text), folder, outbox)
        found.append(
            {
                "call": text,
                "decision": verdict.action,
                "rule": verdict.rule_id,
                "origin": verdict.origin,
                "effect": verdict.effect,
                "because": list(lines),
            }
        )
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)


def _call(agent: str, text: str) -> Any:
    """Return the call that the operator wrote."""
    from fleet.errors import FleetError
    from fleet.events import ToolCall
    from fleet.policy import effect_of

    name, _, rest = text.strip().partition(" ")
    if not rest.lstrip().startswith("{"):
        key = "command" if effect_of(agent, name) == "exec" else "file_path"
        return ToolCall("test", name, {key: rest} if rest else {})
    try:
        return ToolCall("test", name, json.loads(rest))
    except ValueError as error:
        raise FleetError("argument_invalid", f"the input of {name} is not JSON: {error}") from None


def _show(found: list[dict[str, Any]]) -> None:
    console = make_console()
    for one in found:
        rule = one["rule"] or one["origin"]
        console.print(f"{one['decision']:5}", style=STYLES[one["decision"]], end=" ")
        console.print(plain(f"{one['call']}   ({rule})"), markup=False, highlight=False)
        for line in one["because"]:
            console.print(plain(f"      {line}"), style="dim", markup=False, highlight=False)
