"""Errors in OpenAI's form: four keys, always present."""

import re
from typing import Any, NamedTuple

from hotcold.engine.request import PromptTooLongError, RequestError

INVALID = "invalid_request_error"


class APIError(Exception):
    """Raised if a request is refused or ended.

    ``message`` is one line for the author of the request, ``param`` the wrong field, ``code`` is for
    programs. A new attempt may succeed after ``retry_after`` seconds. ``too_long`` has the counts of a prompt
    that does not fit, for the dialects' messages."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        too_long: PromptTooLongError | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.too_long = too_long

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the error, for a reply or the last event of a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.too_long is None:
            return {"error": error}
        # Clients of llama.cpp read these two fields.
        return {"error": {**error, "n_prompt_tokens": self.too_long.tokens, "n_ctx": self.too_long.context}}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> APIError:
    """Returns the error for a wrong value in a request."""
    return APIError(message, param=param, code=code)


class _ErrorTemplate(NamedTuple):
    status: int
    type: str
    code: str


#: :attr:`RequestError.code` -> status, type and code for clients.
_OF_JOBS = {
    "queue_full": _ErrorTemplate(429, "rate_limit_error", "rate_limit_exceeded"),
    "not_ready": _ErrorTemplate(503, "unavailable_error", "model_loading"),
    "closed": _ErrorTemplate(503, "unavailable_error", "shutting_down"),
    "deadline": _ErrorTemplate(408, "timeout_error", "deadline_exceeded"),
    "context_length_exceeded": _ErrorTemplate(400, INVALID, "context_length_exceeded"),
    "invalid_grammar": _ErrorTemplate(400, INVALID, "invalid_grammar"),
    "invalid_request": _ErrorTemplate(400, INVALID, "invalid_value"),
    "engine_failed": _ErrorTemplate(500, "server_error", "engine_failed"),
    "cancelled": _ErrorTemplate(503, "unavailable_error", "cancelled"),
}


#: The server's flags for options of Python that the engine's messages name.
_FLAGS = {"context": "-c", "deadline_s": "--deadline", "timeout_s": "--timeout"}
_PYTHON_OPTION = re.compile("`([a-z_]+)`")


def from_job(error: RequestError, prompt: str = "messages", grammar: str | None = None) -> APIError:
    """Returns the error for a job that the engine refused or ended. ``prompt`` and ``grammar`` are the fields
    of the request. A message about a grammar begins with its field, since some dialects have no field for
    it."""
    template = _OF_JOBS.get(error.code, _OF_JOBS["engine_failed"])
    status = template.status
    retry = None if error.retry_after_s is None else max(1, round(error.retry_after_s))
    if error.code == "engine_failed" and retry is not None:
        status = 503
    param = {"context_length_exceeded": prompt, "invalid_grammar": grammar or None}.get(error.code)
    if isinstance(error, PromptTooLongError):
        message = _openai_message(error, prompt)
        return APIError(
            message, status=status, type=template.type, param=param, code=template.code, too_long=error
        )
    message = _PYTHON_OPTION.sub(lambda match: _FLAGS.get(match[1], match[0]), str(error))
    if error.code == "invalid_grammar" and grammar:
        message = f"{grammar}: {message}"
    return APIError(
        message, status=status, type=template.type, param=param, code=template.code, retry_after=retry
    )


def _openai_message(error: PromptTooLongError, field: str) -> str:
    """Returns the message by which OpenAI's clients recognise that they must shorten a conversation."""
    at_least = " or more" if error.at_least else ""
    return (
        f"This model's maximum context length is {error.context} tokens. However, your {field} resulted in "
        f"{error.tokens} tokens{at_least}. One token is for the answer: please reduce the length of the "
        f"{field}, or start the server with a larger -c."
    )
