from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.events import ToolCall
from fleet.policy import evaluate, parse_policy
from fleet.policy.patterns import ANY, ANY_WORD, Pattern
from fleet.policy.shell import analyse
from tests.unit.policy_lines import NOT_SIMPLE, RUN_GIT_PUSH, RUN_NO_GIT_PUSH, SIMPLE

DENY_PUSH = parse_policy(
    {"default": "allow", "rules": [{"id": "x", "effect": "exec", "action": "deny", "command": ["git push*"]}]}, []
)
ALLOW_LS = parse_policy(
    {"default": "deny", "rules": [{"id": "x", "effect": "exec", "action": "allow", "command": ["ls*", "git status*"]}]},
    [],
)


def verdict(policy, line):
    return evaluate(policy, "claude_code", ToolCall("1", "Bash", {"command": line}), Path("/nowhere"), None).action


def caught(line, pattern):
    return analyse(line).restricted_by(Pattern(pattern)) is not None


@pytest.mark.parametrize("line", RUN_GIT_PUSH)
def test_a_denied_command_is_found_in_a_line_that_runs_it(line):
    assert verdict(DENY_PUSH, line) == "deny"


@pytest.mark.parametrize("line", RUN_NO_GIT_PUSH)
def test_a_line_that_only_names_a_denied_command_passes(line):
    assert verdict(DENY_PUSH, line) == "allow"


@pytest.mark.parametrize("line", SIMPLE)
def test_an_allow_rule_matches_one_simple_command(line):
    assert verdict(ALLOW_LS, line) == "allow"


@pytest.mark.parametrize("line", NOT_SIMPLE)
def test_an_allow_rule_does_not_match_a_line_that_may_do_more(line):
    assert verdict(ALLOW_LS, line) == "deny"


@pytest.mark.parametrize("line", RUN_GIT_PUSH)
def test_what_runs_a_denied_command_rides_on_no_allow_rule_for_another(line):
    assert verdict(ALLOW_LS, line) == "deny"


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("sudo rm x", "sudo *"),
        ("sudo rm x", "rm *"),
        ("cd x && sudo -n rm x", "sudo*"),
        ("/usr/bin/rm x", "/usr/bin/rm *"),
        ("/usr/bin/rm x", "rm x"),
        ("./deploy.sh now", "./deploy.sh*"),
        ("./deploy.sh now", "deploy.sh*"),
        ("curl a | sh", "curl * | sh"),
        ("cd x && curl a | sh -s", "curl * | sh*"),
        ("cd x; echo a > /etc/x", "* > /etc/*"),
        ("cd x; echo a >> ~/.bashrc", "*.bashrc*"),
        ("LD_PRELOAD=x ls", "LD_PRELOAD=*"),
        ("true; LD_PRELOAD=x ls", "LD_PRELOAD=*"),
        ("true; export PATH=x", "export PATH=*"),
        ("true; PATH=x", "PATH=*"),
        ("git --no-pager log", "git --no-pager *"),
        ("git --no-pager log", "git log*"),
        ("bash -c 'rm x'", "bash -c *"),
        ("true; [[ -f x ]]", "[[][[]*"),
        ("rm -rf build", "rm -rf *"),
        ("rm  -rf\tbuild", "rm   -rf *"),
        ("rm -rf 'a b'", "rm -rf a b"),
        ("git commit --amend", "git * --amend"),
        ("git commit --no-verify -m x", "*--no-verify*"),
        ("pip3 install x", "pip[0-9] install *"),
        ("pip3 install x", "pip? install *"),
        ("rm $X", "rm -rf *"),
        ("ls | xargs rm", "rm -rf *"),
    ],
)
def test_a_pattern_may_name_any_part_of_what_runs(line, pattern):
    assert caught(line, pattern)


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("rm build", "rm -rf *"),
        ("rm -f x", "rm -rf *"),
        ('rm "$X"', "rm -rf *"),
        ("rm *.pyc", "rm -rf *"),
        ("pip install x", "pip[0-9] install *"),
        ("Rm x", "RM *"),
        ("apt install curl", "curl*"),
        ("sudo apt-get install -y curl", "curl*"),
        ("echo 'curl x | sh'", "curl * | sh"),
    ],
)
def test_a_pattern_does_not_match_what_it_does_not_say(line, pattern):
    assert not caught(line, pattern)


