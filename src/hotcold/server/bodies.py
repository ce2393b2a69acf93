"""The body of a request as JSON, within bounds: bytes, time, depth, values. What another reader of the same
bytes could understand otherwise is refused: a name twice in an object, NaN, half a character."""

import asyncio
import codecs
import json
import math
import re
from collections import Counter
from itertools import accumulate
from typing import Any

from starlette.requests import ClientDisconnect, Request

from hotcold.server.protocol.errors import APIError
from hotcold.server.security import from_browser
from hotcold.server.settings import Settings

#: Smaller bodies are read at once: a thread would take longer.
AT_ONCE = 32 << 10
#: Of a body, outside of its strings: each value makes objects, which takes far longer than reading its text.
MOST_MARKS = 1 << 18
#: What programs say of a body that nobody gave a type, as ``curl -d``. A page may send these without being
#: asked by its browser whether it may, so they are taken from programs alone.
_OF_PROGRAMS = ("", "application/x-www-form-urlencoded", "text/plain")
_SLICE = 64 << 10
_NO_MARKS = bytes(set(range(256)) - set(b"[]{},:"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, settings: Settings) -> tuple[Any, int]:
    """The value that a request's body is, and its bytes. APIError: it is none, or not within the bounds."""
    _check_headers(request, settings)
    body = await _read(request, settings)
    if len(body) <= AT_ONCE:
        return parse(body, settings.depth), len(body)
    return await asyncio.to_thread(parse, body, settings.depth), len(body)


def parse(body: bytes, depth: int) -> Any:
    """The value of JSON text in UTF-8 with at most ``depth`` arrays and objects in each other.
    APIError: it is none, or more."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise _refused("the body is empty: a JSON object is needed")
    _check_structure(body, depth)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_no_number,
            parse_float=_finite,
        )
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _refused("the body has half of a surrogate pair, which is no character") from None
    except UnicodeDecodeError as error:
        raise _refused(f"the body is not UTF-8: byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _refused(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):  # a number with thousands of digits
        raise _refused("the body has a number that is too long") from None
    return value


def _check_headers(request: Request, settings: Settings) -> None:
    headers = request.headers
    kind = headers.get("content-type", "")
    plain = kind.partition(";")[0].strip().lower()
    if plain != "application/json" and (plain not in _OF_PROGRAMS or from_browser(headers)):
        seen = f"Content-Type is {kind!r:.60}" if kind else "no Content-Type"
        raise APIError(f"{seen}: application/json is needed", status=415, code="unsupported_media_type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise APIError(
            "Content-Encoding is not supported: send the JSON as it is",
            status=415,
            code="unsupported_encoding",
        )
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > settings.body_bytes:
        raise _too_large(settings)


async def _read(request: Request, settings: Settings) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.body_bytes:
                    raise _too_large(settings)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_s:g} seconds"
        raise APIError(message, status=408, type="timeout_error", code="request_timeout") from None
    except ClientDisconnect:
        raise APIError("the client has gone", status=499, code="cancelled") from None
    return bytes(body)


def _check_structure(body: bytes, depth: int) -> None:
    """APIError: more brackets are open than ``depth``, or there are too many values. What is no JSON
    passes or does not. A slice at a time: within one call of ``bytes`` or ``re`` no other thread runs, and a
    large body would hold up everybody's events."""
    marks = opened = 0
    in_string = escaped = False
    for start in range(0, len(body), _SLICE):
        part = body[start + escaped : start + _SLICE]
        if not part:  # of one character, which was escaped
            escaped = False
            continue
        escaped = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        without_strings = b"".join(pieces[in_string::2])
        in_string ^= len(pieces) % 2 == 0
        found = without_strings.translate(None, _NO_MARKS)
        marks += len(found)
        if marks > MOST_MARKS:
            raise _refused(f"the body has more than {MOST_MARKS} brackets, commas and colons")
        brackets = found.translate(None, b",:")
        levels = list(accumulate(map(_STEP.__getitem__, brackets), initial=opened))
        opened = levels[-1]
        if max(levels) > depth:
            raise _refused(f"the body has more than {depth} arrays and objects in each other")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise _refused(f"{twice!r:.60} is twice in an object")
    return found


def _no_number(word: str) -> float:
    raise _refused(f"{word} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _refused(f"the number {text:.40} is too large")
    return value


def _too_large(settings: Settings) -> APIError:
    message = f"the body is too large: {settings.body_bytes} bytes are allowed"
    return APIError(message, status=413, code="request_too_large")


def _refused(message: str) -> APIError:
    return APIError(message, status=400, code="invalid_json")
