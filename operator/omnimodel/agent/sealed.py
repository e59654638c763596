"""Folders of published stores that others filled and sealed with a digest: read when they are whole, never written."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnimodel.agent.stored import tree_digest
from omnimodel.errors import OmniError
from omnimodel.memory.published import read_plain

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sealed:
    """See the module. One that is not as it was sealed is left where it is, and told.

    Args:
        what: they are, for messages: `source` or `environment`.
        roots: each holds a folder for every key; the first that has a key counts.
        marker: name of the file with the digest, `marker_bytes` how large it may be.
        content: name of the folder that the digest is of.
        place: what is wanted of the content, from the marker; None passes the folder over.
        error: made of a subject and what is wrong.
        doubt: hears of it.
        verified: what was found, by folder: every byte of it was read since this agent began.
    """

    what: str
    roots: Sequence[Path]
    marker: str
    marker_bytes: int
    content: str
    place: Callable[[Mapping[str, Any]], str | None]
    error: Callable[[str, str], OmniError]
    doubt: Callable[[OmniError], None]
    verified: dict[Path, Path] = field(default_factory=dict)

    def find(self, key: str) -> Path | None:
        """What is kept under a key, in the first store that has it whole."""
        for root in self.roots:
            folder = root / key
            if folder in self.verified:
                return self.verified[folder]
            try:
                marker = json.loads(read_plain(folder / self.marker, self.marker_bytes))
                place = self.place(marker)
                if place is None:
                    continue
                if marker["digest"] != tree_digest(folder / self.content):
                    raise ValueError("its files are not those that were sealed")
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                log.warning("published_damaged what=%s folder=%s problem=%r", self.what, folder, str(error))
                told = str(error) if isinstance(error, ValueError) else "it cannot be read"
                self.doubt(self.error(f"{self.what} {folder}", f"cannot be used: {told}"))
                continue
            self.verified[folder] = folder / self.content / place
            return self.verified[folder]
        return None
