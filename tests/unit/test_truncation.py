import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fleet import items
from fleet.errors import ThreadFailedError
from fleet.truncation import HEAD_BYTES, LOWER_CAP_BYTES, TAIL_BYTES, fit

LOG = "session_agent_harness-s1/threads/p/a/logs/thread.log"
MARKER = re.compile(r"…\[truncated (\d+) bytes; see (\S+)\]…")
BUDGET = 350_000


def size(item: items.Item) -> int:
    return len(json.dumps(item))


def result(output: object) -> items.Item:
    return {
        "content": [{"type": "text", "text": "→ x"}],
        "metadata": {"type": "tool_result", "tool": {"invocation_id": "i", "is_error": False, "output": output}},
    }


def assert_excerpt(excerpt: str, text: str) -> None:
    """Assert that `excerpt` is the excerpt of `text`: whole characters, at most the allowed bytes, an exact count."""
    marker = MARKER.search(excerpt)
    assert marker is not None
    head, tail = excerpt[: marker.start()], excerpt[marker.end() :]
    assert text.startswith(head)
    assert text.endswith(tail)
    head_bytes, tail_bytes, whole = len(head.encode()), len(tail.encode()), len(text.encode())
    assert HEAD_BYTES - 3 <= head_bytes <= HEAD_BYTES
    assert TAIL_BYTES - 3 <= tail_bytes <= TAIL_BYTES
    assert int(marker[1]) == whole - head_bytes - tail_bytes
    assert marker[2] == LOG


@pytest.mark.parametrize("character", ["a", "é", "€", "😀"])
@pytest.mark.parametrize("shift", range(4))
def test_an_excerpt_keeps_whole_characters_and_counts_the_bytes_between(character, shift):
    text = "x" * shift + character * 400_000
    fitted = fit(result(text), BUDGET, LOG)
    assert_excerpt(fitted["metadata"]["tool"]["output"], text)
    assert fitted["metadata"]["truncated"] is True
    assert fitted["metadata"]["truncated_fields"] == ["tool.output"]
    assert fitted["metadata"]["local_log"] == LOG


def test_an_item_of_exactly_the_budget_is_left_and_one_byte_more_is_not():
    empty = size(result(""))
    exact = result("a" * (BUDGET - empty))
    assert size(exact) == BUDGET
    assert fit(exact, BUDGET, LOG) is exact
    assert fit(result("a" * (BUDGET - empty + 1)), BUDGET, LOG)["metadata"]["truncated"] is True


def test_fitting_does_not_change_its_argument():
    item = result("a" * 400_000)
    kept = json.dumps(item)
    fit(item, BUDGET, LOG)
    assert json.dumps(item) == kept


def full_item(sizes: dict[str, int]) -> items.Item:
    return {
        "content": [{"type": "text", "text": "c" * sizes["content[0].text"]}],
        "metadata": {
            "type": "odd",
            "text": "t" * sizes["text"],
            "tool": {"output": "o" * sizes["tool.output"], "input": {"k": "i" * sizes["tool.input"]}},
            "post_id": "p",
        },
    }


ORDER = ["tool.output", "tool.input", "text", "content[0].text"]


@pytest.mark.parametrize("needed", range(1, 5))
def test_fields_become_excerpts_in_order_until_the_item_fits(needed):
    item = full_item(dict.fromkeys(ORDER, 100_000))
    fitted = fit(item, 420_000 - needed * 95_000, LOG)
    assert fitted["metadata"]["truncated_fields"] == ORDER[:needed]
    assert len(fitted["metadata"]["tool"]["output"]) < 10_000
    untouched = {
        "tool.input": fitted["metadata"]["tool"]["input"] == item["metadata"]["tool"]["input"],
        "text": fitted["metadata"]["text"] == item["metadata"]["text"],
        "content[0].text": fitted["content"] == item["content"],
    }
    assert [name for name, same in untouched.items() if same] == ORDER[needed:]
    assert fitted["metadata"]["post_id"] == "p"


def test_an_input_is_excerpted_as_its_json():
    input_ = {"path": "/w/ä", "text": "line\n" * 100_000}
    fitted = fit(items.tool_call("i", "Write", input_), BUDGET, LOG)
    assert_excerpt(fitted["metadata"]["tool"]["input"], json.dumps(input_, ensure_ascii=False))
    assert fitted["metadata"]["truncated_fields"] == ["tool.input"]
    assert fitted["content"][0]["text"].startswith("Write → {")


def test_a_long_thought_is_excerpted_and_its_brief_is_left():
    fitted = fit(items.thinking("t" * 400_000), BUDGET, LOG)
    assert fitted["metadata"]["truncated_fields"] == ["text"]
    assert fitted["metadata"]["full_text_length"] == 400_000
    assert fitted["content"][0]["text"] == f"[thinking] {'t' * 120}…"


