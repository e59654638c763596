"""The ladder of isolation in real pods: under each security setting, what an agent reaches and what a model sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cluster_node.installation import PODS, Installation
from cluster_node.models import code, prober, said
from cluster_node.reports import ask_agent
from cluster_node.securities import DEFAULT, RESTRICTED, SYS_ADMIN, UNCONFINED, Security, secured

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(900)]
FREE = {"hostUsers": False}


OWN_PROC, OWN_PID, OWN_USER = "a /proc of its own", "a pid namespace of its own", "a user of its own"
BY_GROUP = ("a memory limit by the kernel", "a limit of processes by control group", "a limit of the processor time")
NO_MOUNTS = ("its own /tmp and /dev/shm with a size", "/proc/meminfo with its own limit")
LANDLOCK = (OWN_PID, *NO_MOUNTS, *BY_GROUP)
USER_NAMESPACE = (OWN_PROC, *BY_GROUP)
NO_LOOPBACK = ("a loopback of its own", *BY_GROUP)


@dataclass(frozen=True)
class Row:
    """A line of the table: what pods have, what comes of it.

    Args:
        missing: what the pool's status lacks, each up to the reason.
        pool: of the OmniPool's spec.
    """

    security: Security
    level: str
    missing: tuple[str, ...]
    pool: dict[str, Any] | None = None


TABLE = [
    Row(Security("as-made", None), "landlock", LANDLOCK),
    Row(Security("as-made-namespaces", None), "namespaces", USER_NAMESPACE, {"isolation": {"level": "namespaces"}}),
    Row(Security("plain", {}), "namespaces", USER_NAMESPACE),
    Row(Security("runtime-default", {"seccompProfile": DEFAULT}), "landlock", LANDLOCK),
    Row(
        Security("restricted", {**RESTRICTED, "seccompProfile": DEFAULT}),
        "landlock",
        (OWN_PID, OWN_USER, *NO_MOUNTS, "other models' sockets out of reach", *BY_GROUP),
    ),
    Row(
        Security("restricted-unconfined", {**RESTRICTED, "seccompProfile": UNCONFINED}),
        "namespaces",
        (OWN_PROC, OWN_USER, *BY_GROUP),
    ),
    Row(Security("sys-admin-runtime-default", {**SYS_ADMIN, "seccompProfile": DEFAULT}), "namespaces", NO_LOOPBACK),
    Row(Security("sys-admin", SYS_ADMIN), "namespaces", NO_LOOPBACK),
    Row(Security("privileged", {"privileged": True}), "namespaces", ()),
    Row(Security("free-users", {}, FREE), "namespaces", USER_NAMESPACE),
    Row(Security("free-users-runtime-default", {"seccompProfile": DEFAULT}, FREE), "landlock", LANDLOCK),
    Row(Security("free-users-sys-admin", {**SYS_ADMIN, "seccompProfile": DEFAULT}, FREE), "namespaces", NO_LOOPBACK),
    Row(Security("free-users-privileged", {"privileged": True}, FREE), "namespaces", BY_GROUP),
]
PROMISES = """
import os, socket
def tried(what):
    try:
        return what()
    except OSError as error:
        return error.strerror
def connect():
    with socket.socket() as one:
        one.settimeout(2)
        one.connect(("10.96.0.1", 443))
        return "connected"
def listed(folder):
    return tried(lambda: os.listdir(folder))
refused = {
    **{name: listed(f"/var/lib/omnimodel/{name}") for name in ("store", "sources", "environments", "logs", "run")},
    "volume": listed("/volumes/weights"),
    "token of agents": tried(lambda: open("/etc/omnimodel/token/token").read()[:1]),
    "token": tried(lambda: open("/var/run/secrets/kubernetes.io/serviceaccount/token").read()[:1]),
    "network": tried(connect),
    "shadow": tried(lambda: open("/etc/shadow").read()),
    "package": tried(lambda: open(os.__file__, "a")),
}
capabilities = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")][0]
answer = {"refused": refused, "uid": os.getuid(), "capabilities": capabilities}
"""
REFUSED = {
    "Permission denied",
    "No such file or directory",
    "Address family not supported by protocol",
    "Network is unreachable",
    "Operation not permitted",
    "Read-only file system",
}


@pytest.mark.parametrize("row", [pytest.param(row, id=row.security.name) for row in TABLE])
def test_the_level_that_pods_reach_is_told_and_a_model_sees_neither_others_nor_the_cluster(
    installation: Installation, row: Row
) -> None:
    name = row.security.name
    with secured(installation.cluster, row.security), installation.pool(name, **(row.pool or {})):
        isolation = lambda: installation.get("omnipool", name).get("status", {}).get("isolation", {})  # noqa: E731
        installation.until(lambda: isolation().get("level"), "the level")
        reached = isolation()
        assert reached["level"] == row.level
        missing = [sentence.partition(": ")[0].partition(" (")[0] for sentence in reached.get("missing", [])]
        assert missing == list(row.missing)
        with installation.model(prober(f"in-{name}", name)) as model:
            installation.wait_ready(model)
            sees_neither_others_nor_the_cluster(said(installation.ask(model, code(PROMISES)).values))


STEERING = """
import os, urllib.error, urllib.request
def tried(path, method="GET"):
    url = f"http://127.0.0.1:8710{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
def read(path):
    try:
        return open(path).read()[:1]
    except OSError as error:
        return error.strerror
answer = {
    "alive": tried("/healthz"),
    "evict": tried("/omni/v1/models/NAMESPACE/NAME/evict", "POST"),
    "logs": tried("/omni/v1/models/NAMESPACE/NAME/logs"),
    "report": tried("/omni/v1/report"),
    "request": tried("/omni/v1/ingress/NAMESPACE/NAME/v2/models/NAME"),
    "token": read("/etc/omnimodel/token/token"),
}
"""


@pytest.mark.parametrize("level", ["landlock", "namespaces"])
def test_a_model_with_the_network_steers_nobody(installation: Installation, level: str) -> None:
    """It shares the network of its pod, where no policy stands between it and the agent."""
    name = f"steering-{level}"
    with (
        installation.pool(name, isolation={"level": level}),
        installation.model(prober(name, name, runtime={"allowNetwork": True})) as model,
    ):
        installation.wait_ready(model)
        script = STEERING.replace("NAMESPACE", PODS).replace("NAME", model)
        seen = said(installation.ask(model, code(script)).values)
        assert isinstance(seen, dict), seen
        assert seen.pop("token") in REFUSED
        assert seen.pop("alive") == 200, "it does reach the port"
        assert seen == dict.fromkeys(("evict", "logs", "report", "request"), 401)
        status, _ = ask_agent(installation.cluster, PODS, f"{name}-0", f"/omni/v1/models/{PODS}/{model}/evict", "POST")
        assert status == 200, "with the token it goes"


def sees_neither_others_nor_the_cluster(seen: dict[str, Any]) -> None:
    assert {name: said for name, said in seen["refused"].items() if said not in REFUSED} == {}
    assert seen["capabilities"] == "0" * 16
    assert seen["uid"] != 0
