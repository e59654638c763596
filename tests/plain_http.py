"""The HTTP servers of tests that serve from threads: what is asked is answered by one function, and nothing is printed."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler


def handler(answer: Callable[[BaseHTTPRequestHandler], None]) -> type[BaseHTTPRequestHandler]:
    """A handler of GET and HEAD."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)

        do_HEAD = do_GET  # noqa: N815 the interface

        def log_message(self, *_: object) -> None:
            pass

    return Handler