@pytest.mark.parametrize(
    ("line", "pattern", "matches"),
    [
        ("echo ( git", "git push*", True),
        ("echo ( 'git'", "git push*", True),
        ("echo ( g'i't", "git push*", True),
        ("echo ( /usr/bin/git", "git push*", True),
        ("echo ( x=git", "git push*", True),
        ("echo ( $X", "git push*", True),
        ("echo ( digit", "git push*", False),
        ("echo ( git-lfs", "git push*", False),
        ("echo ( rm3", "rm? -rf*", True),
        ("echo ( x", "*", True),
        ("echo ( --force", "* --force*", True),
        ("echo 'a", "* --force*", False),
    ],
)
def test_a_line_that_no_grammar_covers_is_caught_by_the_program_s_name(line, pattern, matches):
    assert caught(line, pattern) is matches


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("git push*", "git push", True),
        ("git push*", "git pus", False),
        ("a*b*c", "axxbyyc", True),
        ("a*b*c", "axxbyy", False),
        ("*", "", True),
        ("?", "", False),
        ("[ab]x", "bx", True),
        ("[!ab]x", "bx", False),
        ("[]]x", "]x", True),
        ("[x", "[x", True),
        ("a.b", "axb", False),
        ("git push*", ANY, True),
        ("git push*", f"git{ANY}", True),
        ("git push*", f"git {ANY_WORD}", True),
        ("git push*", ANY_WORD, False),
        ("git push*", f"{ANY_WORD} push x", True),
        ("git push*", f"g{ANY}h", True),
        ("git push*", f"ls{ANY}", False),
        ("a*z", f"a{ANY_WORD}y", False),
    ],
)
def test_a_pattern_matches_a_text_when_some_value_of_what_is_unknown_does(pattern, text, matches):
    assert Pattern(pattern).matches(text) is matches


def _quoted(line):
    return shlex.quote(line)


#: Ways to run a line: what stands for the command is `{}`, or `{q}` quoted as one word.
WRAPPINGS = (
    "{}; true", "true; {}", "true && {}", "false || {}", "{} | cat", "true | {}", "{} & wait", "({})", "{{ {}\n}}",
    "if {}\nthen true; fi", "if true; then {}\nfi", "while {}\ndo break; done", "for i in 1; do {}\ndone",
    "case x in x) {}\n;; esac", "f() {{ {}\n}}; f", "echo $({})", 'echo "a $({}) b"', "x=$({})", "cat <({})",
    "cat <<E\n$({})\nE\n", "bash -c {q}", "sh -ec {q}", "eval {q}", "bash <<< {q}", "echo {q} | bash",
    "bash <<'EOS'\n{}\nEOS\n", "env A=1 bash -c {q}", "timeout 9 bash -c {q}", "trap {q} EXIT", "[[ x = $({}) ]]",
    "! ({})", "time ({})", "# comment\n{}", "echo '\n'; {}", "echo ${{Y:-$({})}}",
    "find . -maxdepth 0 -exec sh -c {q} \\;",
)  # fmt: skip

#: Ways to write `git push`.
SPELLINGS = (
    "git push", "git  push", "\\git push", "g'i't push", '"git" "push"', "$'\\x67it' push", "git -C . push",
    "git -c a.b=c push", "git --no-pager push", "A=1 git push", ">/dev/null git push", "git 2>/dev/null push",
    "command git push", "env git push", "env -i A=1 git push", "timeout 9 git push", "nice -n 1 git push",
    "nohup git push", "exec git push", "X=git; $X push", "git $(echo push)", "echo push | xargs git", "git \\\n push",
)  # fmt: skip


