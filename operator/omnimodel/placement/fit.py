"""Which models can never be resident, whoever else is."""

from __future__ import annotations

from collections.abc import Sequence

from omnimodel.placement.state import ModelState, bytes_text


def blocked_models(models: Sequence[ModelState], budget_bytes: int) -> dict[str, str]:
    """The models that can never be resident, each with a sentence that names both numbers.

    Either they are larger than the budget, or the kept models leave too little. Of kept models that do not fit
    together, the more important ones are kept, and of equals the first by name.
    """
    sentences: dict[str, str] = {}
    kept_bytes = 0
    for model in sorted(models, key=lambda m: (not m.keep_resident, -m.priority, m.name)):
        need = model.footprint_bytes
        if need > budget_bytes:
            sentences[model.name] = (
                f"needs {bytes_text(need)} on the device, but the budget is {bytes_text(budget_bytes)}"
            )
        elif need > budget_bytes - kept_bytes:
            sentences[model.name] = (
                f"needs {bytes_text(need)} on the device, but the models that are kept resident leave"
                f" {bytes_text(budget_bytes - kept_bytes)} of {bytes_text(budget_bytes)}"
            )
        elif model.keep_resident:
            kept_bytes += need
    return sentences
