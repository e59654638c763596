"""OmniProcess: the rendered process spec of one model in one pool. Internal: the system writes and reads it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from omnimodel.api.meta import Observed, Part, Resource


class ModelIdentity(Part):
    """The OmniModel that the process is of."""

    namespace: str = Field(description="Its namespace.")
    name: str = Field(description="Its name.")
    uid: str = Field(description="Its uid.")


class ProcessHandler(Part):
    """The class of engine python."""

    entry: str = Field(description="MODULE:CLASS.")
    files: dict[str, str] = Field(description="Inline code, name to text.")


class ProcessEnvironment(Part):
    """Python packages and folders for sys.path."""

    requirements: list[str] = Field(description="Sorted requirements.")
    paths: list[str] = Field(description="Folders for sys.path, in order.")


class ProcessLimits(Part):
    """Bounds, all as numbers."""

    concurrency: int = Field(description="Requests computed at once.")
    queue: int = Field(description="Requests that may wait.")
    deadline_seconds: float = Field(description="Held and computed in all.")
    load_deadline_seconds: float = Field(description="Fetch, publish and start without progress.")
    drain_seconds: float = Field(description="Requests in flight at the end.")
    request_bytes: int = Field(description="Largest request body.")
    response_bytes: int = Field(description="Largest response body.")
    input_tokens: int = Field(description="Longest prompt; 0 for what the context allows.")
    output_tokens: int = Field(description="Longest answer; 0 for what the context allows.")
    processes: int = Field(description="Processes and threads.")
    tmp_bytes: int = Field(description="Size of /tmp.")
    shm_bytes: int = Field(description="Size of /dev/shm.")
    memory_bytes: int = Field(description="Private memory; 0 for auto.")
    cpu_millis: int = Field(description="Thousandths of a core; 0 for no limit.")


class ProcessIdentity(Part):
    """Who the process is on its machine."""

    uid: int = Field(description="User and group id.")
    hostname: str = Field(description="Host name it sees.")


class ProcessResidency(Part):
    """When the model is on the device, as numbers."""

    priority: int = Field(description="0 to 1000.")
    min_resident_seconds: float = Field(description="Least time after a wake.")
    idle_after_seconds: float | None = Field(description="Null for never.")
    idle_tier: str = Field(description="warm, parked or cold.")
    keep_resident: bool = Field(description="Never leaves the device.")
    preload: bool = Field(description="Woken at the start of the pool.")


class ProcessServedName(Part):
    """A name clients send, with its request defaults."""

    name: str = Field(description="The name.")
    defaults: dict[str, Any] = Field(description="Body fields that a request does not set.")
    listed: bool = Field(description="Shown by /v1/models.")


class ProcessSpec(Part):
    """Everything an agent needs to run a model; the runtime gets it as JSON."""

    model: ModelIdentity = Field(description="Whose process it is.")
    generation: int = Field(description="Generation of the OmniModel it was rendered from.")
    pool: str = Field(description="Name of the pool.")
    engine: str = Field(description="Engine.")
    task: str = Field(description="Task.")
    handler: ProcessHandler | None = Field(description="Class of engine python.")
    environment: ProcessEnvironment = Field(description="Python environment.")
    source: dict[str, Any] = Field(description="As in the manifest; a volume has its path beside it.")
    args: list[str] = Field(description="Further arguments of a foreign engine.")
    command: list[str] = Field(description="argv of engine command; {port}, {socket} and {devices} are filled in.")
    env: dict[str, str] = Field(description="Environment, config maps resolved.")
    secret_env: dict[str, dict[str, str]] = Field(description="Variables that come from secrets: name and key.")
    working_dir: str = Field(description="Empty for the root of the sandbox.")
    health_path: str = Field(description="Answers 200 when the engine can serve; empty when not asked.")
    dtype: str = Field(description="auto, float32, bfloat16 or float16.")
    quantization: str = Field(description="none, int8, fp8 or int4.")
    threads: int = Field(description="Of one forward pass; 0 for auto.")
    options: dict[str, Any] = Field(description="Of the engine.")
    mounts: list[dict[str, Any]] = Field(description="As in the manifest; volumes, config maps and sizes resolved.")
    network: bool = Field(description="Whether the sandbox has a network.")
    limits: ProcessLimits = Field(description="Bounds.")
    identity: ProcessIdentity = Field(description="Who it is on its machine.")
    residency: ProcessResidency = Field(description="When it is on the device.")
    device_memory_bytes: int = Field(description="Footprint, of several devices on all of them; 0 for auto.")
    devices: int = Field(description="How many devices.")
    probe: dict[str, Any] | None = Field(description="As in the manifest, times in seconds.")
    served_names: list[ProcessServedName] = Field(description="metadata.name first.")
    capabilities: list[str] = Field(description="Words for /v1/models.")
    metadata: dict[str, Any] = Field(description="Free fields for /v1/models.")
    suspend: bool = Field(description="Whether the model is stopped.")
    isolation_level: str = Field(description="The minimum.")
    pods: list[str] = Field(default_factory=list, description="Pods of the pool that hold the model, in a cluster.")
    hash: str = Field(description="SHA-256 of what concerns the process: another one means a new process.")
    publish_hash: str = Field(description="SHA-256 of what concerns the image: another one means a new image.")

    def to_dict(self) -> dict[str, Any]:
        """The spec as the runtime gets it: every field, with null where it says something."""
        return self.model_dump(mode="json", by_alias=True)


class ProcessStatus(Observed):
    """What the agents say about the process."""

    state: str = Field(default="", description="starting, ready, draining, stopped, backing-off or failed.")
    pid: int = Field(default=0, description="0 for none.")
    restarts: int = Field(default=0, description="Restarts since the agent began.")
    started: str = Field(default="", description="When it was started.")
    private_bytes: int = Field(default=0, description="Private memory.")
    isolation_level: str = Field(default="", description="Reached.")
    isolation_missing: list[str] = Field(default_factory=list, description="What it lacks.")
    tier: str = Field(default="", description="resident, warm, parked or cold.")
    instance: str = Field(default="", description="Identity that the agent gave it at its fork.")
    cgroup: str = Field(default="", description="Control group that limits it.")
    reason: str = Field(default="", description="One word.")
    message: str = Field(default="", description="One sentence.")


class OmniProcess(Resource):
    """The rendered process spec of one model in one pool."""

    kind: Literal["OmniProcess"] = "OmniProcess"
    spec: ProcessSpec
    status: ProcessStatus = Field(default=ProcessStatus())
    plural: ClassVar[str] = "omniprocesses"

    def to_dict(self) -> dict[str, Any]:
        """The whole object, every field of its spec included."""
        return {**super().to_dict(), "spec": self.spec.to_dict()}
