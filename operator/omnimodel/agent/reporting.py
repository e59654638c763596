"""What the agent tells of an instance: controllers and gateways see models by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from omnimodel.agent.instance import Instance, State
from omnimodel.memory.ledger import Kind
from omnimodel.protocol.report import DeviceReport, ModelReport, ProcessReport

if TYPE_CHECKING:
    from omnimodel.agent.moves import DeviceMemory, Moves

MOST_TENSORS = 256  # of one model; each has a name of at most so many characters, and so many dimensions


def tensors(instance: Instance, which: str) -> tuple[dict[str, Any], ...]:
    """The `inputs` or `outputs` that the image of an instance describes."""
    image = instance.prepared.image if instance.prepared else None
    return _tensors_of(image.index.metadata.get(which)) if image else ()


def _tensors_of(described: object) -> tuple[dict[str, Any], ...]:
    """Tensors as an image describes them. A stranger's code wrote it: what is no such list counts as none."""
    if not isinstance(described, list) or len(described) > MOST_TENSORS:
        return ()
    found = []
    for tensor in described:
        if not isinstance(tensor, dict):
            return ()
        name, datatype, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
        if not isinstance(name, str) or not isinstance(datatype, str) or not isinstance(shape, list):
            return ()
        if max(len(name), len(datatype), len(shape)) > MOST_TENSORS or any(type(size) is not int for size in shape):
            return ()
        found.append({"name": name, "datatype": datatype, "shape": list(shape)})
    return tuple(found)


def device_report(moves: Moves) -> DeviceReport:
    """What is held of one device; nothing counts that is lost."""
    name = moves.memory.device.name
    if moves.lost is not None:
        return DeviceReport(name, problem=moves.lost.advice)
    account = moves.memory.ledger.device.snapshot()
    return DeviceReport(
        name=name,
        budget_bytes=account.capacity_bytes,
        resident_bytes=account.total_bytes(Kind.FRAMES),
        promised_bytes=account.total_bytes(Kind.PROMISE),
        working_bytes=account.total_bytes(Kind.WORKING),
        context_bytes=account.total_bytes(Kind.CONTEXT),
        free_bytes=account.free_bytes,
        power_watts=moves.contexts.watts or 0.0,
        energy_joules=moves.contexts.joules or 0.0,
    )


def instance_report(instance: Instance, memories: Sequence[DeviceMemory]) -> ModelReport:
    """An instance that has been brought up, now; the caller says whether the model is ready.

    Args:
        memories: of its devices.
    """
    held = [memory.ledger.held_by(instance.name) for memory in memories]  # of one host
    return ModelReport(
        namespace=instance.namespace,
        name=instance.model,
        generation=instance.generation,
        tier=instance.tier,
        phase=_phase(instance),
        ready=False,
        message=instance.message,
        weights_bytes=instance.prepared.image_bytes if instance.prepared else 0,
        working_bytes=instance.working_bytes * instance.spread.count if instance.measured else 0,
        idle_bytes=instance.history.idle_bytes,
        device_bytes=sum(device_bytes for device_bytes, _ in held),
        host_bytes=held[0][1],
        waiting=sum(not waiter.system for waiter in instance.line.waiting),
        in_flight=instance.line.in_flight - instance.line.system_in_flight,
        served=instance.line.served,
        failed=instance.line.failed,
        prompt_tokens=instance.line.tokens.prompt,
        generated_tokens=instance.line.tokens.generated,
        wakes=instance.history.wakes,
        evictions=instance.history.evictions,
        swaps=dict(sorted(instance.history.causes.items())),
        last_wake_seconds=instance.history.last_wake_seconds,
        wake_seconds=instance.history.wake_seconds,
        last_wake_bytes_per_second=instance.history.last_wake_bytes_per_second,
        last_request_seconds=instance.history.last_request_seconds,
        since_seconds=instance.since_seconds,
        store=instance.prepared.image.store if instance.prepared and instance.prepared.image else "",
        device=str(instance.spread),
        inputs=tensors(instance, "inputs"),
        outputs=tensors(instance, "outputs"),
        process=_process(instance),
    )


def _phase(instance: Instance) -> str:
    moving = {State.WAKING: "waking", State.EVICTING: "evicting", State.STARTING: "starting"}
    if instance.state in moving:
        return moving[instance.state]
    if instance.draining:
        return "draining"
    return "serving" if instance.line.busy else "idle"


def _process(instance: Instance) -> ProcessReport | None:
    process = instance.process
    if process is None:
        return None
    return ProcessReport(
        instance=process.instance,
        pid=process.pid,
        state="draining" if instance.draining else "ready",
        started_seconds=process.started_seconds,
        private_bytes=instance.private_bytes,
        restarts=instance.history.restarts,
        isolation_level=str(process.reached.level),
        isolation_missing=process.reached.missing,
        cgroup=",".join(process.group.paths),
    )
