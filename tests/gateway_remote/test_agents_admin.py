"""What the command line asks of a gateway, answered by agents that come, go and say much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from gateway.world import until
from gateway_remote.world import Cluster
from omnimodel.errors import DispatchError
from omnimodel.gateway import ingress_routes, routing
from omnimodel.gateway.remote_admin import AgentsAdmin
from omnimodel.protocol.admin import Event


class Told:
    """The events of an agent, as one keeps them: all so far, then what happens."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.followers = 0
        self._bell = asyncio.Event()

    def tell(self, message: str) -> None:
        self.events.append(Event(float(len(self.events)), "OmniModel", "default", "m", "Normal", "Woken", message))
        self._bell.set()
        self._bell = asyncio.Event()

    async def __call__(self, *, follow: bool) -> AsyncIterator[Event]:
        seen = 0
        self.followers += follow
        try:
            while True:
                bell = self._bell
                while seen < len(self.events):
                    seen += 1
                    yield self.events[seen - 1]
                if not follow:
                    return
                await bell.wait()
        finally:
            self.followers -= follow


@pytest.fixture
def told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """What happens on each agent."""
    found = [Told() for _ in cluster.pods]
    for pod, events in zip(cluster.pods, found, strict=True):
        monkeypatch.setattr(pod.system, "events", events)
    return found


@pytest.fixture
async def admin(cluster: Cluster) -> AgentsAdmin:
    cluster.add(tier="resident")
    await cluster.known()
    return AgentsAdmin(cluster.backend, lambda _: [])


async def test_events_of_an_agent_that_was_away_are_heard_again(
    cluster: Cluster, admin: AgentsAdmin, told: list[Told]
) -> None:
    told[0].tell("first")
    heard: list[str] = []

    async def listen() -> None:
        async with aclosing(admin.events(follow=True)) as events:
            async for event in events:
                heard.append(event.message)

    listening = asyncio.create_task(listen())
    await until(lambda: [one.followers for one in told] == [1, 1])
    told[1].tell("of the other")
    await cluster.pods[0].kill()
    await until(lambda: told[0].followers == 0)
    told[0].tell("while nobody heard")
    await cluster.pods[0].revive()
    await until(lambda: told[0].followers == 1)
    told[0].tell("last")
    await until(lambda: heard[-1:] == ["last"])
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert heard == ["first", "of the other", "while nobody heard", "last"]
    await until(lambda: [one.followers for one in told] == [0, 0])


async def test_a_line_may_be_longer_than_any_buffer(cluster: Cluster, admin: AgentsAdmin) -> None:
    """A progress bar that begins its line anew is one line for as long as it runs."""
    line = b"x" * (3 << 20) + b"\n"
    for pod in cluster.pods:
        pod.system.kinds["OmniModel"] = [{"metadata": {"name": "m"}}]
        pod.system.lines.put_nowait(line)
    came = b""
    async with aclosing(admin.logs("default", "m", tail=0, follow=True)) as chunks:
        async for chunk in chunks:
            came += chunk
            if len(came) == len(line):
                break
    assert came == line


async def test_an_event_longer_than_any_buffer_is_heard(admin: AgentsAdmin, told: list[Told]) -> None:
    told[0].tell("x" * (3 << 20))
    assert [len(event.message) async for event in admin.events(follow=False)] == [3 << 20]


async def test_a_model_that_nobody_has_is_not_found(admin: AgentsAdmin) -> None:
    with pytest.raises(DispatchError, match="there is no such model"):
        await admin.wake("default", "nothing", 1.0)


async def test_a_change_in_the_moment_of_a_report_is_told_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes between looking and waiting must not wait for the next sign of life."""
    monkeypatch.setattr(ingress_routes, "HEARTBEAT_SECONDS", 3600.0)
    pod = cluster.pods[0]
    report, changed = pod.reporter.report, iter([lambda: pod.add("late")])

    def looked():
        found = report()
        next(changed, lambda: None)()
        return found

    pod.reporter.report = looked
    pod.add("m")
    await until(lambda: cluster.backend._by_model.get("default/late"))


async def test_a_draining_agent_is_asked_less_and_less(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seat = cluster.backend.seats[cluster.pods[0].address.url]
    cluster.pods[0].add("m")
    await cluster.known(pods=1)
    pauses: list[int] = []

    last = len(routing.RETRY_SECONDS) - 1

    class Pauses:
        def __len__(self):
            return last + 1

        def __getitem__(self, index):
            pauses.append(index)
            return 0.001

    monkeypatch.setattr(routing, "RETRY_SECONDS", Pauses())
    cluster.pods[0].gateway.closing.set()
    await until(lambda: pauses[-1:] == [last])
    assert not seat.there
    assert pauses[: last + 1] == list(range(last + 1))
