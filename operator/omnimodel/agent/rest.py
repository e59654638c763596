"""What the process of an instance has of its devices while it is not resident: asleep, parked, or neither."""

from __future__ import annotations


class Rest:
    """See the module; written by whoever puts it to rest (`servers`, `parking`)."""

    def __init__(self) -> None:
        self.pids: set[int] = set()  # of its processes those that were seen to hold device memory
        self.parked_pid = 0  # which of them is parked, when it is
        self.unparkable = False  # the driver refused its process, or failed with it
        self.parks_at_seconds = 0.0  # when it makes sense to park it, if that need not be
        self.asleep = False  # its foreign server is on no device, and has not ended
        self.asleep_bytes: dict[str, int] = {}  # that stay of it on each device meanwhile
        self.sleepless = ""  # why its server is stopped where others are put to sleep

    def begin(self, pid: int, *, foreign: bool) -> None:
        """Note that it has a new process."""
        self.pids = set() if foreign else {pid}
        self.unparkable = self.unparkable and foreign  # of a server nobody knows why, and its start is dear

    def wake(self, *, sleepless: str) -> None:
        """Note that it is awake, and why it is put to sleep no more, if so."""
        self.sleepless = sleepless or self.sleepless
        self.asleep, self.asleep_bytes = False, {}

    def end(self) -> None:
        """Note that its process has ended."""
        self.asleep, self.asleep_bytes = False, {}
