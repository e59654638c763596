"""What an agent in a pod was told last, kept so that a restart without the API server serves.

The processes are kept in the state directory without their secrets. Secrets are kept in memory that outlives the
container but not the pod (`/dev/shm`), readable by the agent's user only, and never on a disk.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnimodel.api import OmniPool, OmniProcess

log = logging.getLogger(__name__)

DESIRED_FILE = "desired.json"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - of the pod, and the file is made with mode 0600
FORMAT = 1

Secrets = Mapping[tuple[str, str], Mapping[str, bytes]]  # namespace and name -> key -> value


@dataclass(frozen=True)
class Applied:
    """What was applied last.

    Args:
        pool: of this pod.
        processes: assigned to this pod, as the API server has them.
        secrets: that they refer to.
        written: models whose status has an entry of this pod, as `namespace/name`.
    """

    pool: OmniPool
    processes: tuple[OmniProcess, ...]
    secrets: Secrets = field(default_factory=dict)
    written: tuple[str, ...] = ()


class AppliedFile:
    """Keeps what was applied last.

    Args:
        state_dir: of the agent.
        pod: whose it is: a file of another pod, on a volume that was given on, is not read.
        memory: where secrets are kept.
    """

    def __init__(self, state_dir: Path, pod: str, memory: Path = SHARED_MEMORY) -> None:
        self._path = state_dir / DESIRED_FILE
        self._pod = pod
        self._secrets = memory / f"omnimodel-{pod}.secrets"
        self._before: tuple[str, str] = ("", "")

    def read(self) -> Applied | None:
        """What an earlier run was told; None when there is nothing, or nothing that this version can read."""
        try:
            kept = json.loads(self._path.read_text("utf-8"))
            if kept.get("format") != FORMAT or kept.get("pod") != self._pod:
                return None
            return Applied(
                OmniPool.model_validate(kept["pool"]),
                tuple(OmniProcess.model_validate(item) for item in kept["processes"]),
                self._read_secrets(),
                tuple(kept.get("written", ())),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            log.warning("kept_state_unreadable file=%s error=%r", self._path, str(error))
            return None

    def _read_secrets(self) -> Secrets:
        try:
            kept = json.loads(self._secrets.read_text("utf-8"))
            return {
                (item["namespace"], item["name"]): {key: base64.b64decode(text) for key, text in item["data"].items()}
                for item in kept
            }
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return {}

    def write(self, applied: Applied) -> None:
        """Keep what was applied; does nothing when it is the same as before."""
        text = json.dumps(
            {
                "format": FORMAT,
                "pod": self._pod,
                "pool": _slim(applied.pool.to_dict()),
                "processes": [_slim(process.to_dict()) for process in applied.processes],
                "written": sorted(applied.written),
            }
        )
        hidden = json.dumps(_encoded(applied.secrets))
        if hidden != self._before[1]:
            self._write_secrets(hidden)
        if text != self._before[0]:
            _replace(self._path, text)
        self._before = (text, hidden)

    def _write_secrets(self, text: str) -> None:
        try:
            if text == "[]":
                self._secrets.unlink(missing_ok=True)
            else:
                _replace(self._secrets, text)
        except OSError as error:
            log.warning("secrets_not_kept error=%r", str(error))


def _slim(item: dict[str, Any]) -> dict[str, Any]:
    metadata = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    return {**{name: value for name, value in item.items() if name != "status"}, "metadata": metadata}


def _encoded(secrets: Secrets) -> Sequence[Mapping[str, Any]]:
    return [
        {
            "namespace": namespace,
            "name": name,
            "data": {key: base64.b64encode(value).decode() for key, value in sorted(content.items())},
        }
        for (namespace, name), content in sorted(secrets.items())
    ]


def _replace(path: Path, text: str) -> None:
    """Replace a file that its owner alone may read; a crash leaves the old or the new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
