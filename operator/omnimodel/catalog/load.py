"""From files and folders to a catalogue: last good versions, duplicates, identities."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from omnimodel.api import Resource
from omnimodel.catalog.catalog import Catalog, ConfigObject, Identity, Key, Source, spec_digest
from omnimodel.catalog.reading import files_of, read_manifests, read_text, twice
from omnimodel.errors import ManifestError


@dataclass(frozen=True)
class _Claim:
    """A file's word that an object stands in it."""

    key: Key
    item: Resource | ConfigObject
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def load(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    previous: Catalog | None = None,
    identities: Mapping[Key, Identity] | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Catalog:
    """Read every manifest of files and folders.

    Nothing is raised for a bad manifest: what is wrong stands in the catalogue's `errors`, and a broken file keeps the
    last good version that `previous` has of it.

    Args:
        paths: files, and folders with .yaml, .yml and .json files at any depth; names beginning with a dot are left
            out.
        previous: the catalogue before, for last good versions and identities.
        identities: those of an earlier run of the program.
        now: the clock, for new objects.
    """
    before = previous or Catalog()
    errors: list[ManifestError] = []
    notes: list[str] = []
    claims: list[_Claim] = []
    files: dict[str, Source] = {}
    for name in files_of(paths, errors):
        source, found = _read(name, before, errors)
        if source is not None:
            files[name] = source
            notes += source.notes
            claims += found
    winners, clashes = _settle(claims, before)
    errors += clashes
    clashing = {error.file for error in clashes}
    files = {
        name: Source(
            "" if name in clashing else source.digest,  # to be read again, so that the clash is told again
            source.complete,
            tuple(key for key, claim in winners.items() if claim.file == name),
            source.notes,
        )
        for name, source in files.items()
    }
    return _assemble(winners, errors, notes, files, {**(identities or {}), **before.identities}, now)


def _read(name: str, before: Catalog, errors: list[ManifestError]) -> tuple[Source | None, list[_Claim]]:
    """A file's claims: of its text, or of its last good version when that is broken or unreadable."""
    earlier = before.files.get(name)
    text = read_text(name, errors)
    if text is None:
        return earlier, _kept(name, before)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if earlier is not None and earlier.complete and earlier.digest == digest:
        return earlier, _kept(name, before)
    fresh = read_manifests(text, name)
    errors += fresh.errors
    if fresh.errors and earlier is not None and earlier.complete:
        # Not its digest: the next look must tell the errors again.
        return Source("", True, earlier.keys, earlier.notes), _kept(name, before)
    claims = [_Claim(key, item, name, line) for key, (item, line) in fresh.objects.items()]
    if fresh.errors:
        # Never wholly good: what was good of it before stays beside what is good now.
        claims += [claim for claim in _kept(name, before) if claim.key not in fresh.objects]
    return Source(digest, not fresh.errors, (), tuple(fresh.notes)), claims


def _kept(name: str, before: Catalog) -> list[_Claim]:
    source = before.files.get(name)
    return [
        _Claim(key, before.items[key], name, int(before.places[key].rpartition(":")[2]))
        for key in (source.keys if source else ())
    ]


def _settle(claims: Sequence[_Claim], before: Catalog) -> tuple[dict[Key, _Claim], list[ManifestError]]:
    """Who has each object: the file that had it before, else the first; and an error for each other claim."""
    by_key: dict[Key, list[_Claim]] = {}
    for claim in claims:
        by_key.setdefault(claim.key, []).append(claim)
    winners: dict[Key, _Claim] = {}
    errors: list[ManifestError] = []
    for key, rivals in by_key.items():
        holder = before.places.get(key, "").rpartition(":")[0]
        winner = next((claim for claim in rivals if claim.file == holder), rivals[0])
        winners[key] = winner
        errors += [twice(key, claim.file, claim.line, winner.place) for claim in rivals if claim is not winner]
    return winners, errors


def _assemble(
    winners: Mapping[Key, _Claim],
    errors: list[ManifestError],
    notes: list[str],
    files: Mapping[str, Source],
    known: Mapping[Key, Identity],
    now: Callable[[], datetime],
) -> Catalog:
    resources: list[Resource] = []
    configs: dict[Key, ConfigObject] = {}
    identities: dict[Key, Identity] = {}
    moment = now().strftime("%Y-%m-%dT%H:%M:%SZ")
    for key in sorted(winners):
        item = winners[key].item
        if isinstance(item, ConfigObject):
            configs[key] = item
            continue
        identity = _identify(item, known.get(key), moment)
        identities[key] = identity
        resources.append(
            item.with_metadata(uid=identity.uid, generation=identity.generation, creation_timestamp=identity.created)
        )
    order = sorted(errors, key=lambda error: (error.file, error.line))
    return Catalog(
        objects=tuple(resources),
        errors=tuple(order),
        notes=tuple(notes),
        configs=configs,
        places={key: claim.place for key, claim in winners.items()},
        files=files,
        identities=identities,
    )


def _identify(resource: Resource, known: Identity | None, moment: str) -> Identity:
    digest = spec_digest(resource)
    if known is None:
        return Identity(str(uuid.uuid4()), moment, 1, digest)
    if known.spec == digest:
        return known
    return Identity(known.uid, known.created, known.generation + 1, digest)
