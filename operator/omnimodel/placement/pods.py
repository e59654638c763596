"""Which pods of a pool hold which models: a pure decision, made anew from everything at each change.

It changes little: a model stays where it is as long as it may, and evening out moves few models at a time. A move is
made before it is broken: the new pod comes to the old one, which is left once the new one serves.

Pods are compared by criteria in order, not by weighted scores (see `_preference`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from omnimodel.errors import Reason
from omnimodel.placement.assignment import Finding, ModelDemand, PoolSupply, precedence, refusal_of
from omnimodel.placement.state import bytes_text

MOVES = 1  # models under way to another pod for evenness alone, at the same time
WAS_THERE = "it was there already"  # why a model is on a pod: it was put there for a reason that was told then
WORTH_SHARE = 0.05  # of the difference between two pods: a smaller model is not worth its move


@dataclass(frozen=True)
class PodSupply:
    """One pod.

    Args:
        name: stable over restarts.
        zone: empty when unknown.
        budget_bytes: of its device; 0 while unknown, which refuses nothing.
        ready: its agent serves.
        lost: its agent has been silent for so long that its models should go elsewhere.
        leaving: it will be removed.
        images: publish hashes of the images in its store.
    """

    name: str
    zone: str = ""
    budget_bytes: int = 0
    ready: bool = True
    lost: bool = False
    leaving: bool = False
    images: frozenset[str] = frozenset()


@dataclass(frozen=True)
class PodDemand:
    """One model that asks for pods.

    Args:
        model: what it is.
        replicas: pods that should hold it.
        current: pods that hold it now.
        serving: pods that serve it, or can wake it.
        image: publish hash of its image; empty when unknown.
    """

    model: ModelDemand
    replicas: int = 1
    current: tuple[str, ...] = ()
    serving: frozenset[str] = frozenset()
    image: str = ""


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


class _Board:
    """The placement while it is being made."""

    def __init__(self, pool: PoolSupply, pods: Sequence[PodSupply]) -> None:
        self.pool = pool
        self.pods = {pod.name: pod for pod in pods}
        self.loads: dict[str, list[ModelDemand]] = {pod.name: [] for pod in pods}
        self.bytes: dict[str, int] = dict.fromkeys(self.loads, 0)
        self.chosen: dict[str, list[str]] = {}
        self.why: dict[str, dict[str, str]] = {}

    def refusal(self, model: ModelDemand, pod: PodSupply) -> Finding | None:
        supply = replace(self.pool, budget_bytes=pod.budget_bytes, pods=(pod.name,))
        return refusal_of(model, supply, self.loads[pod.name])

    def put(self, model: ModelDemand, pod: PodSupply, why: str) -> None:
        self.chosen.setdefault(model.key, []).append(pod.name)
        self.why.setdefault(model.key, {})[pod.name] = why
        self.loads[pod.name].append(model)
        self.bytes[pod.name] += model.footprint_bytes

    def take(self, model: ModelDemand, pod: PodSupply) -> None:
        self.chosen[model.key].remove(pod.name)
        del self.why[model.key][pod.name]
        self.loads[pod.name].remove(model)
        self.bytes[pod.name] -= model.footprint_bytes


def place(
    demands: Sequence[PodDemand], pool: PoolSupply, pods: Sequence[PodSupply], *, moves: int = MOVES
) -> Placement:
    """Choose pods for every model of a pool, or say why not.

    Args:
        demands: of all models that ask for the pool.
        pool: its name and over-commit limit.
        pods: all there are or will be.
        moves: models that may be under way for evenness at the same time.
    """
    board = _Board(pool, pods)
    refused: list[Finding] = []
    warnings: list[Finding] = []
    order = sorted(demands, key=lambda demand: precedence(demand.model))
    held_bytes = {
        name: sum(demand.model.footprint_bytes for demand in order if name in demand.current) for name in board.pods
    }
    # Who has a pod keeps its bytes before anyone looks for room, or a newcomer would drive out who need not move.
    for demand in order:
        if not demand.model.suspended:
            _keep(board, demand, held_bytes)
    for demand in order:
        model = demand.model
        if model.suspended:
            refused.append(Finding(model.key, Reason.SUSPENDED, "is suspended by its manifest (spec.suspend)"))
            continue
        finding = _complete(board, demand)
        have = board.chosen.get(model.key, [])
        if not have:
            refused.append(finding or Finding(model.key, Reason.NO_PODS, f"pool {pool.name} has no pods"))
            continue
        if len(have) < max(1, demand.replicas):
            cause = finding.problem if finding else f"pool {pool.name} has no other pod"
            message = f"asks for {demand.replicas} pods and has {len(have)}: {cause}"
            warnings.append(Finding(model.key, Reason.TOO_FEW_PODS, message))
        if not model.footprint_bytes:
            message = "its size on the device is not known until it was published; it is not counted yet"
            warnings.append(Finding(model.key, Reason.SIZE_UNKNOWN, message))
    for demand in order:
        _stay_until_served(board, demand)
    begun = _even_out(board, demands, moves)
    return Placement(
        pods={key: tuple(sorted(names)) for key, names in board.chosen.items() if names},
        why=board.why,
        refused=tuple(refused),
        warnings=tuple(warnings),
        moves=tuple(begun),
        footprint_bytes=dict(board.bytes),
    )


def _keep(board: _Board, demand: PodDemand, held_bytes: Mapping[str, int]) -> None:
    """Leave a model on the pods it has, as far as they can and as many as it needs."""
    wanted = max(1, demand.replicas)
    usable = [board.pods[name] for name in demand.current if name in board.pods and not board.pods[name].leaving]
    usable = [pod for pod in usable if not pod.lost]
    serving = [pod for pod in usable if pod.name in demand.serving]
    if len(usable) > wanted and len(serving) == len(usable):
        usable = _fewest_zones_shared(serving, wanted, held_bytes)  # the move is done: leave the fuller pods
    usable.sort(key=lambda pod: pod not in serving)
    for pod in usable[: wanted + 1]:
        if board.refusal(demand.model, pod) is None:
            board.put(demand.model, pod, WAS_THERE)


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


def _complete(board: _Board, demand: PodDemand) -> Finding | None:
    """Find pods for what a model still lacks; the most hopeful refusal when there are too few."""
    model = demand.model
    refusals: list[Finding] = []
    while len(board.chosen.get(model.key, ())) < max(1, demand.replicas):
        taken = board.chosen.get(model.key, [])
        others = [pod for pod in board.pods.values() if pod.name not in taken and not pod.leaving]
        # Another replica on a pod that does not answer would help nobody.
        others = [pod for pod in others if not pod.lost or not taken or pod.name in demand.current]
        # Elsewhere while anything else is there; a pod that leaves still serves until it is gone.
        others = others or [
            pod for pod in board.pods.values() if pod.leaving and pod.name in demand.current and not taken
        ]
        refusals = []
        for pod in sorted(others, key=lambda pod: _preference(board, demand, pod)):
            refusal = board.refusal(model, pod)
            if refusal is None:
                board.put(model, pod, _why(board, demand, pod))
                break
            refusals.append(refusal)
        else:
            finding = min(refusals, key=lambda finding: _HOPE.index(finding.reason), default=None)
            if taken or finding is None or finding.reason != Reason.OVER_COMMIT_LIMIT:
                return finding
            if not _displace(board, demand, others):
                return finding
    return None


def _displace(board: _Board, demand: PodDemand, pods: Sequence[PodSupply]) -> bool:
    """Take less important models off the pod where the fewest bytes of them must go; they look for another later."""
    model = demand.model
    ways: list[tuple[bool, int, str, PodSupply, list[ModelDemand]]] = []
    for pod in pods:
        victims: list[ModelDemand] = []
        lesser = [
            other for other in board.loads[pod.name] if other.priority < model.priority and not other.keep_resident
        ]
        for other in sorted(lesser, key=precedence, reverse=True):
            victims.append(other)
            rest = [left for left in board.loads[pod.name] if left not in victims]
            if refusal_of(model, replace(board.pool, budget_bytes=pod.budget_bytes), rest) is None:
                ways.append((pod.lost, sum(v.footprint_bytes for v in victims), pod.name, pod, victims))
                break
    if not ways:
        return False
    *_, pod, victims = min(ways, key=lambda way: way[:3])
    for other in victims:
        board.take(other, pod)
    board.put(model, pod, f"it is more important than {', '.join(other.key for other in victims)}")
    return True


def _stay_until_served(board: _Board, demand: PodDemand) -> None:
    """Keep a model on a pod that will go until it is served elsewhere."""
    chosen = board.chosen.get(demand.model.key, [])
    if not chosen or set(chosen) <= demand.serving:
        return
    for name in demand.current:
        pod = board.pods.get(name)
        if pod is not None and pod.leaving and name in demand.serving and name not in chosen:
            board.put(demand.model, pod, f"{name} will go, and serves until another does")


# Nearest to being solved first.
_HOPE = (Reason.OVER_COMMIT_LIMIT, Reason.SHARES_WITH_KEPT, Reason.TOO_LARGE)


def _preference(
    board: _Board, demand: PodDemand, pod: PodSupply
) -> tuple[bool, bool, bool, bool, bool, bool, int, int, str]:
    taken = [board.pods[name] for name in board.chosen.get(demand.model.key, ())]
    total = board.bytes[pod.name] + demand.model.footprint_bytes
    return (
        not pod.ready,  # an agent that answers
        pod.name not in demand.current,  # where it was: moving from one that is away to another helps nobody
        pod.lost,  # one that may still come
        bool(pod.zone) and pod.zone in {other.zone for other in taken},  # in a zone of its own
        bool(pod.budget_bytes) and total > pod.budget_bytes,  # where all models are resident at once
        not demand.image or demand.image not in pod.images,  # where its image is already
        board.bytes[pod.name],  # with the fewest bytes
        len(board.loads[pod.name]),  # then the fewest models
        pod.name,
    )


def _why(board: _Board, demand: PodDemand, pod: PodSupply) -> str:
    """The first criterion that set the pod apart, in words."""
    if demand.image and demand.image in pod.images:
        return f"{pod.name} has its image"
    others = [other for other in board.pods.values() if other.name != pod.name]
    if not others:
        return f"{pod.name} is the only pod"
    used = board.bytes[pod.name] - demand.model.footprint_bytes
    return f"{pod.name} had the most room ({bytes_text(used)} assigned)"


def _even_out(board: _Board, demands: Sequence[PodDemand], moves: int) -> list[Move]:
    """Begin to move models from the fullest pod to the emptiest one.

    Only from a pod that is over-committed, only models that make the two more equal, and never past equality: the sum
    of squares falls with each move, so that it comes to an end.
    """
    pods = [pod for pod in board.pods.values() if pod.ready and not pod.lost and not pod.leaving]
    if len(pods) < 2:
        return []
    by_key = {demand.model.key: demand for demand in demands}
    under_way = sum(
        len(names) > max(1, by_key[key].replicas) or not set(names) <= by_key[key].serving
        for key, names in board.chosen.items()
        if set(names) != set(by_key[key].current) or len(names) > max(1, by_key[key].replicas)
    )
    begun: list[Move] = []
    while under_way + len(begun) < moves:
        fullest = max(pods, key=lambda pod: (board.bytes[pod.name], pod.name))
        emptiest = min(pods, key=lambda pod: (board.bytes[pod.name], pod.name))
        gap = board.bytes[fullest.name] - board.bytes[emptiest.name]
        if board.bytes[fullest.name] <= fullest.budget_bytes:
            break
        candidates = [
            model
            for model in board.loads[fullest.name]
            if gap * WORTH_SHARE <= model.footprint_bytes <= gap / 2
            and model.footprint_bytes
            and _settled(board, by_key[model.key], fullest.name)
            and emptiest.name not in board.chosen[model.key]
            and not _worse_zone(board, model.key, fullest, emptiest)
            and board.refusal(model, emptiest) is None
        ]
        if not candidates:
            break
        model = max(candidates, key=lambda m: (m.footprint_bytes, m.key))
        message = (
            f"moves from {fullest.name} ({bytes_text(board.bytes[fullest.name])} assigned) to {emptiest.name}"
            f" ({bytes_text(board.bytes[emptiest.name])})"
        )
        board.put(model, emptiest, message)
        begun.append(Move(model.key, fullest.name, emptiest.name, message))
    return begun


def _settled(board: _Board, demand: PodDemand, pod: str) -> bool:
    """Whether a model is where it should be and serves there."""
    chosen = board.chosen[demand.model.key]
    return set(chosen) == set(demand.current) and pod in demand.serving and len(chosen) <= max(1, demand.replicas)


def _worse_zone(board: _Board, key: str, source: PodSupply, target: PodSupply) -> bool:
    rest = {board.pods[name].zone for name in board.chosen[key] if name != source.name} - {""}
    return target.zone in rest and source.zone not in rest
