"""What the chart makes of values, and that an API server takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart.chart import CHART, EVERYTHING, FOREIGN, ROOT, called, objects, options, template
from cluster.connection import ClusterError, Connection
from omnimodel.api.policy import NAME
from omnimodel.cli.kubectl import PORT, SELECTOR
from omnimodel.quantity import parse_bytes
from omnimodel.render.process import DEADLINE_SECONDS, REQUEST_BYTES

pytestmark = pytest.mark.cluster_api
VALUES = [pytest.param({}, id="nothing set"), pytest.param(EVERYTHING, id="everything set")]


@pytest.mark.parametrize("values", [*VALUES, pytest.param(FOREIGN, id="with definitions of others")])
def test_it_is_linted_and_renders_to_the_same_bytes_twice(api_cluster: Connection, values: dict[str, Any]) -> None:
    api_cluster.helm("lint", "--strict", str(CHART), *options(values))
    assert template(api_cluster, values) == template(api_cluster, values)


@pytest.mark.parametrize("values", VALUES)
def test_an_api_server_takes_what_is_rendered(api_cluster: Connection, namespace: str, values: dict[str, Any]) -> None:
    namespaces = [namespace] if values else []
    rendered = template(api_cluster, {**values, "namespaces": namespaces}, namespace=namespace)
    said = api_cluster.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", stdin=rendered
    )
    assert len(said.splitlines()) == len(objects(rendered))


def test_definitions_of_others_are_used_only_when_asked_for(api_cluster: Connection) -> None:
    foreign = {"HTTPRoute", "ServiceMonitor", "PodMonitor", "PrometheusRule", "Ingress"}
    assert not foreign & {one["kind"] for one in objects(template(api_cluster))}
    assert foreign - {"Ingress"} <= {one["kind"] for one in objects(template(api_cluster, FOREIGN))}


def selected(documents: list[dict[str, Any]], labels: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The Services that have these labels."""
    return (one for one in called(documents, "Service") if labels.items() <= one["metadata"]["labels"].items())


def test_metrics_are_scraped_once_from_each_pod(api_cluster: Connection) -> None:
    documents = objects(template(api_cluster, FOREIGN))
    (monitor,) = called(documents, "ServiceMonitor")
    ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
    scraped = [
        (service["spec"]["selector"]["app.kubernetes.io/component"], port["targetPort"])
        for service in selected(documents, monitor["spec"]["selector"]["matchLabels"])
        for port in service["spec"]["ports"]
        if port["name"] in ports
    ]
    assert sorted(scraped) == [("gateway", "admin"), ("operator", "http")]


