"""Leader election by a Lease: compare-and-swap of its holder.

Clocks of machines are not compared: a lease has run out when its holder has not renewed it for as long as it says,
by the watch of the one who waits. The holder gives up earlier, by its own watch, so that there are never two.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from omnimodel.kube.client import Kube
from omnimodel.kube.error import KubeError
from omnimodel.kube.kinds import LEASES

log = logging.getLogger(__name__)


def micro_time() -> str:
    """Now, as a Lease writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Election:
    """Takes a lease as soon as it is free, and renews it.

    Args:
        kube: the connection.
        namespace, name: of the Lease.
        identity: who asks; no two may have the same.
        lease_seconds: after so long without a renewal others may take it.
        renew_seconds: the holder leads on for so long without having been able to renew; less than `lease_seconds`.
        retry_seconds: between renewals, and between looks at a lease that someone else holds.
        clock: monotonic.

    `problem` is why the lease could not be asked for or renewed the last time; empty when it could.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        *,
        lease_seconds: float = 20.0,
        renew_seconds: float = 12.0,
        retry_seconds: float = 4.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._lease_seconds = lease_seconds
        self._renew_seconds = renew_seconds
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._renewed = 0.0
        self._elected = asyncio.Event()
        self._seen: tuple[object, float] = (None, 0.0)  # holder and renewal as last seen, and since when
        self.holder = ""
        self.problem = ""

    @property
    def leads(self) -> bool:
        """Whether this one may write at this moment."""
        return self._elected.is_set() and self._clock() - self._renewed < self._renew_seconds

    async def wait_elected(self) -> None:
        """Wait for the lease."""
        await self._elected.wait()

    async def run(self) -> None:
        """Take part. Returns only when a lease that was held is lost: then nothing may be written any more."""
        while True:
            began = self._clock()
            try:
                async with asyncio.timeout(max(1.0, self._renew_seconds - self._retry_seconds)):
                    held = await self._try()
            except (KubeError, TimeoutError) as error:
                self.problem = str(error) or "the API server did not answer in time"
                log.warning("lease not reached name=%s error=%s", self._name, self.problem)
                held = False
                if self._elected.is_set() and began - self._renewed < self._renew_seconds - self._retry_seconds:
                    held = True  # there is still time to try again
            else:
                self.problem = ""
                if held:
                    self._renewed = began
            if held and not self._elected.is_set():
                log.info("elected name=%s identity=%s", self._name, self._identity)
                self._elected.set()
            if not held and self._elected.is_set():
                log.error("lease lost name=%s holder=%s", self._name, self.holder)
                return
            await asyncio.sleep(self._retry_seconds * random.uniform(0.8, 1.2))  # noqa: S311 - spreads, hides nothing

    async def _try(self) -> bool:
        """Take or renew the lease; whether it is held now."""
        lease = await self._kube.get(LEASES, self._name, self._namespace)
        try:
            if lease is None:
                metadata = {"name": self._name, "namespace": self._namespace}
                self._note(await self._kube.create(LEASES, {"metadata": metadata, "spec": self._spec({})}))
                return True
            self._note(lease)
            spec = lease.get("spec") or {}
            if self.holder not in {"", self._identity} and not self._run_out(spec):
                return False
            self._note(await self._kube.replace(LEASES, {**lease, "spec": self._spec(spec)}))
        except KubeError as error:
            if error.conflict:  # someone else was quicker
                return False
            raise
        return True

    def _note(self, lease: dict[str, Any]) -> None:
        spec = lease.get("spec") or {}
        self.holder = spec.get("holderIdentity") or ""
        state = (self.holder, spec.get("renewTime"))
        if state != self._seen[0]:
            self._seen = (state, self._clock())

    def _run_out(self, spec: dict[str, Any]) -> bool:
        seconds = float(spec.get("leaseDurationSeconds") or self._lease_seconds)
        return self._clock() - self._seen[1] > seconds

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now = micro_time()
        same = before.get("holderIdentity") == self._identity
        transitions = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._lease_seconds),
            "acquireTime": before.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": transitions if same else transitions + bool(before),
        }

    async def resign(self) -> None:
        """Give the lease back, so that another need not wait until it has run out."""
        self._elected.clear()
        try:
            lease = await self._kube.get(LEASES, self._name, self._namespace)
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                await self._kube.replace(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": ""}})
        except KubeError as error:
            log.warning("lease not given back name=%s error=%s", self._name, error)