def test_a_field_that_would_not_get_shorter_is_left():
    item = full_item({"tool.output": 6_100, "tool.input": 0, "text": 400_000, "content[0].text": 10})
    fitted = fit(item, BUDGET, LOG)
    assert fitted["metadata"]["truncated_fields"] == ["text"]
    assert fitted["metadata"]["tool"] == item["metadata"]["tool"]


def test_what_is_too_large_as_excerpts_is_cut_to_markers():
    fitted = fit(full_item(dict.fromkeys(ORDER, 100_000)), 8_192, LOG)
    assert size(fitted) <= 8_192
    marker = f"…[truncated 100000 bytes; see {LOG}]…"
    assert fitted["metadata"]["tool"]["output"] == marker
    assert fitted["metadata"]["truncated_fields"] == ORDER


def test_an_item_that_is_too_large_without_its_long_fields_fails_the_thread():
    item = result("o" * 400_000)
    item["metadata"]["tool"]["invocation_id"] = "i" * 400_000
    with pytest.raises(ThreadFailedError) as caught:
        fit(item, BUDGET, LOG)
    assert caught.value.code == "THREAD_ITEM_TOO_LARGE"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("character", ["a", "€", "😀", f"…[truncated 7 bytes; see {LOG}]…"])
def test_an_excerpt_that_is_fitted_again_still_counts_the_bytes_of_the_full_text(character, shift):
    text = "x" * shift + character * (400_000 // len(character))
    item = full_item(dict.fromkeys(ORDER, 0)) | {"content": [{"type": "text", "text": "c" * 100_000}]}
    item["metadata"]["tool"]["output"] = text
    once = fit(item, BUDGET, LOG)
    lower = fit(once, 40_000, LOG)
    assert lower["metadata"]["tool"]["output"] == once["metadata"]["tool"]["output"]
    lowest = fit(lower, 2_000, LOG)
    assert lowest["metadata"]["tool"]["output"] == f"…[truncated {len(text.encode())} bytes; see {LOG}]…"
    assert lowest["content"][0]["text"] == f"…[truncated 100000 bytes; see {LOG}]…"


def test_an_input_that_is_fitted_again_still_counts_the_bytes_of_its_json():
    input_ = {"text": 'say "hi"\n' * 50_000}
    lowest = fit(fit(items.tool_call("i", "Write", input_), BUDGET, LOG), 2_000, LOG)
    whole = len(json.dumps(input_, ensure_ascii=False).encode())
    assert lowest["metadata"]["tool"]["input"] == f"…[truncated {whole} bytes; see {LOG}]…"


def test_the_lower_cap_of_a_platform_is_met_from_the_full_item():
    item = result("a" * 100_000)
    assert fit(item, BUDGET, LOG) is item
    fitted = fit(item, LOWER_CAP_BYTES, LOG)
    assert size(fitted) <= LOWER_CAP_BYTES
    assert_excerpt(fitted["metadata"]["tool"]["output"], "a" * 100_000)


def test_an_excerpt_that_must_go_lower_still_keeps_the_names_of_what_was_cut_before():
    once = fit(full_item({"tool.output": 400_000, "tool.input": 0, "text": 100_000, "content[0].text": 0}), BUDGET, LOG)
    twice = fit(once, LOWER_CAP_BYTES, LOG)
    assert once["metadata"]["truncated_fields"] == ["tool.output"]
    assert twice["metadata"]["truncated_fields"] == ["tool.output", "text"]
    assert size(twice) <= LOWER_CAP_BYTES


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
LONG = st.tuples(st.text(min_size=1, max_size=6), st.integers(0, 6_000)).map(lambda part: part[0] * part[1])


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "text": LONG,
            "tool": st.fixed_dictionaries({}, optional={"output": LONG | JSON, "input": JSON | LONG, "name": LONG}),
            "detail": LONG,
        },
    ),
    LONG,
    st.integers(1_000, 40_000),
)
def test_any_item_either_fits_or_fails_the_thread(metadata, text, budget):
    item = {"content": [{"type": "text", "text": text}], "metadata": {"type": "x", **metadata}}
    try:
        fitted = fit(item, budget, LOG)
    except ThreadFailedError:
        assert size(item) > budget
        return
    assert size(fitted) <= budget
    json.dumps(fitted, ensure_ascii=False).encode()
    if size(item) <= budget:
        assert fitted is item
    else:
        assert set(fitted["metadata"]["truncated_fields"]) <= set(ORDER)
        assert fitted["metadata"].get("detail") == metadata.get("detail")
    assert fit(fitted, budget, LOG) is fitted


@settings(deadline=None)
@given(LONG, st.integers(8_500, 40_000))
def test_a_shortened_output_is_an_excerpt_of_itself(text, budget):
    item = result(text)
    assume(size(item) > budget)
    output = fit(item, budget, LOG)["metadata"]["tool"]["output"]
    if not output.startswith("…[truncated"):
        assert_excerpt(output, text)
