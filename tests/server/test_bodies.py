"""Bodies of requests: JSON and nothing else, within bounds."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.server.bodies import opened, parse
from hotcold.server.protocol.errors import APIError

DEPTH = 20
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | CHARACTERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CHARACTERS, inner, max_size=3),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    """By recursion, where the code goes level by level."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth_of, inner), default=0)
    return 0


@given(JSON, st.booleans())
def test_what_json_writes_is_read(value: Any, ascii: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii).encode(), 100) == value


@given(JSON, st.integers(0, 6))
def test_depth_is_bounded(value: Any, allowed: int) -> None:
    nested = [[[[[[[[[value]]]]]]]]]  # the count begins where there are some brackets
    body = json.dumps(nested).encode()
    if depth_of(nested) <= 9 + allowed:
        assert parse(body, 9 + allowed) == nested
    else:
        with pytest.raises(APIError, match="nested too deeply"):
            parse(body, 9 + allowed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1}}', "not JSON"),
        (b'{"a": NaN}', r"not JSON: invalid character \(byte 6\)"),
        (b'{"a": Infinity}', "not JSON: invalid character"),
        (b'{"a": -Infinity}', "not JSON: invalid"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1e999}', "too large"),
        (b"9" * 5000, "too long"),
        (b'{"a": 1, "b": 2, "a": 1}', "'a' occurs twice"),
        (b'[{"x": {"a": 1, "a": 2}}]', "'a' occurs twice"),
        (b'[{"a": 1, "a": 2}' + b",1" * 50_000 + b"]", "a name occurs twice in an object"),
        (b'{"a": "\\ud800"}', r"lone surrogate, U\+D800 at byte 7"),
        (b'{"a": "\\ud800 and so on"}', r"lone surrogate, U\+D800 at byte 7"),
        (b'{"\\udc00": 1}', r"lone surrogate, U\+DC00 at byte 2"),
        (b'{"a": "\\ud83d\\ude00\\\\ud800", "b": "\\uDBFF"}', r"lone surrogate, U\+DBFF at byte 35"),
        (b'{"a": ["\\ud800' + b"a" * 50_000 + b'"]}', r"lone surrogate, U\+D800 at byte 8"),
        (b'{a: "\\ud800"}', "not JSON"),
        (b'{"a": "\\ud83d\\ude00', "not JSON: Input data was truncated"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', r"lone surrogate, U\+D800 at byte 7"),
        (b'{"a": "\xed\xa0"}', "not UTF-8"),
        (b"\xef\xbb\xbf", "empty"),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "not JSON"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"a": "\x00"}', "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'[["\\\\",' + b"[" * 50 + b"]" * 52, "nested too deeply"),
    ],
)
def test_what_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(APIError, match=message) as caught:
        parse(body, DEPTH)
    assert caught.value.status == 400
    assert "\n" not in caught.value.message and len(caught.value.message) < 200


@pytest.mark.parametrize("text", ["[" * 200, '"]}[{' * 50, '\\"[' * 50, "\\" * 41, "\\\\[" * 99])
def test_brackets_in_strings_do_not_count(text: str) -> None:
    value = [[text, {text: text}]] * 9
    assert parse(json.dumps(value).encode(), 3) == value


@pytest.mark.parametrize("body", [b"[],", b"{},", b"1,", b'"",', b'{"":{}},'], ids=bytes.decode)
def test_what_is_there_may_be_much(body: bytes) -> None:
    assert len(parse(b"[" + body * 300_000 + b"1]", 3)) == 300_001


@given(JSON, st.booleans(), st.sampled_from(["a", "\\", '"', "\u00e9", '\\"']))
def test_a_name_that_is_twice_is_found_anywhere(value: Any, ascii: bool, name: str) -> None:
    written = json.dumps([value, {name: "x", "other": value}, name], ensure_ascii=ascii)
    assert parse(written.encode(), 100)[1] == {name: "x", "other": value}
    twice = written.replace('"other": ', f"{json.dumps(name)}: ", 1)
    with pytest.raises(APIError, match="occurs twice in an object"):
        parse(twice.encode(), 100)


ESCAPES = ["\\ud800", "\\uDbFf", "\\uDC00", "\\udfff", "\\\\", "\\n", "\\ud7ff", "\\ue000", "u", "d800", "é"]


@given(st.lists(st.sampled_from(ESCAPES), max_size=6).map("".join), st.booleans())
def test_lone_surrogates_are_found_as_python_finds_them(text: str, name: bool) -> None:
    body = f'{{"{text}": 1}}' if name else f'[["{text}"]]'
    value = json.loads(body)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(APIError, match="lone surrogate"):
            parse(body.encode(), DEPTH)
    else:
        assert parse(body.encode(), DEPTH) == value


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/completion",
            "/infill",
        ),
        *(
            "/tokenize",
            "/apply-template",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/api/chat",
            "/api/generate",
        ),
    ],
)
@pytest.mark.parametrize("body", [rb'{"messages": "\ud800"}', rb'{"\udfff": 1}'], ids=["value", "name"])
def test_every_dialect_names_a_lone_surrogate(app: Any, path: str, body: bytes) -> None:
    reply = app.client.post(path, content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert reply.status_code == 400 and "lone surrogate" in message and "both halves" in message


def test_pairs_of_surrogates_are_characters() -> None:
    assert parse(b'["\\ud83d\\ude00"]', DEPTH) == ["\U0001f600"]


def raw(data: bytes) -> bytes:
    """Deflate without zlib's head, as some programs send it."""
    return zlib.compress(data, wbits=-15)


CODINGS: list[tuple[str, Any]] = [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw)]


@given(st.binary(max_size=300), st.sampled_from(CODINGS))
def test_a_compressed_body(data: bytes, coding: tuple[str, Any]) -> None:
    name, compress = coding
    body = compress(data)
    assert opened(body, name, len(data)) == data
    for broken in (body[:-1], body[: len(body) // 2], b"", body + b"x"):
        with pytest.raises(APIError) as caught:
            opened(broken, name, len(data) + 100)
        assert caught.value.status == 400
    if data:
        with pytest.raises(APIError, match=f"{len(data) - 1} bytes are allowed") as caught:
            opened(body, name, len(data) - 1)
        assert caught.value.status == 413


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_routes_open_bodies(app_with: Any, coding: str, compress: Any) -> None:
    app = app_with(body_bytes=10_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}

    def status(words: int, path: str = "/v1/completions") -> int:
        body = json.dumps({"prompt": "a " * words, "content": "a", "messages": []}).encode()
        assert len(compress(body)) < 3000
        return int(app.client.post(path, content=compress(body), headers=headers).status_code)

    assert status(20) == status(20, "/tokenize") == 200
    twice = [*headers.items(), ("Content-Encoding", coding)]
    refused = app.client.post("/tokenize", content=compress(b"{}"), headers=twice)
    assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert status(9_000) == status(1_000_000) == 413
