"""Foreign engines: a real HTTP server of somebody else's, started, spliced and stopped."""

import asyncio
import base64
import json
import os
import socket
import struct
import sys
from contextlib import asynccontextmanager

import aiohttp
import httpx2
import openai
import pytest

from omnimodel.errors import ImageError, OmniError
from omnimodel.protocol.process import Evict, Start, Wake
from omnimodel.runtime.engines import Setting, create, llamacpp
from omnimodel.runtime.engines.foreign import ForeignEngine
from omnimodel.runtime.engines.llamacpp import FIELDS, PROGRAM, PROGRAM_WITHOUT_TILES, command_line, follows
from runtime.children import CommandFailed, exists, spec, until
from runtime.test_llama_gguf import write

SERVER = """
import http.server, os, signal, socketserver, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        body = ("healthy" if self.path == "/health" else os.environ.get("WORD", "?")).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/boom": os._exit(3)
        if self.path == "/stream":
            self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
            try:
                for i in range(100000):
                    self.wfile.write(b"5\\r\\n%05d\\r\\n" % i); self.wfile.flush(); time.sleep(0.002)
            except OSError:
                print("client left", flush=True)
            return
        status, answer = sys.argv[2:4] if sys.argv[2:3] in (["200"], ["400"]) else ("200", None)
        body = body if answer is None else answer.encode()
        self.send_response(int(status)); self.send_header("Content-Length", str(len(body)))
        if self.close_connection: self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128

if "--slow" in sys.argv: time.sleep(3600)
if "--stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("engine starts", os.getpid(), flush=True)
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def started(new_child, script):
    async def start(*arguments, **more):
        child = new_child()
        command = [sys.executable, str(script), "{port}", *arguments]
        found = spec(engine="command", command=command, healthPath="/health", **more)
        await child.command(Start(found, "", 0, 16 << 20, "host", 1))
        child.connect()
        return child

    return start


def server_pids(child):
    """Of the servers that were started, as they print them."""
    return [int(line.split()[-1]) for line in child.log().splitlines() if line.startswith("engine starts")]


async def test_a_wake_starts_the_server_and_an_evict_stops_it(started):
    child = await started()
    status, answer = await child.post("/echo", data=b"x")
    assert (status, answer["error"]["code"]) == (503, "not_resident")
    for _ in range(2):
        await child.command(Wake([]))
        assert await child.post("/echo", data=b"hello") == (200, b"hello")
        await child.command(Evict())
        assert not any(exists(pid) for pid in server_pids(child))
        await child.session.close()  # the connections it keeps end with the engine
        child.connect()
        assert (await child.post("/echo", data=b"x"))[0] == 503


async def test_large_bodies_pass_unchanged_both_ways(started):
    child = await started()
    await child.command(Wake([]))
    body = os.urandom(16 << 20)
    assert await child.post("/echo", data=body) == (200, body)
    answers = await asyncio.gather(*(child.post("/echo", data=body[: 1000 * i]) for i in range(64)))
    assert [answer for _, answer in answers] == [body[: 1000 * i] for i in range(64)]


async def test_the_server_sees_a_client_leave_in_the_middle_of_a_stream(started):
    child = await started()
    await child.command(Wake([]))
    async with child.session.post("/stream", data=b"") as response:
        await response.content.readexactly(50)
        response.close()
    await until(lambda: "client left" in child.log())
    await until(child.idle)


async def test_the_environment_of_the_process_is_the_servers(started, monkeypatch):
    child = await started()
    await child.command(Wake([]))
    async with child.session.get("/") as response:
        assert await response.text() == "?"


async def test_a_server_that_dies_ends_the_process_with_its_status(started):
    child = await started()
    await child.command(Wake([]))
    with pytest.raises(aiohttp.ClientError):
        await child.post("/boom", data=b"x")
    await child.ended()


async def test_a_server_that_ignores_sigterm_is_killed(started, monkeypatch):
    child = await started("--stubborn", limits={"drainSeconds": 0.3})
    await child.command(Wake([]))
    await child.command(Evict())
    assert (await child.post("/echo", data=b"x"))[0] == 503


async def test_a_server_that_is_not_healthy_in_time_is_stopped_and_named(started):
    child = await started("--slow", limits={"loadDeadlineSeconds": 0.5})
    with pytest.raises(CommandFailed, match="not healthy after") as failed:
        await child.command(Wake([]))
    assert failed.value.reply.reason == "LoadTimeout"
    assert child.alive()


@pytest.mark.parametrize(
    ("command", "said"),
    [(["/no/such/server"], "cannot be started: No such file"), ([sys.executable, "-c", "exit(4)"], "exit status 4")],
)
async def test_a_server_that_cannot_start_is_named(new_child, command, said):
    child = new_child()
    await child.command(Start(spec(engine="command", command=command, healthPath="/"), "", 0, 16 << 20, "host", 1))
    with pytest.raises(CommandFailed, match=said):
        await child.command(Wake([]))


async def test_an_empty_command_and_an_unknown_engine_are_refused(new_child):
    for found, said in (
        (spec(engine="command", command=[]), "runtime.command is empty"),
        (spec(engine="ollama"), "'ollama'"),
    ):
        with pytest.raises(CommandFailed, match=said):
            await new_child().command(Start(found, "", 0, 16 << 20, "host", 1))


async def test_a_stop_takes_the_server_along(started):
    child = await started()
    await child.command(Wake([]))
    (pid,) = server_pids(child)
    await child.stop()
    assert not exists(pid)


def setting(folder, **more):
    return Setting(spec("llm", engine="llamacpp", task="text-generation", **more), folder, 0, 0, "host", 2)


@pytest.mark.parametrize(("tiles", "server"), [(False, PROGRAM), (True, PROGRAM_WITHOUT_TILES)])
def test_the_llamacpp_server_is_started_on_the_only_gguf_file(tmp_path, monkeypatch, tiles, server):
    monkeypatch.setattr(llamacpp, "multiplies_tiles", lambda: tiles)
    (tmp_path / "deep").mkdir()
    model = tmp_path / "deep" / "model.gguf"
    model.touch()
    argv = command_line(setting(tmp_path, options={"contextTokens": 512}, args=["--n_batch", "64"]), 4711)
    assert argv[1:7] == [*server, "--model", str(model), "--model_alias", "llm"]
    assert argv[argv.index("--port") + 1] == "4711"
    assert argv[argv.index("--n_ctx") + 1] == "512"
    assert argv[argv.index("--n_threads") + 1] == "2"
    assert argv[-2:] == ["--n_batch", "64"]


def test_a_llamacpp_source_without_or_with_two_files_is_refused(tmp_path):
    with pytest.raises(OmniError, match="0 GGUF files"):
        command_line(setting(tmp_path), 1)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(OmniError, match="2 GGUF files"):
        command_line(setting(tmp_path), 1)


@pytest.mark.parametrize("kept", [0, 23, 5000], ids=["empty", "within its head", "within its tensors"])
def test_a_gguf_file_that_is_cut_off_is_named_before_the_server_starts(tmp_path, kept):
    whole = write(tmp_path / "model.gguf").read_bytes()
    create(setting(tmp_path), lambda _: None)
    (tmp_path / "model.gguf").write_bytes(whole[:kept])
    with pytest.raises(ImageError, match=r"model\.gguf: is no valid GGUF file") as caught:
        create(setting(tmp_path), lambda _: None)
    assert caught.value.reason == "BadArtifact"


# What the server of llama-cpp-python would pass over


@asynccontextmanager
async def relaying(script, tmp_path, options, *answer):
    """A session with the relay of engine llamacpp, behind which a server says everything back, or always `answer`."""
    ended = []
    found = setting(tmp_path, options=options)
    engine = ForeignEngine(
        found, lambda port: [sys.executable, str(script), str(port), *answer], "/health", ended.append, follows(found)
    )
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "model.sock"))
    server = await engine.listen(listener)
    connector = aiohttp.UnixConnector(str(tmp_path / "model.sock"))
    async with aiohttp.ClientSession("http://model", connector=connector) as session:
        try:
            await asyncio.to_thread(engine.wake, [])
            yield session
        finally:
            await asyncio.to_thread(engine.stop)
            server.close()
    assert ended == []


ASKED = {"model": "llm", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "more", "format_"),
    [
        ("/v1/chat/completions", {}, "chatml"),
        ("/v1/chat/completions", {"user": "me", "seed": 1, "top_k": 3, "grammar": "root ::= [a-z]+"}, "chatml"),
        ("/v1/chat/completions", {"n": 1, "tools": [], "tool_choice": "none", "stream_options": None}, "chatml"),
        ("/v1/chat/completions", {"tools": [{}], "tool_choice": "auto"}, "chatml-function-calling"),
        ("/v1/embeddings", {"input": "Hi", "encoding_format": "float"}, None),
        ("/extras/tokenize", {"anything": 1}, None),
    ],
    ids=[
        "plain",
        "its own fields",
        "nothing asked for",
        "tools where they are followed",
        "vectors",
        "another endpoint",
    ],
)
async def test_what_the_llamacpp_server_follows_passes_unchanged(script, tmp_path, path, more, format_):
    body = json.dumps({**({} if "embeddings" in path else ASKED), **more}).encode()
    async with relaying(script, tmp_path, {"chatFormat": format_} if format_ else {}) as session:
        for _ in range(2):
            async with session.post(path, data=body) as answer:
                assert (answer.status, await answer.read()) == (200, body)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/chat/completions", "max_completion_tokens", 8),
        ("/v1/chat/completions", "stream_options", {"include_usage": True}),
        ("/v1/chat/completions", "n", 2),
        ("/v1/chat/completions", "tools", [{"type": "function"}]),
        ("/v1/chat/completions", "temprature", 0),
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "messages", []),
        ("/v1/embeddings", "dimensions", 8),
        ("/v1/embeddings", "encoding_format", "hex"),
        ("/v1/completions", "encoding_format", "base64"),
    ],
)
async def test_what_the_llamacpp_server_would_pass_over_is_refused_by_its_name(script, tmp_path, path, name, value):
    asked = {field: ASKED[field] for field in ASKED if field in FIELDS[path]}
    async with relaying(script, tmp_path, {}) as session:
        for _ in range(2):  # also on a connection that would be kept
            async with session.post(path, json={**asked, name: value}) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["param"], error["code"]) == (400, name, "unsupported_parameter")
            async with session.post(path, json=asked) as answer:
                assert answer.status == 200


VECTORS = [[0.5, -1.25, 0.1], [3.0, 0.0, -0.0]]


def embedded(vectors):
    """As the server of llama-cpp-python says it."""
    found = [{"object": "embedding", "embedding": vector, "index": index} for index, vector in enumerate(vectors)]
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    return json.dumps({"object": "list", "data": found, "model": "llm", "usage": usage})


@asynccontextmanager
async def openai_client(tmp_path):
    transport = httpx2.AsyncHTTPTransport(uds=str(tmp_path / "model.sock"))
    async with httpx2.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://model/v1", api_key="none", http_client=http, max_retries=0)


async def test_vectors_of_the_llamacpp_server_are_told_in_base64_to_who_asks_for_it(script, tmp_path):
    async with relaying(script, tmp_path, {}, "200", embedded(VECTORS)) as session:
        async with openai_client(tmp_path) as client:  # asks for base64 unless told otherwise
            answer = await client.embeddings.create(model="llm", input=["a", "b"])
        assert [item.embedding for item in answer.data] == [pytest.approx(vector) for vector in VECTORS]
        assert answer.usage.total_tokens == 4
        asked = {"model": "llm", "input": ["a", "b"], "encoding_format": "base64"}
        async with session.post("/v1/embeddings", json=asked) as raw:
            found = await raw.json(content_type=None)
        for item, vector in zip(found["data"], VECTORS, strict=True):
            assert base64.b64decode(item["embedding"]) == struct.pack("<3f", *vector)
        async with session.post("/v1/embeddings", json={**asked, "encoding_format": "float"}) as raw:
            assert await raw.json(content_type=None) == json.loads(embedded(VECTORS))


@pytest.mark.parametrize(
    ("status", "said"),
    [(400, '{"error": {"message": "too long"}}'), (200, embedded([[[0.5], [1.0]]]))],
    ids=["an error", "a vector for each token"],
)
async def test_what_are_no_vectors_of_the_llamacpp_server_passes_as_it_is(script, tmp_path, status, said):
    async with (
        relaying(script, tmp_path, {}, str(status), said) as session,
        session.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"}) as answer,
    ):
        assert (answer.status, await answer.text()) == (status, said)


async def test_a_body_of_unknown_length_or_no_json_is_refused_before_the_llamacpp_server(script, tmp_path):
    async def chunks():
        yield b"{}"

    async with relaying(script, tmp_path, {}) as session:
        async with session.post("/v1/completions", data=chunks()) as answer:
            assert answer.status == 411
        async with session.post("/v1/completions", data=b"[1]") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (400, "invalid_json")


async def test_every_request_of_a_kept_connection_is_looked_at(script, tmp_path):
    """A client that sends two at once gets one answer: the second would pass unseen."""
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    second = first.replace(b": 2\r", b": 7\r").replace(b"{}", b'{"n":2}')
    async with relaying(script, tmp_path, {}):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "model.sock"))
        writer.write(first + second)
        answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.endswith(b"{}")
