"""Errors as OpenAI's clients read them: four keys, always present."""

from typing import Any, NamedTuple

from hotcold.engine.request import RequestError

INVALID = "invalid_request_error"


class APIError(Exception):
    """Why a request is refused or ended. ``message`` is one line for whoever wrote the request, ``param`` the
    field that is wrong, ``code`` is for programs; another try may succeed ``retry_after`` seconds later."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """What is sent, as a reply of its own or as the last event of a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> APIError:
    """What a request has wrong."""
    return APIError(message, param=param, code=code)


class _Told(NamedTuple):
    status: int
    type: str
    code: str
    param: str | None = None


#: :attr:`RequestError.code` -> how clients are told.
_OF_JOBS = {
    "queue_full": _Told(429, "rate_limit_error", "rate_limit_exceeded"),
    "not_ready": _Told(503, "unavailable_error", "model_loading"),
    "closed": _Told(503, "unavailable_error", "shutting_down"),
    "deadline": _Told(408, "timeout_error", "deadline_exceeded"),
    "context_length_exceeded": _Told(400, INVALID, "context_length_exceeded", "messages"),
    "invalid_grammar": _Told(400, INVALID, "invalid_grammar", "response_format"),
    "invalid_request": _Told(400, INVALID, "invalid_value"),
    "engine_failed": _Told(500, "server_error", "engine_failed"),
    "cancelled": _Told(503, "unavailable_error", "cancelled"),
}


def from_job(error: RequestError, param: str | None = None) -> APIError:
    """What the engine says of a job. ``param`` is the field that a too long prompt or a bad grammar came in,
    where it is not the chat route's."""
    told = _OF_JOBS.get(error.code, _OF_JOBS["engine_failed"])
    status = told.status
    retry = None if error.retry_after_s is None else max(1, round(error.retry_after_s))
    if error.code == "engine_failed" and retry is not None:
        status = 503
    field = told.param if param is None or told.param is None else param
    return APIError(str(error), status=status, type=told.type, param=field, code=told.code, retry_after=retry)
