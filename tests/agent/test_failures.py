"""When a model that failed is tried again, and from when on it counts as one that works."""

from __future__ import annotations

import pytest

from omnimodel.agent import failures
from omnimodel.agent.failures import BACKOFF_SECONDS, HEALTHY_SECONDS, Failures
from omnimodel.errors import DispatchError, OmniError, Reason
from omnimodel.protocol.dispatch import InferenceRequest

DIED = OmniError("OmniModel default/m", "its process ended (exit status 7)", reason=Reason.CRASHED)


def test_the_first_death_of_one_that_has_worked_is_an_accident() -> None:
    found = Failures()
    assert found.note(DIED, 0.0, verified=True) == 0.0
    assert not found.repeated
    assert not found.waiting(0.0)


def test_one_that_has_worked_is_tried_ever_more_rarely_when_it_dies_again() -> None:
    found, now = Failures(), 1000.0
    found.note(DIED, now, verified=True)
    for wait_seconds in (*BACKOFF_SECONDS, BACKOFF_SECONDS[-1]):
        now += 1.0
        assert found.note(DIED, now, verified=True) == wait_seconds
        assert found.waiting(now)
        assert not found.waiting(now + wait_seconds)


def test_one_that_never_worked_waits_at_once_and_longer_each_time() -> None:
    found, now, waits = Failures(), 0.0, []
    for _ in range(6):
        waits.append(found.note(DIED, now, verified=False))
        now += waits[-1] + 1.0
    assert waits == [*BACKOFF_SECONDS, BACKOFF_SECONDS[-1], BACKOFF_SECONDS[-1]], "a long wait is no health"


def test_one_that_dies_at_every_request_is_repeated_until_it_answers() -> None:
    found = Failures()
    found.note(DIED, 0.0, verified=True)
    assert found.note(DIED, 10 * HEALTHY_SECONDS, verified=True) == BACKOFF_SECONDS[0], "though it was asked seldom"
    after = 20 * HEALTHY_SECONDS
    assert found.repeated
    assert not found.waiting(after), "the next request is let in"
    found.recovered()
    assert not found.repeated
    assert found.note(DIED, after, verified=True) == 0.0, "it was healthy for long: an accident again"


def test_an_answer_between_two_deaths_does_not_shorten_the_wait() -> None:
    found, waits = Failures(), []
    for number in range(4):
        waits.append(found.note(DIED, float(number), verified=True))
        found.recovered()
    assert waits == [0.0, *BACKOFF_SECONDS[:3]]


@pytest.mark.root
@pytest.mark.asyncio(loop_scope="session")
async def test_a_model_that_dies_at_every_request_is_not_ready_until_it_answers(world, monkeypatch) -> None:
    """kserve#1859, kaito#1493: Ready again whenever a pause was over, and every request died."""
    monkeypatch.setattr(failures, "BACKOFF_SECONDS", (0.3, 0.3, 0.3, 0.3))
    await world.apply(world.manifest("m1", seed=1))
    instance = world.instance("m1")

    def card():
        return next(card for card in world.agent.models() if card.name == "m1")

    async def dies() -> None:
        with pytest.raises(DispatchError, match="exit status 7") as caught:
            await world.ask("m1", "exit:7")
        assert caught.value.status == 502, "it was let in"
        await world.until(lambda: instance.process is None, "its end is seen")

    await dies()
    assert world.report("m1").ready, "an accident"
    for _ in range(2):
        await dies()
        assert not card().ready, "requests are refused for a moment"
        await world.until(lambda: card().ready, "gateways send it requests again")
        report = world.report("m1")
        assert (report.ready, report.reason) == (False, Reason.CRASHED)
        assert "exit status 7" in report.message
    async with world.agent.open(InferenceRequest("m1", "GET", "/v2/nothing/there", {}, b"")) as response:
        assert response.status == 404
    assert not world.report("m1").ready, "that it refuses a request proves nothing"
    assert await world.ask("m1") == pytest.approx(world.answer(8, 1))
    assert world.report("m1").ready
    assert (world.report("m1").reason, card().reason) == ("", "")
