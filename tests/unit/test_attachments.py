"""What a block is taken for, and how a prompt names it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.attachments import NAME_MAX_BYTES, Attachment, attachments_in, image_type, safe_name
from fleet.inbound import prompt_of


def item(*blocks, item_id="i1"):
    return {"id": item_id, "content": list(blocks)}


def text(words):
    return {"type": "text", "text": words}


def file(**described):
    return {"type": "file", "file": described}


@pytest.mark.parametrize(
    ("claimed", "name"),
    [
        ("plan.md", "plan.md"),
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\ann\\plan.md", "plan.md"),
        (".bashrc", "bashrc"),
        ("-rf", "rf"),
        ("..", "attachment"),
        ("a/", "attachment"),
        ("", "attachment"),
        ("a\0b\nc\x1b[31m\u202ed.png", "abc[31md.png"),
        ("one two.txt ", "one two.txt"),
        ("e\u0301.txt", "\u00e9.txt"),
        ("\ud800.txt", "\ufffd.txt"),
    ],
)
def test_a_name_becomes_one_harmless_segment(claimed: str, name: str):
    assert safe_name(claimed) == name


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=600))
def test_any_name_is_a_visible_file_name_that_the_disk_takes(claimed: str):
    name = safe_name(claimed)
    assert 1 <= len(name.encode()) <= NAME_MAX_BYTES
    assert name.isprintable()
    assert name[0] not in ".-"
    assert not {"/", "\\"} & set(name)
    assert safe_name(name) == name


def test_a_long_name_keeps_its_extension_and_whole_characters():
    assert safe_name("é" * 300 + ".png") == "é" * 125 + ".png"


def test_what_looks_like_an_endless_extension_is_none():
    assert safe_name("a." + "b" * 300) == "a." + "b" * 253


def test_names_that_collide_are_numbered_within_their_item():
    blocks = [file(name=name) for name in ("a.png", "x/A.png", "a-2.png", "a.png")]
    found = attachments_in([item(*blocks), item(file(name="a.png"), item_id="i2")])
    assert [each.path for each in found] == ["i1/a.png", "i1/A-2.png", "i1/a-2-2.png", "i1/a-3.png", "i2/a.png"]


def test_numbered_long_names_stay_within_the_bound():
    first, second = attachments_in([item(file(name="n" * 300 + ".txt"), file(name="n" * 300 + ".txt"))])
    assert first.name != second.name
    assert second.name.endswith("-2.txt")
    assert len(second.name) == NAME_MAX_BYTES


def test_a_block_without_a_name_is_called_by_its_alias():
    (found,) = attachments_in([item(text("look"), file(alias="up/loads/a.png", content_type="image/png", size=3))])
    assert found == Attachment(("i1", 1), "up/loads/a.png", "a.png", "image/png", 3)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "file"},
        {"type": "file", "file": "a.png"},
        file(alias=1, name=["a"], content_type="a b", size=True),
        file(alias=None, content_type="text/plain; charset=\nutf-8", size="3"),
    ],
)
def test_a_malformed_block_is_an_attachment_without_what_it_lacks(block: object):
    (found,) = attachments_in([item(block)])
    assert found == Attachment(("i1", 0), "", "attachment")


@pytest.mark.parametrize("content", [None, "words", [None, "words", {"type": ["file"]}]])
def test_content_of_another_shape_has_no_attachments(content: object):
    assert attachments_in([{"id": "i1", "content": content}]) == []


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n....", "image/png"),
        (b"\xff\xd8\xff\xe0....", "image/jpeg"),
        (b"GIF87a....", "image/gif"),
        (b"GIF89a....", "image/gif"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "image/webp"),
        (b"RIFF\x10\0\0\0WAVEfmt ", None),
        (b"<svg/>", None),
        (b"", None),
    ],
)
def test_an_image_is_known_by_its_first_bytes(content: bytes, kind: str | None):
    assert image_type(content) == kind


def test_a_prompt_names_each_attachment_where_its_block_stands():
    items = [
        item(text("See"), file(name="a"), text("and"), {"type": "json", "json": {"n": 1}}, file(name="b"), text("!")),
        item(file(name="c"), item_id="i2"),
    ]
    attached = {("i1", 1): "[a]", ("i1", 4): "[b]", ("i2", 0): "[c]"}
    assert prompt_of(items, attached) == 'See\n\n[a]\n\nand\n\n{\n  "n": 1\n}\n\n[b]\n\n!\n\n[c]'


def test_a_prompt_carries_what_utf_8_cannot_as_a_replacement():
    assert prompt_of([item(text("a\ud800b"), {"type": "json", "json": "\udfff"})], {}) == 'a\ufffdb\n\n"\ufffd"'
