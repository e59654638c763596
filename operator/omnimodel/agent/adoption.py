"""After a kill of the agent: models go on with the processes that outlived it.

Once, before anything else holds a byte of the device: what the first catalogue wants unchanged is taken over with its
frames and its working memory, and all else is ended, and seen to be gone, before the device is opened.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnimodel.agent.preparation import Prepared
from omnimodel.agent.supply import Machine, Supply
from omnimodel.agent.survivors import Served, Survivor
from omnimodel.errors import LedgerError

if TYPE_CHECKING:
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.moves import Moves
    from omnimodel.agent.process import ModelProcess

log = logging.getLogger(__name__)

_END_SECONDS = 10.0


@dataclass(frozen=True)
class _Adopted:
    process: ModelProcess
    survivor: Survivor


class Adoption:
    """See the module.

    Args:
        survivors: processes of earlier agents, which are watched already.
    """

    def __init__(self, survivors: Sequence[tuple[ModelProcess, Survivor]]) -> None:
        self._waiting = [_Adopted(process, survivor) for process, survivor in survivors]
        self._chosen: dict[str, _Adopted] = {}

    @property
    def first_number(self) -> int:
        """From here on numbers of processes are free."""
        return 1 + max((int(it.process.instance.rpartition(".")[2]) for it in self._waiting), default=0)

    @property
    def device_bytes(self) -> int:
        """What the chosen ones hold on the device."""
        return sum(it.survivor.facts.served.device_bytes for it in self._chosen.values())

    def machine(self, now: Machine) -> Machine:
        """The machine as it would be without them."""
        held_bytes = sum(
            len(it.survivor.frames) * it.survivor.facts.served.frame_bytes + it.process.private_bytes()
            for it in self._waiting
        )
        return replace(now, available_bytes=min(now.total_bytes, now.available_bytes + held_bytes))

    async def choose(self, specs: Mapping[str, Mapping[str, Any]], found: Supply) -> None:
        """Choose whom the models of a catalogue go on with, and end the others.

        Args:
            specs: process specs by `namespace/name`.
            found: what the device will be opened with.
        """
        others, candidates = [], [*self._waiting, *self._chosen.values()]
        self._waiting, self._chosen = [], {}
        for it in sorted(candidates, key=lambda it: not it.survivor.facts.served.on_device):
            served = it.survivor.facts.served
            spec = specs.get(served.model)
            same = spec is not None and (spec["hash"], spec["deviceMemoryBytes"]) == (
                served.hash,
                served.declared_bytes,
            )
            fits = (served.device, served.frame_bytes) == (found.device, found.frame_bytes)
            if same and fits and served.model not in self._chosen and not it.process.exited.done():
                self._chosen[served.model] = it
            else:
                others.append(it)
        for it in others:
            log.info("not_wanted instance=%s", it.process.instance)
            it.process.kill()
        if others:
            await asyncio.wait([it.process.exited for it in others], timeout=_END_SECONDS)
            for descriptor in [descriptor for it in others for descriptor in it.survivor.frames.values()]:
                os.close(descriptor)

    def adopt(self, key: str, instance: Instance, moves: Moves) -> bool:
        """Let an instance go on with the process chosen for its model, if there is one."""
        it = self._chosen.pop(key, None)
        if it is None:
            return False
        served, memory = it.survivor.facts.served, moves.memory
        instance.prepared = Prepared(
            it.survivor.image,
            Path(served.source) if served.source else None,
            Path(served.environment) if served.environment else None,
            served.frame_bytes,
            served.device,
            served.threads,
        )
        instance.working_bytes, instance.coming_bytes = served.working_bytes, served.coming_bytes
        instance.measured = instance.verified = True
        instance.follow(it.process)
        try:
            if served.on_device:
                working = served.working_bytes
                instance.mapped = memory.frames.adopt(instance.name, served.digest, it.survivor.frames, working)
        except LedgerError as error:
            log.warning("not_adopted model=%s problem=%r", instance.name, error.problem)
            it.process.kill()
        moves.adopt(instance, served.since_seconds)
        return True


def served_by(instance: Instance) -> Served:
    """What the process of an instance serves, for the agent that may have to go on with it."""
    spec, prepared, mapped = instance.spec, instance.prepared, instance.mapped
    assert prepared is not None
    image = prepared.image
    return Served(
        model=f"{instance.namespace}/{instance.model}",
        hash=spec["hash"],
        declared_bytes=spec["deviceMemoryBytes"],
        image=str(image.path) if image else "",
        digest=image.digest if image else "",
        store=image.store if image else "",
        source=str(prepared.source or ""),
        environment=str(prepared.environment or ""),
        device=prepared.device,
        frame_bytes=prepared.frame_bytes,
        threads=prepared.threads,
        working_bytes=instance.working_bytes,
        coming_bytes=instance.coming_bytes,
        on_device=mapped is not None,
        frames=tuple((frame.id, os.fstat(frame.descriptor).st_ino) for frame in mapped or ()),
        since_seconds=instance.since_seconds,
    )
