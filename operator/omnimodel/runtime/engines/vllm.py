"""Engine `vllm`: its OpenAI server, put to sleep and woken by the endpoints of its sleep mode. It has never run here.

Level 1 keeps the weights in host memory and forgets the cache. Level 2 would forget the weights as well, and a server
that is woken then answers gibberish until they are loaded again. The cache has its bytes by name: what a server finds
free on a GPU that others use says nothing of what it may take. Over several GPUs each has its part of the weights, and
of the cache, of which the server is told the bytes on one.

Source: docs/features/sleep_mode.md and docs/cli of vLLM 0.31; vllm-project/vllm#29341 (level 2), #55827 (two that
measure at once), #15483 (a request while it sleeps).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from omnimodel.protocol.dispatch import card_name
from omnimodel.quantity import parse_bytes
from omnimodel.runtime.engines.foreign import socket_path, source_path
from omnimodel.runtime.engines.sleeping import Controls, SleepingEngine

if TYPE_CHECKING:
    from omnimodel.runtime.engines import Setting

HEALTH_PATH = "/health"
# A version that knows `mode` waits for requests in flight, an older one takes no notice of it.
CONTROLS = Controls(sleep="/sleep?level=1&mode=wait", wake="/wake_up", state="/is_sleeping")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it there are no such endpoints
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its sandbox has no other
    "HF_HUB_OFFLINE": "1",
}
# The share of the GPU that has to be free at its start. With a cache of so many bytes it means nothing else.
_LEAST_SHARE = "0.01"


def create(setting: Setting, ended: Callable[[int], None]) -> SleepingEngine:
    """The engine; `options` are followed, `args` are passed on."""
    return SleepingEngine(setting, lambda _: command_line(setting), HEALTH_PATH, ended, CONTROLS, ENVIRONMENT)


def command_line(setting: Setting) -> list[str]:
    """The server's command line; it listens on a UNIX socket.

    Raises:
        OmniError: the source is not there.
    """
    spec, options, model = setting.spec, setting.spec["options"], setting.spec["model"]
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", source_path(setting)]
    argv += ["--served-model-name", card_name(model["namespace"], model["name"]), "--uds", socket_path()]
    argv += ["--enable-sleep-mode", "--gpu-memory-utilization", _LEAST_SHARE]
    argv += ["--kv-cache-memory-bytes", str(parse_bytes(options["cacheMemory"]) // setting.devices)]
    if setting.devices > 1:
        argv += ["--tensor-parallel-size", str(setting.devices)]
    argv += ["--max-num-seqs", str(options.get("maxBatch") or spec["limits"]["concurrency"])]
    if options.get("contextTokens"):
        argv += ["--max-model-len", str(options["contextTokens"])]
    return [*argv, *(spec.get("args") or ())]
