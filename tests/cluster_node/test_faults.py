"""Things that happen to real pods while clients ask: what fails, what is held, and what heals by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import pytest

from cluster.cluster import Cluster
from cluster.connection import ClusterError
from cluster_node.installation import MINUTES, PODS, SYSTEM, Installation, condition, whole_condition
from cluster_node.load import Load
from cluster_node.models import ANSWER, code, linear, prober, said
from cluster_node.reports import report_past_kubelet

pytestmark = [pytest.mark.cluster_node, pytest.mark.slow, pytest.mark.timeout(900)]
BOTH = ("twin-0", "twin-1")
AGENT = "for p in $(cat /proc/1/task/1/children); do cmp -s /proc/1/cmdline /proc/$p/cmdline && echo $p && break; done; true"

START = """
import subprocess, sys
answer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid
"""
KILLED = ["--grace-period=0", "--force"]
GREED = "HELD.append(b'x' * (512 << 20)); import time; time.sleep(60); answer = len(HELD)"


@pytest.fixture(scope="module")
def twin(installation: Installation) -> Iterator[str]:
    """A pool of two pods."""
    with installation.pool("twin", replicas=2) as name:
        yield name


@pytest.fixture(scope="module")
def both(installation: Installation, twin: str) -> Iterator[str]:
    """A model that both of its pods hold."""
    with installation.model(linear("both", twin, replicas={"min": 2})) as name:
        on_both(installation, name)
        yield name


def on_both(installation: Installation, model: str) -> None:
    """Wait until two pods serve a model."""

    def held() -> bool:
        return all(installation.entry(model, pod).get("ready") for pod in BOTH)

    installation.wait_ready(model)
    installation.until(held, f"{model} on both pods")


def restarts(installation: Installation, pod: str) -> int:
    """How often the agent's container was started again."""
    return int(installation.get("pod", pod)["status"]["containerStatuses"][0]["restartCount"])


def kill(installation: Installation, pod: str, pid: str | int) -> None:
    installation.shell(pod, f"kill -9 {pid}")


def evict(installation: Installation, pod: str, namespace: str = PODS) -> None:
    """As `kubectl drain` asks for it."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    installation.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))


# Processes


def test_a_model_that_is_killed_comes_back_at_once(installation: Installation, first: str) -> None:
    assert installation.ask(first).values == ANSWER
    before = installation.pid(first, "default-0")
    with Load(partial(installation.ask, first), ANSWER) as load:
        kill(installation, "default-0", before)
        load.more(20)
    assert len(load.failures) <= 1  # the one that it was at
    assert installation.pid(first, "default-0") not in {0, before}
    assert restarts(installation, "default-0") == 0


def test_an_agent_that_is_killed_is_back_in_its_pod_and_goes_on_with_its_models(
    installation: Installation, first: str
) -> None:
    assert installation.ask(first).values == ANSWER
    before, agent = restarts(installation, "default-0"), installation.shell("default-0", AGENT).strip()

    def model() -> tuple[int, str, int]:
        known = installation.report("default-0")["models"][f"{PODS}/{first}"]
        return known["process"]["pid"], known["tier"], known["device_bytes"]

    def told() -> tuple[str, int]:
        entry = installation.entry(first, "default-0")
        return entry.get("tier", ""), int(entry.get("deviceBytes", 0))

    known = model()
    assert known[1] == "resident"
    installation.until(lambda: told() == known[1:], "the entry")
    with Load(partial(installation.ask, first, seconds=120), ANSWER) as load:
        kill(installation, "default-0", agent)
        installation.until(lambda: installation.shell("default-0", AGENT).strip() not in {"", agent}, "the next agent")
        load.more(20)
    assert len(load.failures) <= len(load.clients)  # what they were at
    assert model() == known
    installation.until(lambda: told() == known[1:], "the entry")
    assert restarts(installation, "default-0") == before
    installation.until(lambda: "Adopted" in [reason for reason, _ in installation.events(first)], "the event", 60)


def test_what_a_model_started_ends_with_it_also_after_its_agent_was_killed(
    installation: Installation, pool: str
) -> None:
    """A pod has no PID namespace for a model: what gets away from its session is the init's when its zygote is gone."""
    with installation.model(prober("starter", pool)) as name:
        installation.wait_ready(name)
        started = int(said(installation.ask(name, code(START), seconds=120).values))
        agent, model = installation.shell("default-0", AGENT).strip(), installation.pid(name, "default-0")
        kill(installation, "default-0", agent)
        installation.until(lambda: installation.shell("default-0", AGENT).strip() not in {"", agent}, "the next agent")
        installation.until(lambda: said(installation.ask(name, code("answer = 1")).values) == 1, "an answer")
        assert installation.pid(name, "default-0") == model
        there = f"test -e /proc/{started} && echo there; true"
        assert installation.shell("default-0", there).strip() == "there"
        kill(installation, "default-0", model)
        installation.until(lambda: not installation.shell("default-0", there).strip(), "the end of what it started")


