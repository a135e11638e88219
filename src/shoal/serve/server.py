"""``shoal serve``: the routes, and the process from its first line to the end of its last answer."""

import asyncio
import hmac
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import RequestError
from shoal.serve.batching import Batcher, Overloaded, TooLate
from shoal.serve.http import HttpServer, Limits, Request, Response
from shoal.serve.models import BATCH
from shoal.serve.newest import NewestModel
from shoal.serve.schema import BadRequest, read_rows
from shoal.serve.token import read_token

_DRAIN_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    """What the user asked for."""

    run_dir: Path
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: Path | None = None
    batch: int = BATCH
    max_wait_ms: float = 2.0
    max_rows: int = 64
    deadline_seconds: float = 10.0
    limits: Limits = field(default_factory=Limits)


class Answers:
    """The routes of the server.

    Args:
        newest: the model.
        request: what the user asked for.
        token: that clients have to give; None for none.
    """

    def __init__(self, newest: NewestModel, request: ServeRequest, token: str | None) -> None:
        self.newest, self._request, self._token = newest, request, token
        self.batcher = Batcher(lambda: newest.current, max_wait=request.max_wait_ms / 1000)
        self.is_draining = False
        self.counts: dict[str, int] = {}
        """Answers by status."""

    async def answer(self, request: Request) -> Response:
        """What a request gets."""
        response = await self._route(request)
        self.counts[str(response.status)] = self.counts.get(str(response.status), 0) + 1
        return response

    async def _route(self, request: Request) -> Response:
        if self._token is not None and not hmac.compare_digest(
            request.headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()
        ):
            return Response(status=401, content={"error": "give the server's token: Authorization: Bearer TOKEN"})
        routes: dict[str, tuple[str, Callable[[Request], Any]]] = {
            "/predict": ("POST", self._predict),
            "/health": ("GET", self._health),
            "/model": ("GET", self._model),
        }
        if request.path not in routes:
            return Response(status=404, content={"error": f"there is no such path; there are {', '.join(routes)}"})
        method, route = routes[request.path]
        if request.method != method:
            error = f"{request.path} takes {method}"
            return Response(status=405, content={"error": error}, headers={"allow": method})
        found: Response = await route(request)
        return found

    async def _health(self, _: Request) -> Response:
        status = "draining" if self.is_draining else "ok"
        return Response(status=503 if self.is_draining else 200, content={"status": status, **self._who()})

    async def _model(self, _: Request) -> Response:
        numbers = {
            "refused_versions": self.newest.refused,
            "last_refusal": self.newest.last_refusal,
            "swaps": self.newest.swapped,
            "passes": self.batcher.passes,
            "rows": self.batcher.rows,
            "waiting": self.batcher.num_waiting,
            "answers": self.counts,
        }
        return Response(status=200, content={**self.newest.current.describe(), **numbers})

    def _who(self) -> dict[str, Any]:
        served = self.newest.current
        return {"version": served.version, "step": served.step, "weights_sha256": served.weights_sha256}

    async def _predict(self, request: Request) -> Response:
        # A page that a browser shows may send a form to this machine, and may not say that it is JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return Response(status=415, content={"error": "say content-type: application/json"})
        asked, seconds = self.newest.current, self._request.deadline_seconds
        fields, prepares = asked.fields, asked.preparation
        try:
            rows = read_rows(request.body, fields, most=self._request.max_rows, preparation=prepares)
            future = self.batcher.submit(rows, fields, seconds=seconds)
            served, found = await asyncio.wait_for(asyncio.wrap_future(future), seconds)
        except BadRequest as error:
            return Response(status=400, content={"error": str(error)})
        except Overloaded as error:
            return Response(status=503, content={"error": str(error)}, headers={"retry-after": "1"})
        except TooLate as error:
            return Response(status=503, content={"error": str(error)})
        except TimeoutError:
            return Response(status=504, content={"error": f"no answer in {seconds:g} s"})
        # The user's own model may raise anything on inputs that have the right shape.
        except Exception as error:
            return Response(
                status=500, content={"error": f"the model raised {type(error).__name__}: {str(error)[:200]}"}
            )
        outputs = [one.tolist() for one in found]
        if not all(math.isfinite(number) for one in found for number in one.reshape(-1).tolist()):
            return Response(status=500, content={"error": "the model's scores are not finite for these inputs"})
        content = {
            "version": served.version,
            "step": served.step,
            "weights_sha256": served.weights_sha256,
            "outputs": outputs,
        }
        if served.labels and all(one.shape == (len(served.labels),) for one in found):
            content["labels"] = [served.labels[int(one.argmax())] for one in found]
        return Response(status=200, content=content)


async def _run(answers: Answers, request: ServeRequest, on_ready: Callable[[str], None]) -> None:
    server = HttpServer(answers.answer, request.limits)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        host, port = await server.listen(request.host, request.port)
    except OSError as error:
        raise RequestError(
            f"cannot listen on {request.host}:{request.port}: {error.strerror}; give another --port, 0 for any"
        ) from error
    answers.newest.start()
    on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    await stop.wait()
    answers.is_draining = True
    await server.drain(_DRAIN_SECONDS)


def serve(request: ServeRequest, *, on_ready: Callable[[str, dict[str, Any]], None]) -> dict[str, Any]:
    """Serve a run until SIGTERM or Ctrl-C, and answer then what was asked before.

    Args:
        request: what the user asked for.
        on_ready: is told the address, and what is served, when requests can come.

    Returns:
        How many answers there were, by status.

    Raises:
        RequestError: the request is wrong.
        RunError: the run has no whole model.
    """
    token = read_token(request.host, request.token_file)
    torch.set_num_threads(1)
    newest = NewestModel(request.run_dir, batch=request.batch)
    answers = Answers(newest, request, token)
    try:
        asyncio.run(_run(answers, request, lambda address: on_ready(address, newest.current.describe())))
    finally:
        newest.close()
        answers.batcher.close()
    return {"answers": answers.counts, "rows": answers.batcher.rows, "refused_versions": newest.refused}
