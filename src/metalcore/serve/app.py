# SPDX-License-Identifier: MIT
"""The HTTP side: OpenAI's paths, errors and streams, on starlette."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from metalcore.serve.engine import Closed, Engine, Full, Job, Piece
from metalcore.serve.prompts import Prompts
from metalcore.serve.requests import Asked, BadRequest, Limits, parse_chat, parse_completion

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# The longest context that there is, in characters, with room to spare.
_MOST_BYTES = 8 * 2**20
# What is more than that is read, and not kept: who still sends does not read that it is too much.
_MOST_READ = 4 * _MOST_BYTES
_SHUTTING_DOWN = "the server is shutting down"


@dataclass(frozen=True)
class Service:
    """A model to be served.

    Args:
        engine: writes the answers.
        prompts: makes tokens of requests.
        name: of the model, for clients.
        limits: of a request.
        token: what clients must send as `Authorization: Bearer`; None for no such thing.
        hosts: the names by which clients may call; "*" for any.
    """

    engine: Engine
    prompts: Prompts
    name: str
    limits: Limits
    token: str | None = None
    hosts: tuple[str, ...] = LOOPBACK
    created: int = field(default_factory=lambda: int(time.time()))


def application(service: Service) -> Starlette:
    """An ASGI application; the engine ends with it."""
    routes = _Routes(service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        service.engine.close()
        await run_in_threadpool(service.engine.join, 30)

    return Starlette(
        routes=[
            Route("/health", routes.health),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
        ],
        # a page in a browser cannot call us by a name of its own that points here
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(service.hosts))],
        exception_handlers={
            BadRequest: _refused,
            HTTPException: _not_found,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
        lifespan=lifespan,
    )


async def _refused(request: Request, error: Any) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    if error.status == 429:
        headers = {"Retry-After": "1"}
    return JSONResponse(error.body, error.status, headers)


async def _not_found(request: Request, error: Any) -> Response:
    said = f"{request.method} {request.url.path}: {error.detail}"
    refused = BadRequest(said, status=error.status_code)
    return JSONResponse(refused.body, error.status_code, error.headers)


async def _gone(request: Request, error: Any) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Any) -> Response:
    refused = BadRequest("the server failed; its log says why", kind="server_error")
    return JSONResponse(refused.body, 500)


class _Routes:
    """What is answered at each path."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def health(self, request: Request) -> Response:
        """Whether it computes; anybody may ask that, but how much only who has the token."""
        engine = self.service.engine
        if not engine.is_alive:
            return JSONResponse({"status": "stopped"}, 503)
        state = engine.state if self._has_token(request) else {}
        return JSONResponse({"status": "ok", **state})

    async def models(self, request: Request) -> Response:
        self._expect_token(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._expect_token(request)
        self._expect_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat, _CHAT)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, parse_completion, _COMPLETION)

    def _model(self) -> dict[str, Any]:
        service = self.service
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "metalcore",
            "context_length": service.limits.context,
        }

    def _has_token(self, request: Request) -> bool:
        token = self.service.token
        if token is None:
            return True
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        # takes as long for a token that is nearly right as for any other
        is_right = hmac.compare_digest(given.strip().encode(), token.encode())
        return is_right and kind.lower() == "bearer"

    def _expect_token(self, request: Request) -> None:
        if not self._has_token(request):
            said = "Authorization must be Bearer and the token that this server was started with"
            raise BadRequest(said, status=401, code="invalid_api_key", kind="authentication_error")

    def _expect_model(self, name: str | None) -> None:
        if name is not None and name != self.service.name:
            raise BadRequest(
                f"there is no model {name[:80]!r} here, but {self.service.name!r}",
                "model",
                status=404,
                code="model_not_found",
            )

    async def _answer(
        self, request: Request, parse: Callable[[Any, Limits], Asked], form: "_Form"
    ) -> Response:
        self._expect_token(request)
        service = self.service
        asked = parse(await _json(request), service.limits)
        self._expect_model(asked.model)
        tokens = await run_in_threadpool(service.prompts.tokens, asked)
        options = asked.with_prompt(tokens, service.limits)
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(piece: Piece) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        job = Job(tokens, options, emit)
        try:
            service.engine.submit(job)
        except Full:
            said = "too many requests wait already"
            raise BadRequest(said, status=429, code="queue_full", kind="overloaded") from None
        except Closed:
            raise BadRequest(_SHUTTING_DOWN, status=503, kind="server_error") from None
        written = _Written(service, form, job, pieces, asked.has_usage)
        if asked.is_streamed:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            return StreamingResponse(written.events(), 200, headers, "text/event-stream")
        return await written.whole(request)


