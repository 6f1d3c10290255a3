from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import ThreadFailedError
from fleet.policy import Policy, parse_policy, parse_rules

RULE = {"id": "r", "effect": "exec", "action": "deny"}


def problem(block, config_rules=()):
    with pytest.raises(ThreadFailedError) as raised:
        parse_policy(block, list(config_rules))
    assert raised.value.code == "POLICY_INVALID"
    return raised.value.detail


def test_the_owner_s_rules_come_first():
    policy = parse_policy({"default": "ask", "rules": [{**RULE, "id": "mine"}]}, [{**RULE, "id": "owner"}])
    assert [(rule.id, rule.origin) for rule in policy.rules] == [("owner", "worker"), ("mine", "thread")]
    assert policy.default == "ask"


def test_rules_and_alias_may_be_left_out():
    assert parse_policy({"default": "deny", "alias": "a/b", "rules": None}, []) == Policy((), "deny")


def test_every_word_of_the_vocabulary_is_known():
    rules = [{"id": f"{e}-{a}", "effect": e, "action": a} for e in ("write", "exec", "read", "network")
             for a in ("allow", "deny", "ask")]  # fmt: skip
    rules += [{"id": "o", "effect": e, "action": "deny", "outside": p} for e in ("write", "read")
              for p in ("work_folder", "outbox")]  # fmt: skip
    assert len(parse_rules(rules, "thread")) == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"effect": "execute"}, ["'r'", "effect", "'execute'", "exec"]),
        ({"effect": None}, ["'r'", "effect"]),
        ({"effect": ["exec"]}, ["'r'", "effect"]),
        ({"action": "block"}, ["'r'", "action", "'block'", "deny"]),
        ({"action": 1}, ["'r'", "action", "1"]),
        ({"outside": "work_folder"}, ["'r'", "outside"]),
        ({"effect": "write", "outside": "home"}, ["'r'", "outside", "'home'"]),
        ({"effect": "write", "outside": None}, ["'r'", "outside"]),
        ({"effect": "write", "outside": "outbox", "action": "allow"}, ["'r'", "outside", "outbox"]),
        ({"effect": "network", "outside": "work_folder"}, ["'r'", "outside"]),
        ({"effect": "write", "command": ["a"]}, ["'r'", "command"]),
        ({"command": "git push*"}, ["'r'", "command"]),
        ({"command": []}, ["'r'", "command"]),
        ({"command": None}, ["'r'", "command"]),
        ({"command": [""]}, ["'r'", "command"]),
        ({"command": ["a", 1]}, ["'r'", "command"]),
        ({"comand": ["a"]}, ["'r'", "'comand'"]),
        ({"id": ""}, ["rules[0]", "id"]),
        ({"id": 7}, ["rules[0]", "id"]),
    ],
)
def test_a_wrong_rule_is_named_with_its_key(change, words):
    detail = problem({"default": "allow", "rules": [{**RULE, **change}]})
    assert all(word in detail for word in words), detail


@pytest.mark.parametrize("block", [None, [], "deny", 1, {}, {"default": "yes"}, {"default": None}, {"rules": []}])
def test_a_policy_without_a_known_default_is_invalid(block):
    problem(block)


@pytest.mark.parametrize("block", [{"rule": []}, {"alias": 1}, {"rules": {}}, {"rules": "x"}, {"rules": [1]}])
def test_a_policy_of_another_shape_is_invalid(block):
    problem({"default": "allow", **block})


def test_a_wrong_rule_of_the_owner_is_told_from_the_thread_s():
    assert "machine" in problem({"default": "allow"}, [{**RULE, "effect": "x"}])


def test_a_wrong_value_is_shown_short():
    assert len(problem({"default": "allow", "rules": [{**RULE, "id": "x" * 9999, "effect": "y" * 9999}]})) < 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(["exec", "deny"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "effect", "action", "command", "outside", "default", "rules", "alias"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
)


@settings(deadline=None)
@given(json_values, st.lists(st.dictionaries(st.sampled_from(["id", "effect", "action"]), json_values), max_size=2))
def test_any_json_is_a_policy_or_invalid(block, config_rules):
    try:
        code = "" if parse_policy(block, config_rules) else "no policy"
    except ThreadFailedError as error:
        code = error.code
    assert code in ("", "POLICY_INVALID")


def test_an_integer_too_long_to_write_is_invalid_and_no_crash():
    problem({"default": 10**6000})
