"""Answers as HTTP responses."""

import json
from typing import Any

from starlette.responses import Response

from hotcold.server.protocol.dialects import error_body
from hotcold.server.protocol.errors import APIError


class JSONReply(Response):
    """Plain data as JSON. Text is written as it is; a NaN would be a defect."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(content: Any) -> bytes:
    """Compact JSON. Half a character of a pair, which UTF-8 cannot hold, is written as an escape."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def error_reply(error: APIError, path: str) -> Response:
    """The error in the form of the route's dialect, with its status, and when to try again."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONReply(error_body(error, path), error.status, headers)
