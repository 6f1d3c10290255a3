import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.aliases import check_alias, is_alias, is_alias_prefix, is_id
from fleet.errors import FleetError

SEGMENTS = st.text("abzAZ09._@-", min_size=1, max_size=12).filter(lambda text: text not in {".", ".."})
ALIASES = st.lists(SEGMENTS, min_size=1, max_size=8).map("/".join)


@pytest.mark.parametrize("alias", ["a", "worker", "projects/p1/plan.md", "..a/b..", "me@x-y_z", "a" * 256])
def test_an_alias_of_the_protocols_characters_is_accepted(alias):
    assert is_alias(alias)
    assert check_alias(alias) == alias


@pytest.mark.parametrize(
    "alias", ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "a/./b", "a b", "ä", "a\n", "a\0", "٣", "a" * 257]
)
def test_an_alias_that_could_leave_its_folder_or_url_is_refused(alias):
    assert not is_alias(alias)
    with pytest.raises(FleetError) as caught:
        check_alias(alias)
    assert caught.value.code == "alias_invalid"


@settings(deadline=None)
@given(ALIASES, st.integers(0, 120))
def test_every_beginning_of_an_alias_is_a_prefix(alias, length):
    prefix = alias[:length]
    ends_in_dots = prefix.split("/")[-1] in {".", ".."}
    assert is_alias_prefix(prefix) or ends_in_dots or "/../" in prefix


@pytest.mark.parametrize("prefix", ["/a", "a//", "../", "a/./", "a b", "ä", "a" * 256])
def test_what_begins_no_alias_is_no_prefix(prefix):
    assert not is_alias_prefix(prefix)


@pytest.mark.parametrize(
    ("text", "valid"), [("ses_01J", True), ("..", False), (".", False), ("a/b", False), ("", False)]
)
def test_an_id_is_one_harmless_path_segment(text, valid):
    assert is_id(text) is valid
