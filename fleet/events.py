"""What an agent says during a turn, in vendor-neutral terms.

Adapters in `agents/` produce these, `fleet.items` turns them into thread items. They are the only types the two share.
Every event may carry `uid`, the event's stable id in the agent's own transcript: the key by which what a crash
swallowed is told from what was already posted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Permissions = Literal["autonomous", "approval", "guarded"]
PromptKind = Literal["text", "approval", "ask_user_question"]


@dataclass(frozen=True, slots=True)
class Text:
    """Words of the agent to the person."""

    text: str
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class Injected:
    """Text that the harness, not the agent, put into the conversation."""

    text: str
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class Thinking:
    """The agent's reasoning."""

    text: str
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool is about to run. `input` is any JSON value."""

    invocation_id: str
    name: str
    input: Any
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool has run, or was refused. `output` is its whole text."""

    invocation_id: str
    output: str
    is_error: bool = False
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """A machine token and a human detail, such as `compacting_context`."""

    status: str
    detail: str = ""
    uid: str | None = None


@dataclass(frozen=True, slots=True)
class SessionStarted:
    """The agent's own session id: from here on a later attempt can resume, the prompt has been taken."""

    session_id: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens used since the turn's last `Usage`. `input_tokens` counts cached and uncached input (protocol §4)."""

    input_tokens: int = 0
    input_tokens_cached: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a turn.

    `transient` marks a failure of the model's service that resuming may cure (protocol §3.7).
    """

    ok: bool
    error: str = ""
    transient: bool = False


#: What becomes an item.
SaidEvent = Text | Injected | Thinking | ToolCall | ToolResult | Status
AgentEvent = SaidEvent | SessionStarted | Usage | Ended


class AgentDiedError(Exception):
    """The agent's process ended in the middle of a turn without having been asked to."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a prompt. `options` are (label, description) pairs."""

    question: str
    header: str = ""
    options: tuple[tuple[str, str], ...] = ()
    multi_select: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person answered: one tuple of chosen labels or free text per question."""

    answers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a tool call may run; `message` is what the agent is told when it may not."""

    allow: bool
    message: str = ""


class PromptCancelledError(Exception):
    """Nobody will answer: the prompt was superseded, or the turn is being stopped."""


class TurnHost(Protocol):
    """What an adapter may ask of the fleet while a turn runs."""

    async def permit(self, call: ToolCall) -> Decision:
        """Decide whether `call` may run. Never raises; an evaluation error denies."""
        ...

    async def ask(self, kind: PromptKind, questions: tuple[Question, ...]) -> Answer:
        """Ask a person and wait for the answer.

        Raises:
            PromptCancelledError: nobody will answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Image:
    """An image that a person attached, for a model that sees: a PNG, JPEG, GIF or WebP, by its content.

    `data` is what was looked at; what is under `path` in the work folder may be something else by now.
    """

    path: Path
    content_type: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """All that an adapter needs to run one turn.

    `state_dir` is a private folder of this thread on this host, where an adapter may keep what outlives the turn.
    `process_file` is where the running agent's process is recorded, so that a later attempt finds and ends it.
    `env` is the whole environment of the agent, already built from the allow-list.
    `images` belong to the prompt, which names their paths too: an adapter may hand them over or leave them out.
    `stop_grace_s` is the time in seconds between asking the agent and all it started to end, and killing them.
    """

    work_folder: Path
    prompt: str
    turn: int
    session_id: str | None
    permissions: Permissions
    state_dir: Path
    process_file: Path
    env: dict[str, str] = field(repr=False)
    executable: str = ""
    model: str = ""
    effort: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    stop_grace_s: float = 0.3


class Agent(Protocol):
    """One vendor's agent. See `agents.base`."""

    def turn(self, request: TurnRequest, host: TurnHost) -> AsyncGenerator[AgentEvent, None]:
        """Run one turn and yield its events in order, `Ended` last.

        Closing the iterator (`aclose`) stops the agent: when that returns, neither the agent nor anything it started
        is alive.

        Raises:
            AgentDiedError: the agent's process ended unasked.
        """
        ...

    def recorded(self, request: TurnRequest) -> list[AgentEvent]:
        """Return what the agent's own transcript has of the session's last turn, oldest first; reads files.

        After a crash it holds what was said but never reached the fleet: those events whose `uid` the log lacks. It is
        empty without a session or a transcript, and has no `SessionStarted` and no `Ended`.
        """
        ...
