"""Glob patterns for command lines, matched in linear time, also against text that is known in part only.

A shell word such as `$X` is text that nobody knows before it runs. In a text, `ANY` and `ANY_WORD` stand for it, and a
pattern matches when *some* value in their place would match. Both are code points that Unicode never assigns, so an
agent that writes them itself only makes its command less known.
"""

from __future__ import annotations

import fnmatch
import re
from functools import cached_property

#: Stands for any text.
ANY = "\ufdd0"
#: Stands for any text without white space.
ANY_WORD = "\ufdd1"

_UNKNOWN = re.compile(f"[{ANY}{ANY_WORD}]")
_PART = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


def is_known(text: str) -> bool:
    """Return whether nothing in `text` stands for something else."""
    return not _UNKNOWN.search(text)


def shown(text: str) -> str:
    """Return `text` with what is unknown as an ellipsis, for people."""
    return _UNKNOWN.sub("…", text)


def normalized(text: str) -> str:
    """Return `text` with each run of white space made one space, and none around it."""
    return " ".join(text.split())


class Pattern:
    """A glob (`*`, `?`, `[…]`, case matters) over a whole text; both have their white space normalized.

    Matching simulates an automaton: bit i of the state says that i parts have matched so far, `_loops` has the places
    where a `*` lets any text pass. Its time is the length of the text, whatever the pattern.
    """

    def __init__(self, glob: str) -> None:
        self.glob = normalized(glob)
        self._parts: list[str] = []
        self._loops = 0
        for part in _PART.findall(self.glob):
            if part == "*":
                self._loops |= 1 << len(self._parts)
            else:
                self._parts.append(part)
        self._end = 1 << len(self._parts)
        self._by_character: dict[str, int] = {}
        self._no_space = sum(1 << i for i, part in enumerate(self._parts) if part != " ")

    def matches(self, text: str) -> bool:
        """Return whether `text`, or some text that it may stand for, matches."""
        state = 1
        for character in text:
            if character == ANY:
                state = -(state & -state) & (2 * self._end - 1)
            elif character == ANY_WORD:
                state = self._skip_word(state)
            else:
                state = (state & self._accepting(character)) << 1 | state & self._loops
            if not state or state & self._end & self._loops:
                break
        return bool(state & self._end)

    @cached_property
    def program(self) -> Pattern:
        """The pattern of the program's name: of the first word that says something, its last path segment."""
        word = next((word for word in self.glob.split(" ") if word.strip("*")), "*")
        return Pattern(word.rpartition("/")[2] or "*")

    @cached_property
    def is_literal(self) -> bool:
        """Whether only one text matches: the glob itself."""
        return not self._loops and not any(part == "?" or len(part) > 1 for part in self._parts)

    def _accepting(self, character: str) -> int:
        """Return the places whose token accepts `character`."""
        if character not in self._by_character:
            self._by_character[character] = sum(
                1 << i for i, part in enumerate(self._parts) if _accepts(part, character)
            )
        return self._by_character[character]

    def _skip_word(self, state: int) -> int:
        while (further := state | (state & self._no_space) << 1) != state:
            state = further
        return state


def _accepts(part: str, character: str) -> bool:
    return part == character if len(part) == 1 and part != "?" else fnmatch.fnmatchcase(character, part)