def wrapped(line, wrappings):
    for wrapping in wrappings:
        line = wrapping.format(line, q=_quoted(line))
    return line


lines = st.builds(wrapped, st.sampled_from(SPELLINGS), st.lists(st.sampled_from(WRAPPINGS), max_size=4))


@settings(deadline=None, max_examples=150)
@given(lines)
def test_however_a_denied_command_is_wrapped_it_is_denied(line):
    assert verdict(DENY_PUSH, line) == "deny"


@settings(deadline=None, max_examples=100)
@given(lines, st.sampled_from(["ls; ", "ls && ", "ls | ", "ls & ", "ls\n", "ls || "]))
def test_an_allow_rule_never_matches_a_line_of_two_commands(line, beginning):
    assert verdict(ALLOW_LS, beginning + line) == "deny"


fragments = st.sampled_from(
    [
        *"\n;&|(){}`\"'\\<>#=*\0é ",
        "git push",
        "ls",
        "$(",
        "<<E\n",
        "\nE\n",
        "$X",
        "if ",
        "then ",
        "fi",
        "case ",
        "esac",
        "bash -c ",
        "eval ",
        "[[",
        "]]",
        "((",
        "))",
    ]
)
texts = st.one_of(st.text(max_size=80), st.lists(fragments, max_size=20).map("".join))


@settings(deadline=None, max_examples=150)
@given(texts)
@example("\udc80 git push")
@example("\ufdd0\ufdd1")
def test_any_text_is_analysed(text):
    line = analyse(text)
    assert not any(not command.strip() and command for command in line.commands)


@settings(deadline=None, max_examples=100)
@given(texts, texts)
def test_a_line_that_is_allowed_holds_no_other_command(text, more):
    if verdict(ALLOW_LS, text) == "allow":
        assert verdict(ALLOW_LS, f"{text};{more}") == "deny"


@settings(deadline=None)
@given(st.text("ab*?[]!- ", max_size=8), st.text("ab]- ", max_size=12), st.text("ab ", max_size=4))
def test_a_pattern_that_matches_a_text_matches_it_with_a_part_unknown(pattern, text, part):
    pattern = Pattern(pattern)
    if pattern.matches(f"{text}{part}"):
        assert pattern.matches(f"{text}{ANY}")
        if " " not in part:
            assert pattern.matches(f"{text}{ANY_WORD}")


@pytest.mark.parametrize("unit", ["a;", "a|", "$(", "a b ", "eval ", "$X "])
def test_a_command_of_a_megabyte_is_judged_in_seconds(unit):
    line = unit * (1_000_000 // len(unit))
    began = time.thread_time()
    assert verdict(DENY_PUSH, f"{line}\ngit push") == "deny"
    assert time.thread_time() - began < 8


def test_a_deep_nest_is_caught_by_name():
    assert verdict(DENY_PUSH, "(" * 3000 + "git push" + ")" * 3000) == "deny"
    assert verdict(DENY_PUSH, "env " * 100 + "git push") == "deny"
    assert verdict(DENY_PUSH, "env " * 100 + "ls") == "allow"


def test_the_vectors_of_the_protocol_hold(tmp_path):
    def moved(value):
        """The vectors' work folder /w is the test's."""
        return f"{tmp_path}{value[2:]}" if isinstance(value, str) and value.startswith("/w") else value

    vectors = json.loads((Path(__file__).parent / "vectors" / "policy.json").read_text(encoding="utf-8"))
    for group in vectors["groups"]:
        policy = parse_policy(group["policy"], group["config_rules"])
        for case in group["calls"]:
            call = ToolCall("1", case["tool"], {key: moved(value) for key, value in case["input"].items()})
            decided = evaluate(policy, "claude_code", call, tmp_path, None)
            assert (decided.action, decided.rule_id) == (case["decision"], case.get("rule")), case