async def _json(request: Request) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # a form that a page in a browser may send unasked is none
        raise BadRequest(f"Content-Type must be application/json, got {kind!r}", status=415)
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= _MOST_BYTES:
            body += part
        elif size > _MOST_READ:
            break
    if size > _MOST_BYTES:
        raise BadRequest(f"the body may have {_MOST_BYTES} bytes", status=413)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


@dataclass(frozen=True)
class _Form:
    """How a path writes its answers."""

    prefix: str
    whole: str
    part: str
    choice: Callable[[str], dict[str, Any]]
    begin: dict[str, Any] | None
    delta: Callable[[str], dict[str, Any]]


_CHAT = _Form(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    {"delta": {"role": "assistant", "content": ""}},
    lambda text: {"delta": {"content": text} if text else {}},
)
_COMPLETION = _Form(
    "cmpl-",
    "text_completion",
    "text_completion",
    lambda text: {"text": text},
    None,
    lambda text: {"text": text},
)


class _Written:
    """An answer on its way to a client."""

    def __init__(
        self,
        service: Service,
        form: _Form,
        job: Job,
        pieces: "asyncio.Queue[Piece]",
        has_usage: bool,
    ) -> None:
        self.service, self.form, self.job, self.pieces = service, form, job, pieces
        self.has_usage = has_usage
        self.head = {
            "id": form.prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": service.name,
        }

    async def whole(self, request: Request) -> Response:
        """All of it, unless the client leaves before."""
        left = asyncio.ensure_future(_until_gone(request))
        texts = []
        try:
            while True:
                next_piece = asyncio.ensure_future(self.pieces.get())
                await asyncio.wait([next_piece, left], return_when=asyncio.FIRST_COMPLETED)
                if not next_piece.done():
                    next_piece.cancel()
                    raise ClientDisconnect
                piece = next_piece.result()
                if piece.error is not None:
                    status = 503 if piece.error == _SHUTTING_DOWN else 500
                    raise BadRequest(piece.error, status=status, kind="server_error")
                texts.append(piece.text)
                if piece.is_last:
                    break
        finally:
            left.cancel()
            self.service.engine.cancel(self.job)
        choice = {"index": 0, **self.form.choice("".join(texts)), "logprobs": None}
        choice["finish_reason"] = piece.finish
        made = {**self.head, "object": self.form.whole, "choices": [choice]}
        return JSONResponse({**made, "usage": self._usage(piece)})

    async def events(self) -> AsyncIterator[str]:
        """It piece by piece; whoever leaves ends it."""
        try:
            if self.form.begin is not None:
                yield self._event(self.form.begin, None)
            while True:
                piece = await self.pieces.get()
                if piece.error is not None:
                    yield _sent(BadRequest(piece.error, kind="server_error").body)
                    return
                if piece.text:
                    yield self._event(self.form.delta(piece.text), None)
                if piece.is_last:
                    break
            yield self._event(self.form.delta(""), piece.finish)
            if self.has_usage:
                end = {**self.head, "object": self.form.part, "choices": []}
                yield _sent({**end, "usage": self._usage(piece)})
            yield "data: [DONE]\n\n"
        finally:
            self.service.engine.cancel(self.job)

    def _event(self, choice: dict[str, Any], finish: str | None) -> str:
        whole = {"index": 0, **choice, "logprobs": None, "finish_reason": finish}
        made = {**self.head, "object": self.form.part, "choices": [whole]}
        return _sent({**made, "usage": None} if self.has_usage else made)

    def _usage(self, piece: Piece) -> dict[str, int]:
        prompt = len(self.job.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": piece.tokens,
            "total_tokens": prompt + piece.tokens,
        }


def _sent(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
