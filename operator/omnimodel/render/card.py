"""What a gateway is told of a model by its manifest alone: the same from whoever tells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnimodel.api import OmniModel
from omnimodel.protocol.dispatch import ModelCard, card_name
from omnimodel.render.process import told


def spec_card(spec: Mapping[str, Any]) -> ModelCard:
    """The card of a model by its process spec: cold, not ready, and without tensors.

    Args:
        spec: of an OmniProcess, as JSON values.
    """
    model, served = spec["model"], spec["servedNames"]
    return ModelCard(
        name=card_name(model["namespace"], model["name"]),
        namespace=model["namespace"],
        served_names=tuple(item["name"] for item in served),
        task=spec["task"],
        tier="cold",
        ready=False,
        unlisted=tuple(item["name"] for item in served if not item["listed"]),
        defaults={item["name"]: item["defaults"] for item in served if item["defaults"]},
        request_bytes=spec["limits"]["requestBytes"],
        capabilities=tuple(spec["capabilities"]),
        metadata=spec["metadata"],
        concurrency=spec["limits"]["concurrency"],
    )


def model_card(model: OmniModel, names: Sequence[str]) -> ModelCard:
    """The card of a model that has no process.

    Args:
        model: checked.
        names: that it was granted, or asks for.
    """
    return spec_card(told(model, names))
