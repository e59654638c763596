"""The agent as the gateway sees it, plus the models that have no process: a request for one is told why.

Without this a suspended model, or one larger than the whole budget, would be unknown (404), and a client could not
tell a misspelt name from a model that waits for a person.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from omnimodel.api import OmniModel
from omnimodel.controllers.conditions import Refusal
from omnimodel.controllers.decisions import unix_seconds
from omnimodel.errors import DispatchError, Reason
from omnimodel.protocol.dispatch import Backend, Estimate, InferenceRequest, InferenceResponse, ModelCard, card_name
from omnimodel.render import model_card


@dataclass(frozen=True)
class RefusedModel:
    """A model without a process: why, and the names it was granted."""

    model: OmniModel
    refusal: Refusal
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of its card."""
        return card_name(self.model.metadata.namespace, self.model.metadata.name)

    def error(self, status: int) -> DispatchError:
        """The answer to whoever wants its process.

        Args:
            status: of HTTP.
        """
        refusal = self.refusal
        reason = Reason(refusal.reason) if refusal.reason in set(Reason) else Reason.INTERNAL
        return DispatchError(self.model.subject, refusal.problem, refusal.advice, reason=reason, status=status)


class LocalBackend:
    """See the module (`protocol.dispatch.Backend`).

    Args:
        agent: answers for the models that have a process.
        refused: the others, as they are now.
    """

    def __init__(self, agent: Backend, refused: Callable[[], Sequence[RefusedModel]]) -> None:
        self._agent = agent
        self._refused = refused

    def models(self) -> Sequence[ModelCard]:
        """Every model of the catalogue, in the order of their names."""
        cards = {card.name: card for card in self._agent.models()}
        for refused in self._refused():
            cards.setdefault(refused.name, _card(refused))
        return [cards[name] for name in sorted(cards)]

    @asynccontextmanager
    async def open(self, request: InferenceRequest) -> AsyncIterator[InferenceResponse]:
        """Pass a request on, or refuse it with the reason its model has no process."""
        found = self._find(request.model)
        if found is not None:
            raise found.error(503)
        async with self._agent.open(request) as response:
            yield response

    def estimate(self, model: str) -> Estimate:
        """What a request that came now could expect."""
        if self._find(model) is not None:
            return Estimate(position=1, seconds=0.0)
        return self._agent.estimate(model)

    def _find(self, name: str) -> RefusedModel | None:
        if any(card.name == name for card in self._agent.models()):
            return None  # an older generation of it may still serve
        return next((refused for refused in self._refused() if refused.name == name), None)


def _card(refused: RefusedModel) -> ModelCard:
    refusal, created = refused.refusal, unix_seconds(refused.model.metadata.creation_timestamp)
    card = model_card(refused.model, refused.names)
    return replace(card, reason=refusal.reason, message=refusal.message, created_seconds=int(created))
