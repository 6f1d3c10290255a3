from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from fleet.cli.app import cli

POLICY = """
default: allow
rules:
  - {id: no_push, effect: exec, action: deny, command: ["git push*"]}
  - {id: stay, effect: write, action: ask, outside: work_folder}
"""


@pytest.fixture
def judge(tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)

    def judge(*arguments: str) -> list[dict[str, object]]:
        result = CliRunner().invoke(
            cli, ["policy", "test", str(file), "--work-folder", str(tmp_path), "--json", *arguments]
        )
        assert result.exit_code == 0, result.output
        found: list[dict[str, object]] = json.loads(result.output)
        return found

    return judge


@pytest.mark.parametrize(
    ("call", "decision", "rule"),
    [
        ("Bash cd x && git push", "deny", "no_push"),
        ("Bash echo 'git push'", "allow", None),
        ("Write ../x", "ask", "stay"),
        ('Edit {"file_path": "a.py"}', "allow", None),
    ],
)
def test_a_call_is_judged_with_the_rule_that_decides(judge, call, decision, rule):
    (found,) = judge(call)
    assert (found["decision"], found["rule"]) == (decision, rule)
    assert found["because"]


def test_the_owners_rules_come_first(judge, tmp_path):
    owner = tmp_path / "fleet.yaml"
    owner.write_text("policy: {rules: [{id: nothing, effect: exec, action: deny}]}")
    (found,) = judge("--owner", str(owner), "Bash ls")
    assert (found["decision"], found["rule"], found["origin"]) == ("deny", "nothing", "worker")
