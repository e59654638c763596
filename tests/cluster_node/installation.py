"""The chart on a node that runs real pods, and what a person does with it: pools, models, questions.

The release lies in a namespace in which only restricted pods are admitted; pools and models in another one.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chart.chart import CHART, options
from cluster.connection import Connection
from cluster.images import Images
from cluster_node.models import QUESTION
from cluster_node.reports import RELEASE, report
from omnimodel.api import API_VERSION

SYSTEM, PODS = "omni-system", "omni-models"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
MINUTES = "--timeout=240s"
READY_SECONDS = 240.0
VOLUME = "weights"
NOT_OURS_TO_END = ("events", "customresourcedefinitions")
OF_EVERY_NAMESPACE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}


@dataclass(frozen=True)
class Answer:
    """What came back over HTTP; status 0 when nothing did."""

    status: int
    body: Any

    @property
    def values(self) -> Any:
        """The first output of a model, or None."""
        return self.body["outputs"][0]["data"] if self.status == 200 else None


def repository(image: str) -> dict[str, str]:
    """An image's name as the chart's values have it."""
    name, _, tag = image.rpartition(":")
    return {"repository": name, "tag": tag}


def values_of(images: Images, system: str, pods: str) -> dict[str, Any]:
    """The chart's values for a test cluster: its images, a port of the node for the gateway, and no other namespaces."""
    return {
        "namespaces": [system, pods],
        "images": {
            "operator": repository(images.operator),
            "agent": repository(images.agent),
            "pullPolicy": "Never",
        },
        "crds": {"install": False},
        "agent": {"namespaces": [pods]},
        "gateway": {"drainSeconds": 5, "service": {"type": "NodePort"}},
    }


