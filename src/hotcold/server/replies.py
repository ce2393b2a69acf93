"""HTTP responses with JSON and with errors."""

from typing import Any

from starlette.responses import Response

from hotcold.server.protocol.dialects import error_body
from hotcold.server.protocol.errors import APIError
from hotcold.server.protocol.json_parts import to_json


class JSONReply(Response):
    """Plain data as JSON. Text is not escaped to ASCII; NaN is not allowed."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_reply(error: APIError, path: str) -> Response:
    """Returns the error in the form of the route's dialect, with its status and ``Retry-After``."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONReply(error_body(error, path), error.status, headers)
