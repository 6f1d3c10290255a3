"""A script is either right as a whole, or an error says where it is wrong and what is allowed."""

from pathlib import Path

import pytest

from agents.script import ScriptError, load


def load_text(tmp_path: Path, text: str):
    path = tmp_path / "script.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def test_every_event_kind_is_read_and_defaults_are_set(tmp_path: Path):
    turns = load_text(
        tmp_path,
        """
        turns:
          - match: parser
            events:
              - thinking: hm
              - text: hello
              - tool: {name: Bash, input: {command: ls}, output: a, is_error: true}
              - tool: {name: List}
              - write: {path: .out/plan.md, text: x}
              - write: {path: b.bin, base64: AAE=, replace: true}
              - write: {path: link, symlink: /etc}
              - status: {status: compacting_context}
              - ask: {kind: approval, questions: [{question: sure}]}
              - repeat: {times: 2, events: [{repeat: {times: 0, events: [{text: x}]}}]}
              - sleep: 1
              - usage: {output_tokens: 7}
              - api_error: server_error
              - fail: message
              - exit: 137
          - events: []
        """,
    )
    assert [turn["match"] for turn in turns] == ["parser", None]
    assert turns[0]["events"][3] == {"tool": {"name": "List", "input": {}, "output": "", "is_error": False}}
    assert turns[0]["events"][7] == {"status": {"status": "compacting_context", "detail": ""}}
    assert turns[0]["events"][8]["ask"]["questions"] == [
        {"question": "sure", "header": "", "options": [], "multiSelect": False}
    ]
    assert turns[0]["events"][10] == {"sleep": 1.0}
    assert turns[0]["events"][11] == {"usage": {"input_tokens": 0, "input_tokens_cached": 0, "output_tokens": 7}}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ("[{txt: hello}]", "turn 1, event 1: unknown kind 'txt'; kinds: text, thinking, tool"),
        ("[{text: a}, {text: 5}]", "turn 1, event 2, text: must be a string, not 5; quote it"),
        ("[{text: a, sleep: 1}]", "turn 1, event 1: must be one kind and its value"),
        ("[hello]", "turn 1, event 1: must be one kind and its value"),
        ("[{tool: {input: {}}}]", "turn 1, event 1, tool: name is missing"),
        ("[{tool: {name: A, out: b}}]", "unknown key 'out'; allowed: name, input, output, is_error"),
        ("[{write: {path: /etc/x, text: a}}]", "write.path: must be relative to the work folder"),
        ("[{write: {path: a/../../x, text: a}}]", "write.path: must be relative to the work folder"),
        ("[{write: {path: a}}]", "needs exactly one of text, base64, symlink"),
        ("[{write: {path: a, base64: '*'}}]", "write.base64"),
        ("[{ask: {questions: []}}]", "must be a list of 1 to 4 questions"),
        ("[{ask: {kind: guess, questions: [{question: a}]}}]", "must be one of text, approval, ask_user_question"),
        ("[{repeat: {times: 2, events: [{text: a}, {sleep: -1}]}}]", "turn 1, event 1.2, sleep: must be a number"),
        ("[{repeat: {times: true, events: []}}]", "event 1, repeat.times: must be a whole number"),
        ("[{exit: 256}]", "must be an exit status from 0 to 255"),
        ("{text: a}", "turn 1, events: must be a list of events"),
    ],
)
def test_a_mistake_is_named_with_file_turn_and_event(tmp_path: Path, events: str, message: str):
    with pytest.raises(ScriptError) as caught:
        load_text(tmp_path, f"turns: [{{events: {events}}}]")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'script.yaml'}: ")


@pytest.mark.parametrize("text", ["", "turns: 3", "turns: [{events: [], when: now}]", "turns: [", "- a"])
def test_what_is_no_script_is_an_error(tmp_path: Path, text: str):
    with pytest.raises(ScriptError):
        load_text(tmp_path, text)


def test_a_missing_script_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(ScriptError, match=r"absent\.yaml"):
        load(tmp_path / "absent.yaml")
