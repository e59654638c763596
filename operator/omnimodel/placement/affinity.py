"""Models that are to share pods and models that must not, by the groups of their manifests. Pure.

A group is a label within a namespace, so that no team binds or bars the models of another. `together` is the required
affinity of Kubernetes, `apart` the required anti-affinity, but between models, and on pods of a pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omnimodel.errors import Reason
from omnimodel.placement.assignment import Finding, ModelDemand, age

_ONE_POD = "serve them from a pool of two pods in a cluster, or remove the group from one of them"
_ONE_POOL = "write the same spec.pool for both, or remove the group from one of them"


def apart_group(model: ModelDemand, other: ModelDemand) -> str:
    """The group that keeps two models apart; empty for none."""
    if model.namespace != other.namespace or model.key == other.key:
        return ""
    return next((group for group in model.apart if group in other.apart), "")


def exclusion(model: ModelDemand, pod: str, there: Iterable[ModelDemand]) -> Finding | None:
    """Why a model must not be on a pod where these are; None when it may."""
    if not model.apart:
        return None
    for other in there:
        if group := apart_group(model, other):
            problem = f"is to be apart from {other.key} (group {group}), which is on {pod}"
            return Finding(model.key, Reason.AFFINITY_CONFLICT, problem)
    return None


def sets_together(models: Iterable[ModelDemand]) -> list[list[ModelDemand]]:
    """Models in the sets that go to the same pods: those of a group, and of groups with a model in common."""
    of_model: dict[str, list[ModelDemand]] = {}
    of_group: dict[tuple[str, str], str] = {}
    for model in models:
        mine = of_model[model.key] = [model]
        for group in model.together:
            other = of_model[of_group.setdefault((model.namespace, group), model.key)]
            if other is not mine:
                other.extend(mine)
                of_model.update(dict.fromkeys((member.key for member in mine), other))
                mine = other
    return list({id(members): members for members in of_model.values()}.values())


def together_group(model: ModelDemand, others: Sequence[ModelDemand]) -> tuple[ModelDemand, str]:
    """The model of a set that a model is bound to, and by which group; by another model where they share none."""
    for other in others:
        for group in model.together:
            if group in other.together:
                return other, group
    return others[0], model.together[0]


def beside(model: ModelDemand, placed: Sequence[ModelDemand], pod: str, finding: Finding) -> Finding:
    """The refusal of a model that cannot be where the others of its set are."""
    other, group = together_group(model, placed)
    problem = f"is to be together with {other.key} (group {group}) on {pod}, where it cannot be: it {finding.problem}"
    return Finding(model.key, Reason.AFFINITY_CONFLICT, problem)


def divided(models: Iterable[ModelDemand]) -> dict[str, Finding]:
    """Models that are to be together with an older one of another pool, by their keys."""
    first: dict[tuple[str, str], ModelDemand] = {}
    found: dict[str, Finding] = {}
    for model in sorted((model for model in models if not model.suspended), key=age):
        for group in model.together:
            oldest = first.setdefault((model.namespace, group), model)
            if oldest.pool != model.pool and model.key not in found:
                problem = (
                    f"is to be together with {oldest.key} (group {group}), which is older and asks for pool"
                    f" {oldest.pool}, not {model.pool}"
                )
                found[model.key] = Finding(model.key, Reason.AFFINITY_CONFLICT, problem, _ONE_POOL)
    return found


def on_one_pod(load: Sequence[ModelDemand]) -> list[Finding]:
    """What cannot be kept apart where there is one pod for all: models with an earlier one beside them."""
    found = []
    for index, model in enumerate(load):
        for other in load[:index] if model.apart else ():
            if group := apart_group(model, other):
                problem = (
                    f"is to be apart from {other.key} (group {group}), and one machine is one pod: they take turns"
                )
                found.append(Finding(model.key, Reason.AFFINITY_CONFLICT, problem, _ONE_POD))
                break
    return found
