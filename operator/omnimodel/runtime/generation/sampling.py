"""Per-request sampling as one logits processor of the library's continuous batching.

The library picks the largest score of each row. Rows that ask for nothing stay as they are, which makes them greedy
to the bit. Rows that are sampled become `probability / exponential noise`, whose largest value is a draw from the
probabilities (the exponential race). The noise depends on the request's seed and the token's position alone, not on
what else is in the batch, so that a seed means the same text in any company, and across a freeze.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

KEY = "sampling"  # of the request's keyword arguments in the library
_ODD = 0x9E3779B97F4A7C15  # spreads seeds over 64 bits; Source: Knuth's multiplicative hashing, golden ratio


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen.

    Args:
        temperature: 0 means the most likely token.
        top_p: share of the probability that is drawn from; 1 for all.
        top_k: how many tokens are drawn from; 0 for all.
        frequency_penalty, presence_penalty: taken off a token's score per time it was generated, and once.
        bias: added to scores, by token.
        seed: of the draws.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = field(default_factory=lambda: secrets.randbits(63))

    @property
    def plain(self) -> bool:
        """Whether the most likely token is taken and nothing changes the scores."""
        return not (self.temperature or self.frequency_penalty or self.presence_penalty or self.bias)


class Sampler(ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """See the module."""

    supported_kwargs: dict[str, type] = {KEY: Sampling}  # noqa: RUF012 the library's interface
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[tuple[Sampling, list[int]]] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Nothing goes through the library's tensor of arguments."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Sequence[Any]) -> torch.Tensor:
        """Note what the rows of the next step want."""
        self._rows = [
            (request.state.logit_processor_kwargs[KEY], _generated(request.state))
            for request in requests_with_new_token
        ]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 the interface
        """Replace the rows that are not greedy; `scores` has the shape (tokens, vocabulary)."""
        if all(sampling.plain for sampling, _ in self._rows):
            return scores
        scores = scores.clone()
        for row, (sampling, generated) in enumerate(self._rows):
            if not sampling.plain:
                scores[row] = chosen(scores[row], sampling, generated)
        return scores


def _generated(state: Any) -> list[int]:
    """Every token generated so far: the library moves them to the prompt when it recomputes a request."""
    moved: list[int] = state.initial_tokens[state._true_initial_tokens :] if state._true_initial_tokens else []  # noqa: SLF001
    tokens: list[int] = moved + state.generated_tokens
    return tokens


def chosen(scores: torch.Tensor, sampling: Sampling, generated: Sequence[int]) -> torch.Tensor:
    """Scores of one row, of which the largest is the token to take.

    Args:
        scores: logits, shape (vocabulary,).
        sampling: what the request asks for.
        generated: tokens of this request so far.
    """
    if generated and (sampling.frequency_penalty or sampling.presence_penalty):
        tokens, counts = torch.unique(torch.tensor(generated, device=scores.device), return_counts=True)
        scores[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for token, bias in sampling.bias.items():
        scores[token] += bias
    if not sampling.temperature:
        return scores
    scores = scores / sampling.temperature
    if sampling.top_k:
        lowest = scores.topk(min(sampling.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    probabilities = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        rest = before >= sampling.top_p
        rest[0] = False  # the most likely token stays, whatever top_p is
        probabilities[tokens[rest]] = 0
    source = torch.Generator().manual_seed((sampling.seed * _ODD + len(generated)) % (1 << 63))
    noise = torch.empty_like(probabilities, device="cpu").exponential_(generator=source)
    return probabilities / noise.to(scores.device)
