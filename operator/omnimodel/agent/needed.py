"""What of the disk the models that are here need, and what is told of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omnimodel.agent.housekeeping import Needs
from omnimodel.agent.stored import Stored
from omnimodel.placement.state import bytes_text

if TYPE_CHECKING:
    from omnimodel.agent.forms import Forms
    from omnimodel.agent.instance import Instance
    from omnimodel.agent.model import Model


def needs_of(
    models: Iterable[Model], applied: Iterable[Mapping[str, Any]], instances: Iterable[Instance], forms: Forms
) -> Needs:
    """What must stay: for models as they serve, as they were applied last, and as they still end.

    Args:
        models: all that are here.
        applied: process specs as they were applied last; a revision for one may not have begun yet.
        instances: that the broker has; those of deleted models may still answer.
        forms: in which their images are looked for.
    """
    here = [*(instance for model in models for instance in model.instances), *instances]
    specs = [*applied, *(instance.spec for instance in here)]
    keys = {key for spec in specs for key in forms.keys(spec)}
    images = [instance.prepared.image for instance in here if instance.prepared is not None]
    return Needs(specs, frozenset(keys), frozenset(image.digest for image in images if image is not None))


def removed(items: Sequence[Stored]) -> dict[str, Any]:
    """What was removed, as `protocol.admin.Admin.prune` answers it."""
    return {
        "bytes": sum(item.size_bytes for item in items),
        "removed": [
            {
                "kind": item.kind,
                "name": item.name,
                "what": item.what,
                "bytes": item.size_bytes,
                "lastUsedSeconds": item.used_seconds,
            }
            for item in items
        ],
    }


def removed_words(items: Sequence[Stored]) -> str:
    """What was removed because the disk was short, in a sentence."""
    counts = [(sum(item.kind == kind for item in items), kind) for kind in ("image", "source", "environment")]
    words = [f"{count} {kind}{'' if count == 1 else 's'}" for count, kind in counts if count]
    size = bytes_text(sum(item.size_bytes for item in items))
    return f"the disk was short: {' and '.join(words)} that no model needs were removed ({size})"
