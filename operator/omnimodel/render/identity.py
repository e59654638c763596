"""Who a process is on its machine: a user id of its own, found from its name so that it stays the same."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from omnimodel.errors import OmniError

FIRST_UID = 20_000  # above people and services, below the ranges of subordinate ids
UID_COUNT = 40_000
HOSTNAME_LIMIT = 63


def user_id(
    namespace: str,
    name: str,
    uid: str,
    taken: Collection[int] = (),
    *,
    first: int = FIRST_UID,
    count: int = UID_COUNT,
) -> int:
    """A user id for a model: the same one for the same model, as long as nobody else has it.

    Args:
        namespace: of the model.
        name: of the model.
        uid: of the model, so that one made anew under the old name does not get the files of the old one.
        taken: ids in use by others; the next free one is taken instead.
        first: the least id.
        count: how many ids there are.

    Raises:
        OmniError: all are taken.
    """
    digest = hashlib.sha256(f"{namespace}/{name}/{uid}".encode()).digest()
    start = int.from_bytes(digest[:8], "big") % count
    for step in range(count):
        candidate = first + (start + step) % count
        if candidate not in taken:
            return candidate
    raise OmniError(f"OmniModel {namespace}/{name}", "finds no free user id", "run fewer models on this machine")


def hostname(namespace: str, name: str) -> str:
    """The host name that a model's process sees: its name, with the namespace unless that is `default`."""
    text = name if namespace == "default" else f"{name}.{namespace}"
    return text if len(text) <= HOSTNAME_LIMIT else text[:HOSTNAME_LIMIT].rstrip(".-")
