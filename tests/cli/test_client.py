"""The client of the command line against a system that breaks off in the middle of an answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from omnimodel.cli.check import addressed
from omnimodel.cli.client import Client
from omnimodel.cli.exits import ConnectionFailed, ExitCode, exit_code
from omnimodel.errors import DispatchError, Reason

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
WHOLE = HEAD + b"Content-Length: 100\r\n\r\n{"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n6\r\nhello\n\r\n"


@pytest.fixture
def said(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a system that says this to its one client, and is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                while b"\r\n\r\n" not in connection.recv(65536):
                    pass
                connection.sendall(request.param)

        thread = threading.Thread(target=answer)
        thread.start()
        yield "http://{}:{}".format(*server.getsockname()[:2])
        thread.join()


@pytest.mark.parametrize("said", [WHOLE], ids=["half an answer"], indirect=True)
def test_half_an_answer_is_a_lost_connection(said: str) -> None:
    with pytest.raises(ConnectionFailed, match="it broke off") as failure:
        Client(said).objects("omnimodels")
    assert exit_code(failure.value) is ExitCode.NO_CONNECTION


@pytest.mark.parametrize("said", [CHUNKED], ids=["a log that ends"], indirect=True)
def test_a_log_that_is_followed_ends_with_what_happened(said: str) -> None:
    lines = Client(said).logs("default", "words", tail=1, follow=True)
    assert next(lines) == b"hello\n"
    with pytest.raises(ConnectionFailed, match="it broke off"):
        next(lines)


def refusal(status: int, code: str) -> bytes:
    body = json.dumps({"error": {"message": "no", "type": "server_error", "param": None, "code": code}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("said", "reason", "code"),
    [
        (refusal(503, "load_timeout"), Reason.LOAD_TIMEOUT, ExitCode.TIMED_OUT),
        (refusal(502, "evict_timeout"), Reason.EVICT_TIMEOUT, ExitCode.TIMED_OUT),
        (refusal(409, "pool_not_found"), Reason.POOL_NOT_FOUND, ExitCode.NOT_FOUND),
        (refusal(404, "not_found"), Reason.MODEL_NOT_FOUND, ExitCode.NOT_FOUND),
        (refusal(504, "gateway_timeout"), Reason.DEADLINE_EXCEEDED, ExitCode.TIMED_OUT),
        (refusal(500, "internal_error"), Reason.INTERNAL, ExitCode.FAILED),
    ],
    indirect=["said"],
    ids=lambda value: str(value) if isinstance(value, Reason) else "",
)
def test_the_reason_of_a_refusal_decides_about_the_exit_code(said: str, reason: Reason, code: ExitCode) -> None:
    with pytest.raises(DispatchError) as failure:
        Client(said).wake("default", "words", 1.0)
    assert failure.value.reason is reason
    assert exit_code(failure.value) is code


def test_codes_and_reasons_lead_to_each_other() -> None:
    assert [Reason.of_code(reason.code) for reason in Reason] == list(Reason)
    assert Reason.of_code("model_missing") is None


@pytest.mark.parametrize(
    ("probe", "name", "path", "model"),
    [
        ({"path": "/v1/embeddings", "json": {"input": "cat"}}, "words", "/v1/embeddings", "default/words"),
        ({"path": "/v1/embeddings", "json": {"input": "cat"}}, "team/x", "/v1/embeddings", "team/x"),
        ({"path": "/v1/audio/transcriptions", "form": {"file": "a"}}, "x", "/v1/audio/transcriptions", "default/x"),
        ({"path": "/v2/models/x/infer", "json": {}}, "team/x", "/v2/models/team/x/infer", None),
        ({"path": "/v2/models/other/infer", "json": {}}, "team/x", "/v2/models/other/infer", None),
        ({"path": "/v1/x", "json": {"model": "x:brief"}}, "team/x", "/v1/x", "x:brief"),
    ],
)
def test_a_probe_reaches_the_model_whatever_others_are_called(
    probe: dict[str, object], name: str, path: str, model: str | None
) -> None:
    found = addressed(probe, name)
    assert found["path"] == path
    assert (found.get("json") or found.get("form") or {}).get("model") == model
