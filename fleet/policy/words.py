"""What the shell makes of a word: quotes removed, and what only the running shell knows marked as unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tree_sitter import Node

from fleet.policy.bash import below, text_of
from fleet.policy.patterns import ANY, ANY_WORD

#: How a process substitution reads: bash puts a path of this folder in its place.
DESCRIPTORS = "/dev/fd/"

#: Leaves in which braces and brackets are text.
_QUOTED = frozenset({"raw_string", "ansi_c_string", "string_content"})
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_SIMPLE_ESCAPES = {
    "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", "'": "'", '"': '"', "?": "?",
}  # fmt: skip
_ANSI_C = re.compile(
    r"\\(?:(?P<octal>[0-7]{1,3})|x(?P<hex>[0-9a-fA-F]{1,2})|u(?P<short>[0-9a-fA-F]{1,4})|U(?P<long>[0-9a-fA-F]{1,8})"
    r"|c(?P<control>.)|(?P<simple>.))",
    re.DOTALL,
)


def value_of(parts: Sequence[Node]) -> str:
    """Return the value of one word; `parts` are the nodes that touch each other in it."""
    leaves = [leaf for part in parts for leaf in below(part) if not leaf.children]
    bare = "".join(_ESCAPED.sub("", text_of(leaf)) for leaf in leaves if leaf.type not in _QUOTED)
    braces, brackets = bare.partition("{")[2], bare.partition("[")[2]
    if "}" in braces and ("," in braces or ".." in braces):  # {git,push} and {1..3} make several words
        return ANY
    return ANY_WORD if "]" in brackets else "".join(map(_value, parts))


def ansi_c(text: str) -> str:
    """Return what `$'text'` stands for; bash ends it at a NUL."""
    return _ANSI_C.sub(_ansi_c_character, text).partition("\0")[0]


def _value(node: Node) -> str:
    match node.type:
        case "raw_string":
            return text_of(node)[1:-1]
        case "ansi_c_string":
            return ansi_c(text_of(node)[2:-1])
        case "translated_string":
            return "".join(map(_value, node.named_children))
        case "string":
            return _double_quoted(node)
        case "concatenation" | "command_name":
            return "".join(map(_value, node.children))
        case "process_substitution":
            return DESCRIPTORS + ANY_WORD
    return ANY if node.children else _unquoted(text_of(node))


def _double_quoted(node: Node) -> str:
    """Return the value of a string. The grammar leaves out some white space in it, so the source is cut up instead."""
    source, start = node.text or b"", node.start_byte
    value, position = "", 1
    for child in node.named_children:
        if child.type != "string_content":
            value += _unescaped(source[position : child.start_byte - start])
            value += ANY if "@" in text_of(child) else ANY_WORD  # "$@" makes many words
            position = child.end_byte - start
    return value + _unescaped(source[position:-1])


def _unescaped(content: bytes) -> str:
    text = re.sub(r"\\([$`\"\\\n])", lambda found: found[1].strip("\n"), content.decode("utf-8", "replace"))
    return ANY if "`" in _ESCAPED.sub("", content.decode("utf-8", "replace")) else text


def _unquoted(text: str) -> str:
    """Return the value of text without quotes: a backslash keeps the next character, a glob stands for file names."""
    if "`" in _ESCAPED.sub("", text):
        return ANY
    return re.sub(
        r"\\(.)|[*?\[]", lambda found: ANY_WORD if found[1] is None else found[1].strip("\n"), text, flags=re.S
    )


def _ansi_c_character(found: re.Match[str]) -> str:
    match found.lastgroup, found[found.lastindex or 0]:
        case "octal", digits:
            return chr(int(digits, 8) & 0xFF)
        case "control", character:
            return chr(ord(character) & 0x1F)
        case "simple", character:
            return _SIMPLE_ESCAPES.get(character, f"\\{character}")
        case _, digits:
            code = int(digits, 16)
            return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"
