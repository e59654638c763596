"""What an agent tells a follower arrives as it was said."""

from __future__ import annotations

import json

from omnimodel.controllers.pool_status import pod_entry, pool_report
from omnimodel.protocol.ingress import Snapshot, changes, merged
from omnimodel.protocol.report import DeviceReport, ModelReport, PoolReport, ProcessReport

GPUS = (
    DeviceReport("cuda:0", 100, 40, 0, 10, 50),
    DeviceReport("cuda:1", 0, 0, 0, 0, 0, problem="the driver reports Xid 79"),
)
POOL = PoolReport(
    pool="gpu", node="n", device="cuda:0 to cuda:1", budget_bytes=100, resident_bytes=40, promised_bytes=0,
    working_bytes=10, free_bytes=50, host_budget_bytes=9, host_bytes=3, arena_bytes=2, footprint_bytes=7,
    isolation_level="namespaces", isolation_missing=("seccomp",), ready=True, devices=GPUS,
)  # fmt: skip
MODEL = ModelReport(
    "d",
    "m",
    1,
    "warm",
    "idle",
    ready=True,
    device="cuda:0",
    process=ProcessReport("i", 1, "ready", 0.0, 5, 0, "process"),
)


def test_a_snapshot_arrives_whole_with_its_devices():
    said = Snapshot(POOL, {"d/m": MODEL})
    heard = merged(None, json.loads(json.dumps(changes(None, said))))
    assert heard == said
    assert pod_entry("gpu-0", heard.pool) == pod_entry("gpu-0", POOL)


def test_an_agent_of_an_earlier_version_tells_no_devices():
    message = json.loads(json.dumps(changes(None, Snapshot(POOL))))
    del message["pool"]["devices"]
    assert merged(None, message).pool.devices == ()


def test_an_agent_of_an_earlier_version_tells_no_tokens():
    message = json.loads(json.dumps(changes(None, Snapshot(POOL, {"d/m": MODEL}))))
    del message["models"]["d/m"]["prompt_tokens"], message["models"]["d/m"]["generated_tokens"]
    heard = merged(None, message).models["d/m"]
    assert (heard.prompt_tokens, heard.generated_tokens) == (0, 0)


def test_a_pool_says_which_device_of_which_pod_is_lost_although_it_serves():
    entries = [pod_entry("gpu-0", POOL), pod_entry("gpu-1", POOL)]
    report = pool_report("gpu", entries)
    assert report is not None
    assert report.ready
    assert report.message == "gpu-0: cuda:1: the driver reports Xid 79; gpu-1: cuda:1: the driver reports Xid 79"
