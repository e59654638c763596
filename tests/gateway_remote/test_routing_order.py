"""Which of two agents is asked first: one line a criterion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnimodel.gateway.order import Closeness, Load, Place, order
from omnimodel.protocol.dispatch import ModelCard
from omnimodel.protocol.ingress import Snapshot, changes, merged
from omnimodel.protocol.report import ModelReport, PoolReport, ProcessReport

KEY = "default/m"
NOTHING = Load(0, 0)


def agent(
    tier: str = "cold", *, ready: bool = True, free: int = 0, needs: int = 10, concurrency: int = 2, held: int = 0
) -> Snapshot:
    pool = PoolReport("p", "n", "cpu", 100, 0, 0, 0, free, 0, 0, 0, 0, "process", (), ready=True)
    report = ModelReport("default", "m", 1, tier, "idle", ready, weights_bytes=needs, waiting=held)
    card = ModelCard("m", "default", ("m",), "embeddings", tier, ready, concurrency=concurrency)
    return Snapshot(pool, {KEY: report}, {KEY: card})


def rank(snapshot: Snapshot, load: Load = NOTHING, closeness: Closeness = Closeness.ELSEWHERE, busy: int = 0):
    return order(snapshot, KEY, load, closeness, busy)


RESIDENT, WARM, ROOM, FULL = agent("resident"), agent("warm"), agent(free=10), agent(free=9)
NEAR, REGION = Closeness.SAME_ZONE, Closeness.SAME_REGION

BETTER = {
    "a free place beats a full one": (rank(RESIDENT), rank(RESIDENT, Load(2, 0), NEAR)),
    "a place that is free soon beats a warm process": (rank(RESIDENT, Load(1, 2)), rank(WARM, closeness=NEAR)),
    "a warm process beats a long queue that is as near": (rank(WARM), rank(RESIDENT, Load(4, 5))),
    "a warm process beats idle room": (rank(WARM), rank(ROOM, closeness=NEAR)),
    "idle room beats having to evict": (rank(ROOM), rank(FULL, closeness=NEAR)),
    "parked with room beats cold without": (rank(agent("parked", free=10)), rank(FULL, closeness=NEAR)),
    "a warm process with room beats one without": (rank(agent("warm", free=10)), rank(WARM, closeness=NEAR)),
    "on its way for one of us beats waking it elsewhere": (rank(FULL, Load(1, 0)), rank(WARM, closeness=NEAR)),
    "not if its places are all taken by then": (rank(WARM), rank(FULL, Load(2, 0))),
    "anything beats a model that failed there": (
        rank(FULL, Load(9, 9)),
        rank(agent("cold", ready=False), NOTHING, NEAR),
    ),
    "equal otherwise, the same zone": (rank(RESIDENT, Load(1, 0), NEAR, 9), rank(RESIDENT, NOTHING, REGION)),
    "equal otherwise, the same region": (rank(RESIDENT, Load(1, 0), REGION, 9), rank(RESIDENT)),
    "equally near, the less loaded": (rank(WARM, NOTHING, NEAR, 5), rank(WARM, Load(0, 1), NEAR)),
    "equally loaded for the model, the less loaded agent": (rank(WARM, busy=1), rank(WARM, busy=2)),
    "requests of other gateways count": (rank(RESIDENT, Load(0, 1)), rank(RESIDENT, Load(0, 2))),
}


@pytest.mark.parametrize("what", BETTER)
def test_the_better_agent_comes_first(what: str) -> None:
    better, worse = BETTER[what]
    assert better < worse


@pytest.mark.parametrize(
    ("here", "there", "closeness"),
    [
        (Place("eu", "eu-1"), Place("eu", "eu-1"), Closeness.SAME_ZONE),
        (Place("eu", "eu-1"), Place("eu", "eu-2"), Closeness.SAME_REGION),
        (Place("eu", "a"), Place("us", "a"), Closeness.ELSEWHERE),
        (Place(), Place(), Closeness.ELSEWHERE),
        (Place("eu", "eu-1"), Place(), Closeness.ELSEWHERE),
    ],
)
def test_closeness(here: Place, there: Place, closeness: Closeness) -> None:
    assert here.closeness(there) is closeness


# -- what an agent tells --


def with_process(snapshot: Snapshot) -> Snapshot:
    process = ProcessReport("i", 7, "ready", 1.0, 5, 0, "landlock", ("cgroups",))
    report = replace(snapshot.models[KEY], process=process, inputs=({"name": "x", "shape": [-1]},))
    return replace(snapshot, models={KEY: report})


def test_changes_lead_from_any_state_to_any_other() -> None:
    other = ModelCard("z/b", "z", ("b",), "infer", "cold", ready=False, reason="TooLarge", defaults={"b": {"n": 1}})
    states = [
        agent(),
        with_process(agent("resident")),
        replace(agent("warm"), draining=True),
        replace(agent(), cards={"z/b": other}, models={}),
        replace(agent(), cards={}, models={}),
    ]
    for before in (None, *states):
        for after in states:
            message = changes(before, after)
            assert merged(before, message) == after
            assert bool(message) == (before != after)


def test_a_newer_agent_may_say_more() -> None:
    message = changes(None, agent())
    message["new"] = 1
    message["cards"][KEY]["colour"] = "blue"
    message["models"][KEY]["mood"] = "good"
    message["pool"]["moon"] = "full"
    assert merged(None, message) == agent()


@pytest.mark.parametrize(
    "message",
    [{}, {"whole": True}, {"models": {}}, {"whole": True, "pool": 5}, {"whole": True, "pool": {"pool": "p"}}],
    ids=str,
)
def test_nonsense_is_no_report(message) -> None:
    with pytest.raises(ValueError):
        merged(None, message)
