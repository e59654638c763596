"""Engine `llamacpp`: the OpenAI server of llama-cpp-python over a GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from omnimodel.errors import SourceError
from omnimodel.runtime.engines.foreign import ForeignEngine, source_path

if TYPE_CHECKING:
    from omnimodel.runtime.engines import Setting

CONTEXT_TOKENS = 2048
HEALTH_PATH = "/v1/models"


def create(setting: Setting, ended: Callable[[int], None]) -> ForeignEngine:
    """The engine; `options.contextTokens` and `options.chatFormat` are followed, `args` are passed on."""
    return ForeignEngine(setting, lambda port: command_line(setting, port), HEALTH_PATH, ended)


def command_line(setting: Setting, port: int) -> list[str]:
    """The server's command line.

    Raises:
        SourceError: the source has no GGUF file, or several.
    """
    options = setting.spec.get("options") or {}
    argv = [sys.executable, "-m", "llama_cpp.server", "--model", str(_model(setting)), "--model_alias", setting.name]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--verbose", "false"]
    argv += ["--n_ctx", str(options.get("contextTokens") or CONTEXT_TOKENS)]
    if setting.threads > 0:
        argv += ["--n_threads", str(setting.threads), "--n_threads_batch", str(setting.threads)]
    if options.get("chatFormat"):
        argv += ["--chat_format", str(options["chatFormat"])]
    if setting.spec.get("task") == "embeddings":
        argv += ["--embedding", "true"]
    return [*argv, *(setting.spec.get("args") or ())]


def _model(setting: Setting) -> Path:
    path = Path(source_path(setting))
    if path.is_file():
        return path
    found = sorted(path.rglob("*.gguf"))
    if len(found) != 1:
        raise SourceError(setting.subject, f"its source has {len(found)} GGUF files", "name one with source…path")
    return found[0]
