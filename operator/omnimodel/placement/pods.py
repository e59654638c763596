"""Which pods of a pool hold which models: a pure decision, made anew from everything at each change.

It changes little: a model stays where it is as long as it may, and evening out moves few models at a time. A move is
made before it is broken: the new pod comes to the old one, which is left once the new one serves.

Models that are to be together are placed as one. Where not all of them have room, those that are there already stay,
then the more important ones; the others are refused.

Pods are compared by criteria in order, not by weighted scores (see `_preference`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from omnimodel.errors import Reason
from omnimodel.placement.affinity import beside
from omnimodel.placement.assignment import Finding, PoolSupply
from omnimodel.placement.board import WAS_THERE, Board, PodDemand, PodSupply, Unit, units_of
from omnimodel.placement.state import bytes_text

MOVES = 1  # models under way to another pod for evenness alone, at the same time
WORTH_SHARE = 0.05  # of the difference between two pods: a smaller model is not worth its move


@dataclass(frozen=True)
class Move:
    """A model that gets another pod although it could stay."""

    model: str
    source: str
    target: str
    message: str


@dataclass(frozen=True)
class Placement:
    """What is where.

    Args:
        pods: model key -> pods, sorted.
        why: model key -> pod -> why it is there.
        refused: models without a pod.
        warnings: models with fewer pods than they ask for, or of unknown size.
        moves: evening out that begins now.
        footprint_bytes: pod -> sum of the footprints of its models.
    """

    pods: Mapping[str, tuple[str, ...]]
    why: Mapping[str, Mapping[str, str]]
    refused: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    moves: tuple[Move, ...] = ()
    footprint_bytes: Mapping[str, int] = field(default_factory=dict)


def place(
    demands: Sequence[PodDemand], pool: PoolSupply, pods: Sequence[PodSupply], *, moves: int = MOVES
) -> Placement:
    """Choose pods for every model of a pool, or say why not.

    Args:
        demands: of all models that ask for the pool.
        pool: its name and over-commit limit.
        pods: all there are or will be.
        moves: models, or sets that are to be together, that may be under way for evenness at the same time.
    """
    refused: list[Finding] = []
    warnings: list[Finding] = []
    wanted: list[PodDemand] = []
    for demand in demands:
        if demand.model.suspended:
            message = "is suspended by its manifest (spec.suspend)"
            refused.append(Finding(demand.model.key, Reason.SUSPENDED, message))
        elif demand.refusal is not None:
            refused.append(demand.refusal)
        else:
            wanted.append(demand)
    board = Board(pool, pods, [demand for demand in demands if not demand.model.suspended])
    held_bytes = {
        name: sum(demand.model.footprint_bytes for demand in demands if name in demand.current) for name in board.pods
    }
    # Who has a pod keeps its bytes before anyone looks for room, or a newcomer would drive out who need not move.
    waiting = [(unit, _keep(board, unit, held_bytes)) for unit in units_of(wanted)]
    settled: dict[Unit, Finding | None] = {}
    while waiting:
        unit, kept = waiting.pop(0)
        part, left_out, lacking = _complete(board, unit, kept)
        refused.extend(left_out.values())
        if part is not None:
            settled[part] = lacking
        # A set without its most important model may have had its turn before who displaced it: it has another.
        if again := [other for other in board.displaced if other in settled]:
            for other in again:
                del settled[other]
            waiting.extend((other, other) for other in again)
            waiting.sort(key=lambda entry: entry[0].precedence)
        board.displaced.clear()
    for part, lacking in settled.items():
        have = len(board.placed(part))
        for demand in part.demands:
            model = demand.model
            if have < max(1, demand.replicas):
                cause = lacking.problem if lacking else f"pool {pool.name} has no other pod"
                message = f"asks for {demand.replicas} pods and has {have}: {cause}"
                warnings.append(Finding(model.key, Reason.TOO_FEW_PODS, message))
            if not model.footprint_bytes:
                message = "its size on the device is not known until it was published; it is not counted yet"
                warnings.append(Finding(model.key, Reason.SIZE_UNKNOWN, message))
    for unit in settled:
        _stay_until_served(board, unit)
    begun = _even_out(board, list(settled), moves)
    return Placement(
        pods={key: tuple(sorted(names)) for key, names in board.chosen.items() if names},
        why=board.why,
        refused=tuple(refused),
        warnings=tuple(warnings),
        moves=tuple(begun),
        footprint_bytes=dict(board.bytes),
    )


def _keep(board: Board, unit: Unit, held_bytes: Mapping[str, int]) -> Unit:
    """Leave a unit on the pods it has, as far as they can and as many as it needs; the part that does, or all of it."""
    usable = [board.pods[name] for name in unit.current if name in board.pods and not board.pods[name].leaving]
    usable = [pod for pod in usable if not pod.lost]
    placed = [demand for demand in unit.demands if demand.current]
    serving = [pod for pod in usable if all(pod.name in demand.serving for demand in placed)]
    coming = any(pod.name in set(demand.current) - demand.serving for pod in usable for demand in placed)
    if len(usable) > unit.wanted <= len(serving) and not coming:
        usable = _fewest_zones_shared(serving, unit.wanted, held_bytes)  # the move is done: leave the fuller pods
    usable.sort(key=lambda pod: pod not in serving)
    kept = unit
    refusals = {pod.name: board.refusals(unit, pod) for pod in usable[: unit.wanted + 1]}
    if refusals and all(refusals.values()):  # not all of it can stay anywhere: those that can, where most can
        best = min(refusals, key=lambda name: _missing(unit, refusals[name]))
        stay = unit.only(unit.keys - refusals[best].keys())
        if any(best in demand.current for demand in stay.demands):
            kept = stay
            refusals = {name: board.refusals(kept, board.pods[name]) for name in refusals}
    for name, found in refusals.items():
        if not found:
            board.put(kept, board.pods[name], WAS_THERE)
    return kept


def _missing(unit: Unit, refusals: Mapping[str, Finding]) -> tuple[bool, ...]:
    """Which models of a unit a pod would leave out: to be compared, for the first of them matter most."""
    return tuple(model.key in refusals for model in unit.models)


def _fewest_zones_shared(pods: Sequence[PodSupply], wanted: int, held_bytes: Mapping[str, int]) -> list[PodSupply]:
    """The pods to stay on: first those in zones of their own, then the emptier ones."""
    left = sorted(pods, key=lambda pod: (held_bytes[pod.name], pod.name))
    kept: list[PodSupply] = []
    while left and len(kept) < wanted:
        zones = [pod.zone for pod in kept]
        best = min(left, key=lambda pod: bool(pod.zone) and pod.zone in zones)
        kept.append(best)
        left.remove(best)
    return kept


def _complete(board: Board, unit: Unit, kept: Unit) -> tuple[Unit | None, dict[str, Finding], Finding | None]:
    """Find pods for what a unit still lacks.

    Args:
        board: to put it on.
        unit: all of it.
        kept: the part of it that has stayed where it was.

    Returns:
        The part that has pods, why the others have none, and the most hopeful refusal when there are too few pods.
    """
    part, left_out = unit, dict[str, Finding]()
    if kept is not unit and board.placed(kept):
        part, left_out = _reunite(board, unit, kept)
    while True:
        taken = board.placed(part)
        if len(taken) >= part.wanted:
            return part, left_out, None
        others = [pod for pod in board.pods.values() if pod.name not in taken and not pod.leaving]
        # Another replica on a pod that does not answer would help nobody.
        others = [pod for pod in others if not pod.lost or not taken or pod.name in part.current]
        # Elsewhere while anything else is there; a pod that leaves still serves until it is gone.
        others = others or [
            pod for pod in board.pods.values() if pod.leaving and pod.name in part.current and not taken
        ]
        others.sort(key=lambda pod: _preference(board, part, pod))
        found: dict[str, dict[str, Finding]] = {}
        for pod in others:
            found[pod.name] = board.refusals(part, pod)
            if not found[pod.name]:
                break
        best = min(found, key=lambda name: _missing(part, found[name]), default="")
        refusals = found.get(best, {})
        if found and (not refusals or (not taken and len(refusals) < len(part.keys))):
            all_of_it, part = part, part.only(part.keys - refusals.keys())
            board.put(part, board.pods[best], _why(board, part, board.pods[best]))
            left_out |= _left_out(board, all_of_it, part, board.pods[best], refusals)
            continue
        finding = _most_hopeful(finding for refused in found.values() for finding in refused.values())
        if taken:
            return part, left_out, finding
        if finding is not None and finding.reason == Reason.OVER_COMMIT_LIMIT and _displace(board, part, others):
            continue
        for model in part.models:
            none = Finding(model.key, Reason.NO_PODS, f"pool {board.pool.name} has no pods")
            left_out[model.key] = _most_hopeful(found[pod.name][model.key] for pod in others) or none
        return None, left_out, None


def _reunite(board: Board, unit: Unit, kept: Unit) -> tuple[Unit, dict[str, Finding]]:
    """Take a unit that is too large for where it is to a pod that has room for more of it, if there is one."""
    pods = [board.pods[name] for name in board.placed(kept)]
    whys = [board.why[kept.first.key][pod.name] for pod in pods]
    for pod in pods:
        board.take(kept, pod)
    found = {pod.name: board.refusals(unit, pod) for pod in board.pods.values() if not (pod.leaving or pod.lost)}
    ranked = sorted(found, key=lambda name: (_missing(unit, found[name]), _preference(board, unit, board.pods[name])))
    here = min(_missing(unit, found[pod.name]) for pod in pods)
    if _missing(unit, found[ranked[0]]) < here:
        return unit, {}
    for pod, why in zip(pods, whys, strict=True):
        board.put(kept, pod, why)
    refusals = {key: finding for key, finding in found[pods[0].name].items() if key not in kept.keys}
    return kept, _left_out(board, unit, kept, pods[0], refusals)


def _left_out(
    board: Board, unit: Unit, part: Unit, pod: PodSupply, refusals: Mapping[str, Finding]
) -> dict[str, Finding]:
    """Why the others of a unit are not on the pod that a part of it got."""
    found = {}
    for model in unit.models:
        if model.key not in refusals:
            continue
        too_large = all(0 < other.budget_bytes < model.footprint_bytes for other in board.pods.values())
        finding = refusals[model.key]
        found[model.key] = finding if too_large else beside(model, part.models, pod.name, finding)
    return found


def _most_hopeful(findings: Iterable[Finding]) -> Finding | None:
    return min(findings, key=lambda finding: _HOPE.index(finding.reason), default=None)


def _displace(board: Board, unit: Unit, pods: Sequence[PodSupply]) -> bool:
    """Take less important units off the pod where the fewest bytes of them must go; they look for another later."""
    rank = min(model.priority for model in unit.models)
    ways: list[tuple[bool, int, str, PodSupply, list[Unit]]] = []
    for pod in pods:
        victims: list[Unit] = []
        lesser = [
            other
            for other in board.units[pod.name]
            if all(model.priority < rank and not model.keep_resident for model in other.models)
        ]
        for other in sorted(lesser, key=lambda other: other.precedence, reverse=True):
            victims.append(other)
            gone = {key for victim in victims for key in victim.keys}
            rest = [left for left in board.loads[pod.name] if left.key not in gone]
            if not board.refusals(unit, pod, rest):
                ways.append((pod.lost, sum(v.footprint_bytes for v in victims), pod.name, pod, victims))
                break
    if not ways:
        return False
    *_, pod, victims = min(ways, key=lambda way: way[:3])
    for other in victims:
        board.take(other, pod)
    board.displaced.extend(victims)
    names = ", ".join(model.key for other in victims for model in other.models)
    board.put(unit, pod, f"it is more important than {names}")
    return True


def _stay_until_served(board: Board, unit: Unit) -> None:
    """Keep models on pods that they are to leave until all of their unit are served elsewhere."""
    chosen = set(board.placed(unit))
    if not chosen or chosen <= unit.serving:
        return
    for demand in unit.demands:
        for name in demand.current:
            pod = board.pods.get(name)
            if pod is None or pod.lost or name in chosen or name not in demand.serving:
                continue
            if pod.leaving:
                board.hold(demand.model, pod, f"{name} will go, and serves until another does")
            elif unit.bound and board.fits(demand.model, pod, board.loads[name]) is None:
                board.hold(demand.model, pod, f"{name} serves until another does")


# Nearest to being solved first.
_HOPE = (Reason.OVER_COMMIT_LIMIT, Reason.AFFINITY_CONFLICT, Reason.SHARES_WITH_KEPT, Reason.TOO_LARGE)


def _preference(board: Board, unit: Unit, pod: PodSupply) -> tuple[bool, bool, bool, bool, bool, int, int, int, str]:
    taken = [board.pods[name] for name in board.placed(unit)]
    total = board.bytes[pod.name] + unit.footprint_bytes
    return (
        not pod.ready,  # an agent that answers
        pod.name not in unit.current,  # where it was: moving from one that is away to another helps nobody
        pod.lost,  # one that may still come
        bool(pod.zone) and pod.zone in {other.zone for other in taken},  # in a zone of its own
        bool(pod.budget_bytes) and total > pod.budget_bytes,  # where all models are resident at once
        sum(image not in pod.images for image in unit.images),  # where most of its images are already
        board.bytes[pod.name],  # with the fewest bytes
        len(board.loads[pod.name]),  # then the fewest models
        pod.name,
    )


def _why(board: Board, unit: Unit, pod: PodSupply) -> str:
    """The first criterion that set the pod apart, in words."""
    if any(image and image in pod.images for image in unit.images):
        return f"{pod.name} has its image"
    others = [other for other in board.pods.values() if other.name != pod.name]
    if not others:
        return f"{pod.name} is the only pod"
    return f"{pod.name} had the most room ({bytes_text(board.bytes[pod.name])} assigned)"


def _even_out(board: Board, units: Sequence[Unit], moves: int) -> list[Move]:
    """Begin to move units from the fullest pod to the emptiest one.

    Only from a pod that is over-committed, only units that make the two more equal, and never past equality: the sum
    of squares falls with each move, so that it comes to an end.
    """
    pods = [pod for pod in board.pods.values() if pod.ready and not pod.lost and not pod.leaving]
    if len(pods) < 2:
        return []
    free = moves - sum(_under_way(board, unit) for unit in units)
    begun: list[Move] = []
    while free > 0:
        fullest = max(pods, key=lambda pod: (board.bytes[pod.name], pod.name))
        emptiest = min(pods, key=lambda pod: (board.bytes[pod.name], pod.name))
        gap = board.bytes[fullest.name] - board.bytes[emptiest.name]
        if board.bytes[fullest.name] <= fullest.budget_bytes:
            break
        candidates = [
            unit
            for unit in board.units[fullest.name]
            if gap * WORTH_SHARE <= unit.footprint_bytes <= gap / 2
            and unit.footprint_bytes
            and _settled(board, unit, fullest.name)
            and emptiest.name not in board.placed(unit)
            and not _worse_zone(board, unit, fullest, emptiest)
            and not board.refusals(unit, emptiest)
        ]
        if not candidates:
            break
        unit = max(candidates, key=lambda unit: (unit.footprint_bytes, unit.first.key))
        message = (
            f"moves from {fullest.name} ({bytes_text(board.bytes[fullest.name])} assigned) to {emptiest.name}"
            f" ({bytes_text(board.bytes[emptiest.name])})"
        )
        board.put(unit, emptiest, message)
        begun.extend(Move(model.key, fullest.name, emptiest.name, message) for model in unit.models)
        free -= 1
    return begun


def _under_way(board: Board, unit: Unit) -> bool:
    """Whether a unit is not where it should be yet."""
    for demand in unit.demands:
        names = set(board.chosen[demand.model.key])
        if len(names) > unit.wanted or (names != set(demand.current) and not names <= demand.serving):
            return True
    return False


def _settled(board: Board, unit: Unit, pod: str) -> bool:
    """Whether a unit is where it should be and serves there."""
    return pod in unit.serving and all(
        set(chosen) == set(demand.current) and len(chosen) <= unit.wanted
        for demand in unit.demands
        for chosen in [board.chosen[demand.model.key]]
    )


def _worse_zone(board: Board, unit: Unit, source: PodSupply, target: PodSupply) -> bool:
    rest = {board.pods[name].zone for name in board.placed(unit) if name != source.name} - {""}
    return target.zone in rest and source.zone not in rest
