"""Host memory for who needs it: images leave the arena, then the warm processes go that are missed least."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from omnimodel.agent.instance import State
from omnimodel.memory.ledger import Kind

if TYPE_CHECKING:
    from omnimodel.agent.broker import Broker


def relieve_host(brokers: Iterable[Broker], short_bytes: int, worth: Callable[[str], float]) -> bool:
    """Give up images of the arena, then warm processes, since host memory is short.

    Args:
        brokers: of all devices; they share the host's account and the arena.
        short_bytes: how much is wanted.
        worth: of an image by its digest, to any model.

    Returns:
        Whether any bytes are free now that were not, or will be in a moment.
    """
    all_of_them = list(brokers)
    here = {name: (broker, it) for broker in all_of_them for name, it in broker.instances.items()}.values()
    memory = all_of_them[0].memory
    host = memory.ledger.host
    going = (i for b, i in here if i.name in b.moves and (i.going is State.COLD or i.state is State.STOPPING))
    coming_bytes = sum(host.held_bytes(instance.name, Kind.PROCESS) for instance in going)
    if coming_bytes < short_bytes:
        coming_bytes += memory.arena.give_up(short_bytes - coming_bytes, worth)
    warm = [
        (broker, instance)
        for broker, instance in here
        if instance.state in {State.WARM, State.PARKED} and not instance.line.busy and instance.name not in broker.moves
    ]
    for broker, instance in sorted(warm, key=lambda it: (it[1].residency.priority, it[1].line.last_arrival_seconds)):
        if coming_bytes >= short_bytes:
            break
        broker.moves.step_off(instance, "host memory is short", "host", stop=True)
        coming_bytes += host.held_bytes(instance.name, Kind.PROCESS)
    return coming_bytes > 0