@pytest.mark.parametrize("values", [*VALUES, pytest.param(FOREIGN, id="with definitions of others")])
def test_what_steers_is_published_nowhere(api_cluster: Connection, values: dict[str, Any]) -> None:
    """Whatever leads here from outside leads to the Service of the public endpoints, and that to their port."""
    documents = objects(template(api_cluster, values))
    (gateway,) = called(documents, "Deployment", "gateway")
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert env["OMNI_LISTEN"] == f"0.0.0.0:{ports['http']}"
    assert env["OMNI_ADMIN_LISTEN"] == f"0.0.0.0:{ports['admin']}"
    services = {one["metadata"]["name"]: one["spec"] for one in called(documents, "Service", "gateway")}
    public = services.pop("omni-omnimodel-gateway")
    assert [port["targetPort"] for port in public["ports"]] == ["http"]
    assert {spec["type"] for spec in services.values()} == {"ClusterIP"}
    for ingress in called(documents, "Ingress"):
        paths = [path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
        assert {path["backend"]["service"]["name"] for path in paths} == {"omni-omnimodel-gateway"}
    for route in called(documents, "HTTPRoute"):
        backends = [backend for rule in route["spec"]["rules"] for backend in rule["backendRefs"]]
        assert [(each["name"], each["port"]) for each in backends] == [
            ("omni-omnimodel-gateway", public["ports"][0]["port"])
        ]


def test_an_ingress_has_what_it_is_given(api_cluster: Connection) -> None:
    given = EVERYTHING["gateway"]["ingress"]
    (ingress,) = called(objects(template(api_cluster, EVERYTHING)), "Ingress")
    assert ingress["metadata"]["annotations"] == given["annotations"]
    assert (ingress["spec"]["ingressClassName"], ingress["spec"]["tls"]) == (given["className"], given["tls"])
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == given["hosts"]
    (plain,) = called(
        objects(template(api_cluster, {"gateway": {"ingress": {"enabled": True, "hosts": given["hosts"]}}})), "Ingress"
    )
    assert "annotations" not in plain["metadata"]
    assert plain["spec"].keys() == {"rules"}


def test_the_guide_says_how_an_ingress_cuts_off_nothing(api_cluster: Connection) -> None:
    blocks = (ROOT / "docs/kubernetes.md").read_text().split("```yaml\n")[1:]
    (values,) = [yaml.safe_load(text.partition("```")[0]) for text in blocks if text.startswith("gateway:\n  ingress:")]
    (ingress,) = called(objects(template(api_cluster, values)), "Ingress")
    assert ingress["metadata"]["annotations"] == values["gateway"]["ingress"]["annotations"]
    said = {name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}
    assert float(said["proxy-read-timeout"]) >= DEADLINE_SECONDS
    assert parse_bytes(said["proxy-body-size"].replace("m", "Mi")) >= REQUEST_BYTES


@pytest.mark.parametrize(
    ("timeouts", "rendered"),
    [
        pytest.param({}, {"request": "0s", "backendRequest": "0s"}, id="none cuts a model that wakes or an answer"),
        pytest.param({"request": "15m"}, {"request": "15m", "backendRequest": "0s"}, id="one that is given"),
        pytest.param(None, None, id="left out"),
    ],
)
def test_a_route_has_the_timeouts_that_are_given(api_cluster: Connection, timeouts: Any, rendered: Any) -> None:
    """LLMKube#734: one that was set never reached the route, so that requests were cut after 60 s."""
    given = {"gateway": {"httpRoute": {**FOREIGN["gateway"]["httpRoute"], "timeouts": timeouts}}}
    (route,) = called(objects(template(api_cluster, given)), "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert rule.get("timeouts") == rendered


def test_only_those_who_are_named_reach_what_steers(api_cluster: Connection) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    documents = objects(template(api_cluster, {"networkPolicy": {"adminPeers": peers, "agentPeers": peers}}))
    (policy,) = called(documents, "NetworkPolicy", "gateway")
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["spec"]["ingress"]}
    assert rules["http"] is None
    (check,) = called(documents, "Pod", "check")
    own, *others = rules["admin"]
    assert own["podSelector"]["matchLabels"].items() <= check["metadata"]["labels"].items()
    assert others == peers
    (policy,) = called(documents, "NetworkPolicy", "agent")
    gateway, *others = policy["spec"]["ingress"][0]["from"]
    (deployment,) = called(documents, "Deployment", "gateway")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert gateway["podSelector"]["matchLabels"].items() <= labels.items()
    assert others == peers


def test_gateways_and_operators_mean_the_same_secret(api_cluster: Connection) -> None:
    """It is without a token: the operator writes one, and an upgrade of the chart leaves it."""
    documents = objects(template(api_cluster, {"agent": {"namespaces": ["team-a", "team-b"]}}))
    envs = {}
    for who in ("operator", "gateway"):
        (deployment,) = called(documents, "Deployment", who)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        envs[who] = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    name = f"{envs['operator']['OMNI_RELEASE']}-agents"
    secrets = list(called(documents, "Secret"))
    assert {one["metadata"]["name"] for one in secrets} == {name, envs["gateway"]["OMNI_AGENT_TOKEN_SECRET"]}
    assert [one["metadata"]["namespace"] for one in secrets] == envs["gateway"]["OMNI_AGENT_NAMESPACES"].split(",")
    assert not any("data" in one or "stringData" in one for one in secrets)


def test_kubectl_omni_finds_the_service_of_the_admin_port(api_cluster: Connection) -> None:
    wanted = dict(label.split("=") for label in SELECTOR.split(","))
    (service,) = selected(objects(template(api_cluster)), wanted)
    assert [port["name"] for port in service["spec"]["ports"]] == [PORT]


def test_the_crds_are_the_repositorys_but_for_being_kept(api_cluster: Connection) -> None:
    rendered = {
        one["metadata"]["name"]: one for one in called(objects(template(api_cluster)), "CustomResourceDefinition")
    }
    for path in (ROOT / "crds").iterdir():
        definition = yaml.safe_load(path.read_text())
        kept = rendered.pop(definition["metadata"]["name"])
        assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert kept == definition
    assert not rendered
    assert not list(called(objects(template(api_cluster, {"crds": {"install": False}})), "CustomResourceDefinition"))


def test_the_policy_of_manifests_is_there_where_a_server_knows_its_words(api_cluster: Connection) -> None:
    def policies(values: dict[str, Any], version: str) -> list[Any]:
        documents = objects(template(api_cluster, values, version=version))
        kinds = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
        named = [one for one in documents if one["kind"] in kinds and one["metadata"]["name"] == NAME]
        return [one["spec"] for one in named]

    generated = yaml.safe_load_all((CHART / "files/policies/omnimodels.yaml").read_text())
    assert policies({}, "1.33.0") == [one["spec"] for one in generated]
    assert policies({}, "1.32.9") == []
    assert policies({"crds": {"install": False}}, "1.37.0") == []


def images(node: Any) -> Iterator[str]:
    """Every image that a rendered object runs, or has others run."""
    if isinstance(node, dict):
        yield from (value for name, value in node.items() if name == "image" and isinstance(value, str))
        if node.get("name") == "OMNI_AGENT_IMAGE":
            yield node["value"]
        for child in node.values():
            yield from images(child)
    elif isinstance(node, list):
        for child in node:
            yield from images(child)


def test_images_are_named_by_tag_or_digest(api_cluster: Connection) -> None:
    assert set(images(objects(template(api_cluster)))) == {"omnimodel-operator:0.1.0", "omnimodel-agent:0.1.0"}
    everything = set(images(objects(template(api_cluster, EVERYTHING))))
    assert everything == {f"example/operator@sha256:{'a' * 64}", "example/agent:1.2.3"}


def test_two_releases_share_no_name_but_the_crds(api_cluster: Connection) -> None:
    def names(name: str, namespace: str) -> set[tuple[str, str, str]]:
        documents = objects(template(api_cluster, {"crds": {"install": False}}, name, namespace))
        return {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]) for one in documents}

    assert not names("one", "team-a") & names("one", "team-b")
    assert names("one", "team-a") & names("two", "team-a") == {("ServiceAccount", "team-a", "omni-agent")}


REFUSED = [
    ("a misspelt value", {"gateways": {}}, "gateways"),
    ("a misspelt value further down", {"gateway": {"replica": 2}}, "replica"),
    ("no pods", {"gateway": {"replicas": 0}}, "/gateway/replicas"),
    ("a number as text", {"operator": {"replicas": "2"}}, "/operator/replicas"),
    ("a namespace in capitals", {"namespaces": ["Team"]}, "/namespaces/0"),
    ("a namespace twice", {"namespaces": ["a", "a"]}, "/namespaces"),
    ("half a digest", {"images": {"operator": {"digest": "sha256:abc"}}}, "/images/operator/digest"),
    ("a timeout without unit", {"gateway": {"httpRoute": {"timeouts": {"request": "60"}}}}, "/gateway/httpRoute/timeouts/request"),
    ("an ingress without hosts", {"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts is empty: name a host"),
    ("a route without gateway", {"gateway": {"httpRoute": {"enabled": True}}}, "gateway.httpRoute.parentRefs is empty: name a Gateway"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "named"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_values_are_refused_by_name(api_cluster: Connection, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ClusterError) as refused:
        template(api_cluster, values)
    assert named in refused.value.stderr
