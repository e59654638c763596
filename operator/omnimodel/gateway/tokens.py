"""Who may ask an agent: whoever knows its token, which is in a file of the pod that no model sees.

The file is looked at again and again, so that a change of it counts without a restart. The token before it stays good
for a while, for agents and gateways do not hear of a change at the same time; and when the file goes, what it had last.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the file
BEFORE_SECONDS = 300.0  # so long the token before is good: a kubelet takes up to two minutes to bring a new one


class Tokens:
    """The token of a file, and the one before it; see the module. While there never was one, nobody is let in.

    Args:
        path: of the file; space around the token is none of it.
        clock: monotonic.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked = -LOOK_SECONDS
        self._problem = ""
        self._before = ""
        self._before_until = 0.0
        self.current = ""
        self.look()

    def look(self) -> None:
        """Read the file, unless that was a moment ago."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            found = self._path.read_text(encoding="ascii").strip()
            problem = "" if found else "it is empty"
        except (OSError, ValueError) as error:
            found, problem = "", str(error)
        if problem != self._problem:
            self._problem = problem
            if problem:
                log.warning("token_not_read path=%s problem=%r known=%s", self._path, problem, bool(self.current))
        if found and found != self.current:
            self._before, self._before_until = self.current, now + BEFORE_SECONDS
            self.current = found
            log.info("token_read path=%s", self._path)

    def accept(self, authorization: str) -> bool:
        """Whether a request with this header `Authorization` comes from someone who knows the token."""
        scheme, _, text = authorization.partition(" ")
        given = text.strip().encode(errors="surrogateescape")
        known = [hmac.compare_digest(token.encode(), given) for token in self.good()]
        return scheme.lower() == "bearer" and any(known)

    def good(self) -> tuple[str, ...]:
        """What is accepted now, the newest first."""
        self.look()
        before = self._before if self._clock() < self._before_until else ""
        return tuple(token for token in (self.current, before) if token)


def bearer(token: str) -> Mapping[str, str]:
    """Headers of one who knows a token; none without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}
