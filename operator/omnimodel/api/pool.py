"""OmniPool: equal pods, or this machine, that models are assigned to."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from omnimodel.api.amounts import Cpu, PoolQuantity, Quantity
from omnimodel.api.fields import AbsolutePath, Checked, Flag, Label, choice, number, plain, refusal, whole
from omnimodel.api.meta import LabelMap, Part, Resource, Rule
from omnimodel.api.pool_sources import PoolSources
from omnimodel.api.pool_store import IMAGE_VOLUME, SYSTEM_FOLDER, ClaimVolume, ImageVolume, PoolStore
from omnimodel.api.references import ObjectName
from omnimodel.api.status import PoolStatus

VOLUMES_PATH = "/volumes"  # in a pod: where claims and images are mounted


class Device(Part):
    """The accelerators of a pod."""

    type: Annotated[Literal["auto", "cpu", "cuda"], choice("auto", "cpu", "cuda")] = Field(
        default="auto",
        description="auto takes the CPU in this version, whatever GPUs there are; cuda takes NVIDIA GPUs, the "
        "first `count` of them, and is refused with a sentence where there is none.",
        examples=["cpu"],
    )
    count: Annotated[int, whole(1, 64, "how many devices, never an index,")] = Field(
        default=1, description="Devices of one pod. The system chooses on which of them a model is.", examples=[1]
    )
    memory: PoolQuantity = Field(
        default="auto",
        description="Budget of one device for all models: a quantity, a share of the device, or auto. On a CPU "
        "machine it is host memory.",
        examples=["80%"],
    )
    frame_size: Quantity | None = Field(
        default=None,
        description="Unit of device memory, a multiple of 2Mi; the device's own when left out.",
        examples=["16Mi"],
    )


class Overcommit(Part):
    """How far the footprints of all models may exceed the budget."""

    limit: Annotated[float, number(1, 1000)] = Field(
        description="Sum of the footprints / device budget, at most.", examples=[8]
    )


class Isolation(Part):
    """How well models must be kept apart."""

    level: Annotated[Literal["namespaces", "landlock", "process"], choice("namespaces", "landlock", "process")] = Field(
        default="process",
        description="The minimum. The pool takes the best it can get, and starts no model when that is less.",
        examples=["namespaces"],
    )


class Location(Part):
    """Where the pool is, for routing."""

    region: Annotated[str, plain(63)] | None = Field(default=None, description="Region.", examples=["eu-west"])
    zone: Annotated[str, plain(63)] | None = Field(default=None, description="Zone.", examples=["eu-west-1a"])


class Volume(Part):
    """A volume that models may use in source and mounts."""

    name: Label = Field(description="Its name.", examples=["models"])
    path: AbsolutePath | None = Field(default=None, description="A folder of the machine.", examples=["/srv/models"])
    persistent_volume_claim: ClaimVolume | None = Field(
        default=None, description="A claim, in a cluster.", examples=[{"claimName": "models"}]
    )
    image: ImageVolume | None = Field(
        default=None,
        description=IMAGE_VOLUME,
        examples=[{"reference": "registry.example.org/models/voices:2026-11"}],
    )
    read_only: Flag = Field(default=True, description="Whether models can only read it.", examples=[True])
    rules = (
        Rule(
            "[has(self.path), has(self.persistentVolumeClaim), has(self.image)].filter(x, x).size() == 1",
            lambda self: sum(part is not None for part in (self.path, self.persistent_volume_claim, self.image)) == 1,
            "needs exactly one of path, persistentVolumeClaim and image",
            "write path: /srv/models, or persistentVolumeClaim: {claimName: models}, for example",
        ),
        Rule(
            "!has(self.image) || !has(self.readOnly) || self.readOnly",
            lambda self: self.image is None or self.read_only,
            "an image is only read",
            "remove readOnly: false, or have a claim to write to",
            "readOnly",
        ),
        SYSTEM_FOLDER,
    )

    @property
    def folder(self) -> str:
        """Where an agent finds it."""
        return self.path or f"{VOLUMES_PATH}/{self.name}"


class PodResources(Part):
    """Requests and limits of the pod itself."""

    cpu: Cpu | None = Field(
        default=None, description="Cores that a pod is sure of; half a one for each device when left out.", examples=[8]
    )
    memory: Quantity | None = Field(default=None, description="Host memory.", examples=["32Gi"])


_TOLERATION = {
    "type": "object",
    "properties": {
        **{name: {"type": "string", "maxLength": 256} for name in ("key", "operator", "value", "effect")},
        "tolerationSeconds": {"type": "integer", "format": "int64"},
    },
}


def _toleration(value: Any) -> dict[str, Any]:
    known = {"key": str, "operator": str, "value": str, "effect": str, "tolerationSeconds": int}
    if not isinstance(value, dict) or not all(type(item) is known.get(name) for name, item in value.items()):
        raise refusal("is no toleration", "write one such as {key: nvidia.com/gpu, operator: Exists}")
    return value


class Pod(Part):
    """Pods of the pool in a cluster."""

    image: Annotated[str, plain(512, empty=False)] | None = Field(
        default=None, description="Image of the agent.", examples=["registry.example.org/omnimodel/agent:0.1.0"]
    )
    node_selector: LabelMap = Field(
        default_factory=dict, max_length=32, description="Labels of the nodes.", examples=[{"gpu": "l4"}]
    )
    tolerations: list[Annotated[dict[str, Any], Checked(_toleration, _TOLERATION)]] = Field(
        default_factory=list,
        max_length=32,
        description="Taints it may be put on, as Kubernetes writes them.",
        examples=[[{"key": "nvidia.com/gpu", "operator": "Exists"}]],
    )
    resources: PodResources | None = Field(
        default=None, description="Its requests and limits.", examples=[{"cpu": 8, "memory": "32Gi"}]
    )
    service_account_name: ObjectName | None = Field(
        default=None, description="Its service account.", examples=["omni-agent"]
    )
    priority_class_name: ObjectName | None = Field(default=None, description="Its priority class.", examples=["high"])
    runtime_class_name: ObjectName | None = Field(default=None, description="Its runtime class.", examples=["nvidia"])


class Autoscale(Part):
    """How many pods, by load."""

    min: Annotated[int, whole(0, 1000)] = Field(description="At least so many pods.", examples=[1])
    max: Annotated[int, whole(1, 1000)] = Field(
        description="At most so many pods. More than `min` by load are not in this version.", examples=[1]
    )
    rules = (
        Rule(
            "self.min <= self.max",
            lambda self: self.min <= self.max,
            "min is more than max",
            "write a min that is at most max",
            "min",
        ),
        Rule(
            "self.max <= self.min",
            lambda self: self.max <= self.min,
            "pods by load are not in this version",
            "write replicas instead of autoscale",
            "max",
        ),
    )


class UpdateStrategy(Part):
    """How pods are replaced when the pool changes."""

    type: Annotated[Literal["RollingUpdate", "OnDelete"], choice("RollingUpdate", "OnDelete")] = Field(
        default="RollingUpdate", description="As of a StatefulSet.", examples=["RollingUpdate"]
    )
    max_unavailable: Annotated[int, whole(1, 1000)] | None = Field(
        default=None, description="Pods that may be away at once; 1 when left out.", examples=[1]
    )


class PoolSpec(Part):
    """What a person wants of a pool."""

    replicas: Annotated[int, whole(0, 1000)] | None = Field(
        default=None, description="Pods in a cluster; 1 when left out. One machine is one replica.", examples=[1]
    )
    device: Device = Field(default=Device(), description="Its devices.", examples=[{"type": "cpu", "memory": "512Mi"}])
    host_memory: PoolQuantity = Field(
        default="auto",
        description="Host memory for the arena, processes and zygotes: a quantity, a share, or auto.",
        examples=["50%"],
    )
    overcommit: Overcommit | None = Field(
        default=None, description="Limit of the over-commit ratio; none when left out.", examples=[{"limit": 8}]
    )
    isolation: Isolation = Field(
        default=Isolation(), description="The least isolation.", examples=[{"level": "namespaces"}]
    )
    location: Location | None = Field(
        default=None, description="Where it is.", examples=[{"region": "eu-west", "zone": "eu-west-1a"}]
    )
    volumes: list[Volume] = Field(
        default_factory=list,
        max_length=32,
        description="Volumes for models.",
        examples=[[{"name": "models", "path": "/srv/models"}]],
    )
    pod: Pod | None = Field(
        default=None, description="Its pods in a cluster.", examples=[{"nodeSelector": {"gpu": "l4"}}]
    )
    autoscale: Autoscale | None = Field(
        default=None,
        description="Pods by load: not in this version; write `replicas`.",
        examples=[{"min": 1, "max": 1}],
    )
    update_strategy: UpdateStrategy | None = Field(
        default=None, description="How pods are replaced, in a cluster.", examples=[{"type": "OnDelete"}]
    )
    sources: PoolSources | None = Field(
        default=None,
        description="Where packages, models and files are fetched from; as the agent's environment says when left out.",
        examples=[{"packageIndex": "https://packages.example.org/simple"}],
    )
    store: PoolStore | None = Field(
        default=None,
        description="Where images and environments are kept; in the pod, and gone with it, when left out. On one "
        "machine in the state directory.",
        examples=[{"volumeClaimTemplate": {"size": "100Gi"}}],
    )
    rules = (
        Rule(
            "has(self.store) && has(self.store.volumeClaimTemplate)"
            " ? has(oldSelf.store) && has(oldSelf.store.volumeClaimTemplate)"
            " && self.store.volumeClaimTemplate == oldSelf.store.volumeClaimTemplate"
            " : !(has(oldSelf.store) && has(oldSelf.store.volumeClaimTemplate))",
            None,
            "store.volumeClaimTemplate cannot be changed: the claims of pods are made with the pool",
            "make a pool of another name with it, name that in spec.pool of the models, and delete this one",
            "store",
        ),
        Rule(
            "!(has(self.replicas) && has(self.autoscale))",
            lambda self: self.replicas is None or self.autoscale is None,
            "replicas and autoscale exclude each other",
            "remove replicas, or autoscale",
            "replicas",
        ),
    )


class OmniPool(Resource):
    """Equal pods, or this machine, that models are assigned to."""

    kind: Literal["OmniPool"] = "OmniPool"
    spec: PoolSpec = Field(default=PoolSpec())
    status: PoolStatus = Field(default=PoolStatus())
    plural: ClassVar[str] = "omnipools"
