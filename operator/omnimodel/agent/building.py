"""Builds packages that have no wheel, in a sandbox: their setup code is a stranger's as much as a model's is.

The process sees the interpreter, the files with its requirements, and the network; it writes to one folder. What it
leaves there is looked through before it is used.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnimodel.agent.confinement import building_request
from omnimodel.agent.programs import Finished, without_logins
from omnimodel.errors import OmniError, Reason
from omnimodel.protocol.process import Build

if TYPE_CHECKING:
    from omnimodel.agent.layout import Layout
    from omnimodel.agent.spawner import Spawner

FOLDER = "build"  # the one that the process may write to, below the folder that it sees
_SILENT_SECONDS = 3600.0  # a compiler says nothing while it works
_KEPT_LINES = 200
# What a build gets to know: where packages are fetched from, and how they are compiled; no logins and no tokens.
_PASSED = ("uv_", "cmake_", "http_proxy", "https_proxy", "no_proxy", "all_proxy")
_COMPILING = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")
_AUTHORITIES = "SSL_CERT_FILE"


class Builder:
    """Makes the processes that build.

    Args:
        layout: of the state directory.
        spawner: makes processes.
    """

    def __init__(self, layout: Layout, spawner: Spawner) -> None:
        self._layout = layout
        self._spawner = spawner
        self._numbers = itertools.count(1)

    async def uv(
        self,
        subject: str,
        spec: Mapping[str, Any],
        folder: Path,
        arguments: Sequence[str],
        variables: Mapping[str, str | None],
        hear: Callable[[str], None],
    ) -> Finished:
        """Run uv with arguments.

        Args:
            subject, spec: of the model that asks first for what is built; the process has its user and its limits.
            folder: that the process sees; its `build` is made and may be written to.
            variables: of uv, beside those of the agent's own environment; None takes one away. It gets those that
                say where to fetch from, without logins.
            hear: gets each line.

        Raises:
            OmniError: the process could not be made, or did not end.
        """
        writable = folder / FOLDER
        writable.mkdir(mode=0o700, exist_ok=True)
        request = building_request(subject, spec, self._layout, folder, writable, number=next(self._numbers))
        request = replace(request, env={**request.env, **_told({**os.environ, **variables}, folder, writable)})
        lines: deque[str] = deque(maxlen=_KEPT_LINES)

        def heard(line: str) -> None:
            lines.append(without_logins(line))
            hear(lines[-1])

        process = await self._spawner.spawn(request)
        try:
            reply = await process.command(Build(list(arguments)), (), _SILENT_SECONDS, lambda said: heard(said.stage))
        finally:
            process.kill()
            await process.released
        return Finished(int(reply.values.get("code", 1)), tuple(lines))


def _told(variables: Mapping[str, str | None], folder: Path, writable: Path) -> dict[str, str]:
    """The environment of uv inside, and the authorities where it can read them.

    What it makes lies on the disk: compiling takes more than a /tmp in memory holds.
    """
    found = {
        name: without_logins(value)
        for name, value in variables.items()
        if value is not None and (name.lower().startswith(_PASSED) or name in _COMPILING)
    }
    if authorities := variables.get(_AUTHORITIES):
        shown = folder / "authorities.pem"
        shown.write_bytes(Path(authorities).read_bytes())
        found[_AUTHORITIES] = str(shown)
    places = {"UV_CACHE_DIR": "cache", "TMPDIR": "tmp", "HOME": "home"}
    return {**found, **{name: str(writable / place) for name, place in places.items()}, "NO_COLOR": "1"}


def take_over(subject: str, built: Path, target: Path) -> None:
    """Move what a process has built, which must have ended, to where it is kept, as files of this user.

    Raises:
        OmniError: there is something else than folders, files of their own, and links among it.
    """
    owner = (0, 0) if os.geteuid() == 0 else (-1, -1)
    if not stat.S_ISDIR(built.lstat().st_mode):
        raise _odd(subject, built)
    for place, folders, files in os.walk(built):
        for name in (".", *folders, *files):
            path = Path(place, name)
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                os.chown(path, *owner, follow_symlinks=False)
                continue
            folder = stat.S_ISDIR(status.st_mode)
            if not folder and not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
                raise _odd(subject, path)
            os.chown(path, *owner)
            os.chmod(path, 0o755 if folder or status.st_mode & 0o111 else 0o644)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(built, target)


def _odd(subject: str, path: Path) -> OmniError:
    return OmniError(
        subject,
        f"its environment cannot be built: a package made {path.name!r}, which is no ordinary file",
        "leave that package out",
        reason=Reason.ENVIRONMENT_FAILED,
    )
