"""Which processes belong to a model's where no control group says so."""

from __future__ import annotations

import os
import subprocess
import time

from omnimodel.agent.family import family_of


def test_what_has_begun_a_session_of_its_own_belongs_to_who_started_it() -> None:
    program = "sh -c 'setsid sleep 600 & setsid sh -c \"sleep 600 & wait\" & sleep 600'"
    leader = subprocess.Popen(["sh", "-c", program], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while _sleepers(family_of(leader.pid)) < 3:
            assert time.monotonic() < deadline, "three sleep"
            time.sleep(0.01)
        assert os.getpid() not in family_of(leader.pid)
        assert leader.pid not in family_of(leader.pid)
    finally:
        for pid in family_of(leader.pid):
            os.kill(pid, 9)
        leader.kill()
        leader.wait()


def _sleepers(pids: set[int]) -> int:
    return sum(open(f"/proc/{pid}/comm").read().strip() == "sleep" for pid in pids)
