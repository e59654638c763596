"""Downloads a repository of the Hugging Face hub, in a process of its own that can be stopped at any moment.

huggingface_hub does the work, so that its own settings hold (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, proxies), and it
goes on with a part that an interrupted download left.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omnimodel.agent.origins import Origins
from omnimodel.agent.programs import run_program
from omnimodel.errors import OmniError, Reason, SourceError

_WATCH_SECONDS = 0.5
_MARK = "omnimodel:"
_TOKEN = "give a token: spec.sources.hubToken of the pool, or HF_TOKEN"  # noqa: S105 - a sentence
_ENDPOINT = "spec.sources.hubEndpoint of the pool, or HF_ENDPOINT"

# Runs in the child. It says what it knows as lines of JSON behind the mark.
_CHILD = """
import fnmatch, hashlib, json, os, sys
request = json.loads(sys.argv[1])
def say(**what):
    print("omnimodel:" + json.dumps(what), flush=True)
def wanted(name):
    patterns = request["files"]
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
try:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub import errors as hub
    from huggingface_hub.utils import disable_progress_bars
except ImportError as error:
    say(failed="missing", text=str(error))
    sys.exit(3)
disable_progress_bars()
try:
    revision = request["revision"]
    if constants.HF_HUB_OFFLINE:
        raise hub.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    info = HfApi().model_info(request["repo"], revision=revision, files_metadata=True)
    files = [file for file in info.siblings if wanted(file.rfilename)]
    if not files:
        say(failed="nothing", text=", ".join(file.rfilename for file in info.siblings[:10]))
        sys.exit(3)
    total = sum(file.size or 0 for file in files)
    say(total=total)
    if total > request["limit"]:
        say(failed="large", text=str(total))
        sys.exit(3)
    folder = request["folder"]
    snapshot_download(request["repo"], revision=info.sha, local_dir=folder, allow_patterns=request["files"] or None)
    for file in files:
        path = os.path.join(folder, file.rfilename)
        if file.size is not None and os.path.getsize(path) != file.size:
            say(failed="hash", text=f"{file.rfilename} has {os.path.getsize(path)} bytes, the hub says {file.size}")
            os.unlink(path)
            sys.exit(3)
        expected = file.lfs and file.lfs.sha256
        if expected:
            with open(path, "rb") as content:
                found = hashlib.file_digest(content, "sha256").hexdigest()
            if found != expected:
                say(failed="hash", text=f"{file.rfilename} has the sha256 {found}, the hub says {expected}")
                os.unlink(path)
                sys.exit(3)
    say(done=True)
except hub.GatedRepoError as error:
    say(failed="gated", text=str(error))
except hub.RepositoryNotFoundError as error:
    say(failed="repository", text=str(error))
except hub.RevisionNotFoundError as error:
    say(failed="revision", text=str(error))
except hub.OfflineModeIsEnabled as error:
    say(failed="offline", text=str(error))
except OSError as error:
    say(failed="full" if error.errno in (28, 122, 27) else "network", text=str(error))
except Exception as error:
    say(failed="network", text=f"{type(error).__name__}: {error}")
"""


async def fetch(
    subject: str,
    spec: Mapping[str, Any],
    work: Path,
    content: Path,
    progress: Callable[[int, int], None],
    limit_bytes: int,
    origins: Origins,
) -> str:
    """Download a snapshot of `repo` at `revision`; see `source_package.fetch` for the arguments."""
    said: dict[str, Any] = {}

    def hear(line: str) -> None:
        if line.startswith(_MARK):
            said.update(json.loads(line.removeprefix(_MARK)))

    request = {
        "repo": spec["repo"],
        "revision": spec.get("revision") or "main",
        "files": list(spec.get("files") or ()),
        "folder": str(content),
        "limit": limit_bytes,
    }
    watch = asyncio.ensure_future(_watch(content, said, progress))
    try:
        finished = await run_program(
            [sys.executable, "-c", _CHILD, json.dumps(request)],
            hear,
            environment={
                **origins.variables(),
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_XET_CACHE": str(work / "xet"),
                "TMPDIR": str(work),
            },
        )
    finally:
        watch.cancel()
    if not said.get("done"):
        last = finished.lines[-1] if finished.lines else f"exit code {finished.code}"
        raise _refusal(subject, request, said.get("failed", ""), str(said.get("text", last)))
    await asyncio.to_thread(shutil.rmtree, content / ".cache", ignore_errors=True)
    return ""


async def _watch(content: Path, said: Mapping[str, Any], progress: Callable[[int, int], None]) -> None:
    """Tell how many bytes have come: the library says nothing that another process could read."""
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        progress(await asyncio.to_thread(_size_of, content), int(said.get("total", 0)))


def _size_of(folder: Path) -> int:
    size_bytes = 0
    for path in folder.rglob("*"):
        try:
            size_bytes += path.stat().st_blocks * 512 if path.is_file() else 0
        except OSError:  # renamed in this moment
            continue
    return size_bytes


def _refusal(subject: str, request: Mapping[str, Any], failed: str, text: str) -> OmniError:
    repository = f"repository {request['repo']}"
    first = text.strip().splitlines()[0][:300] if text.strip() else ""
    if failed == "full":
        return OmniError(
            subject, f"the disk is full while {repository} is downloaded", "free space there", reason=Reason.DISK_FULL
        )
    if failed == "large":
        problem = f"{repository} has {text} bytes, at most {request['limit']} are fetched"
        return OmniError(subject, problem, "name the files you need", reason=Reason.TOO_LARGE)
    if failed == "hash":
        return SourceError(
            subject, f"{repository}: {first}", "try again, or choose another revision", reason=Reason.DIGEST_MISMATCH
        )
    problem, cure = {
        "missing": (f"{repository} needs huggingface_hub", "install the extra omnimodel[agent]"),
        "repository": (
            f"there is no {repository} on the hub, or it is private",
            f"correct spec.source.huggingFace.repo, or {_TOKEN}",
        ),
        "gated": (f"{repository} is gated", f"accept its terms on the hub, and {_TOKEN}"),
        "revision": (
            f"{repository} has no revision {request['revision']}",
            "correct spec.source.huggingFace.revision",
        ),
        "nothing": (
            f"{repository} has no file that matches {', '.join(request['files'])}",
            f"correct spec.source.huggingFace.files; it has {first}",
        ),
        "offline": (f"{repository} is not here and the hub is off (HF_HUB_OFFLINE)", "unset it, or use a path"),
    }.get(failed, (f"{repository} cannot be downloaded: {first}", f"check the network, and {_ENDPOINT}"))
    return SourceError(subject, problem, cure)
