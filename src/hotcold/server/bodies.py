"""Reads the body of a request as JSON, within bounds of bytes, time and depth.

It refuses text that JSON readers may read differently: a name twice in an object, NaN, a lone surrogate."""

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

_SMALL = 32 << 10  # largest body that may be parsed twice, in bytes
#: Escapes in JSON. ``half`` is a surrogate without its pair.
_ESCAPES = re.compile(
    rb"\\(?:u[Dd][89ABab]..\\u[Dd][C-Fc-f]..|u(?P<half>[Dd][89A-Fa-f][0-9A-Fa-f]{2})|.)", re.DOTALL
)
#: Types that programs state when their user gave none, such as ``curl -d``. A web page may send these types
#: without a preflight request, so requests of pages must not have them.
_PROGRAM_TYPES = ("", "application/x-www-form-urlencoded", "text/plain")
#: Content-Encoding -> compression; empty: none.
_CODINGS = {"identity": "", "gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}


async def read_body(request: Request, settings: Settings, in_thread: InThread) -> bytes:
    """Reads the body of a request and decompresses it. Raises APIError if the headers do not state JSON, or
    if the body exceeds a bound."""
    coding = _check_headers(request, settings)
    body = await _read(request, settings)
    return await in_thread(opened, body, coding, settings.body_bytes) if coding else body


def opened(body: bytes, coding: str, limit: int) -> bytes:
    """Decompresses gzip, or deflate with or without zlib's header. Raises APIError if the data is broken or
    has more than ``limit`` bytes. Never decompresses more than one byte beyond the limit."""
    reader = zlib.decompressobj(_window(body, coding))
    try:
        content = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise _refused(f"the body is not {coding}: {error}") from None
    if len(content) > limit:
        raise _too_large(limit)
    if not reader.eof:
        raise _refused(f"the body is not whole: its {coding} data ends too soon")
    if surplus := len(reader.unused_data):
        raise _refused(f"the body has {surplus} bytes after the end of its {coding} data")
    return content


def _window(body: bytes, coding: str) -> int:
    """Returns zlib's ``wbits`` for compressed data."""
    if coding == "gzip":
        return zlib.MAX_WBITS | 16
    zlib_head = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
    return zlib.MAX_WBITS if zlib_head else -zlib.MAX_WBITS


def parse(body: bytes, depth: int) -> Any:
    """Parses JSON in UTF-8. Raises APIError for other bytes, or above ``depth`` nested arrays and objects."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if not body.strip():
        raise _refused("the body is empty: a JSON object is needed")
    try:
        value = _decoded(body)
    except RecursionError:
        raise _too_deep(depth) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refused(_error_text(body, error)) from None
    strings = body.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"') // 2
    if _strings(value, depth) != strings:
        if len(body) <= _SMALL:
            json.loads(body, object_pairs_hook=_refuse_repeated_names, parse_int=str, parse_float=str)
        raise _refused("a name occurs twice in an object")  # a second pass over a large body would take long
    return value


def _decoded(body: bytes) -> Any:
    """Parses a body with Python's garbage collector off. It would scan all new objects again and again and
    find no garbage. No other thread runs meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(body)
    finally:
        if enabled:
            gc.enable()


def _strings(value: Any, depth: int) -> int:
    """Counts the strings of a value, names included. The text has more if an object has a name twice. Raises
    APIError if the value is nested too deep."""
    count = 0
    level = [value]
    for _ in range(depth + 1):
        containers = [each for each in level if isinstance(each, list | dict)]
        count += sum(isinstance(each, str) for each in level)
        count += sum(len(each) for each in containers if isinstance(each, dict))
        if not containers:
            return count
        inner = (each.values() if isinstance(each, dict) else each for each in containers)
        level = [*chain.from_iterable(inner)]
    raise _too_deep(depth)


def _check_headers(request: Request, settings: Settings) -> str:
    """Checks the headers, and returns the compression of the body; empty: none."""
    headers = request.headers
    kind = headers.get("content-type", "")
    plain = kind.partition(";")[0].strip().lower()
    if plain != "application/json" and (plain not in _PROGRAM_TYPES or from_browser(headers)):
        got = f"Content-Type is {kind!r:.60}" if kind else "no Content-Type"
        raise APIError(f"{got}: application/json is needed", status=415, code="unsupported_media_type")
    coding = ", ".join(headers.getlist("content-encoding")).strip().lower() or "identity"
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


def _error_text(body: bytes, error: Exception) -> str:
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
    got = f"a lone surrogate, U+{digits.upper()} at byte {place}, which is half of a character"
    return f"the body has {got}: write both halves, or the character itself in UTF-8"


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> None:
    repeated = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if repeated:
        raise _refused(f"{repeated[0]!r:.60} occurs twice in an object")


def _too_deep(depth: int) -> APIError:
    return _refused(f"the body is nested too deeply: {depth} levels are allowed")


def _too_large(limit: int) -> APIError:
    message = f"the body is too large: {limit} bytes are allowed"
    return APIError(message, status=413, code="request_too_large")


def _refused(message: str) -> APIError:
    return APIError(message, status=400, code="invalid_json")