class Installation:
    """A release of the chart.

    Args:
        cluster: that it is installed in.
        images: of operator and agent.
        folder: of the node; it is the volume of every pool.
        release: its name.
        namespaces: of the release, and of its pools and models.
    """

    def __init__(
        self,
        cluster: Connection,
        images: Images,
        folder: Path,
        release: str = RELEASE,
        namespaces: tuple[str, str] = (SYSTEM, PODS),
    ) -> None:
        self.cluster = cluster
        self.images = images
        self.folder = folder
        self.release = release
        self.system, self.pods = namespaces
        self.host = ""
        self.port = 0

    def install(self) -> None:
        """`helm install`, and wait until it serves."""
        for name, labels in ((self.system, RESTRICTED), (self.pods, {})):
            metadata = {"name": name, "labels": labels}
            self.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        values = options(values_of(self.images, self.system, self.pods))
        self.cluster.helm("install", self.release, str(CHART), "-n", self.system, "--wait", MINUTES, *values)
        service = self.cluster.get("service", f"{self.release}-gateway", "-n", self.system)
        self.port = next(port["nodePort"] for port in service["spec"]["ports"] if port["name"] == "http")
        addresses = self.cluster.get("nodes")["items"][0]["status"]["addresses"]
        self.host = next(one["address"] for one in addresses if one["type"] == "InternalIP")

    def uninstall(self) -> None:
        """Pools first: their pods need the service account of the chart."""
        self.cluster.kubectl("delete", "omnimodels,omnipools", "--all", "-n", self.pods, "--wait", MINUTES)
        self.cluster.helm("uninstall", self.release, "-n", self.system, "--wait", MINUTES)

        def left() -> list[str]:
            return remains(self.cluster, self.release, self.system, self.pods)

        with suppress(AssertionError):  # what ends by itself may take a moment
            self.until(lambda: not left(), "everything to be gone", 60)
        assert left() == []
        self.cluster.kubectl("delete", "namespace", self.system, self.pods, "--ignore-not-found", "--wait", MINUTES)

    @contextmanager
    def pool(self, name: str, **spec: Any) -> Iterator[str]:
        """A pool with the volume `weights`, for as long as the context lasts.

        Args:
            spec: of the OmniPool, over what is needed here.
        """
        pod: dict[str, Any] = {"resources": {"cpu": 0.05}}  # several pools at once have to fit on a small machine
        if self.images.runtime_class:
            pod["runtimeClassName"] = self.images.runtime_class
        whole = {
            "device": {"type": "cpu", "memory": "256Mi"},
            "volumes": [{"name": VOLUME, "path": str(self.folder)}],
            **spec,
            "pod": {**pod, **spec.get("pod", {})},
        }
        self.apply("OmniPool", name, whole)
        try:
            yield name
        finally:
            self.delete("omnipool", name)

    @contextmanager
    def model(self, manifest: Mapping[str, Any]) -> Iterator[str]:
        """A model, for as long as the context lasts; it is not waited for."""
        name = str(manifest["metadata"]["name"])
        self.apply("OmniModel", name, manifest["spec"])
        try:
            yield name
        finally:
            self.delete("omnimodel", name)

    def apply(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        """An object of ours among the pods."""
        metadata = {"name": name, "namespace": self.pods}
        self.cluster.apply({"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "spec": spec})

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """`kubectl patch --type merge`."""
        self.cluster.kubectl("patch", kind, name, "-n", self.pods, "--type=merge", "-p", json.dumps(change))

    def delete(self, kind: str, name: str) -> None:
        """Delete an object of ours and wait until it is gone."""
        self.cluster.kubectl("delete", kind, name, "-n", self.pods, "--ignore-not-found", "--wait", MINUTES)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """An object among the pods; empty when there is none."""
        found = self.cluster.kubectl("get", kind, name, "-n", self.pods, "-o", "json", "--ignore-not-found")
        return dict(json.loads(found)) if found else {}

    def wait_ready(self, *models: str) -> None:
        """`kubectl wait --for=condition=Ready` for models."""
        names = [f"omnimodel/{name}" for name in models]
        self.cluster.kubectl("wait", *names, "--for=condition=Ready", "-n", self.pods, MINUTES)

    def wait_pod(self, pod: str, *, other_than: str = "") -> dict[str, Any]:
        """A pod that the kubelet calls Ready.

        Args:
            other_than: uid of the one that is being replaced.
        """
        found: dict[str, Any] = {}

        def is_ready() -> bool:
            nonlocal found
            found = self.get("pod", pod)
            return bool(found) and found["metadata"]["uid"] != other_than and condition(found, "Ready") == "True"

        self.until(is_ready, f"pod {pod} to be Ready")
        return found

    def until(self, holds: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> float:
        """Wait until something holds; the seconds it took."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < seconds, f"waited {seconds} s for {what}"
            time.sleep(0.2)
        return time.monotonic() - began

    def send(self, method: str, path: str, body: Any = None, *, seconds: float = 60.0) -> Answer:
        """One request over a connection of its own, to the gateway's Service at a port of the node."""
        headers = {"Content-Type": "application/json", "Omni-Deadline-Seconds": f"{seconds:g}"}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=seconds + 5)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, repr(error))
        finally:
            connection.close()
        try:
            return Answer(response.status, json.loads(text))
        except ValueError:
            return Answer(response.status, text.decode(errors="replace"))

    def ask(self, model: str, question: Any = QUESTION, *, seconds: float = 60.0) -> Answer:
        """A question to a model."""
        return self.send("POST", f"/v2/models/{model}/infer", question, seconds=seconds)

    def report(self, pod: str) -> dict[str, Any]:
        """What an agent says of itself, past operator and gateway."""
        return report(self.cluster, self.pods, pod)

    def pid(self, model: str, pod: str) -> int:
        """The model's process, as the pod numbers it; 0 for none."""
        process = self.report(pod)["models"][f"{self.pods}/{model}"]["process"]
        return int(process["pid"]) if process else 0

    def entry(self, model: str, pod: str) -> dict[str, Any]:
        """The residency entry of a pod in a model's status; empty when it has none."""
        entries = self.get("omnimodel", model).get("status", {}).get("residency", [])
        return next((dict(entry) for entry in entries if entry["pod"] == pod), {})

    def events(self, model: str) -> list[tuple[str, str]]:
        """Reason and message of what happened to a model, at the end of `kubectl describe`."""
        table = self.cluster.kubectl("describe", "omnimodel", model, "-n", self.pods).partition("\nEvents:")[2]
        rows = [re.split(r"\s{2,}", line.strip(), maxsplit=4) for line in table.splitlines()]
        return [(row[1], row[4]) for row in rows if len(row) == 5 and row[0] in {"Normal", "Warning"}]

    def shell(self, pod: str, script: str) -> str:
        """What a shell script prints in an agent's container."""
        return self.cluster.kubectl("exec", pod, "-n", self.pods, "-c", "agent", "--", "sh", "-c", script)

    def omni(self, *arguments: str) -> str:
        """`kubectl omni …`, against this cluster."""
        plugin = Path(sys.executable).parent / "kubectl-omni"
        command = [str(plugin), "--kubeconfig", str(self.cluster.kubeconfig), "-n", self.pods, *arguments]
        return self.cluster._run(command)


def remains(cluster: Connection, release: str, *namespaces: str) -> list[str]:
    """What is left of a release and its pools, besides the definitions, which stay.

    Args:
        namespaces: that nothing else was in; everywhere else its objects are told by their label.
    """
    kinds = {True: "", False: ""}  # those of namespaces, and those of the whole cluster
    for namespaced in kinds:
        known = cluster.kubectl("api-resources", "--verbs=list", f"--namespaced={namespaced}".lower(), "-o", "name")
        kinds[namespaced] = ",".join(kind for kind in known.split() if not kind.startswith(NOT_OURS_TO_END))
    labelled = ("-o", "name", "-l", f"app.kubernetes.io/instance={release}")
    found = cluster.kubectl("get", kinds[False], *labelled).splitlines()
    found += cluster.kubectl("get", kinds[True], "-A", *labelled).splitlines()
    for namespace in namespaces:
        found += cluster.kubectl("get", kinds[True], "-n", namespace, "-o", "name").splitlines()
    return sorted({*found} - OF_EVERY_NAMESPACE)


def condition(item: Mapping[str, Any], kind: str) -> str:
    """Status of a condition of an object; empty when it has none of that type."""
    return str(whole_condition(item, kind).get("status", ""))


def whole_condition(item: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A condition of an object; empty when it has none of that type."""
    found = item.get("status", {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), {})
