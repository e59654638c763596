"""The chart on a node: models answer through the Service, the status says where they are, what is deleted is gone."""

from __future__ import annotations

import pytest

from cluster_node.installation import PODS, SYSTEM, Installation
from cluster_node.models import ANSWER, linear
from cluster_node.reports import RELEASE

pytestmark = [pytest.mark.cluster_node, pytest.mark.timeout(600)]


def test_a_model_answers_through_the_service(installation: Installation, first: str) -> None:
    assert installation.ask(first).values == ANSWER


def test_the_status_says_where_a_model_is(installation: Installation, first: str) -> None:
    assert installation.ask(first).values == ANSWER
    installation.until(lambda: installation.entry(first, "default-0").get("tier") == "resident", "the entry", 60)
    assert installation.entry(first, "default-0")["deviceBytes"] > 0
    row = installation.cluster.kubectl("get", "omnimodels", first, "-n", PODS, "--no-headers").split()
    assert row[1:3] == ["True", "resident"]


def test_the_status_says_what_a_pool_has(installation: Installation, first: str) -> None:
    assert installation.ask(first).values == ANSWER

    def columns() -> dict[str, str]:
        table = installation.cluster.kubectl("get", "omnipools", "default", "-n", PODS).splitlines()
        return dict(zip(*(line.split() for line in table), strict=True))

    installation.until(lambda: float(columns()["RESIDENT"]) > 0, "what is resident", 60)
    told = columns()
    assert (told["READY"], told["DEVICES"], told["BUDGET"]) == ("True", "1", str(256 << 20))
    assert 0 < float(told["OVERCOMMIT"]) < 1


def test_the_pods_of_the_release_are_restricted_and_those_of_pools_are_not_privileged(
    installation: Installation, first: str
) -> None:
    system = installation.cluster.get("pods", "-n", SYSTEM)["items"]
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in system} >= {"operator", "gateway"}
    assert all(pod["status"]["phase"] in {"Running", "Succeeded"} for pod in system)
    agent = installation.get("pod", "default-0")["spec"]["containers"][0]["securityContext"]
    assert agent["allowPrivilegeEscalation"] is False
    assert "SYS_ADMIN" not in agent["capabilities"]["add"]


@pytest.mark.usefixtures("first")
def test_helm_test_sends_a_real_request(installation: Installation) -> None:
    said = installation.cluster.helm("test", RELEASE, "-n", SYSTEM, "--logs", "--timeout", "180s")
    assert "Phase:          Succeeded" in said
    assert "passed" in said


def test_the_plugin_reaches_the_gateway_through_the_api_server(installation: Installation, first: str) -> None:
    assert f"passed   {PODS}/{first}" in installation.omni("check", first)
    assert first in installation.omni("get", "models")


def test_the_plugin_steers_the_agents_of_the_cluster(installation: Installation, first: str) -> None:
    assert installation.ask(first).values == ANSWER
    assert f"{first} is warm" in installation.omni("evict", first)
    assert f"{first} is resident" in installation.omni("wake", first)
    assert "asked" in installation.omni("logs", first)
    row = next(line for line in installation.omni("top", "--once").splitlines() if first in line)
    assert "resident" in row.split()


def test_a_deleted_model_is_gone_and_answers_no_more(installation: Installation, pool: str) -> None:
    with installation.model(linear("third", pool, shift=1.0)) as name:
        installation.wait_ready(name)
        assert installation.ask(name).values == [7.0, 23.0]
    installation.until(lambda: installation.ask(name).status == 404, "404", 30)
    processes = installation.cluster.get("omniprocesses", "-n", PODS)["items"]
    assert "third" not in [item["metadata"]["name"] for item in processes]
