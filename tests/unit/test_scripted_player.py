"""What the scripted agent does with a script, apart from the process."""

from agents.scripted_player import steps


def test_nested_repeats_are_unrolled_with_the_innermost_counter():
    events = [{"repeat": {"times": 2, "events": [{"text": "a"}, {"repeat": {"times": 2, "events": [{"text": "b"}]}}]}}]
    assert [(value, i) for _, value, i in steps(events)] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]


def test_a_tool_is_a_call_and_a_result():
    assert [kind for kind, _, _ in steps([{"tool": {"name": "Bash"}}, {"sleep": 1}])] == [
        "tool_call",
        "tool_result",
        "sleep",
    ]
