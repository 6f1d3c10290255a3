"""The grammar of bash: tree-sitter's parser, with a bound on its time and size."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

#: Bytes of one script. Commands that agents write are far shorter; files belong into the write tool.
MAX_BYTES = 65_536
#: `|` in one script. Recovering from an error behind a long pipeline takes the square of its length, and no call back
#: can stop it; this many take a third of a second.
MAX_PIPES = 2048
#: Seconds for one parse. A script of `MAX_BYTES` without errors takes 0.1.
PARSE_MAX_S = 0.5

#: Bytes that the parser asks for at once.
_CHUNK = 4096

_LANGUAGE = Language(tree_sitter_bash.language())

#: Leaves in which a substitution is text; and those in double quotes, where `<(` is.
_LITERAL = frozenset({"raw_string", "ansi_c_string", "comment", "heredoc_start", "heredoc_end"})
_QUOTED = frozenset({"string_content", "heredoc_body", "heredoc_content"})
_ESCAPED = re.compile(r"\\.", re.DOTALL)


class UnparsableError(Exception):
    """The script is over a bound."""


def parse(script: str) -> Node:
    """Return the root of the script's tree, which may have errors. Nodes count bytes of UTF-8.

    Raises:
        UnparsableError: the script is over a bound.
    """
    source = script.encode("utf-8", "replace")
    if len(source) > MAX_BYTES or source.count(b"|") > MAX_PIPES or b"\0" in source:
        raise UnparsableError
    deadline = time.thread_time() + PARSE_MAX_S
    parser = Parser(_LANGUAGE)
    try:
        tree = parser.parse(
            lambda offset, _: source[offset : offset + _CHUNK],
            progress_callback=lambda _offset, _has_error: time.thread_time() > deadline,
        )
    except ValueError:
        raise UnparsableError from None
    # Only a call back can stop the parser, but with one each look at a node's text calls it. This reuses the tree.
    return parser.parse(source, tree).root_node


def is_reliable(root: Node) -> bool:
    """Return whether the tree has no error, and none of the places where this grammar is known to differ from bash."""
    return not root.has_error and not any(map(_is_misread, below(root)))


def is_quoted(redirect: Node) -> bool:
    """Return whether a here-document is taken as it is, without expansions."""
    return any(quote in _delimiter(redirect) for quote in "'\"\\")


def text_of(node: Node) -> str:
    """Return the source of a node."""
    return (node.text or b"").decode("utf-8", "replace")


def below(node: Node) -> Iterator[Node]:
    """Yield `node` and all nodes below it, in the order of the text."""
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(reversed(node.children))


def _is_misread(node: Node) -> bool:
    match node.type:
        case "heredoc_redirect":
            return not _is_where_bash_has_it(node)
        case "heredoc_body" if node.parent is not None and is_quoted(node.parent):
            return False
        case "comment":
            return _follows_a_word(node)
        case "command_substitution":  # in backticks, bash takes backslashes away before it parses
            return text_of(node).startswith("`") and "\\" in text_of(node)
        case "simple_expansion":  # `$ git` is a dollar sign and a command
            return bool(re.search(r"\s", text_of(node)))
    return node.is_named and not node.children and _hides_substitution(node)


def _hides_substitution(leaf: Node) -> bool:
    """Return whether the grammar took a substitution for text, as it does with backticks in `${X:-`a`}`."""
    if leaf.type in _LITERAL:
        return False
    text = _ESCAPED.sub("", text_of(leaf))
    return "`" in text or "$(" in text or (leaf.type not in _QUOTED and ("<(" in text or ">(" in text))


def _follows_a_word(comment: Node) -> bool:
    """Return whether a comment does not begin a word: to bash, `a#b` has none."""
    before = comment.prev_sibling
    return before is not None and before.end_byte == comment.start_byte and text_of(before)[-1:].isalnum()


def _is_where_bash_has_it(redirect: Node) -> bool:
    """Return whether a here-document begins and ends where bash sees it do so: else a command could pass for its text.

    Bash's begins on the next line, and its delimiter is the whole word behind `<<`.
    """
    source, start = redirect.text or b"", redirect.start_byte
    word = re.match(rb"[0-9]*<<-?[ \t]*([^ \t\n;&|()<>]*)[^\n]*\n", source)
    if word is None or word[1].decode("utf-8", "replace") != _delimiter(redirect):
        return False
    bodies = [child for child in redirect.children if child.type == "heredoc_body"]
    ends = [text_of(child).strip("\t\n") for child in redirect.children if child.type == "heredoc_end"]
    delimiter = re.sub(r"['\"\\]", "", _delimiter(redirect))
    lines = [line.lstrip("\t") for body in bodies for line in text_of(body).split("\n")]
    begins = all(source[word.end() : body.start_byte - start].strip(b"\t\n") == b"" for body in bodies)
    return begins and delimiter not in lines and ends == [delimiter] and bool(re.fullmatch(r"[^$`\s]+", delimiter))


def _delimiter(redirect: Node) -> str:
    return next((text_of(child) for child in redirect.children if child.type == "heredoc_start"), "")
