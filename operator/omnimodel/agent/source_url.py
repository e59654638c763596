"""Downloads one file of the web; an interrupted download goes on where it was, and only the right hash is taken."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

import aiohttp

from omnimodel.agent.origins import Origins
from omnimodel.agent.programs import without_logins
from omnimodel.errors import OmniError, Reason, SourceError
from omnimodel.memory.disk import disk_errors

_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5
_PAUSE_SECONDS = 0.5  # doubled with each attempt that brought nothing
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
_FINAL_STATUS = {400, 401, 403, 404, 405, 410, 451}


class _Interrupted(Exception):
    """The connection ended early; another attempt may go on."""


async def fetch(
    subject: str,
    spec: Mapping[str, Any],
    work: Path,
    content: Path,
    progress: Callable[[int, int], None],
    limit_bytes: int,
    origins: Origins,
) -> str:
    """Download `url` and check its `sha256`; see `source_package.fetch` for the arguments."""
    url, expected = spec["url"], spec.get("sha256") or ""
    if not expected:
        raise SourceError(
            subject, f"{_shown(url)} has no sha256", "write spec.source.url.sha256", reason=Reason.INVALID_MANIFEST
        )
    name = re.sub(r"[^A-Za-z0-9._-]", "_", unquote(urlsplit(url).path).rpartition("/")[2]).lstrip(".") or "file"
    part = _Part(work / "part")
    for fresh in (False, True):
        resumed = part.size_bytes() > 0
        await _download(subject, url, part, progress, limit_bytes, origins)
        found = await asyncio.to_thread(part.sha256)
        if found == expected:
            break
        part.remove()
        if fresh or not resumed:
            raise SourceError(
                subject,
                f"{_shown(url)} has the sha256 {found}, its manifest says {expected}",
                "correct spec.source.url.sha256 if you trust the new file",
                reason=Reason.DIGEST_MISMATCH,
            )
    part.move(content, name)
    return name


class _Part:
    """The file that is being downloaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def open(self, *, resume: bool) -> BinaryIO:
        return open(self.path, "ab" if resume else "wb")

    def sha256(self) -> str:
        if not self.path.exists():  # a file of no bytes at all
            return hashlib.sha256().hexdigest()
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def move(self, folder: Path, name: str) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        self.path.touch()
        self.path.rename(folder / name)


async def _download(
    subject: str,
    url: str,
    part: _Part,
    progress: Callable[[int, int], None],
    limit_bytes: int,
    origins: Origins,
) -> None:
    failures, reason = 0, ""
    connector = aiohttp.TCPConnector(ssl=await asyncio.to_thread(origins.tls))
    login = await asyncio.to_thread(origins.login, url)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=_TIMEOUT,
        auto_decompress=False,
        proxy=origins.proxy(url),
    ) as session:
        while failures < _ATTEMPTS:
            before = part.size_bytes()
            try:
                await _attempt(subject, session, url, login, part, progress, limit_bytes)
                return
            except (_Interrupted, aiohttp.ClientError, TimeoutError, OSError) as error:
                if isinstance(error, OSError) and not isinstance(error, aiohttp.ClientError | TimeoutError):
                    raise
                reason = without_logins(str(error)).replace(url, _shown(url)) or type(error).__name__
                moved = part.size_bytes() > before
                failures = 1 if moved else failures + 1
            await asyncio.sleep(_PAUSE_SECONDS * 2 ** (failures - 1))
    raise SourceError(
        subject, f"{_shown(url)} cannot be downloaded: {reason[:300]}", "check the network and spec.source.url"
    )


def _shown(url: str) -> str:
    """A URL without its query, which often holds a token."""
    return without_logins(url.partition("?")[0])


async def _attempt(
    subject: str,
    session: aiohttp.ClientSession,
    url: str,
    login: Mapping[str, str],
    part: _Part,
    progress: Callable[[int, int], None],
    limit_bytes: int,
) -> None:
    done = part.size_bytes()
    headers = {**login, "Accept-Encoding": "identity", **({"Range": f"bytes={done}-"} if done else {})}
    async with session.get(url, headers=headers) as response:
        if response.status in _FINAL_STATUS:
            cure = "correct spec.source.url" if response.status in {404, 410} else "make it readable without a login"
            raise SourceError(subject, f"{_shown(url)} answers {response.status} {response.reason}", cure)
        if response.status == 416:  # the part is as long as the file, or longer: its hash will tell
            if done == _length_of(response.headers.get("Content-Range", "")):
                return
            part.remove()
            raise _Interrupted("the part is longer than the file")
        if response.status not in {200, 206}:
            raise _Interrupted(f"it answers {response.status} {response.reason}")
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.remove()
            raise _Interrupted("it sent another range than it was asked for")
        if response.status == 200:
            done = 0
        total = done + response.content_length if response.content_length is not None else 0
        _check_size(subject, url, max(done, total), limit_bytes)
        with disk_errors(str(part.path)), part.open(resume=done > 0) as file:
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                done += len(chunk)
                _check_size(subject, url, done, limit_bytes)
                await asyncio.to_thread(file.write, chunk)
                progress(done, total)
        if total and done != total:
            raise _Interrupted(f"it ended after {done} of {total} bytes")


def _check_size(subject: str, url: str, size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise OmniError(
            subject,
            f"{_shown(url)} has {size_bytes} bytes or more, at most {limit_bytes} are fetched",
            reason=Reason.TOO_LARGE,
        )


def _length_of(content_range: str) -> int:
    length = content_range.rpartition("/")[2]
    return int(length) if length.isdecimal() else -1
