"""Several agents as one `Backend`: their cards merged, and each request sent to the agent that answers it soonest.

`Seat` is what is known of one agent; a task for each follows its report. A seat is out of the table from the first
failure on, of a request or of the report, and is back with the next report. What an agent has not given to its model
goes to another one when it fails; when there is none, the request is held here until its deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import aiohttp

from omnimodel.errors import DispatchError, Reason
from omnimodel.gateway.order import Closeness, Place, Residency, order, residency_of
from omnimodel.gateway.remote import NotSentError, model_key
from omnimodel.gateway.routing_measures import RoutingMeasures
from omnimodel.gateway.seats import Address, Seat
from omnimodel.protocol.dispatch import Estimate, InferenceRequest, InferenceResponse, ModelCard
from omnimodel.protocol.ingress import Snapshot

log = logging.getLogger(__name__)

RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)  # between two tries to reach an agent
HOLD_SECONDS = 120.0  # of a request without a deadline, for a model that no agent has at the moment
HELD_REQUESTS = 1000  # of one model, while no agent has it
ABSENT_SECONDS = 60.0  # so long a model is waited for whose only agents do not answer
LOOK_SECONDS = 0.2  # between two looks at the table while a request is held
REFUSED_ROUNDS = 10  # an agent that says of a model in its own list that there is none is believed after so many
# Reasons that another agent may be free of. A deadline that has passed is not among them.
_ELSEWHERE = frozenset(Reason) - {Reason.DEADLINE_EXCEEDED, Reason.SUSPENDED, Reason.INVALID_MANIFEST}
_GONE = frozenset({Reason.DRAINING, Reason.MODEL_NOT_FOUND})  # the agent will not have the model soon
_TIERS = {"resident": 0, "warm": 1, "parked": 2, "cold": 3}


class RoutingBackend:
    """See the module (`protocol.dispatch.Backend`).

    Args:
        here: where this gateway is.
        measures: where decisions are counted.
        known: cards of models by `namespace/name`, for the time that no agent has them: with a reason when none will,
            and ready when a request may wait for one. None in place of a card when a model is known to be deleted.
    """

    def __init__(
        self,
        *,
        here: Place | None = None,
        measures: RoutingMeasures | None = None,
        known: Callable[[], Mapping[str, ModelCard | None]] = dict,
    ) -> None:
        self.here = here or Place()
        self.measures = measures or RoutingMeasures()
        self.seats: dict[str, Seat] = {}
        self._known = known
        self._by_model: dict[str, list[Seat]] = {}
        self._cards: list[ModelCard] | None = None
        self._held: dict[str, int] = {}
        self._news = asyncio.Event()
        self._retiring: set[asyncio.Task[None]] = set()
        self.measures.seats, self.measures.held = self.seats, self._held

    # The table

    def set_agents(self, addresses: Iterable[Address]) -> None:
        """Make these the agents there are. One that is gone ends its answers but gets nothing more."""
        wanted = {address.url: address for address in addresses}
        for url in [url for url, seat in self.seats.items() if wanted.get(url) != seat.address]:
            self._dismiss(self.seats.pop(url))
        for url, address in wanted.items():
            if url in self.seats:
                self._hand(self.seats[url], address.tokens)
            else:
                self.seats[url] = seat = Seat(address, self.here.closeness(address.place))
                seat.task = asyncio.create_task(self._follow(seat), name=f"follow {seat.agent.name}")
        self.changed()

    @staticmethod
    def _hand(seat: Seat, tokens: Sequence[str]) -> None:
        """Let a gateway use other tokens at an agent; one that is out of the table is tried again at once."""
        if seat.agent.tokens != tokens:
            seat.agent.tokens = tokens
            if not seat.there:
                seat.again.set()

    def _dismiss(self, seat: Seat) -> None:
        log.info("agent_gone agent=%s", seat.agent.name)
        if seat.task is not None:
            seat.task.cancel()
        self._out(seat, "its pod is gone")
        self.measures.forget(seat.label)
        task = asyncio.create_task(self._retire(seat), name=f"retire {seat.agent.name}")
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    @staticmethod
    async def _retire(seat: Seat) -> None:
        """Close its connections once nobody uses them."""
        await seat.idle.wait()
        await seat.agent.close()

    async def close(self) -> None:
        """Let go of every agent."""
        seats = list(self.seats.values())
        self.set_agents(())
        for task in self._retiring:
            task.cancel()
        following = [seat.task for seat in seats if seat.task]
        await asyncio.gather(*following, *self._retiring, return_exceptions=True)
        await asyncio.gather(*(seat.agent.close() for seat in seats))

    async def _follow(self, seat: Seat) -> None:
        failures = 0
        while True:
            seat.again.clear()
            try:
                async for snapshot in seat.agent.follow():
                    if not snapshot.draining:  # it says only that, and ends, however often it is asked
                        failures = 0
                    self._told(seat, snapshot)
                    if seat.again.is_set():
                        break
                problem = "it has ended its report"
            except PermissionError as error:
                problem = str(error)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                problem = f"it does not answer ({type(error).__name__}: {error})"
            self._out(seat, problem)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]):
                    await seat.again.wait()
            failures += 1

    def _told(self, seat: Seat, snapshot: Snapshot) -> None:
        """Take over what an agent knows."""
        if snapshot is seat.snapshot:  # a sign of life
            return
        seat.told = dict(seat.open)
        if snapshot.draining:
            self._out(seat, "it is stopping")
            return
        before, seat.snapshot = seat.snapshot, snapshot
        if before is None:
            log.info("agent_there agent=%s models=%d", seat.agent.name, len(snapshot.cards))
        self.changed(table=before is None or before.cards.keys() != snapshot.cards.keys())

    def _out(self, seat: Seat, problem: str) -> None:
        """Take an agent out of the table: its requests that no model has taken go elsewhere."""
        if seat.snapshot is not None:
            log.warning("agent_lost agent=%s problem=%r", seat.agent.name, problem)
            seat.last, seat.left_seconds = seat.snapshot, time.monotonic()
        seat.problem = problem
        seat.snapshot = None
        seat.agent.lose()
        self.changed()

    def changed(self, *, table: bool = True) -> None:
        """Something is new: of an agent, or of the models that are known without one."""
        if table:
            self._by_model = {}
            for seat in self.seats.values():
                for key in seat.snapshot.cards if seat.snapshot else ():
                    self._by_model.setdefault(key, []).append(seat)
        self._cards = None
        self._news.set()
        self._news = asyncio.Event()

    async def wait_changed(self) -> None:
        """Return after the next change of the table."""
        await self._news.wait()

    # Backend

    def models(self) -> Sequence[ModelCard]:
        """Every model of every agent, in the order of their names; made anew only after a change."""
        if self._cards is None:
            known = self._known()
            last = {key: card for seat in self.seats.values() if seat.last for key, card in seat.last.cards.items()}
            found: dict[str, ModelCard | None] = dict(last)
            for key, card in known.items():
                found[key] = _remembered(card, last[key]) if card and key in last else card
            for key, seats in self._by_model.items():
                cards = [seat.snapshot.cards[key] for seat in seats if seat.snapshot]
                if cards and known.get(key, cards) is not None:  # a deleted model may yet be with its agent
                    found[key] = _merged(cards)
            self._cards = sorted((card for card in found.values() if card), key=lambda card: card.name)
        return self._cards

    def estimate(self, model: str) -> Estimate:
        """What a request that came now could expect."""
        key = model_key(model)
        seat = self.choose(key)
        if seat is None:
            return Estimate(self._held.get(key, 0) + 1, 0.0)
        estimate = seat.agent.estimate(model)
        return replace(estimate, position=max(1, estimate.position, seat.open.get(key, 0)))

    @asynccontextmanager
    async def open(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        """See `Backend.open`: on the best agent, and on others as long as nothing of it was sent."""
        key = model_key(request.model)
        began = time.monotonic()
        tried: set[Seat] = set()
        refusal: NotSentError | None = None
        rounds = 0
        self._check_there(key)
        while True:
            seat = self.choose(key, tried)
            if seat is None:
                rounds += 1
                if refusal is not None and (refusal.reason not in _GONE or rounds > REFUSED_ROUNDS):
                    raise refusal
                await self._seat_for(key, request, began, again=bool(tried))
                tried.clear()
                continue
            left = _left(request, began) if rounds or tried else request
            seat.enter(key)
            try:
                self._count(seat, key)
                exchange = AsyncExitStack()
                try:
                    response = await exchange.enter_async_context(seat.agent.open(left))
                except NotSentError as error:
                    self._not_sent(seat, key, error)
                    if error.reason not in _ELSEWHERE:
                        raise
                    tried.add(seat)
                    refusal = error if refusal is None or not error.lost else refusal
                    continue
                async with exchange:
                    yield response if refusal is None else _waited(response, time.monotonic() - began)
                return
            finally:
                seat.leave(key)

    def choose(self, key: str, without: Iterable[Seat] = ()) -> Seat | None:
        """The agent for the next request of a model; None when there is none."""
        seats = [seat for seat in self._by_model.get(key, ()) if seat.snapshot is not None and seat not in without]
        if len(seats) > 1:
            return min(seats, key=lambda seat: _order(seat, key))
        return seats[0] if seats else None

    def _count(self, seat: Seat, key: str) -> None:
        assert seat.snapshot is not None
        standing = residency_of(
            seat.snapshot, seat.snapshot.cards[key], seat.snapshot.models.get(key), seat.load(key, entered=1)
        )
        self.measures.routed.labels(seat.label, standing.name.lower()).inc()

    def _not_sent(self, seat: Seat, key: str, error: NotSentError) -> None:
        log.info("not_sent agent=%s model=%s reason=%s", seat.agent.name, key, error.reason)
        self.measures.retries.labels("Lost" if error.lost else str(error.reason)).inc()
        if error.lost:
            self._out(seat, error.problem)
            seat.again.set()
        elif error.reason is Reason.DRAINING:
            self._out(seat, "it is stopping")

    # Held here

    async def _seat_for(self, key: str, request: InferenceRequest, began: float, *, again: bool) -> None:
        """Hold a request until an agent has its model.

        Args:
            key: of the model.
            request: what is held.
            began: when it came, monotonic.
            again: agents have refused it; look at the table only after it may have changed.

        Raises:
            DispatchError: its deadline is over, the model will have no agent, or too many wait.
        """
        allowed = request.deadline_seconds or HOLD_SECONDS
        if self._held.get(key, 0) >= HELD_REQUESTS:
            raise _refused(key, f"{HELD_REQUESTS} requests wait for it already", Reason.QUEUE_FULL, 429)
        self._held[key] = self._held.get(key, 0) + 1
        try:
            while again or self.choose(key) is None:
                again = False
                self._check_there(key)
                self._check_awaited(key)
                left = began + allowed - time.monotonic()
                if left <= 0:
                    raise _refused(
                        key,
                        f"the request was held for {allowed:g} s, its deadline, and no agent had the model",
                        Reason.DEADLINE_EXCEEDED,
                        504,
                    )
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, LOOK_SECONDS)):
                        await self.wait_changed()
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def _check_there(self, key: str) -> None:
        """Refuse a model that is deleted, though an agent may still have it.

        Raises:
            DispatchError: it is.
        """
        known = self._known()
        if key in known and known[key] is None:
            raise _refused(key, "there is no such model", Reason.MODEL_NOT_FOUND, 404)

    def _check_awaited(self, key: str) -> None:
        """Refuse a model that no agent has and none will.

        Raises:
            DispatchError: with the reason.
        """
        card = self._known().get(key)
        if card is not None and not card.ready:
            reason = Reason(card.reason) if card.reason in set(Reason) else Reason.INTERNAL
            raise _refused(key, card.message or "it is not ready", reason, 503)
        if card is not None or key in self._by_model:
            return
        absent = [seat for seat in self.seats.values() if seat.last and key in seat.last.cards]
        if not absent:
            raise _refused(key, "there is no such model", Reason.MODEL_NOT_FOUND, 404)
        if min(time.monotonic() - seat.left_seconds for seat in absent) > ABSENT_SECONDS:
            names = ", ".join(seat.agent.name for seat in absent)
            raise _refused(key, f"its agent does not answer: {names}, {absent[0].problem}", Reason.CRASHED, 503)


def _order(seat: Seat, key: str) -> tuple[Residency, bool, Closeness, int, int]:
    assert seat.snapshot is not None
    return order(seat.snapshot, key, seat.load(key), seat.closeness, seat.open_total)


def _left(request: InferenceRequest, began: float) -> InferenceRequest:
    """A request with what is left of its deadline; never nothing, so that it is the agent who says that it is over."""
    if request.deadline_seconds is None:
        return request
    return replace(request, deadline_seconds=max(0.001, request.deadline_seconds - (time.monotonic() - began)))


def _waited(response: InferenceResponse, in_all_seconds: float) -> InferenceResponse:
    """The response of a request that was held elsewhere before."""
    reason = "queue" if response.hold.reason == "none" else response.hold.reason
    return replace(response, hold=replace(response.hold, waited_seconds=in_all_seconds, reason=reason))


def _merged(cards: Sequence[ModelCard]) -> ModelCard:
    """One card of a model that several agents have: that of the agent where it stands best."""
    return min(cards, key=lambda card: (not card.ready, _TIERS.get(card.tier, 3)))


def _remembered(known: ModelCard, last: ModelCard) -> ModelCard:
    """The card of a model that no agent has at the moment, with what only its agent could tell."""
    return replace(
        known,
        inputs=known.inputs or last.inputs,
        outputs=known.outputs or last.outputs,
        created_seconds=known.created_seconds or last.created_seconds,
    )


def _refused(key: str, problem: str, reason: Reason, status: int) -> DispatchError:
    return DispatchError(
        f"OmniModel {key}", problem, reason=reason, status=status, retry_after_seconds=None if status == 404 else 5
    )
