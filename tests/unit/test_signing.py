"""Sealed texts open where they were sealed for, with the key they were sealed with, and nowhere else."""

from __future__ import annotations

import pytest

from fleet.credentials import signing_key
from fleet.errors import ConfigError
from fleet.signing import KEY_MIN_BYTES, SEALED, Seal, TamperedError

KEY = "a-key-of-the-fleet-under-test"
TEXTS = ['{"a": 1}', "", ":", "über\n", "\ud800", f"{SEALED}x:y"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_sealed_text_opens_for_its_purpose(text: str):
    sealed = Seal(KEY).seal("inbox s/t", text)
    assert sealed.startswith(SEALED)
    assert Seal(KEY).open("inbox s/t", sealed) == text


@pytest.mark.parametrize(
    "forged",
    [
        "",
        SEALED,
        f"{SEALED}:",
        f"{SEALED}{'0' * 64}:text",
        f"{SEALED}é:text",
        "text",
        Seal(KEY).seal("prompt s/t", "text"),
        Seal(KEY).seal("inbox s/t2", "text"),
        Seal("another-key-of-a-fleet").seal("inbox s/t", "text"),
        Seal(KEY).seal("inbox s/t", "text") + "s",
        Seal(KEY).seal("inbox s/t", "text").replace("text", "Text"),
        Seal(KEY).seal("inbox s/t", "text").removeprefix(SEALED),
    ],
)
def test_a_text_that_was_not_sealed_for_its_place_does_not_open(forged: str):
    with pytest.raises(TamperedError):
        Seal(KEY).open("inbox s/t", forged)


def test_the_end_of_a_purpose_can_not_become_the_beginning_of_a_text():
    mac = Seal(KEY).seal("inbox s/t", "1 text").split(":")[1]
    with pytest.raises(TamperedError):
        Seal(KEY).open("inbox s/t1", f"{SEALED}{mac}: text")


def test_without_a_key_a_text_stays_as_it_is():
    assert Seal().seal("inbox s/t", '{"a": 1}') == '{"a": 1}'
    assert Seal().open("inbox s/t", '{"a": 1}') == '{"a": 1}'


def test_a_process_without_the_key_does_not_take_a_sealed_text_for_a_plain_one():
    with pytest.raises(TamperedError, match="no signing key"):
        Seal().open("inbox s/t", Seal(KEY).seal("inbox s/t", "text"))


def test_an_error_quotes_neither_the_key_nor_the_text():
    with pytest.raises(TamperedError) as raised:
        Seal(KEY).open("inbox s/t", Seal("another-key-of-a-fleet").seal("inbox s/t", "s3cret"))
    assert KEY not in str(raised.value)
    assert "s3cret" not in str(raised.value)


def test_the_signing_key_comes_from_a_variable_or_a_file_or_not_at_all(tmp_path):
    file = tmp_path / "signing.key"
    file.write_text(f"{KEY}\n")
    assert signing_key({"FLEET_SIGNING_KEY": KEY}) == KEY
    assert signing_key({"FLEET_SIGNING_KEY_FILE": str(file)}) == KEY
    assert signing_key({}) is None
    assert signing_key({"FLEET_SIGNING_KEY": "", "FLEET_SIGNING_KEY_FILE": ""}) is None


def test_a_signing_key_that_is_too_short_is_refused_and_not_quoted():
    short = "k" * (KEY_MIN_BYTES - 1)
    with pytest.raises(ConfigError, match=f"has {len(short)} characters") as raised:
        signing_key({"FLEET_SIGNING_KEY": short})
    assert raised.value.code == "signing_key_invalid"
    assert short not in str(raised.value)


def test_a_signing_key_file_that_can_not_be_read_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="FLEET_SIGNING_KEY_FILE") as raised:
        signing_key({"FLEET_SIGNING_KEY_FILE": str(tmp_path / "none")})
    assert raised.value.code == "signing_key_invalid"
