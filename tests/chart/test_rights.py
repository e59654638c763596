"""What each part may do once the chart is installed, as the API server sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.builders import MODEL, POOL
from chart.chart import CHART, options
from cluster.cluster import Cluster
from cluster.connection import ClusterError
from cluster.server import Server, path_of
from omnimodel.api import API_VERSION

pytestmark = pytest.mark.cluster_api
OURS = ("omnimodels", "omnipools", "omniprocesses")
WRITING = ("create", "update", "patch", "delete", "deletecollection")


@pytest.fixture(scope="module")
def release(own_cluster: Cluster) -> str:
    """The chart, installed for the namespaces team-a and team-b; the namespace of the release."""
    for namespace in ("team-a", "team-b", "team-c"):
        own_cluster.kubectl("create", "namespace", namespace)
    values = options({"namespaces": ["team-a", "team-b"]})
    own_cluster.helm("install", "omni", str(CHART), "-n", "omni-system", "--create-namespace", *values)
    return "omni-system"


def may(server: Server, user: str, verb: str, resource: str, namespace: str = "team-a", name: str = "") -> bool:
    """Whether a service account, as NAMESPACE:NAME, may do something."""
    resource, _, subresource = resource.partition("/")
    groups = {**dict.fromkeys(OURS, "omnimodel.io"), "statefulsets": "apps", "leases": "coordination.k8s.io"}
    asked = {
        "namespace": namespace,
        "verb": verb,
        "group": groups.get(resource, ""),
        "resource": resource,
        "subresource": subresource,
        "name": name,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{user}", "resourceAttributes": asked},
    }
    answer = server.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer.body["status"]["allowed"])


@pytest.mark.parametrize(
    ("role", "rights"), [("view", set()), ("edit", {"get", "create"}), ("admin", {"get", "create"})]
)
def test_the_admin_port_is_reached_through_the_api_server_by_those_who_may_edit(
    own_cluster: Cluster, server: Server, release: str, role: str, rights: set[str]
) -> None:
    """`kubectl omni` asks the proxy of the Service: with GET to look, with POST to steer."""
    user = f"{release}:one-with-{role}"
    own_cluster.kubectl(
        "create", "rolebinding", role, f"--clusterrole={role}", f"--serviceaccount={user}", "-n", release
    )
    service = "omni-omnimodel-gateway-admin"
    for _ in own_cluster.until(30):  # the roles are put together by a controller
        found = {verb for verb in ("get", "create") if may(server, user, verb, "services/proxy", release, service)}
        if found == rights and may(server, user, "get", "services", release, service):
            break


def test_the_operator_writes_what_it_owns_and_nothing_that_people_write(server: Server, release: str) -> None:
    user = f"{release}:omni-omnimodel-operator"
    for kind in ("omnimodels", "omnipools"):
        assert may(server, user, "watch", kind)
        assert may(server, user, "patch", f"{kind}/status")
        assert [verb for verb in WRITING if may(server, user, verb, kind)] == []
    assert all(may(server, user, verb, "omniprocesses") for verb in ("create", "patch", "delete"))
    assert all(may(server, user, verb, "statefulsets") for verb in ("create", "patch"))
    assert not may(server, user, "delete", "statefulsets"), "they go with their pool"
    assert may(server, user, "update", "leases", release, "omni-omnimodel-operator")
    assert not may(server, user, "update", "leases", release, "of-another")
    assert not may(server, user, "update", "leases")


def test_secrets_are_read_by_name_and_never_listed(server: Server, release: str) -> None:
    for user in (f"{release}:omni-omnimodel-operator", "team-a:omni-agent"):
        assert may(server, user, "get", "secrets")
        assert not may(server, user, "list", "secrets")
        assert not may(server, user, "watch", "secrets")
        assert not may(server, user, "get", "secrets", "team-c")
        assert not may(server, user, "get", "secrets", "kube-system")
    assert not may(server, f"{release}:omni-omnimodel-gateway", "get", "secrets")


def test_the_token_of_agents_is_seen_by_gateways_and_made_by_operators(server: Server, release: str) -> None:
    token, verbs = "omni-omnimodel-agents", ("get", "list", "watch", *WRITING)
    operator, gateway = (f"{release}:omni-omnimodel-{who}" for who in ("operator", "gateway"))
    for namespace in ("team-a", "team-b"):
        assert [verb for verb in verbs if may(server, gateway, verb, "secrets", namespace, token)] == ["list", "watch"]
        assert [verb for verb in verbs if may(server, operator, verb, "secrets", namespace, token)] == ["get", "patch"]
        assert not may(server, gateway, "list", "secrets", namespace)
        assert not may(server, operator, "patch", "secrets", namespace, "of-someone-else")
    for user in (operator, gateway):
        assert not any(may(server, user, verb, "secrets", "team-c", token) for verb in verbs)


def test_the_gateway_only_looks(server: Server, release: str) -> None:
    user = f"{release}:omni-omnimodel-gateway"
    assert may(server, user, "watch", "omnimodels")
    assert may(server, user, "watch", "pods")
    for resource in (*OURS, *(f"{kind}/status" for kind in OURS), "pods", "leases", "statefulsets"):
        assert [verb for verb in WRITING if may(server, user, verb, resource)] == []


def test_an_agent_writes_statuses_and_its_heartbeat(server: Server, release: str) -> None:
    del release
    user = "team-a:omni-agent"
    assert may(server, user, "watch", "omniprocesses", "team-b")
    assert may(server, user, "patch", "omnimodels/status", "team-b")
    assert may(server, user, "patch", "leases")
    assert not may(server, user, "patch", "leases", "team-b")
    for resource in (*OURS, "pods", "secrets", "configmaps", "statefulsets"):
        assert [verb for verb in WRITING if may(server, user, verb, resource)] == []


def test_nobody_is_let_into_other_namespaces(server: Server, release: str) -> None:
    for user in (f"{release}:omni-omnimodel-operator", f"{release}:omni-omnimodel-gateway", "team-a:omni-agent"):
        assert not may(server, user, "get", "omnimodels", "team-c")


@pytest.mark.parametrize(("role", "verbs"), [("view", []), ("edit", list(WRITING)), ("admin", list(WRITING))])
def test_people_who_edit_a_namespace_edit_its_models(
    own_cluster: Cluster, server: Server, release: str, role: str, verbs: list[str]
) -> None:
    del release
    own_cluster.kubectl(
        "create",
        "rolebinding",
        f"{role}er",
        f"--clusterrole={role}",
        f"--serviceaccount=team-a:{role}er",
        "-n",
        "team-a",
    )
    for _ in own_cluster.until(30):  # roles are put together by a controller
        if may(server, f"team-a:{role}er", "watch", "omnimodels"):
            break
    assert [verb for verb in WRITING if may(server, f"team-a:{role}er", verb, "omnimodels")] == verbs
    assert not may(server, f"team-a:{role}er", "patch", "omnimodels/status")


class Agent:
    """An agent's view of the cluster: the token of its pod, or one that was made for no pod."""

    def __init__(self, cluster: Cluster, kubeconfig: Path, pod: str) -> None:
        self.cluster = cluster
        self.kubeconfig = kubeconfig
        self.pod = pod

    def apply(self, body: dict[str, Any], *options: str, manager: str = "") -> str:
        """Server-side apply; what kubectl says about it, refusals too."""
        command = ["apply", "--server-side", "--force-conflicts", f"--field-manager={manager or self.manager}"]
        try:
            return self.cluster.kubectl(
                *command, *options, "-f", "-", stdin=json.dumps(body), kubeconfig=self.kubeconfig
            )
        except ClusterError as error:
            return error.stderr

    @property
    def manager(self) -> str:
        return f"omni-agent.{self.pod}"

    def says(self, kind: str, status: dict[str, Any], **options: str) -> str:
        """Write a status."""
        name = "tiny" if kind == "OmniModel" else "default"
        body = {
            "apiVersion": API_VERSION,
            "kind": kind,
            "metadata": {"name": name, "namespace": "team-a"},
            "status": status,
        }
        return self.apply(body, "--subresource=status", **options)

    def beats(self, name: str) -> str:
        """Write a heartbeat."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": name, "namespace": "team-a"},
            "spec": {"holderIdentity": self.pod},
        }
        return self.apply(body)


def agent(cluster: Cluster, folder: Path, pod: str) -> Agent:
    """The agent in a pod of team-a, which is made if it has a name."""
    bound: list[str] = []
    if pod:
        spec = {"serviceAccountName": "omni-agent", "containers": [{"name": "agent", "image": "localhost/none:dev"}]}
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod, "namespace": "team-a"}, "spec": spec}
        cluster.apply(made)
        uid = cluster.get("pod", pod, "-n", "team-a")["metadata"]["uid"]
        bound = ["--bound-object-kind=Pod", f"--bound-object-name={pod}", f"--bound-object-uid={uid}"]
    token = cluster.kubectl("create", "token", "omni-agent", "-n", "team-a", *bound).strip()
    config = json.loads(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    kubeconfig = folder / f"{pod or 'nobody'}.kubeconfig"
    kubeconfig.write_text(json.dumps(config))
    return Agent(cluster, kubeconfig, pod)


@pytest.fixture(scope="module")
def agents(
    own_cluster: Cluster, release: str, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Agent]:
    """Two agents, and someone with a token of the service account that no pod has; a model and a pool."""
    del release
    server.create(MODEL, "team-a")
    server.create(POOL, "team-a")
    folder = tmp_path_factory.mktemp("agents")
    made = {pod: agent(own_cluster, folder, pod) for pod in ("default-0", "default-1", "")}
    # A policy comes into force a moment after it was made.
    refused = "made for no pod"
    for _ in own_cluster.until(30):
        if refused in made[""].says("OmniModel", {"residency": []}):
            break
    return made


@pytest.fixture
def clean(server: Server) -> None:
    """Statuses with what the operator wrote, and nothing else."""
    for kind, name in (("OmniModel", "tiny"), ("OmniPool", "default")):
        path = path_of(kind, "team-a", name, "status")
        current = dict(server.ask("GET", path_of(kind, "team-a", name)).body)
        current["status"] = {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]}
        assert server.ask("PUT", path, current).ok


DONE = "serverside-applied"


@pytest.mark.parametrize(("kind", "entries"), [("OmniModel", "residency"), ("OmniPool", "pods")])
@pytest.mark.usefixtures("clean")
def test_an_agent_writes_its_own_entry_and_takes_it_back(agents: dict[str, Agent], kind: str, entries: str) -> None:
    first, second = agents["default-0"], agents["default-1"]
    assert DONE in first.says(kind, {entries: [{"pod": "default-0"}]})
    assert DONE in second.says(kind, {entries: [{"pod": "default-1"}]})
    assert DONE in first.says(kind, {entries: [{"pod": "default-0", "message": "again"}]})
    assert DONE in first.says(kind, {entries: []})


@pytest.mark.parametrize(("kind", "entries"), [("OmniModel", "residency"), ("OmniPool", "pods")])
@pytest.mark.usefixtures("clean")
def test_an_agent_cannot_touch_the_entry_of_another_pod(agents: dict[str, Agent], kind: str, entries: str) -> None:
    first, second = agents["default-0"], agents["default-1"]
    refusal = "the agent of pod default-0 changes the entry of another pod; it may write its own only"
    assert refusal in first.says(kind, {entries: [{"pod": "default-1"}]})
    assert DONE in second.says(kind, {entries: [{"pod": "default-1"}]})
    assert refusal in first.says(kind, {entries: [{"pod": "default-0"}, {"pod": "default-1", "message": "x"}]})
    assert refusal in first.says(kind, {entries: []}, manager=second.manager)


@pytest.mark.parametrize("kind", ["OmniModel", "OmniPool"])
@pytest.mark.usefixtures("clean")
def test_an_agent_cannot_touch_what_the_operator_writes(agents: dict[str, Agent], kind: str) -> None:
    refusal = "the agent of pod default-0 changes what the operator writes; it may write its own entry only"
    for status in ({"observedGeneration": 9}, {"conditions": [{"type": "Ready", "status": "False"}]}):
        assert refusal in agents["default-0"].says(kind, status)
    assert refusal in agents["default-0"].says("OmniModel", {"servedNames": ["stolen"]})


@pytest.mark.usefixtures("clean")
def test_a_token_of_no_pod_changes_nothing(agents: dict[str, Agent]) -> None:
    refusal = "the token was made for no pod; an agent uses the one that is mounted into its pod"
    assert refusal in agents[""].says("OmniModel", {"residency": [{"pod": "default-0"}]})
    assert "belongs to another pod" in agents[""].beats("default-0")


def test_a_heartbeat_has_the_name_of_its_pod(agents: dict[str, Agent]) -> None:
    assert DONE in agents["default-0"].beats("default-0")
    assert "lease default-1 belongs to another pod" in agents["default-0"].beats("default-1")


def test_others_are_not_held_to_it(own_cluster: Cluster, agents: dict[str, Agent]) -> None:
    del agents
    administrator = Agent(own_cluster, own_cluster.kubeconfig, "anyone")
    assert DONE in administrator.says("OmniModel", {"residency": [{"pod": "default-1"}], "observedGeneration": 2})
    assert DONE in administrator.beats("anything")
