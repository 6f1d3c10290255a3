"""The stand-in for the model's API, asked as a CLI asks it."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from fleet.sandbox.model_api import ModelApi, main
from fleet.sandbox.model_script import DEFAULT_TEXT, Script, load
from fleet.sandbox.sse import SeveredStreamError

STEPS = {
    "steps": [
        {
            "match": "parser",
            "rounds": [
                [{"thinking": "hm"}, {"text": "é" * 500}, {"tool_use": {"name": "Bash", "input": {"command": "ls"}}}],
                [{"text": "done"}],
            ],
        },
        {"match": "busy", "rounds": [[{"text": "a"}], [{"text": "b"}]], "errors": {"times": 2, "round": 1}},
        {"match": "cut", "rounds": [[{"text": "a"}]], "errors": {"times": 1, "severed": 0}},
        {"match": "torn", "rounds": [[{"text": "a"}]], "errors": {"times": 1, "severed": 1}},
    ]
}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {}}]}
OUTPUT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}


def user(text: str) -> dict:
    reminder = {"type": "text", "text": "<system-reminder>the parser</system-reminder>"}
    return {"role": "user", "content": [reminder, {"type": "text", "text": text}]}


def ask(*requests: list[dict], stream: bool = False, tools: tuple = ({"name": "Bash"},)) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(ModelApi(Script.model_validate(STEPS)).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://model") as client:
            body = {"model": "m", "stream": stream, "tools": tools}
            return [await client.post("/v1/messages", json={**body, "messages": each}) for each in requests]

    return asyncio.run(run())


def text_of(response: httpx.Response) -> str:
    return "".join(block.get("text", "") for block in response.json()["content"])


def test_the_round_follows_from_the_conversation_alone():
    first, second, beyond = ask(
        [user("fix the parser")],
        [user("fix the parser"), CALL, OUTPUT],
        [user("fix the parser"), CALL, OUTPUT, CALL, OUTPUT],
    )
    assert [block["type"] for block in first.json()["content"]] == ["thinking", "text", "tool_use"]
    assert first.json()["stop_reason"] == "tool_use"
    assert (text_of(second), second.json()["stop_reason"]) == ("done", "end_turn")
    assert text_of(beyond) == DEFAULT_TEXT


def test_an_interrupted_step_goes_on_under_a_prompt_that_matches_none():
    (answer,) = ask(
        [user("fix the parser"), CALL, {**OUTPUT, "content": [*OUTPUT["content"], *user("go on")["content"]]}]
    )
    assert text_of(answer) == "done"


def test_a_prompt_without_a_step_and_a_side_request_get_the_default_text():
    (unknown,) = ask([user("sing")])
    (side,) = ask([user("fix the parser")], tools=())
    assert text_of(unknown) == text_of(side) == DEFAULT_TEXT


def test_a_stream_carries_the_same_message_in_pieces():
    (answer,) = ask([user("fix the parser")], stream=True)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "é" * 500
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"command": "ls"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_rehearsed_error_fails_its_round_as_often_as_it_says():
    later = [user("busy"), CALL, OUTPUT]
    assert [answer.status_code for answer in ask([user("busy")], later, later, later)] == [200, 529, 529, 200]


@pytest.mark.parametrize("prompt", ["cut", "torn"])
def test_a_severed_stream_breaks_off(prompt: str):
    with pytest.raises(SeveredStreamError):
        ask([user(prompt)], stream=True)


def respond(*requests: list[dict], tools: tuple = ()) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(ModelApi(Script.model_validate(STEPS)).app())
        async with httpx.AsyncClient(transport=transport, base_url="http://model") as client:
            return [await client.post("/v1/responses", json={"input": each, "tools": tools}) for each in requests]

    return asyncio.run(run())


def said(text: str, role: str = "user") -> dict:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def completed_items(response: httpx.Response) -> list[dict]:
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.completed"]
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def test_the_same_script_is_played_to_codex():
    first = [said("the parser", "developer"), said("<environment_context>parser"), said("fix the parser")]
    call = {"type": "function_call", "name": "Bash", "call_id": "c", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    opening, second = respond(first, [*first, {"type": "reasoning", "summary": []}, call, output])
    reasoning, text, tool = completed_items(opening)
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert text["content"][0]["text"] == "é" * 500
    assert (tool["type"], tool["name"], json.loads(tool["arguments"])) == ("function_call", "Bash", {"command": "ls"})
    assert [item["content"][0]["text"] for item in completed_items(second)] == ["done"]


def test_codex_gets_cached_input_as_a_part_of_the_input():
    (answer,) = respond([said("sing")])
    usage = json.loads(answer.text.splitlines()[-2][6:])["response"]["usage"]
    assert usage["input_tokens"] == 420
    assert usage["input_tokens_details"] == {"cached_tokens": 400}


def test_codex_gets_rehearsed_errors_too():
    later = [said("busy"), {"type": "reasoning", "summary": []}, {"type": "function_call_output", "output": ""}]
    assert [answer.status_code for answer in respond(later, later, later)] == [529, 529, 200]
    with pytest.raises(SeveredStreamError):
        respond([said("cut")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [{rounds: [[{txt: a}]]}]", "txt"),
        ("steps: [{rounds: [[{text: a, thinking: b}]]}]", "exactly one of thinking, text, tool_use"),
        ("steps: [", "script.yaml"),
    ],
)
def test_a_wrong_script_is_refused_with_the_place(tmp_path: Path, text: str, message: str):
    path = tmp_path / "script.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)
    outcome = CliRunner().invoke(main, ["--script", str(path)])
    assert outcome.exit_code == 1
    assert str(path) in outcome.output
