"""`omni bench gateway`: what the front door adds to a request, and many streaming clients at once."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click

from omnimodel.cli.bench.report import Report, json_option, median, percentile
from omnimodel.cli.bench.system import System, on_one_thread, running, system_options
from omnimodel.cli.check import addressed
from omnimodel.protocol import probe as known_answer

STREAM_TOKENS = 24
STREAM_SECONDS = 600.0
BATCH = 16  # generations whose tokens per second are compared
PROMPTS = ("Count from one to ten.", "Name three rivers.", "What is the capital of France?", "Write a line about rain.")


@click.command()
@click.option("--requests", type=click.IntRange(min=10), default=300, show_default=True, help="Requests on each way.")
@click.option("--clients", type=click.IntRange(min=1), default=64, show_default=True, help="Streaming clients at once.")
@click.option("--model", default="", help="The model for the latency; without it, the one that answers fastest.")
@json_option
@system_options
def command(
    requests: int, clients: int, model: str, json_path: Path | None, address: str | None, catalog: Path, state_dir: Path
) -> None:
    """Measure the latency that the gateway adds, and whether many streams arrive whole."""
    report = Report("gateway")
    with on_one_thread(catalog) as folder, running(address, folder, state_dir) as system:
        if system.state_dir is None:
            click.echo("added latency: only on this machine, where the model's own socket can be reached", err=True)
        else:
            _latency(report, system, requests, model)
        asyncio.run(_streams(report, system, clients, one_thread=not address))
    report.finish(json_path)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP to a model's own socket."""

    def __init__(self, path: str) -> None:
        super().__init__("model")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


def _latency(report: Report, system: System, requests: int, model: str) -> None:
    """The same request to the gateway and to the model's socket, in turn, on connections that stay open."""
    item = _chosen(system, model)
    name, namespace = item["metadata"]["name"], item["metadata"].get("namespace", "default")
    system.client.wake(namespace, name, 300.0)
    instance = next(
        str(process["status"]["instance"])
        for process in system.client.objects("omniprocesses")
        if process["metadata"]["name"] == name
    )
    assert system.state_dir is not None
    direct = _UnixConnection(str(system.state_dir.resolve() / "run" / f"{instance}.sock"))
    host = system.client.address.removeprefix("http://")
    through = http.client.HTTPConnection(host)
    asked = known_answer.request(addressed(item["spec"]["probe"], name))
    seconds: dict[str, list[float]] = {"direct": [], "through": []}
    for _ in range(requests):
        for way, connection in (("direct", direct), ("through", through)):
            began = time.perf_counter()
            connection.request(asked.method, asked.path, asked.body, dict(asked.headers))
            answer = connection.getresponse()
            answer.read()
            seconds[way].append(time.perf_counter() - began)
            if answer.status != 200:
                report.failures.append(f"{way}: status {answer.status}")
                return
    direct.close()
    through.close()
    direct_ms, through_ms = median(seconds["direct"]) * 1000, median(seconds["through"]) * 1000
    report.add("request to the model's own socket", direct_ms, "ms", note=f"{name}, median of {requests}")
    report.add("the same through the gateway", through_ms, "ms", note="in turn with the other")
    report.add("added by the gateway", through_ms - direct_ms, "ms", goal=1.5)
    for way in ("direct", "through"):
        report.add(f"p99 {way}", percentile(seconds[way], 0.99) * 1000, "ms")


def _chosen(system: System, model: str) -> dict[str, Any]:
    """The model asked for, or the one whose resident answer is fastest."""
    models = system.models()
    if model:
        return next(item for item in models if item["metadata"]["name"] == model)
    timed = []
    for item in models:
        system.ask(item)
        began = time.perf_counter()
        system.ask(item)
        timed.append((time.perf_counter() - began, item["metadata"]["name"], item))
    return min(timed)[2]


@dataclass
class Stream:
    """What one streaming client saw."""

    text: str = ""
    chunks: int = 0
    tokens: int = 0
    finished: str = ""
    ended: bool = False
    first_seconds: float = 0.0
    error: str = ""
    seconds: float = field(default=0.0)

    @property
    def whole(self) -> bool:
        """Whether it got everything: text, its end, and as many tokens as were counted for it."""
        counted = self.tokens == STREAM_TOKENS if self.finished == "length" else self.tokens > 0
        return self.ended and bool(self.finished and self.text) and counted and not self.error


