"""A package index and a web server of files, as an intranet has them: logins, TLS, and a proxy in front of hosts."""

from __future__ import annotations

import base64
import html
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from plain_http import handler


class PackageIndex:
    """Serves the wheels of a folder by PEP 503 below /simple, and its other files below /files.

    Asked as a proxy (`GET http://any.host/…`), it answers for every host itself.

    Args:
        folder: of the wheels and files.
        login: `(user, password)` that must be given, if any.
        certificate: file with key and certificate, for TLS.
        host: address to listen on.
    """

    def __init__(
        self,
        folder: Path,
        login: tuple[str, str] | None = None,
        certificate: Path | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder = folder
        self.asked: list[str] = []  # request targets that were answered with 200
        self.refused = 0
        self._wanted = "Basic " + base64.b64encode(":".join(login).encode()).decode() if login else ""
        self._server = ThreadingHTTPServer((host, 0), handler(self._answer))
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        status, kind, body = 401, "text/plain", b"who are you"
        if not self._wanted or request.headers.get("Authorization") == self._wanted:
            status, kind, body = self._found(urlsplit(request.path).path)
        if status == 200:
            self.asked.append(request.path)
        self.refused += status == 401
        request.send_response(status)
        if status == 401:
            request.send_header("WWW-Authenticate", 'Basic realm="index"')
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    def _found(self, path: str) -> tuple[int, str, bytes]:
        _, top, *rest = path.split("/")
        if top == "simple" and rest and rest[0]:
            names = [file.name for file in self.folder.glob(f"{rest[0].replace('-', '_')}-*.whl")]
            links = "".join(f'<a href="/files/{html.escape(name)}">{html.escape(name)}</a>' for name in names)
            if names:
                return 200, "text/html", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        if top == "files" and len(rest) == 1 and (self.folder / rest[0]).is_file():
            return 200, "application/octet-stream", (self.folder / rest[0]).read_bytes()
        return 404, "text/plain", b"not here"


def make_certificates(folder: Path) -> tuple[Path, Path]:
    """An authority's certificate, and a key with a certificate for 127.0.0.1 that it signed, in one file."""
    authority, server = folder / "authority.pem", folder / "server.pem"
    keys = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", "req", "-x509", *keys, *arguments], check=True, capture_output=True)

    openssl("-subj", "/CN=authority", "-keyout", f"{authority}.key", "-out", str(authority))
    openssl(
        *("-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"),
        *("-CA", str(authority), "-CAkey", f"{authority}.key", "-keyout", f"{server}.key", "-out", str(server)),
    )
    server.write_bytes(server.read_bytes() + Path(f"{server}.key").read_bytes())
    return authority, server
