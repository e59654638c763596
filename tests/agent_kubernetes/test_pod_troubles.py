"""The controller of one pod when things are away: the API server, its file, secrets, the pool; and what it tells."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import pytest

from agent_kubernetes.world import POD, Catalogue, Line, eventually, serving
from controllers.standin import StandInAgent
from omnimodel.controllers.agent_kubernetes_admin import PodAdmin
from omnimodel.controllers.agent_kubernetes_status import Pace
from omnimodel.kube import EVENTS, LEASES, MODELS, PROCESSES, Kube

# -- the API server is away --


async def test_what_happens_while_the_api_server_is_away_is_told_when_it_is_back(
    catalogue: Catalogue, start, line: Line
) -> None:
    pod = await serving(catalogue, start, "m", "n")
    await line.cut()
    pod.agent.say(catalogue.key("m"), tier="resident", device_bytes=42)
    await catalogue.delete("n")
    await catalogue.assign(await catalogue.model("o"), POD)
    await asyncio.sleep(1.0)
    assert not pod.task.done()
    assert pod.agent.names == [catalogue.key("m"), catalogue.key("n")], "it goes on with what it knew"
    await line.mend()
    await eventually(lambda: pod.agent.names == [catalogue.key("m"), catalogue.key("o")], "what was missed", 40)

    async def swapped() -> bool:
        return (await catalogue.entry("m")).get("deviceBytes") == 42

    await eventually(swapped, "the swap that happened meanwhile", 40)
    await eventually(lambda: catalogue.entry("o"), "the new one's entry", 40)


async def test_a_restart_without_the_api_server_serves(catalogue: Catalogue, start, line: Line, tmp_path) -> None:
    await catalogue.secret("key", token="hush")
    env = {"TOKEN": {"secretKeyRef": {"name": "key", "key": "token"}}}
    model = await catalogue.model("m", runtime={**(await catalogue.model("n"))["spec"]["runtime"], "env": env})
    await catalogue.assign(model, POD, secrets={"key": {"token": b"hush"}})
    first = await start()
    await eventually(lambda: first.agent.names == [catalogue.key("m")], "the model")
    file = tmp_path / POD / "desired.json"
    await eventually(lambda: file.exists() and '"name": "m"' in file.read_text(), "that it is kept")
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    await line.cut()

    again = await start(agent=StandInAgent())
    await eventually(lambda: again.agent.applied, "what was kept")
    assert again.agent.names == [catalogue.key("m")]
    assert again.agent.applied[-1][0][0].spec.env["TOKEN"] == "hush"
    kept = (tmp_path / POD / "desired.json").read_text()
    assert "hush" not in kept
    assert base64.b64encode(b"hush").decode() not in kept, "secrets are on no disk"
    await line.mend()
    await catalogue.unassign("m")
    await eventually(lambda: again.agent.names == [], "what the API server says now", 40)


async def test_a_damaged_file_of_the_last_assignment_is_no_reason_to_fail(
    catalogue: Catalogue, start, tmp_path
) -> None:
    (tmp_path / POD).mkdir()
    (tmp_path / POD / "desired.json").write_text('{"format": 1, "pod": "default-0", "pool": 7')
    await catalogue.assign(await catalogue.model("m"), POD)
    pod = await start()
    await eventually(lambda: pod.agent.names == [catalogue.key("m")], "the model")


async def test_a_volume_of_another_pod_tells_nothing(catalogue: Catalogue, start, tmp_path, line: Line) -> None:
    pod = await serving(catalogue, start, "m")
    pod.task.cancel()
    await asyncio.gather(pod.task, return_exceptions=True)
    (tmp_path / POD).rename(tmp_path / "default-1")
    await line.cut()
    other = await start("default-1", StandInAgent())
    assert other.controller.applied is None


# -- ready --


async def test_a_pod_is_ready_once_its_models_are_and_stays_so(catalogue: Catalogue, start) -> None:
    """A change of all pods must wait for the models of each."""
    agent = StandInAgent()
    serving_ = agent._serving
    agent._serving = lambda process: replace(serving_(process), ready=False, phase="publishing")
    for name in "ab":
        await catalogue.assign(await catalogue.model(name), POD)
    pod = await start(agent=agent)
    admin = PodAdmin(pod.agent, pod.controller)

    def is_ready() -> bool:
        (pool,) = admin.objects("OmniPool")
        return any(c["type"] == "Ready" and c["status"] == "True" for c in pool["status"]["conditions"])

    assert not is_ready(), "nothing is known yet"
    await eventually(lambda: pod.agent.applied, "the models")
    assert not is_ready()
    pod.agent.say(catalogue.key("a"), ready=True, phase="idle")
    assert not is_ready()
    pod.agent.say(catalogue.key("b"), phase="failed", reason="BadArtifact")
    assert is_ready(), "one that has failed is not waited for"
    pod.agent.say(catalogue.key("a"), ready=False, phase="failed")
    await catalogue.assign(await catalogue.model("c"), POD)
    await eventually(lambda: len(pod.agent.names) == 3, "the third")
    assert is_ready()
    assert [item["metadata"]["name"] for item in admin.objects("OmniModel")] == ["a", "b", "c"]


# -- secrets --


async def test_a_missing_secret_is_told_and_does_not_touch_what_runs(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "fine")
    runtime = {**(await catalogue.kube.get(MODELS, "fine", catalogue.namespace))["spec"]["runtime"]}
    runtime["env"] = {"TOKEN": {"secretKeyRef": {"name": "late", "key": "token"}}}
    model = await catalogue.model("m", runtime=runtime)
    await catalogue.assign(model, POD, secrets={"late": {"token": b"x"}})
    entry = await eventually(lambda: catalogue.entry("m"), "why it does not run")
    assert (entry["ready"], entry["phase"], entry["reason"]) == (False, "failed", "SourceNotFound")
    assert "there is no Secret late" in entry["message"]
    assert pod.agent.names == [catalogue.key("fine")]
    await catalogue.secret("late", token="x")
    await eventually(lambda: catalogue.key("m") in pod.agent.names, "the model, once the secret is there")
    await eventually(lambda: _ready(catalogue, "m"), "its entry")


async def _ready(catalogue: Catalogue, name: str) -> bool:
    return bool((await catalogue.entry(name)).get("ready"))


async def test_a_changed_secret_reaches_the_model(catalogue: Catalogue, start) -> None:
    await catalogue.secret("key", token="old")
    first = await catalogue.model("n")
    env = {"TOKEN": {"secretKeyRef": {"name": "key", "key": "token"}}}
    model = await catalogue.model("m", runtime={**first["spec"]["runtime"], "env": env})
    await catalogue.assign(model, POD, secrets={"key": {"token": b"old"}})
    pod = await start()
    await eventually(lambda: pod.agent.applied and pod.agent.applied[-1][0], "the model")
    await catalogue.secret("key", token="new")
    await catalogue.assign(model, POD, secrets={"key": {"token": b"new"}})  # as the operator does: another digest
    await eventually(lambda: pod.agent.applied[-1][0][0].spec.env["TOKEN"] == "new", "the new value")


# -- heartbeats and events --


async def test_the_lease_beats(catalogue: Catalogue, start) -> None:
    await start()
    lease = await eventually(lambda: catalogue.kube.get(LEASES, POD, catalogue.namespace), "the lease")
    assert lease["spec"]["holderIdentity"] == POD
    assert lease["spec"]["leaseDurationSeconds"] > 20
    assert lease["metadata"]["labels"]["omnimodel.io/pool"] == "default"


async def test_events_are_for_people_and_not_one_for_each_swap(catalogue: Catalogue, start, kube: Kube) -> None:
    pod = await serving(catalogue, start, "m")
    for number in range(500):
        pod.agent.events.add("OmniModel", catalogue.namespace, "m", "Woken", f"waking took {number / 100} s")
    pod.agent.events.add("OmniModel", catalogue.namespace, "m", "TooLarge", "it is too large", warning=True)

    async def told() -> list[dict]:
        return list((await kube.list(EVENTS, catalogue.namespace)).items)

    found = await eventually(lambda: _with(told, "TooLarge"), "the events")
    by_reason: dict[str, list[dict]] = {}
    for event in found:
        by_reason.setdefault(event["reason"], []).append(event)
    assert len(by_reason["Woken"]) == 1
    (refused,) = by_reason["TooLarge"]
    model = await kube.get(MODELS, "m", catalogue.namespace)
    assert refused["involvedObject"]["uid"] == model["metadata"]["uid"]
    assert refused["type"] == "Warning"


async def test_what_happened_before_the_api_server_was_heard_is_told_too(
    catalogue: Catalogue, start, kube: Kube
) -> None:
    """An agent that goes on with its models says so before it hears from the API server whose they are."""
    await catalogue.assign(await catalogue.model("m"), POD)
    agent = StandInAgent()
    agent.events.add("OmniModel", catalogue.namespace, "m", "Adopted", "goes on")
    await start(agent=agent)

    async def told() -> list[dict]:
        return list((await kube.list(EVENTS, catalogue.namespace)).items)

    await eventually(lambda: _with(told, "Adopted"), "the event")


async def _with(told, reason: str) -> list[dict]:
    found = await told()
    return found if any(event["reason"] == reason for event in found) else []


# -- foreign hands --


async def test_a_deleted_assignment_that_comes_back_is_run_again(catalogue: Catalogue, start) -> None:
    pod = await serving(catalogue, start, "m")
    await catalogue.kube.delete(PROCESSES, "m", catalogue.namespace)
    await eventually(lambda: not pod.agent.names, "the model to go")
    await catalogue.assign(await catalogue.kube.get(MODELS, "m", catalogue.namespace), POD)
    await eventually(lambda: pod.agent.names, "the model to come back")
    await eventually(lambda: catalogue.entry("m"), "its entry")


async def test_an_agent_that_cannot_serve_the_pool_says_so_and_tries_again(catalogue: Catalogue, start) -> None:
    agent = StandInAgent()
    agent.fail_apply = RuntimeError("the device is gone")
    pod = await start(agent=agent)
    await eventually(lambda: any("device is gone" in e.message for _, e in agent.events._events), "the event")
    agent.fail_apply = None
    await catalogue.assign(await catalogue.model("m"), POD)
    await eventually(lambda: pod.agent.applied and pod.agent.names, "the next round")


@pytest.mark.parametrize("burst", [1, 3])
def test_the_pace_lets_a_burst_pass_and_then_so_much_a_second(burst: int) -> None:
    now = [0.0]
    pace = Pace(burst, 2.0, lambda: now[0])
    assert [pace.take() for _ in range(burst)] == [0.0] * burst
    assert pace.take() == pytest.approx(0.5)
    now[0] += 0.5
    assert pace.take() == 0.0
