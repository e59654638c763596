"""A package index on the machine's side of the node's link: pods have no other way to packages.

It passes on the index that pip of this machine is configured for, and keeps every file that was asked for, so that
later runs need no network for them.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from example_models import cache
from plain_http import handler

_LINK = re.compile(r'href="([^"#]+)')
ATTEMPTS, SECONDS = 3, 120


def configured() -> str:
    """Address of the index that pip of this machine uses, with a slash at its end."""
    asked = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    settings = dict(line.split("=", 1) for line in listed if "=" in line)  # the environment's are `:env:.NAME`
    named = {name: value.strip("'") for name, value in settings.items() if name.rpartition(".")[2].startswith("index")}
    found = named.get(min(named, default=""), "")
    if not found.strip():
        from pip._internal.models.index import PyPI

        found = PyPI.simple_url
    return found.strip().rstrip("/") + "/"


class PackageIndex:
    """What runs.

    Args:
        host: address to listen on.
    """

    def __init__(self, host: str) -> None:
        self.asked: list[str] = []
        self.failed: list[str] = []
        self._upstream = configured()
        self._folder = cache() / "index"
        self._locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
        self._server = ThreadingHTTPServer((host, 0), handler(self._answer))
        self.url = f"http://{host}:{self._server.server_port}/simple"

    @property
    def files(self) -> list[str]:
        """Names of the files that were asked for."""
        return [path.rpartition("/")[2] for path in self.asked if path.startswith("/files/")]

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        kind, _, rest = request.path.lstrip("/").partition("/")
        try:
            if kind == "simple":
                content_type, body = "text/html", self._page(rest)
            else:
                content_type, body = "application/octet-stream", self._file(unquote(rest)).read_bytes()
        except OSError as error:
            self.failed.append(f"{request.path}: {error!r}")
            request.send_error(getattr(error, "code", 502))
            return
        request.send_response(200)
        request.send_header("Content-Type", content_type)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        with suppress(OSError):
            if request.command == "HEAD":
                return
            request.wfile.write(body)

    def _page(self, name: str) -> bytes:
        """A project's page, its links leading back here."""
        address = self._upstream + name
        with _open(address) as answer:
            text = answer.read().decode()

        def here(match: re.Match[str]) -> str:
            return f'href="/files/{quote(urljoin(address, html.unescape(match[1])), safe="/")}'

        return _LINK.sub(here, text).encode()

    def _file(self, address: str) -> Path:
        kept = self._folder / urlsplit(address).path.lstrip("/")
        with self._locks[kept]:
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
                with _open(address) as answer, part.open("wb") as file:
                    shutil.copyfileobj(answer, file)
                part.replace(kept)
        return kept


def _open(address: str) -> Any:
    request = urllib.request.Request(address, headers={"Accept": "text/html, */*"})
    for _ in range(ATTEMPTS - 1):
        try:
            return urllib.request.urlopen(request, timeout=SECONDS)
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(1)
    return urllib.request.urlopen(request, timeout=SECONDS)


@contextmanager
def package_index(host: str) -> Iterator[PackageIndex]:
    """The index, answering for as long as the context lasts."""
    index = PackageIndex(host)
    thread = threading.Thread(target=index._server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index._server.shutdown()
        index._server.server_close()
        thread.join()
