"""JSON in parts: the same values as at once, and no part is long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotcold.server.protocol import json_parts as module
from hotcold.server.protocol.json_parts import LongText, is_large, json_parts, to_json

TEXT = st.text(max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(TEXT, inner, max_size=8),
    max_leaves=60,
)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART", 20)


def written(value: Any) -> Any:
    return json.loads(b"".join(json_parts(value)))


@given(JSON)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_are_the_whole(value: Any) -> None:
    assert written(value) == json.loads(to_json(value))


@given(st.lists(st.text(max_size=50)), st.lists(JSON))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_made_while_it_is_written(texts: list[str], values: list[Any]) -> None:
    assert written({"a": LongText(iter(texts)), "b": iter(values)}) == {
        "a": json.loads(to_json("".join(texts))),
        "b": json.loads(to_json(values)),
    }


def test_no_part_is_long() -> None:
    for value in (
        "x" * 10_000,
        "\U0001f600" * 10_000,
        [1] * 10_000,
        [["a", {"b": [0.5] * 300}]] * 100,
        {str(i): "y" * 100 for i in range(100)},
        {"data": ({"id": i} for i in range(1000))},
        [[[[["z" * 19]]]]] * 50,
    ):
        assert is_large(value)
        assert max(map(len, json_parts(value))) <= 20 * 6 + 20


def test_parts_are_made_when_they_are_asked_for() -> None:
    made: list[int] = []

    def values() -> Iterator[int]:
        for i in range(1000):
            made.append(i)
            yield i

    parts = json_parts({"tokens": values()})
    while not made:
        next(parts)
    assert len(made) < 10


def test_the_size_of_a_large_value_is_not_counted_to_its_end() -> None:
    class Counting(list[Any]):
        count = 0

        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                Counting.count += 1
                yield each

    assert is_large([Counting([1] * 5) for _ in range(1000)])
    assert Counting.count < 50
    assert not is_large({"a": 1}) and not is_large([])


def test_half_characters_are_escapes() -> None:
    assert b"".join(json_parts(["\ud83d" + "a" * 50])) == b'["\\ud83d' + b"a" * 50 + b'"]'
