"""The body of a request as JSON, within bounds: bytes, time, depth. What another reader of the same bytes
could understand otherwise is refused: a name twice in an object, NaN, half a character."""

import asyncio
import codecs
import contextlib
import gc
import json
import re
import zlib
from collections import Counter
from itertools import chain
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from hotcold.server.protocol.errors import APIError
from hotcold.server.security import from_browser
from hotcold.server.sending import InThread
from hotcold.server.settings import Settings

_SMALL = 32 << 10  # bytes of a body that may be read twice
#: Escapes in JSON; ``half`` is a surrogate without the other one of its pair.
_ESCAPES = re.compile(
    rb"\\(?:u[Dd][89ABab]..\\u[Dd][C-Fc-f]..|u(?P<half>[Dd][89A-Fa-f][0-9A-Fa-f]{2})|.)", re.DOTALL
)
#: Types that programs state for a body whose sender gave none, as ``curl -d``. A page's browser may send
#: these without asking whether it may, so they are taken from programs alone.
_OF_PROGRAMS = ("", "application/x-www-form-urlencoded", "text/plain")
#: Content-Encoding -> how the body is compressed; empty: not at all.
_CODINGS = {"identity": "", "gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}


async def read_body(request: Request, settings: Settings, in_thread: InThread) -> bytes:
    """The body of a request whose headers state JSON, opened if it is compressed. APIError: they do not, or
    it is beyond the bounds."""
    coding = _check_headers(request, settings)
    body = await _read(request, settings)
    return await in_thread(opened, body, coding, settings.body_bytes) if coding else body


def opened(body: bytes, coding: str, most: int) -> bytes:
    """The content of a compressed body: gzip, or deflate with or without zlib's head. APIError: it has more
    than ``most`` bytes, of which no more are opened, or is broken."""
    reader = zlib.decompressobj(_window(body, coding))
    try:
        found = reader.decompress(body, most + 1)
    except zlib.error as error:
        raise _refused(f"the body is not {coding}: {error}") from None
    if len(found) > most:
        raise _too_large(most)
    if not reader.eof:
        raise _refused(f"the body is not whole: its {coding} data ends too soon")
    if rest := len(reader.unused_data):
        raise _refused(f"the body has {rest} bytes after the end of its {coding} data")
    return found


def _window(body: bytes, coding: str) -> int:
    """The window and head of compressed data, as zlib numbers them."""
    if coding == "gzip":
        return zlib.MAX_WBITS | 16
    zlib_head = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
    return zlib.MAX_WBITS if zlib_head else -zlib.MAX_WBITS


def parse(body: bytes, depth: int) -> Any:
    """The value of JSON text in UTF-8 with at most ``depth`` arrays and objects in each other.
    APIError: it is none, or more."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise _refused("the body is empty: a JSON object is needed")
    try:
        value = _decoded(body)
    except RecursionError:
        raise _too_deep(depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused(_what_is_wrong(body, error)) from None
    strings = body.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') // 2
    if _strings(value, depth) != strings:
        if len(body) <= _SMALL:
            json.loads(body, object_pairs_hook=_object, parse_int=str, parse_float=str)
        raise _refused("a name occurs twice in an object")  # of a large body: a second look would take long
    return value


def _decoded(body: bytes) -> Any:
    """Parses a body without Python's garbage collector, which would look again and again at all that was made
    so far, and find nothing. No other thread runs meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(body)
    finally:
        if enabled:
            gc.enable()


def _strings(value: Any, depth: int) -> int:
    """Counts the strings, names included: fewer than in the text if a name occurs twice in an object.
    APIError: it is too deep."""
    found = 0
    level = [value]
    for _ in range(depth + 1):
        opened = [each for each in level if isinstance(each, list | dict)]
        found += sum(isinstance(each, str) for each in level)
        found += sum(len(each) for each in opened if isinstance(each, dict))
        if not opened:
            return found
        inner = (each.values() if isinstance(each, dict) else each for each in opened)
        level = [*chain.from_iterable(inner)]
    raise _too_deep(depth)


def _check_headers(request: Request, settings: Settings) -> str:
    """Returns the coding of the body; empty where it is not compressed."""
    headers = request.headers
    kind = headers.get("content-type", "")
    plain = kind.partition(";")[0].strip().lower()
    if plain != "application/json" and (plain not in _OF_PROGRAMS or from_browser(headers)):
        seen = f"Content-Type is {kind!r:.60}" if kind else "no Content-Type"
        raise APIError(f"{seen}: application/json is needed", status=415, code="unsupported_media_type")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in _CODINGS:
        raise APIError(
            f"Content-Encoding is {coding!r:.60}: gzip, deflate and identity are allowed",
            status=415,
            code="unsupported_encoding",
        )
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > settings.body_bytes:
        raise _too_large(settings.body_bytes)
    return _CODINGS[coding]


async def _read(request: Request, settings: Settings) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.body_bytes:
                    raise _too_large(settings.body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_s:g} seconds"
        raise APIError(message, status=408, type="timeout_error", code="request_timeout") from None
    except ClientDisconnect:
        raise APIError("the client closed the connection", status=499, code="cancelled") from None
    return bytes(body)


def _what_is_wrong(body: bytes, error: Exception) -> str:
    if "surrogate" in str(error) or "truncated" in str(error):
        for escape in _ESCAPES.finditer(body):
            if half := escape["half"]:
                return _half(half.decode(), escape.start())
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        with contextlib.suppress(UnicodeDecodeError):
            bits = body[wrong.start : wrong.start + 3].decode("utf-8", "surrogatepass")
            return _half(f"{ord(bits):04x}", wrong.start)
        return f"the body is not UTF-8: byte {wrong.start}"
    if isinstance(error, msgspec.ValidationError):
        return "the body has a number that is too large or too long"
    return f"the body is not JSON: {str(error).removeprefix('JSON is malformed: ')}"


def _half(digits: str, place: int) -> str:
    seen = f"a lone surrogate, U+{digits.upper()} at byte {place}, which is half of a character"
    return f"the body has {seen}: write both halves, or the character itself in UTF-8"


def _object(pairs: list[tuple[str, Any]]) -> None:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise _refused(f"{twice[0]!r:.60} occurs twice in an object")


def _too_deep(depth: int) -> APIError:
    return _refused(f"the body is nested too deeply: {depth} levels are allowed")


def _too_large(most: int) -> APIError:
    message = f"the body is too large: {most} bytes are allowed"
    return APIError(message, status=413, code="request_too_large")


def _refused(message: str) -> APIError:
    return APIError(message, status=400, code="invalid_json")
