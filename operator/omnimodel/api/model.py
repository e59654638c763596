"""OmniModel: one model of the catalogue."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from omnimodel.api.amounts import Cpu, Duration, DurationOrZero, Lifetime, Quantity, QuantityOrAuto
from omnimodel.api.fields import Flag, Label, ServedNameText, choice, plain, whole
from omnimodel.api.meta import Part, Resource, Rule
from omnimodel.api.mounts import Mount
from omnimodel.api.priority import Priority
from omnimodel.api.probe import Probe
from omnimodel.api.references import text_or
from omnimodel.api.runtime import FOREIGN, Runtime
from omnimodel.api.source import Source
from omnimodel.api.status import ModelStatus


class ServedName(Part):
    """A name that clients send, with request fields of its own."""

    name: ServedNameText = Field(description="The name.", examples=["Qwen/Qwen3-Coder-30B:high"])
    defaults: dict[str, Any] = Field(
        default_factory=dict,
        description="Fields of the request body that a request by this name gets where it does not set them.",
        examples=[{"temperature": 0.2, "max_tokens": 512}],
    )
    listed: Flag = Field(default=True, description="Whether /v1/models shows the name.", examples=[False])


ServedNameItem = Annotated[
    Annotated[ServedNameText, Tag("~text")] | Annotated[ServedName, Tag("~name")], text_or("~name")
]


class Resources(Part):
    """What the model needs."""

    device_memory: QuantityOrAuto = Field(
        default="auto",
        description="Device memory of the whole footprint, weights and working memory, as a quantity; `auto` measures "
        "it at the first load and remembers it. A quantity wins over what was measured. Over several `devices` it is "
        "the sum, and each of them grants an equal part.",
        examples=["600Mi"],
    )
    host_memory: QuantityOrAuto = Field(
        default="auto",
        description="Limit of the process's private host memory; a process above it dies alone with reason "
        "OutOfMemory. `auto` derives it from the footprint.",
        examples=["1Gi"],
    )
    cpu: Cpu | None = Field(
        default=None, description="Cores that the process may use: `2`, `0.5`, `500m`. None is no limit.", examples=[2]
    )
    devices: Annotated[int, whole(1, 64, "how many devices, never an index,")] = Field(
        default=1,
        description="How many GPUs of one machine the model is spread over, by a server of others that does so "
        "itself; which ones is the system's choice. Of a pool with `device.type: cuda` and as large a `device.count`.",
        examples=[2],
    )


class Residency(Part):
    """When the model is on the device."""

    priority: Priority = Field(
        default="normal",
        description="Who wins when models compete: 0 to 1000, or batch (0), low (250), normal (500), high (750), "
        "critical (1000).",
        examples=["high"],
    )
    min_resident: DurationOrZero | None = Field(
        default=None, description="How long the model stays resident at least after a wake.", examples=["30s"]
    )
    idle_after: Lifetime | None = Field(
        default=None,
        description="How long after its last answer an idle model leaves the device although nobody needs the room; "
        "`never` (the meaning when left out) leaves it until another model needs the room.",
        examples=["15m"],
    )
    idle_tier: Annotated[Literal["warm", "parked", "cold"], choice("warm", "parked", "cold")] | None = Field(
        default=None,
        description="Where it goes after `idleAfter`. `warm` keeps its process for good; when left out, the process of "
        "an evicted model stays for five minutes, or as long as `OmniPool.hostMemory` has room for it, and then goes.",
        examples=["warm"],
    )
    keep_resident: Flag = Field(
        default=False,
        description="The model never leaves the device; its footprint is a hard reservation.",
        examples=[True],
    )
    preload: Flag = Field(
        default=False,
        description="Woken when the pool starts, before anyone asks, as far as there is room.",
        examples=[True],
    )
    rules = (
        Rule(
            "!(has(self.keepResident) && self.keepResident && has(self.idleAfter) && self.idleAfter != 'never')",
            lambda self: not (self.keep_resident and self.idle_after not in (None, "never")),
            "keepResident and idleAfter exclude each other",
            "remove idleAfter, or keepResident",
            "idleAfter",
        ),
        Rule(
            "!(has(self.idleTier) && (!has(self.idleAfter) || self.idleAfter == 'never'))",
            lambda self: not (self.idle_tier is not None and self.idle_after in (None, "never")),
            "idleTier says where to go after idleAfter, which is not set",
            "add idleAfter: 15m, or remove idleTier",
            "idleTier",
        ),
    )


class Limits(Part):
    """Bounds of what one model may take and how long things may last."""

    concurrency: Annotated[int, whole(1, 4096)] | None = Field(
        default=None,
        description="Requests that the process has at once; 16 for text generation and foreign engines, else 1. A "
        "handler computes them one after another all the same.",
        examples=[16],
    )
    queue: Annotated[int, whole(0, 65536)] | None = Field(
        default=None,
        description="Requests that may wait, cold or resident alike; the next gets 429. 256 when left out.",
        examples=[256],
    )
    deadline: Duration | None = Field(
        default=None,
        description="How long a request may be held and computed in all; 10m when left out.",
        examples=["2m"],
    )
    load_deadline: Duration | None = Field(
        default=None,
        description="How long fetching, publishing and starting may go without progress; 20m when left out.",
        examples=["20m"],
    )
    drain_timeout: Duration | None = Field(
        default=None,
        description="How long requests in flight may go on when the process has to end; 30s when left out.",
        examples=["30s"],
    )
    request_bytes: Quantity | None = Field(
        default=None,
        description="The largest request body; the next larger gets 413. 32Mi when left out.",
        examples=["32Mi"],
    )
    response_bytes: Quantity | None = Field(
        default=None, description="The largest response body; 256Mi when left out.", examples=["256Mi"]
    )
    input_tokens: Annotated[int, whole(1, 16_777_216)] | None = Field(
        default=None,
        description="The longest prompt of a text generation by engine transformers; what the context allows when "
        "left out.",
        examples=[4096],
    )
    output_tokens: Annotated[int, whole(1, 16_777_216)] | None = Field(
        default=None,
        description="The longest answer of a text generation by engine transformers; what the context allows when "
        "left out.",
        examples=[1024],
    )
    processes: Annotated[int, whole(1, 4096)] | None = Field(
        default=None, description="Processes and threads in the model's sandbox; 256 when left out.", examples=[256]
    )
    tmp: Quantity | None = Field(
        default=None, description="Size of its own /tmp; 64Mi when left out.", examples=["64Mi"]
    )
    shm: Quantity | None = Field(
        default=None, description="Size of its own /dev/shm; 64Mi when left out.", examples=["2Gi"]
    )


class Replicas(Part):
    """How many pods of the pool hold the model."""

    min: Annotated[int, whole(0, 1000)] | None = Field(
        default=None, description="At least so many; 1 when left out.", examples=[1]
    )
    max: Annotated[int, whole(1, 1000)] | None = Field(
        default=None, description="At most so many. More than `min` by load is not in this version.", examples=[1]
    )
    rules = (
        Rule(
            "!has(self.max) || has(self.min)",
            lambda self: self.max is None or self.min is not None,
            "max without min says half",
            "add min, such as min: 1",
            "max",
        ),
        Rule(
            "!has(self.max) || !has(self.min) || self.min <= self.max",
            lambda self: self.max is None or self.min is None or self.min <= self.max,
            "min is more than max",
            "write a min that is at most max",
            "min",
        ),
        Rule(
            "!has(self.max) || !has(self.min) || self.max <= (self.min > 1 ? self.min : 1)",
            lambda self: self.max is None or self.min is None or self.max <= max(1, self.min),
            "more pods by load are not in this version",
            "leave max out, and write the min that it needs",
            "max",
        ),
    )


class Affinity(Part):
    """Which models share pods of the pool and which must not, by groups: labels of your choice within the namespace."""

    together: list[Label] = Field(
        default_factory=list,
        max_length=16,
        description="Models of one such group go to the same pods, as many as the one that asks for most: required, as "
        "podAffinity of Kubernetes is.",
        examples=[["rag"]],
    )
    apart: list[Label] = Field(
        default_factory=list,
        max_length=16,
        description="No two models of one such group are on the same pod: required, as podAntiAffinity of Kubernetes "
        "is. On one machine, which is one pod, they take turns, and are told so.",
        examples=[["large"]],
    )
    rules = (
        Rule(
            "!has(self.together) || !has(self.apart) || !self.together.exists(group, group in self.apart)",
            lambda self: not set(self.together) & set(self.apart),
            "has a group that is in together as well",
            "name it in one of the two: models of a group share pods, or never do",
            "apart",
        ),
    )


def _counts_tokens(field: str, spec: ModelSpec) -> bool:
    """Whether a limit of tokens (snake_case) is not there, or is kept."""
    runtime = spec.runtime
    return getattr(spec.limits, field) is None or (runtime.engine, runtime.task) == ("transformers", "text-generation")


class ModelSpec(Part):
    """What a person wants of one model."""

    pool: Label = Field(
        default="default",
        description="Name of the OmniPool, in the same namespace or else in `default`.",
        examples=["default"],
    )
    served_names: list[ServedNameItem] = Field(
        default_factory=list,
        max_length=64,
        description="Further names that clients may use, besides metadata.name: a text, or an object with request "
        "defaults. Unique in the cluster; the oldest model keeps a name that two ask for.",
        examples=[["HuggingFaceTB/SmolLM2-135M-Instruct", {"name": "smollm2:brief", "defaults": {"max_tokens": 32}}]],
    )
    suspend: Flag = Field(default=False, description="True stops the model and keeps its manifest.", examples=[True])
    description: Annotated[str, plain(4096)] | None = Field(
        default=None, description="What the model is, for people.", examples=["a small chat model"]
    )
    capabilities: list[Annotated[str, plain(64, empty=False)]] = Field(
        default_factory=list,
        max_length=32,
        description="Words for /v1/models, such as chat, embeddings, vision, tools.",
        examples=[["chat", "tools"]],
    )
    metadata: dict[str, Any] = Field(
        default_factory=dict,
        description="Free fields for /v1/models, such as price, owner, context length.",
        examples=[{"owner": "search", "contextLength": 8192}],
    )
    source: Source = Field(
        description="Where the weights come from: exactly one of path, package, huggingFace, url, volume.",
        examples=[{"package": {"name": "wordllama", "version": "0.4.0.post1"}}],
    )
    runtime: Runtime = Field(
        description="How the model is run.", examples=[{"engine": "transformers", "task": "text-generation"}]
    )
    resources: Resources = Field(
        default=Resources(), description="What it needs.", examples=[{"deviceMemory": "600Mi"}]
    )
    residency: Residency = Field(
        default=Residency(), description="When it is on the device.", examples=[{"idleAfter": "15m"}]
    )
    mounts: list[Mount] = Field(
        default_factory=list,
        max_length=32,
        description="What the model sees in its file system besides its environment.",
        examples=[[{"name": "code", "source": {"configMap": {"name": "handler"}}, "path": "/code"}]],
    )
    limits: Limits = Field(default=Limits(), description="Bounds.", examples=[{"concurrency": 16}])
    probe: Probe | None = Field(
        default=None,
        description="A request with a known answer, sent after a load, and what `omni check` sends.",
        examples=[
            {"path": "/v1/embeddings", "json": {"input": "cat"}, "expect": [{"at": "/data/0/index", "equals": 0}]}
        ],
    )
    replicas: Replicas | None = Field(default=None, description="How many pods hold it.", examples=[{"min": 2}])
    affinity: Affinity = Field(
        default=Affinity(), description="Which models it shares pods with.", examples=[{"together": ["rag"]}]
    )
    rules = (
        Rule(
            "!has(self.resources) || !has(self.resources.devices) || self.resources.devices == 1 || "
            "!(self.runtime.engine in ['transformers', 'python'])",
            lambda self: self.resources.devices == 1 or self.runtime.engine in FOREIGN,
            "engines transformers and python keep a model on one device",
            "write devices: 1, or engine: vllm, sglang, llamacpp or command",
            "resources.devices",
        ),
        *(
            Rule(
                f"!has(self.limits) || !has(self.limits.{name}) || (self.runtime.engine == 'transformers' && "
                "has(self.runtime.task) && self.runtime.task == 'text-generation')",
                partial(_counts_tokens, field),
                "only engine transformers counts tokens, for text-generation",
                "remove it; requestBytes and responseBytes limit every model",
                f"limits.{name}",
            )
            for field, name in (("input_tokens", "inputTokens"), ("output_tokens", "outputTokens"))
        ),
        Rule(
            "!has(self.runtime.environment) || !has(self.runtime.environment.path) || "
            "self.runtime.environment.path.all(path, has(self.mounts) && self.mounts.exists(mount, "
            "path == mount.path || path.startsWith(mount.path + '/')))",
            None,
            "is in no mount",
            "write a path under one of spec.mounts",
            "runtime.environment.path",
        ),
        Rule(
            "!has(self.runtime.workingDir) || self.runtime.workingDir in ['/', '/tmp'] || (has(self.mounts) && "
            "self.mounts.exists(mount, self.runtime.workingDir == mount.path || "
            "self.runtime.workingDir.startsWith(mount.path + '/')))",
            None,
            "is in no mount",
            "write a path under one of spec.mounts",
            "runtime.workingDir",
        ),
    )


class OmniModel(Resource):
    """One model of the catalogue."""

    kind: Literal["OmniModel"] = "OmniModel"
    spec: ModelSpec
    status: ModelStatus = Field(default=ModelStatus())
    plural: ClassVar[str] = "omnimodels"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that clients may use, metadata.name first."""
        extra = (item if isinstance(item, str) else item.name for item in self.spec.served_names)
        return (self.metadata.name, *extra)
