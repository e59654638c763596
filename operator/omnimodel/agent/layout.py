"""Where an agent keeps its state, every path of it named here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from omnimodel.agent.origins import FOLDER_VARIABLE
from omnimodel.memory.disk import disk_errors


@dataclass(frozen=True)
class Layout:
    """The state directory of one agent.

    Args:
        root: the directory itself.
        volume: for what is worth keeping for another agent, where that is not the state directory.
    """

    root: Path
    volume: Path | None = None

    @property
    def kept(self) -> Path:
        """Images, sources, environments and footprints: all that the next agent would have to make anew."""
        return self.volume or self.root

    @property
    def store(self) -> Path:
        """Published images."""
        return self.kept / "store"

    @property
    def sources(self) -> Path:
        """Fetched sources: wheels, files, snapshots."""
        return self.kept / "sources"

    @property
    def environments(self) -> Path:
        """Built environments, a folder each."""
        return self.kept / "environments"

    @property
    def run(self) -> Path:
        """Sockets and the folders of running processes; emptied at each start of what nobody goes on with."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """What models' processes printed."""
        return self.root / "logs"

    @property
    def journal(self) -> Path:
        """What to clean after a crash."""
        return self.root / "journal"

    @property
    def footprints(self) -> Path:
        """Measured footprints, a file for each publish hash."""
        return self.kept / "footprints"

    @property
    def origins(self) -> Path:
        """Authorities, logins and token for fetching, for this user only; in a pod the kubelet's folder."""
        return Path(os.environ.get(FOLDER_VARIABLE) or self.root / "origins")

    def log(self, namespace: str, name: str) -> Path:
        """The log file of one model."""
        return self.logs / f"{namespace}.{name}.log"

    def make(self) -> None:
        """Make every directory of one agent. What models' users may enter is decided where it is made."""
        for path in (self.run, self.logs, self.journal):
            path.mkdir(parents=True, exist_ok=True)

    def make_kept(self) -> None:
        """Make every directory of what is kept."""
        with disk_errors(str(self.kept)):
            for path in (self.store, self.sources, self.environments, self.footprints):
                path.mkdir(parents=True, exist_ok=True)
