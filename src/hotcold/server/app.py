"""The ASGI application: the routes behind the guard. Each dialect has its own form of errors."""

from collections.abc import Sequence
from itertools import chain

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hotcold.engine.request import RequestError
from hotcold.errors import UserError
from hotcold.server.protocol.errors import APIError, from_job
from hotcold.server.replies import error_reply
from hotcold.server.request_log import Logged, RequestLog, defect
from hotcold.server.routes import api_routes
from hotcold.server.security import Guard, Public
from hotcold.server.service import Service
from hotcold.server.targets import PlainTarget
from hotcold.values import printable

_HEALTH = ("/health", "/v1/health")


def make_app(
    service: Service,
    log: RequestLog | None = None,
    pages: Sequence[BaseRoute] = (),
    page_paths: Public = lambda path: False,
) -> ASGIApp:
    """Makes the ASGI application. ``pages`` are routes of static files. ``page_paths`` returns whether a path
    is one of these, which need no key."""
    app = Starlette(
        routes=[*api_routes(service), *pages],
        exception_handlers={
            APIError: _answer_error,
            UserError: _answer_user_error,
            HTTPException: _of_http,
            Exception: _answer_defect,
        },
    )
    app.router.redirect_slashes = False
    guard = Guard(_Counted(app, service), service.settings, lambda path: path in _HEALTH or page_paths(path))
    return PlainTarget(Logged(guard, log, service.metrics, service.rare))


class _Counted:
    """Counts each POST from its admission, so that shutdown also waits while its body is read or
    tokenised."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._service.asked():
            await self._app(scope, receive, send)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error_reply(error, request.scope["path"])


async def _answer_user_error(request: Request, error: Exception) -> Response:
    """Answers with an error that a lower layer raised about values in the request."""
    if isinstance(error, RequestError):
        return error_reply(from_job(error), request.scope["path"])
    return error_reply(APIError(str(error), code="invalid_value"), request.scope["path"])


async def _answer_defect(request: Request, error: Exception) -> Response:
    """Answers with an internal error. Starlette raises the exception again, for the log."""
    return error_reply(defect(error, request.scope), request.scope["path"])


async def _of_http(request: Request, error: Exception) -> Response:
    """Answers a request for an unknown path or method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        methods = _allowed_methods(request)
        headers["Allow"] = ", ".join(methods)
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        answer = APIError(f"{request.method:.20} is not allowed here: use {', '.join(methods)}", status=405)
        answer.code = "method_not_allowed"
    elif error.status_code == 404:
        request_line = f"{request.method:.20} {printable(request.scope['path'], 100)}"
        message = f"there is no route {request_line}; routes are listed at GET /openapi.json"
        answer = APIError(message, status=404, code="not_found")
    else:
        answer = APIError(str(error.detail), status=error.status_code)
    reply = error_reply(answer, request.scope["path"])
    reply.headers.update(headers)
    return reply


def _allowed_methods(request: Request) -> list[str]:
    """Returns the methods of all routes with the request's path. Starlette names only the first route's."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    same_path = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({"OPTIONS", *chain.from_iterable(route.methods or () for route in same_path)})
