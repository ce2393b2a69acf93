"""Dataclasses as JSON and back, and messages in pieces of any size."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.engine.generation import Piece
from hotcold.engine.request import Grammar, Job, Timings
from hotcold.engine.sampler import Logprobs
from hotcold.hosting.messages import (
    Abort,
    AskStats,
    Close,
    Failure,
    Load,
    LoadFailed,
    Loading,
    Ready,
    Stats,
    Step,
    Submit,
    decode,
    encode,
)
from hotcold.hosting.state import ModelInfo, ProcessStats
from hotcold.processes.plain_data import (
    HEADER,
    MOST_BYTES,
    PlainDataError,
    Unpacker,
    from_plain,
    lengths,
    pack,
    to_plain,
)
from hotcold.runtime.sampling import SamplingParams
from hotcold.values import LARGEST

texts = st.text(max_size=20)
floats = st.floats(allow_nan=False)
logprobs = st.builds(
    Logprobs, floats, st.lists(st.tuples(st.integers(0, 1 << 31), floats), max_size=3).map(tuple)
)
pieces = st.builds(
    Piece,
    text=texts,
    ids=st.lists(st.integers(0, 1 << 31)).map(tuple),
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, "stop", "length", "cancelled", "error"]),
    stop=st.none() | texts,
    context_full=st.booleans(),
    prompt_tokens=st.integers(0),
    seed=st.integers(0, (1 << 64) - 1),
    timings=st.builds(Timings, st.none() | floats, st.none() | floats, st.none() | floats),
    reused=st.integers(0, 100),
    prompt_logprobs=st.lists(st.none() | logprobs, max_size=3).map(tuple),
)
biases = st.just(-math.inf) | st.floats(-1e4, 1e4)
jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(-(1 << 31), (1 << 31) - 1)),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0, 100),
        seed=st.none() | st.integers(0, (1 << 64) - 1),
        logit_bias=st.dictionaries(st.integers(0, 1 << 20), biases, max_size=3),
    ),
    max_tokens=st.integers(1, LARGEST),
    stop=st.lists(st.text(min_size=1, max_size=20)).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["json_object", "regex"]), texts),
    deadline_s=st.none() | st.floats(0, 1e9),
    timeout_s=st.none() | st.floats(0, 1e9),
    logprobs=st.none() | st.integers(0, 20),
    echo=st.booleans(),
)
failures = st.builds(Failure, st.integers(0), texts, texts, st.none() | floats)
messages = st.one_of(
    st.builds(Load, st.none() | texts, st.dictionaries(texts, texts | st.integers())),
    st.builds(Submit, st.integers(0), jobs),
    st.builds(Abort, st.integers(0)),
    st.builds(AskStats, st.integers(0), st.booleans()),
    st.just(Close()),
    st.builds(Loading, st.integers(), st.integers()),
    st.builds(Ready, st.from_type(ModelInfo)),
    st.builds(LoadFailed, texts),
    st.builds(
        Step,
        st.lists(st.tuples(st.integers(0), pieces), max_size=4).map(tuple),
        st.lists(failures, max_size=2).map(tuple),
    ),
    st.builds(Stats, st.integers(0), st.from_type(ProcessStats)),
)


def comparable(message: Any) -> str:
    """By its ``repr``, in which NaN equals itself; a prompt as a list, whatever holds it."""
    if isinstance(message, Submit):
        message = replace(message, job=replace(message.job, prompt=list(message.job.prompt)))
    return repr(message)


@given(st.lists(messages, max_size=4), st.integers(1, 300))
def test_every_message_comes_back_however_its_bytes_arrive(sent: list[Any], size: int) -> None:
    data = b"".join(map(encode, sent))
    unpacker, found = Unpacker(), []
    for start in range(0, len(data), size):
        found += [decode(*each) for each in unpacker.push(data[start : start + size])]
    assert list(map(comparable, found)) == list(map(comparable, sent))


@given(messages)
def test_a_message_is_json_that_any_reader_takes(message: Any) -> None:
    """Strict JSON has no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    data = encode(message)
    n_text, n_ids = HEADER.unpack(data[: HEADER.size])
    name, _ = json.loads(data[HEADER.size : HEADER.size + n_text], parse_constant=refuse)
    assert name == type(message).__name__
    assert len(data) == HEADER.size + n_text + n_ids


class Pair(NamedTuple):
    name: str
    value: float


@dataclass(frozen=True)
class Inner:
    value: float
    text: str = "none"


