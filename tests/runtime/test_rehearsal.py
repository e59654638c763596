"""What a spare does before it is told whose it will be."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import gc, json, os, resource, sys, threading
from omnimodel.runtime.preload import PRELOAD, preload

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def state():
    return {
        "path": list(sys.path), "finders": len(sys.meta_path), "modules": sorted(sys.modules),
        "threads": threading.active_count(), "descriptors": sorted(os.listdir("/proc/self/fd")),
    }

preload(PRELOAD, lambda *_: None)
from omnimodel.runtime import rehearsal
gc.collect()
gc.freeze()
if os.fork() == 0:
    seen, states = [], [state()]
    for _ in range(2):
        began = faults()
        rehearsal.rehearse()
        seen.append(faults() - began)
        states.append(state())
    print(json.dumps({"faults": seen, "states": states}), flush=True)
    os._exit(0)
os.wait()
"""


def test_a_rehearsal_leaves_nothing_but_the_pages_that_it_has_touched() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    before, once, twice = found["states"]
    assert once == twice
    assert {**before, "modules": once["modules"]} == once
    assert set(once["modules"]) - set(before["modules"]) == set(), "the zygote lacks what every model imports"
    first, second = found["faults"]
    assert first > 1000
    assert second < first / 4
