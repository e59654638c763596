"""What one machine and a cluster decide alike: how much a model asks for, and what its process is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from omnimodel.api import OmniModel, OmniPool, OmniProcess, priority_number
from omnimodel.controllers.conditions import Refusal
from omnimodel.errors import OmniError, Reason
from omnimodel.placement.assignment import ModelDemand
from omnimodel.quantity import AUTO, parse_bytes
from omnimodel.render import Config, render_process


def demand_of(model: OmniModel, measured_bytes: int) -> ModelDemand:
    """What a model asks of placement.

    Args:
        model: checked.
        measured_bytes: its footprint as measured; 0 while unknown. The manifest's word wins over it.
    """
    spec = model.spec
    asked = spec.resources.device_memory
    return ModelDemand(
        namespace=model.metadata.namespace,
        name=model.metadata.name,
        pool=spec.pool,
        footprint_bytes=(0 if asked == AUTO else parse_bytes(asked)) or measured_bytes,
        served_names=model.names,
        created_seconds=unix_seconds(model.metadata.creation_timestamp),
        keep_resident=spec.residency.keep_resident,
        priority=priority_number(spec.residency.priority),
        suspended=spec.suspend,
        together=tuple(spec.affinity.together),
        apart=tuple(spec.affinity.apart),
    )


def unix_seconds(timestamp: str) -> float:
    """Unix time of an RFC 3339 timestamp; 0 for an empty one."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def rendered(
    model: OmniModel,
    pool: OmniPool,
    config: Config,
    names: Sequence[str],
    notes: Sequence[tuple[str, str]],
    taken: Collection[int] = (),
) -> OmniProcess | Refusal:
    """The process of a model, or why it has none.

    Args:
        model, pool: checked.
        config: config maps and secrets of the model's namespace.
        names: it was granted.
        notes: (reason, sentence) about it, among them the names that it lost.
        taken: user ids of other models on the same machines.
    """
    if not names:
        lost = "; ".join(message for reason, message in notes if reason == Reason.NAME_TAKEN)
        return Refusal(Reason.NAME_TAKEN, f"it has no name left to be served by: {lost}", "")
    try:
        return render_process(model, pool, config=config, served_names=names, taken=taken)
    except OmniError as error:
        return Refusal(error.reason, error.problem, error.cure or None)