@dataclass(frozen=True)
class Everything:
    whole: int
    kind: Literal["a", "b"] = "a"
    value: float = 0.0
    maybe: float | None = None
    flag: bool = False
    data: bytes = b""
    pairs: tuple[Pair, ...] = ()
    two: tuple[int, str] = (0, "")
    table: Mapping[int, float] = field(default_factory=dict)
    rows: Sequence[list[int]] = field(default_factory=list)
    inner: Inner | None = None
    free: Any = None


everything = st.builds(
    Everything,
    whole=st.integers(),
    kind=st.sampled_from("ab"),
    value=st.floats(),
    maybe=st.none() | st.floats(),
    flag=st.booleans(),
    data=st.binary(max_size=9),
    pairs=st.lists(st.builds(Pair, texts, st.floats()), max_size=3).map(tuple),
    two=st.tuples(st.integers(), texts),
    table=st.dictionaries(st.integers(), st.floats(), max_size=3),
    rows=st.lists(st.lists(st.integers(), max_size=3), max_size=3),
    inner=st.none() | st.builds(Inner, st.floats(), texts),
    free=st.none() | texts | st.lists(st.integers(), max_size=3),
)


@given(everything)
def test_any_dataclass_comes_back(value: Everything) -> None:
    text = json.dumps(to_plain(value), allow_nan=False)
    assert repr(from_plain(Everything, json.loads(text))) == repr(value)


def test_what_holds_its_default_is_left_out() -> None:
    assert to_plain(Everything(3)) == {"whole": 3, "table": [], "rows": []}
    # A value that only looks like the default is written: 1 == True, and 0 == 0.0.
    assert to_plain(Everything(3, maybe=0)) == {"whole": 3, "maybe": 0, "table": [], "rows": []}


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {},
        {"whole": "1"},
        {"whole": True},
        {"whole": 1.0},
        {"whole": 1, "more": 2},
        {"whole": 1, "kind": "c"},
        {"whole": 1, "value": "1.5"},
        {"whole": 1, "value": None},
        {"whole": 1, "flag": 0},
        {"whole": 1, "pairs": [["a"]]},
        {"whole": 1, "pairs": {}},
        {"whole": 1, "two": [1, 2]},
        {"whole": 1, "table": [[1]]},
        {"whole": 1, "inner": 5},
        {"whole": 1, "rows": [1]},
        {"whole": 1, "data": 5},
        {"whole": 1, "data": "\u20ac"},
    ],
)
def test_anything_else_is_refused(plain: Any) -> None:
    with pytest.raises(PlainDataError):
        from_plain(Everything, plain)


@pytest.mark.parametrize(
    "plain", [None, [], ["Submit"], ["Nothing", {}], [[], {}], ["Abort", {}], ["Abort", {"id": "1"}]]
)
def test_no_message_is_refused(plain: Any) -> None:
    with pytest.raises(PlainDataError):
        decode(plain, array("i"))


def test_types_without_a_plain_form_are_a_defect_at_once() -> None:
    @dataclass
    class Wrong:
        either: Any

    Wrong.__annotations__["either"] = int | str
    with pytest.raises(TypeError, match="has no plain form"):
        to_plain(Wrong(1))


def test_messages_are_bounded() -> None:
    assert lengths(HEADER.pack(3, 8)) == (3, 8)
    for wrong in ((MOST_BYTES, 0), (1, MOST_BYTES), (0xFFFFFFFF, 0xFFFFFFFF), (2, 3)):
        with pytest.raises(PlainDataError):
            lengths(HEADER.pack(*wrong))
    with pytest.raises(PlainDataError, match="more than 256 MiB"):
        pack("", array("i", bytes(MOST_BYTES)))
    for ids in ([1 << 31], [0.5], ["1"]):
        with pytest.raises(PlainDataError, match="32 bits"):
            pack("", ids)  # type: ignore[list-item]


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"NaN", b"[Infinity]", b"[" * 100_000])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(PlainDataError):
        list(Unpacker().push(HEADER.pack(len(text), 0) + text))


def test_numbers_that_json_lacks_are_refused_where_nothing_says_that_they_are_numbers() -> None:
    for long in (False, True):
        with pytest.raises(PlainDataError):
            pack(math.nan, long=long)


def test_a_long_message_is_the_same_one() -> None:
    plain = {"a": [1, 2.5, None, "é"], "b": {"c": True}}
    assert pack(plain, [1, 2], long=True) == pack(plain, [1, 2])
