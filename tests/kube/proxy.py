"""A proxy between an operator and the API server, which counts requests and makes trouble.

It speaks plain HTTP to the operator and knows the administrator's credentials, so that any request can be looked at,
held up, refused, or be the last one before the operator is killed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import aiohttp
from aiohttp import web

from omnimodel.kube import Kube

WRITES = {"PATCH", "POST", "PUT", "DELETE"}
Trouble = Callable[[web.Request], Awaitable[web.Response | None]]


async def no_trouble(_: web.Request) -> web.Response | None:
    return None


def status(code: int, reason: str, message: str) -> web.Response:
    """A refusal as the API server words it."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": code,
    }
    return web.json_response(body, status=code)


class Proxy:
    """See the module.

    Args:
        kubeconfig: of the administrator.
        folder: for the kubeconfig that leads here.
    """

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._given = kubeconfig
        self.kubeconfig = folder / "proxied.kubeconfig"
        self.counts: Counter[tuple[str, str]] = Counter()  # method and user agent
        self.writers: list[str] = []  # user agents of writes, in order
        self.before: Trouble = no_trouble
        self.after: Trouble = no_trouble
        self.flowing = asyncio.Event()  # while it is clear, watches say nothing
        self.flowing.set()
        self._watches: set[asyncio.Task[object]] = set()

    async def __aenter__(self) -> Self:
        self._kube = await Kube.connect(str(self._given))
        self._client = self._kube._client.rest_client._create_pool_manager()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        port = self._runner.addresses[0][1]
        self.kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "proxy", "user": {"token": "unused"}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        }))  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        await self._runner.cleanup()
        await self._client.close()
        await self._kube.close()

    def cut(self) -> None:
        """End all watches at this moment, in the middle of whatever they say."""
        for task in list(self._watches):
            task.cancel()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        agent = request.headers.get("User-Agent", "")
        self.counts[request.method, agent] += 1
        trouble = await self.before(request)
        if trouble is not None:
            return trouble
        headers = {k: v for k, v in request.headers.items() if k.lower() not in {"host", "authorization"}}
        token = await self._kube.token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        url = f"{self._kube.configuration.host}{request.raw_path}"
        watch = request.query.get("watch") == "true"
        timeout = aiohttp.ClientTimeout(total=None if watch else 60)
        try:
            async with self._client.request(
                request.method, url, headers=headers, data=await request.read() or None, timeout=timeout
            ) as answer:
                if not watch:
                    body = await answer.read()
                    if request.method in WRITES:
                        self.writers.append(agent)
                    trouble = await self.after(request)
                    if trouble is not None:
                        return trouble
                    return web.Response(body=body, status=answer.status, headers=_plain(answer.headers))
                return await self._stream(request, answer)
        except aiohttp.ClientError:
            return status(503, "ServiceUnavailable", "the API server is away")

    async def _stream(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=_plain(answer.headers))
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await self.flowing.wait()
                await response.write(chunk)
        except (asyncio.CancelledError, ConnectionError, aiohttp.ClientError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._watches.discard(task)
        return response


def _plain(headers: object) -> dict[str, str]:
    kept = ("content-type", "retry-after", "warning")
    return {k: v for k, v in headers.items() if k.lower() in kept}  # type: ignore[attr-defined]