async def _streams(report: Report, system: System, clients: int, *, one_thread: bool) -> None:
    """Many clients stream a chat at once; each must get its end and every token that the model counted."""
    chats = [item for item in system.models() if item["spec"]["runtime"].get("task") == "text-generation"]
    if not chats:
        click.echo("streams: no model here generates text", err=True)
        return
    name = chats[0]["metadata"]["name"]
    url = f"{system.client.address}/v1/chat/completions"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(STREAM_SECONDS)) as session:
        await _stream(session, url, name, PROMPTS[0])  # wakes it
        alone = await _stream(session, url, name, PROMPTS[0])
        began = time.perf_counter()
        asked = [_stream(session, url, name, PROMPTS[number % len(PROMPTS)]) for number in range(clients)]
        streams = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        await _batch(report, session, url, name, one_thread=one_thread)
    broken = [stream for stream in streams if not stream.whole]
    report.failures += [f"stream: {stream.error or 'cut off'} after {stream.tokens} tokens" for stream in broken[:5]]
    tokens = sum(stream.tokens for stream in streams)
    report.add("streaming clients at once", clients, note=f"{name}, {STREAM_TOKENS} tokens each")
    report.add("streams that lost something", len(broken), goal=0)
    report.add("tokens of all streams", tokens / seconds, "1/s")
    report.add("tokens of one stream alone", alone.tokens / alone.seconds if alone.seconds else 0.0, "1/s")
    report.add("first token, median", median([stream.first_seconds for stream in streams]), "s")


async def _batch(report: Report, session: aiohttp.ClientSession, url: str, name: str, *, one_thread: bool) -> None:
    """The same generations one after another, then at once: tokens per second of both."""
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(BATCH)]
    began = time.perf_counter()
    serial = [await _stream(session, url, name, prompt, whole=True) for prompt in prompts]
    middle = time.perf_counter()
    together = await asyncio.gather(*(_stream(session, url, name, prompt, whole=True) for prompt in prompts))
    ended = time.perf_counter()
    for stream in [*serial, *together]:
        if stream.error or stream.tokens != STREAM_TOKENS:
            report.failures.append(f"generation: {stream.error or 'cut off'} after {stream.tokens} tokens")
    alone_rate = sum(stream.tokens for stream in serial) / (middle - began)
    batch_rate = sum(stream.tokens for stream in together) / (ended - middle)
    threads = "one thread" if one_thread else "threads as its manifest says"
    report.add(f"tokens of {BATCH} generations one after another", alone_rate, "1/s", note=f"{name}, {threads}")
    report.add(f"tokens of {BATCH} generations at once", batch_rate, "1/s", note="the same prompts")
    report.add("times as many", batch_rate / alone_rate, goal=4.0 if one_thread else None, at_least=True)


async def _stream(session: aiohttp.ClientSession, url: str, model: str, prompt: str, *, whole: bool = False) -> Stream:
    """Stream a chat; with `whole` it does not end before its last token."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": STREAM_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if whole else {}),
    }
    seen = Stream()
    began = time.perf_counter()
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                seen.error = f"status {response.status}: {(await response.text())[:200]}"
                return seen
            async for line in response.content:
                _take(seen, line.decode().strip(), time.perf_counter() - began)
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.seconds = time.perf_counter() - began
    return seen


def _take(seen: Stream, line: str, after_seconds: float) -> None:
    """Read one line of server-sent events."""
    if not line.startswith("data:"):
        return
    text = line.removeprefix("data:").strip()
    if text == "[DONE]":
        seen.ended = True
        return
    event = json.loads(text)
    if "error" in event:
        seen.error = str(event["error"].get("message"))
        return
    if event.get("usage"):
        seen.tokens = int(event["usage"]["completion_tokens"])
    for choice in event.get("choices", ()):
        content = (choice.get("delta") or {}).get("content") or ""
        if content:
            seen.first_seconds = seen.first_seconds or after_seconds
            seen.chunks += 1
            seen.text += content
        seen.finished = choice.get("finish_reason") or seen.finished
