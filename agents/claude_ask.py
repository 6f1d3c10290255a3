"""`ask_user`: how Claude Code asks a person, as an MCP tool that runs in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from claude_agent_sdk import create_sdk_mcp_server, tool
from claude_agent_sdk.types import McpSdkServerConfig

from fleet.events import Answer, PromptCancelledError, Question, TurnHost

SERVER = "fleet"

#: The tool's name in the CLI.
ASK_USER = f"mcp__{SERVER}__ask_user"

#: The CLI's own way to ask, which needs somebody at its terminal.
BUILT_IN = "AskUserQuestion"

DESCRIPTION = (
    "Ask the person who gave you this task, and wait for the answer, which may take long. Use it when you can't go on "
    "without a decision or a fact that only they have. Give options where there are some; the person may answer "
    "something else."
)

OPTION_SCHEMA = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "description": {"type": "string"}},
    "required": ["label"],
}

QUESTION_SCHEMA = {
    "type": "object",
    "properties": {
        "question": {"type": "string", "minLength": 1},
        "header": {"type": "string", "description": "A word or two that name the subject."},
        "options": {"type": "array", "items": OPTION_SCHEMA},
        "multiSelect": {"type": "boolean", "description": "Whether several options may be chosen."},
    },
    "required": ["question"],
}

#: As many questions as a prompt may have (protocol §4).
SCHEMA = {
    "type": "object",
    "properties": {"questions": {"type": "array", "items": QUESTION_SCHEMA, "minItems": 1, "maxItems": 4}},
    "required": ["questions"],
}


def server(host: TurnHost) -> McpSdkServerConfig:
    """Return the MCP server whose `ask_user` asks `host`."""

    @tool("ask_user", DESCRIPTION, SCHEMA)
    async def ask_user(given: dict[str, Any]) -> dict[str, Any]:
        questions = tuple(_question(each) for each in given["questions"])
        is_text = len(questions) == 1 and not questions[0].options
        try:
            answer = await host.ask("text" if is_text else "ask_user_question", questions)
        except PromptCancelledError:
            return {**_content("Nobody will answer this: the question was cancelled."), "is_error": True}
        return _content(in_words(questions, answer))

    return create_sdk_mcp_server(SERVER, tools=[ask_user])


def in_words(questions: tuple[Question, ...], answer: Answer) -> str:
    """Return what the agent is told: each question with its answers, or the answer alone to a single question."""
    given = [", ".join(words) for words in answer.answers]
    if len(questions) == 1:
        return given[0]
    asked = zip(questions, given, strict=True)
    return "\n\n".join(f"{question.question}\nAnswer: {words}" for question, words in asked)


def _question(given: Mapping[str, Any]) -> Question:
    options = tuple((option["label"], option.get("description", "")) for option in given.get("options", ()))
    return Question(given["question"], given.get("header", ""), options, given.get("multiSelect", False))


def _content(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}]}
