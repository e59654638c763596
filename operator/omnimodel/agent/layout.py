"""Where an agent keeps its state: one directory, every path of it named here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from omnimodel.agent.origins import FOLDER_VARIABLE


@dataclass(frozen=True)
class Layout:
    """The state directory of one agent.

    Args:
        root: the directory itself.
    """

    root: Path

    @property
    def store(self) -> Path:
        """Published images."""
        return self.root / "store"

    @property
    def sources(self) -> Path:
        """Fetched sources: wheels, files, snapshots."""
        return self.root / "sources"

    @property
    def environments(self) -> Path:
        """Built environments, a folder each."""
        return self.root / "environments"

    @property
    def run(self) -> Path:
        """Sockets and the folders of running processes; emptied at each start."""
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
        return self.root / "footprints"

    @property
    def origins(self) -> Path:
        """Authorities, logins and token for fetching, for this user only; in a pod the kubelet's folder."""
        return Path(os.environ.get(FOLDER_VARIABLE) or self.root / "origins")

    def log(self, namespace: str, name: str) -> Path:
        """The log file of one model."""
        return self.logs / f"{namespace}.{name}.log"

    def make(self) -> None:
        """Make every directory. What models' users may enter is decided where it is made: `run`, images, packages."""
        for path in (self.store, self.sources, self.environments, self.run, self.logs, self.journal, self.footprints):
            path.mkdir(parents=True, exist_ok=True)
