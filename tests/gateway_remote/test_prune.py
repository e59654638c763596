"""`prune` of a gateway: on every agent, and who did not answer is named."""

from __future__ import annotations

from gateway_remote.world import Cluster
from omnimodel.gateway.remote_admin import AgentsAdmin


async def test_every_agent_is_asked_and_one_that_is_gone_is_named(cluster: Cluster) -> None:
    cluster.add(tier="resident")
    await cluster.known()
    admin = AgentsAdmin(cluster.backend, lambda _: [])
    pods = sorted(pod.name for pod in cluster.pods)
    found = await admin.prune(dry_run=True)
    assert sorted(item["pod"] for item in found["removed"]) == pods
    assert found["bytes"] == len(pods) * (3 << 20)
    assert found["unreached"] == []
    assert all(pod.system.calls == [("prune", "", "True", 0.0)] for pod in cluster.pods)
    await cluster.pods[0].kill()
    found = await admin.prune(dry_run=False)
    assert found["unreached"] == [cluster.pods[0].name]
    assert [item["pod"] for item in found["removed"]] == [pod.name for pod in cluster.pods[1:]]
