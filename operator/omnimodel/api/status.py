"""What the system says about a model and a pool. Written by operator and agents, never by a person."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from omnimodel.api.fields import Flag, choice, number, plain, whole
from omnimodel.api.meta import Condition, Observed, Time

Tier = Annotated[Literal["resident", "warm", "parked", "cold"], choice("resident", "warm", "parked", "cold")]
ByteCount = Annotated[int, whole(0, 2**62, "bytes")]
Counter = Annotated[int, whole(0, 2**62)]
Seconds = Annotated[float, number(0, 1e12)]
Watts = Annotated[float, number(0, 1e6)]
Joules = Annotated[float, number(0, 1e15)]
ObservedGeneration = Annotated[int, whole(-1, 2**62)]  # -1: kstatus takes an object without one for done


class ResidencyEntry(Observed):
    """One pod's word on the model; only that pod's agent writes it."""

    pod: Annotated[str, plain(253, empty=False)] = Field(
        description="Name of the pod, or of the machine.", examples=["default-0"]
    )
    pod_uid: Annotated[str, plain(63)] = Field(
        default="",
        description="Uid of the pod that wrote it, which one of its name after it does not have; empty on one machine.",
        examples=["0b9d4d9e-2f0c-4b5e-9f59-8a2f6f5a7c11"],
    )
    tier: Tier = Field(default="cold", description="Where the model is.", examples=["resident"])
    phase: Annotated[str, plain(32)] = Field(
        default="", description="What is being done with it: publishing, waking, serving ...", examples=["serving"]
    )
    ready: Flag = Field(
        default=False, description="Whether this pod serves the model, or can wake it.", examples=[True]
    )
    progress: Annotated[float, number(-1, 1)] = Field(
        default=-1, description="Share of the phase that is done; below 0 when unknown.", examples=[0.4]
    )
    generation: Counter = Field(default=0, description="Generation of the spec that serves.", examples=[3])
    device_bytes: ByteCount = Field(default=0, description="Device memory it holds.", examples=[269484032])
    host_bytes: ByteCount = Field(
        default=0, description="Host memory it holds: arena and private memory.", examples=[301989888]
    )
    weights_bytes: ByteCount = Field(default=0, description="Bytes of its image, as measured.", examples=[269484032])
    working_bytes: ByteCount = Field(default=0, description="Working memory at its peak.", examples=[67108864])
    private_bytes: ByteCount = Field(
        default=0, description="Private memory of its process when idle; 0 while unknown.", examples=[16777216]
    )
    pid: Counter = Field(default=0, description="Its process; 0 for none.", examples=[4711])
    since: Time = Field(default="", description="When it came to this tier.", examples=["2026-11-29T12:00:00Z"])
    last_request: Time = Field(default="", description="When it was asked last.", examples=["2026-11-29T12:00:00Z"])
    requests: Counter = Field(default=0, description="Requests answered since the agent began.", examples=[17])
    failed: Counter = Field(default=0, description="Requests that failed since the agent began.", examples=[0])
    prompt_tokens: Counter = Field(
        default=0,
        description="Tokens of prompts that were computed since the agent began; counted where engine transformers "
        "generates text.",
        examples=[1480],
    )
    generated_tokens: Counter = Field(
        default=0,
        description="Tokens that were generated since the agent began; counted like those of prompts.",
        examples=[5310],
    )
    waiting: Counter = Field(default=0, description="Requests that are held.", examples=[2])
    in_flight: Counter = Field(default=0, description="Requests that are being computed.", examples=[1])
    wakes: Counter = Field(default=0, description="How often it was woken.", examples=[3])
    evictions: Counter = Field(default=0, description="How often it left the device.", examples=[2])
    swaps: dict[str, Counter] = Field(
        default_factory=dict,
        max_length=16,
        description="Wakes and evictions by cause: request, preload, check, hand, room, freeze, idle, host, end.",
        examples=[{"request": 3, "room": 2}],
    )
    last_wake_seconds: Seconds = Field(default=0, description="How long the last wake took.", examples=[0.021])
    wake_seconds: Seconds = Field(default=0, description="How long all its wakes took together.", examples=[0.064])
    last_wake_bytes_per_second: Counter = Field(
        default=0,
        description="At which the last wake copied; 0 when nothing was missing.",
        examples=[55300000000],
    )
    reason: Annotated[str, plain(128)] = Field(
        default="", description="Why it is there, one word.", examples=["Evicted"]
    )
    message: Annotated[str, plain(4096)] = Field(
        default="", description="Why it is there, one sentence.", examples=["made room"]
    )
    store: Annotated[str, plain(63)] = Field(
        default="",
        description="Published store that its image comes from; empty for the pod's own.",
        examples=["catalogue"],
    )
    device: Annotated[str, plain(1024)] = Field(
        default="", description="Device of the pod that it is placed on, or its devices.", examples=["cuda:1"]
    )


class Footprint(Observed):
    """Bytes of the model as measured."""

    weights_bytes: ByteCount = Field(default=0, description="Bytes of its image.", examples=[269484032])
    working_bytes: ByteCount = Field(default=0, description="Working memory at its peak.", examples=[67108864])
    private_bytes: ByteCount = Field(
        default=0, description="Private memory of its process when idle; 0 while unknown.", examples=[16777216]
    )


class Assignment(Observed):
    """One pod that the model is assigned to."""

    pod: Annotated[str, plain(253, empty=False)] = Field(description="Name of the pod.", examples=["default-0"])
    why: Annotated[str, plain(1024)] = Field(
        default="",
        description="Why this one, one sentence.",
        examples=["default-0 had the most room (1.20 GiB assigned)"],
    )


class ModelStatus(Observed):
    """What the system says about a model."""

    observed_generation: ObservedGeneration = Field(
        default=0, description="Generation that the status speaks of; -1 before the first.", examples=[3]
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Ready (the model serves, or can be woken), Reconciling and Stalled.",
        examples=[[{"type": "Ready", "status": "True", "reason": "Serving"}]],
    )
    residency: list[ResidencyEntry] = Field(
        default_factory=list,
        max_length=1000,
        description="One entry a pod.",
        examples=[[{"pod": "default-0", "tier": "warm"}]],
    )
    assigned: list[Assignment] = Field(
        default_factory=list,
        max_length=1000,
        description="Pods that are to hold it, in a cluster.",
        examples=[[{"pod": "default-0", "why": "default-0 is the only pod"}]],
    )
    footprint: Footprint | None = Field(
        default=None, description="Measured bytes.", examples=[{"weightsBytes": 269484032}]
    )
    served_names: list[Annotated[str, plain(96)]] = Field(
        default_factory=list, max_length=65, description="Names the model answers to.", examples=[["smollm2"]]
    )


class IsolationStatus(Observed):
    """The isolation that the pool reached."""

    level: Annotated[str, plain(32)] = Field(
        default="",
        description="namespaces, landlock or process; empty for a pool that nobody serves.",
        examples=["namespaces"],
    )
    missing: list[Annotated[str, plain(512)]] = Field(
        default_factory=list, max_length=64, description="What it lacks.", examples=[["cgroup memory limits"]]
    )


class StoreStatus(Observed):
    """The store that is written, when something was last written there."""

    path: Annotated[str, plain(4096)] = Field(
        default="", description="Its folder.", examples=["/var/lib/omnimodel-store"]
    )
    capacity_bytes: ByteCount = Field(default=0, description="Size of its volume.", examples=[107374182400])
    free_bytes: ByteCount = Field(default=0, description="What is free of it.", examples=[53687091200])


class DeviceEntry(Observed):
    """One device of a pod that has several."""

    name: Annotated[str, plain(63, empty=False)] = Field(description="Its name in the pod.", examples=["cuda:1"])
    budget_bytes: ByteCount = Field(default=0, description="Its memory for models.", examples=[536870912])
    resident_bytes: ByteCount = Field(default=0, description="What models hold of it.", examples=[402653184])
    promised_bytes: ByteCount = Field(default=0, description="What is promised to wakes.", examples=[0])
    working_bytes: ByteCount = Field(default=0, description="Working memory of resident models.", examples=[67108864])
    context_bytes: ByteCount = Field(default=0, description="Contexts of processes.", examples=[671088640])
    free_bytes: ByteCount = Field(default=0, description="What is free.", examples=[67108864])
    power_watts: Watts = Field(default=0, description="What it drew then; 0 when unknown.", examples=[310.5])
    energy_joules: Joules = Field(
        default=0, description="What it had used by then since its driver was loaded.", examples=[184320.0]
    )
    problem: Annotated[str, plain(4096)] = Field(
        default="",
        description="Why nothing is served from it any more; empty as long as it is.",
        examples=["the driver reports Xid 79"],
    )


PER_DEVICE: list[object] = [[{"name": "cuda:0", "budgetBytes": 536870912}, {"name": "cuda:1"}]]


class PodEntry(Observed):
    """One pod's word on its device; only that pod's agent writes it."""

    pod: Annotated[str, plain(253, empty=False)] = Field(description="Name of the pod.", examples=["default-0"])
    pod_uid: Annotated[str, plain(63)] = Field(
        default="",
        description="Uid of the pod that wrote it, which one of its name after it does not have; empty on one machine.",
        examples=["0b9d4d9e-2f0c-4b5e-9f59-8a2f6f5a7c11"],
    )
    ready: Flag = Field(default=False, description="Whether it can serve models.", examples=[True])
    reason: Annotated[str, plain(128)] = Field(default="", description="Why not, one word.", examples=[""])
    message: Annotated[str, plain(4096)] = Field(default="", description="Why not, one sentence.", examples=[""])
    device: Annotated[str, plain(128)] = Field(default="", description="What its device is.", examples=["cpu"])
    budget_bytes: ByteCount = Field(default=0, description="Device memory for models.", examples=[536870912])
    resident_bytes: ByteCount = Field(default=0, description="Device memory that models hold.", examples=[402653184])
    promised_bytes: ByteCount = Field(default=0, description="Device memory promised to wakes.", examples=[0])
    working_bytes: ByteCount = Field(default=0, description="Working memory of resident models.", examples=[67108864])
    context_bytes: ByteCount = Field(
        default=0, description="Device memory of processes beside that: their contexts.", examples=[671088640]
    )
    free_bytes: ByteCount = Field(default=0, description="Device memory that is free.", examples=[67108864])
    footprint_bytes: ByteCount = Field(default=0, description="Footprints of its models.", examples=[1610612736])
    power_watts: Watts = Field(
        default=0, description="What its devices drew when this entry was written; 0 when unknown.", examples=[310.5]
    )
    energy_joules: Joules = Field(
        default=0,
        description="What its devices had used by then since their drivers were loaded.",
        examples=[184320.0],
    )
    host_budget_bytes: ByteCount = Field(default=0, description="Its host memory.", examples=[4294967296])
    host_bytes: ByteCount = Field(default=0, description="Host memory in use.", examples=[1073741824])
    arena_bytes: ByteCount = Field(default=0, description="Of it, the images that wait.", examples=[805306368])
    isolation: IsolationStatus | None = Field(
        default=None, description="The isolation it reached.", examples=[{"level": "namespaces"}]
    )
    store: StoreStatus | None = Field(
        default=None, description="Its store.", examples=[{"path": "/var/lib/omnimodel-store"}]
    )
    images: list[Annotated[str, plain(128)]] = Field(
        default_factory=list, max_length=1000, description="Images in its store, by publish hash.", examples=[["3fb0"]]
    )
    per_device: list[DeviceEntry] = Field(
        default_factory=list,
        max_length=64,
        description="Each of its devices, where it has several; the bytes above are their sums.",
        examples=PER_DEVICE,
    )


class PoolStatus(Observed):
    """What the system says about a pool."""

    observed_generation: ObservedGeneration = Field(
        default=0, description="Generation that the status speaks of; -1 before the first.", examples=[1]
    )
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="Ready, Reconciling and Stalled.",
        examples=[[{"type": "Ready", "status": "True", "reason": "Serving"}]],
    )
    replicas: Counter = Field(default=0, description="Pods there are.", examples=[1])
    ready_replicas: Counter = Field(default=0, description="Pods that serve.", examples=[1])
    selector: Annotated[str, plain(1024)] = Field(
        default="", description="Label selector of its pods.", examples=["omnimodel.io/pool=default"]
    )
    devices: Counter = Field(default=0, description="Devices of all pods.", examples=[1])
    device: Annotated[str, plain(128)] = Field(default="", description="What a device is.", examples=["cpu"])
    models: Counter = Field(default=0, description="Models assigned.", examples=[12])
    budget_bytes: ByteCount = Field(default=0, description="Device memory for models.", examples=[536870912])
    resident_bytes: ByteCount = Field(default=0, description="Device memory that models hold.", examples=[402653184])
    promised_bytes: ByteCount = Field(default=0, description="Device memory promised to wakes under way.", examples=[0])
    working_bytes: ByteCount = Field(default=0, description="Working memory of resident models.", examples=[67108864])
    context_bytes: ByteCount = Field(
        default=0, description="Device memory of processes beside that: their contexts.", examples=[671088640]
    )
    free_bytes: ByteCount = Field(default=0, description="Device memory that is free.", examples=[67108864])
    footprint_bytes: ByteCount = Field(
        default=0, description="Sum of the footprints of all models.", examples=[1610612736]
    )
    power_watts: Watts = Field(
        default=0, description="What the devices of one machine draw; 0 when unknown.", examples=[310.5]
    )
    energy_joules: Joules = Field(
        default=0, description="What they have used since their drivers were loaded.", examples=[184320.0]
    )
    host_budget_bytes: ByteCount = Field(default=0, description="Host memory of the pool.", examples=[4294967296])
    host_bytes: ByteCount = Field(default=0, description="Host memory in use.", examples=[1073741824])
    arena_bytes: ByteCount = Field(default=0, description="Of it, the images that wait.", examples=[805306368])
    overcommit_ratio: Seconds = Field(
        default=0, description="Footprints of all models / device budget.", examples=[3.0]
    )
    isolation: IsolationStatus | None = Field(
        default=None, description="The isolation reached.", examples=[{"level": "namespaces"}]
    )
    store: StoreStatus | None = Field(
        default=None,
        description="The stores of all pods, bytes in sum.",
        examples=[{"path": "/var/lib/omnimodel-store"}],
    )
    per_device: list[DeviceEntry] = Field(
        default_factory=list,
        max_length=64,
        description="Each device of one machine that has several; in a cluster the pods have theirs.",
        examples=PER_DEVICE,
    )
    pods: list[PodEntry] = Field(
        default_factory=list,
        max_length=1000,
        description="One entry a pod of a cluster.",
        examples=[[{"pod": "default-0", "ready": True}]],
    )
