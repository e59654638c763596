"""Which models can never be resident, whoever else is."""

from __future__ import annotations

from collections.abc import Sequence

from omnimodel.errors import CURES, Reason
from omnimodel.placement.state import Blocked, ModelState, bytes_text


def blocked_models(models: Sequence[ModelState], budget_bytes: int) -> dict[str, Blocked]:
    """The models that can never be resident, and why.

    Either they are larger than the budget, or the kept models leave too little. Of kept models that do not fit
    together, the more important ones are kept, and of equals the first by name.
    """
    found: dict[str, Blocked] = {}
    kept_bytes = 0
    for model in sorted(models, key=lambda m: (not m.keep_resident, -m.priority, m.name)):
        need = model.footprint_bytes
        if need > budget_bytes:
            sentence = f"needs {bytes_text(need)} on the device, but the budget is {bytes_text(budget_bytes)}"
            found[model.name] = Blocked(Reason.TOO_LARGE, sentence, CURES[Reason.TOO_LARGE])
        elif need > budget_bytes - kept_bytes:
            sentence = (
                f"needs {bytes_text(need)} on the device, but the models that are kept resident leave"
                f" {bytes_text(budget_bytes - kept_bytes)} of {bytes_text(budget_bytes)}"
            )
            found[model.name] = Blocked(Reason.SHARES_WITH_KEPT, sentence, CURES[Reason.SHARES_WITH_KEPT])
        elif model.keep_resident:
            kept_bytes += need
    return found