def test_a_model_over_its_memory_is_ended_alone(installation: Installation, first: str, pool: str) -> None:
    """In a pod no control group can be made, and no other user's process be traced: the agent must see it all the same."""
    assert installation.ask(first).values == ANSWER
    neighbour = installation.pid(first, "default-0")
    with installation.model(prober("hungry", pool, resources={"hostMemory": "192Mi"})) as name:
        installation.wait_ready(name)
        with Load(partial(installation.ask, first), ANSWER) as load:
            answer = installation.ask(name, code(GREED), seconds=120)
            load.more(20)
        assert load.failures == []
        assert answer.status >= 500
        assert "more than its 192 MiB" in str(answer.body)
        assert said(installation.ask(name, code("answer = len(HELD)")).values) == 0
        # One that is over it again has not had an accident: it is not Ready until it answers.
        assert installation.ask(name, code(GREED), seconds=120).status >= 500

        def stalled() -> bool:
            found = whole_condition(installation.get("omnimodel", name), "Stalled")
            return found.get("reason") == "OutOfMemory" and "more than its 192 MiB" in found["message"]

        installation.until(stalled, "the condition", 60)
        assert condition(installation.get("omnimodel", name), "Ready") == "False"
        assert "OutOfMemory" in [reason for reason, _ in installation.events(name)]
        installation.until(lambda: installation.ask(name, code("answer = 1")).status == 200, "an answer", 60)
        installation.wait_ready(name)
    assert restarts(installation, "default-0") == 0
    assert installation.pid(first, "default-0") == neighbour


def test_an_edited_model_takes_over_and_a_broken_one_does_not_and_no_request_fails(
    installation: Installation, pool: str
) -> None:
    manifest = linear("edited", pool)
    ((file, good),) = manifest["spec"]["runtime"]["handler"]["files"].items()

    def edit(code: str) -> None:
        installation.patch("omnimodel", "edited", {"spec": {"runtime": {"handler": {"files": {file: code}}}}})

    def is_served(condition_type: str) -> bool:
        found = installation.get("omnimodel", "edited")
        newest = found["status"].get("observedGeneration") == found["metadata"]["generation"]
        return newest and condition(found, condition_type) == "True"

    with installation.model(manifest) as name:
        installation.wait_ready(name)
        before = installation.pid(name, "default-0")
        with Load(partial(installation.ask, name), ANSWER) as load:
            edit(f"{good}\n# edited\n")
            installation.until(lambda: is_served("Ready") and installation.pid(name, "default-0") != before, "the edit")
            load.more(20)
            edited = installation.pid(name, "default-0")
            edit(good.replace("return torch.nn.Linear(4, 2)", "raise RuntimeError('broken')"))
            installation.until(lambda: is_served("Stalled"), "the condition")
            load.more(20)
        assert load.failures == []
        assert installation.pid(name, "default-0") == edited
        assert "broken" in str(whole_condition(installation.get("omnimodel", name), "Stalled"))


# Pods


def test_a_deleted_pod_of_two_fails_no_request(installation: Installation, both: str) -> None:
    uid = installation.get("pod", "twin-0")["metadata"]["uid"]
    with Load(partial(installation.ask, both), ANSWER) as load:
        installation.cluster.kubectl("delete", "pod", "twin-0", "-n", PODS, "--wait=false")
        installation.wait_pod("twin-0", other_than=uid)
        load.more(20)
    assert load.failures == []


def test_a_pod_of_two_that_is_killed_fails_at_most_what_it_was_at(installation: Installation, both: str) -> None:
    uid = installation.get("pod", "twin-0")["metadata"]["uid"]
    with Load(partial(installation.ask, both), ANSWER) as load:
        installation.cluster.kubectl("delete", "pod", "twin-0", "-n", PODS, *KILLED)
        installation.wait_pod("twin-0", other_than=uid)
        load.more(20)
    assert len(load.failures) <= len(load.clients)
    on_both(installation, both)


def test_of_two_pods_one_is_evicted_at_a_time_and_no_request_fails(installation: Installation, both: str) -> None:
    uid = installation.wait_pod("twin-0")["metadata"]["uid"]
    with Load(partial(installation.ask, both), ANSWER) as load:
        evict(installation, "twin-0")
        with pytest.raises(ClusterError, match="disruption budget"):
            evict(installation, "twin-1")
        installation.wait_pod("twin-0", other_than=uid)
        load.more(20)
    assert load.failures == []
    on_both(installation, both)


@pytest.mark.parametrize("how", ["evicted", "killed"])
def test_a_gateway_that_goes_fails_at_most_what_it_was_at(installation: Installation, both: str, how: str) -> None:
    gateways = ["pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=gateway"]
    with Load(partial(installation.ask, both), ANSWER) as load:
        pod, other = (item["metadata"]["name"] for item in installation.cluster.get(*gateways)["items"])
        if how == "evicted":
            evict(installation, pod, SYSTEM)
            with pytest.raises(ClusterError, match="disruption budget"):
                evict(installation, other, SYSTEM)
            installation.cluster.kubectl("wait", "--for=delete", f"pod/{pod}", "-n", SYSTEM, MINUTES)
        else:
            installation.cluster.kubectl("delete", "pod", pod, "-n", SYSTEM, MINUTES, *KILLED)
        installation.cluster.kubectl("rollout", "status", "deployment/omnimodel-gateway", "-n", SYSTEM, MINUTES)
        load.more(20)
    assert len(load.failures) <= (0 if how == "evicted" else len(load.clients))


