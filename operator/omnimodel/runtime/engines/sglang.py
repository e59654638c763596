"""Engine `sglang`: its server, whose memory is released and resumed by its own endpoints. It has never run here.

Without a copy of the weights in host memory (`--enable-weights-cpu-backup`, SGLang 0.5.3 or later) a server answers
gibberish after a resume. Its cache has its tokens by name: the share that it takes else is one of what it finds free.
Over several GPUs each has its part of the weights, and of every token in the cache.

Source: python/sglang/srt/entrypoints/http_server.py and docs/advanced_features/server_arguments.md of SGLang;
sgl-project/sglang#6367 (weights), radixark/miles#86 (a release that is answered too early).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from omnimodel.protocol.dispatch import card_name
from omnimodel.runtime.engines.foreign import source_path
from omnimodel.runtime.engines.sleeping import Controls, SleepingEngine

if TYPE_CHECKING:
    from omnimodel.runtime.engines import Setting

HEALTH_PATH = "/health"
CONTROLS = Controls(sleep="/release_memory_occupation", wake="/resume_memory_occupation", body={})
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


def create(setting: Setting, ended: Callable[[int], None]) -> SleepingEngine:
    """The engine; `options` are followed, `args` are passed on."""
    return SleepingEngine(setting, lambda port: command_line(setting, port), HEALTH_PATH, ended, CONTROLS, ENVIRONMENT)


def command_line(setting: Setting, port: int) -> list[str]:
    """The server's command line; it knows no UNIX sockets.

    Raises:
        OmniError: the source is not there.
    """
    spec, options, model = setting.spec, setting.spec["options"], setting.spec["model"]
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", source_path(setting)]
    argv += ["--served-model-name", card_name(model["namespace"], model["name"])]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    argv += ["--max-total-tokens", str(options["cacheTokens"])]
    if setting.devices > 1:
        argv += ["--tp-size", str(setting.devices)]
    argv += ["--max-running-requests", str(options.get("maxBatch") or spec["limits"]["concurrency"])]
    if options.get("contextTokens"):
        argv += ["--context-length", str(options["contextTokens"])]
    return [*argv, *(spec.get("args") or ())]
