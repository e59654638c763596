"""How many tokens a process has computed. What was computed and never sent counts, too: it took the same energy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Computed:
    """Tokens since the process began: of prompts, and generated. One thread writes, any may read."""

    prompt: int = 0
    generated: int = 0


class Count:
    """Of one request.

    Args:
        total: of all requests; what is new of this one is added to it.
    """

    def __init__(self, total: Computed) -> None:
        self._total = total
        self._so_far = Computed()

    def reach(self, prompt: int, generated: int) -> None:
        """So many tokens have been computed by now; a request that is computed anew has been counted before."""
        so_far = self._so_far
        self._total.prompt += max(0, prompt - so_far.prompt)
        self._total.generated += max(0, generated - so_far.generated)
        self._so_far = Computed(max(prompt, so_far.prompt), max(generated, so_far.generated))