def test_without_operators_models_go_on_and_new_ones_follow_when_they_are_back(
    installation: Installation, both: str, twin: str
) -> None:
    with Load(partial(installation.ask, both), ANSWER) as load:
        selected = ["-n", SYSTEM, "-l", "app.kubernetes.io/component=operator"]
        installation.cluster.kubectl("delete", "pods", *selected, "--grace-period=0", "--force")
        with installation.model(linear("later", twin, shift=2.0)) as name:
            installation.wait_ready(name)
            assert installation.ask(name).values == [8.0, 24.0]
    assert load.failures == []


# Changes of a pool


def test_a_changed_pool_rolls_pod_by_pod_and_fails_no_request(installation: Installation, both: str, twin: str) -> None:
    before = {pod: installation.get("pod", pod)["metadata"]["uid"] for pod in BOTH}
    with Load(partial(installation.ask, both), ANSWER) as load:
        installation.patch("omnipool", twin, {"spec": {"pod": {"resources": {"cpu": "20m"}}}})
        for pod in reversed(BOTH):
            installation.wait_pod(pod, other_than=before[pod])
        load.more(20)
    assert load.failures == []
    on_both(installation, both)


def test_requests_are_held_while_the_only_pod_is_replaced(installation: Installation, first: str, pool: str) -> None:
    before = installation.get("pod", "default-0")["metadata"]["uid"]
    with Load(partial(installation.ask, first, seconds=200), ANSWER) as load:
        installation.patch("omnipool", pool, {"spec": {"pod": {"resources": {"cpu": "20m"}}}})
        installation.wait_pod("default-0", other_than=before)
        load.more(20)
    assert load.failures == []


def test_a_bad_image_stops_at_the_first_pod_and_heals_with_the_image(
    installation: Installation, both: str, twin: str
) -> None:
    on_both(installation, both)
    with Load(partial(installation.ask, both), ANSWER) as load:
        installation.patch("omnipool", twin, {"spec": {"pod": {"image": "localhost/no-such-agent:dev"}}})
        installation.until(
            lambda: whole_condition(installation.get("omnipool", twin), "Stalled").get("reason") == "ImageNotPulled",
            "the condition",
        )
        good = installation.get("pod", "twin-0")
        assert condition(good, "Ready") == "True"
        load.more(20)
        installation.patch("omnipool", twin, {"spec": {"pod": {"image": None}}})
        installation.until(lambda: condition(installation.get("omnipool", twin), "Ready") == "True", "the pool")
        assert installation.get("pod", "twin-0")["metadata"]["uid"] == good["metadata"]["uid"]
    assert load.failures == []


def test_a_pod_too_small_for_its_agent_says_so_and_heals_when_it_has_more(installation: Installation) -> None:
    """The kernel ends what is in its container again and again, and the kubelet tells it in a word of its own."""
    with installation.pool("small", pod={"resources": {"cpu": 0.05, "memory": "32Mi"}}) as pool:
        told: list[str] = []

        def stalled() -> bool:
            found = whole_condition(installation.get("omnipool", pool), "Stalled")
            told[:] = [found.get("reason", ""), found.get("message", "")]
            return told[0] == "OutOfMemory"

        installation.until(stalled, "the condition")
        assert told[1].startswith("small-0: its container ran out of memory and was killed")
        assert "raise spec.pod.resources.memory of the pool" in told[1]
        installation.patch("omnipool", pool, {"spec": {"pod": {"resources": {"memory": "2Gi"}}}})
        installation.until(lambda: condition(installation.get("omnipool", pool), "Ready") == "True", "the pool")


# The node


def test_when_the_kubelet_is_silent_models_run_on_and_are_reached_again_with_it(
    installation: Installation, both: str, twin: str
) -> None:
    cluster = installation.cluster
    if not isinstance(cluster, Cluster):
        pytest.skip("the node is someone else's")
    on_both(installation, both)
    before = {pod: installation.get("pod", pod)["metadata"]["uid"] for pod in BOTH}
    with cluster.silent_kubelet():
        installation.until(lambda: condition(cluster.get("node", "node1"), "Ready") == "Unknown", "its silence", 120)
        installation.until(
            lambda: whole_condition(installation.get("omnipool", twin), "Ready").get("reason") == "NodeSilent",
            "the pool",
        )
        assert report_past_kubelet(cluster, PODS, "twin-0")["models"][f"{PODS}/{both}"]["ready"]
    installation.until(lambda: installation.ask(both).values == ANSWER, "an answer", 60)
    installation.until(lambda: condition(installation.get("omnipool", twin), "Ready") == "True", "the pool")
    assert {pod: installation.get("pod", pod)["metadata"]["uid"] for pod in BOTH} == before
