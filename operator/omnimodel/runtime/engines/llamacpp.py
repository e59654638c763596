"""Engine `llamacpp`: the OpenAI server of llama-cpp-python over a GGUF file.

That server passes over fields that it does not know, and over some that it does. So the fields that it follows stand
here, and a request with another one is refused. Vectors in base64, which the official client of OpenAI asks for unless
it is told otherwise, it does not make: those are made here of its numbers.

Source: llama_cpp/server/types.py and app.py of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnimodel.errors import SourceError
from omnimodel.memory.devices.processor import multiplies_tiles
from omnimodel.memory.readers import gguf
from omnimodel.runtime.engines.foreign import Check, ForeignEngine, Translation, source_path
from omnimodel.runtime.requests import read_object, refuse_others

if TYPE_CHECKING:
    from omnimodel.runtime.engines import Setting

CONTEXT_TOKENS = 2048
HEALTH_PATH = "/v1/models"
PROGRAM = ("-m", "llama_cpp.server")
# With tiles it dies of SIGSEGV at the first request, on some machines: the threads that multiply have no leave of the
# kernel to use them. Weights in plain buffers are not multiplied by tiles, and stay pages of the file, besides.
# Source: seen with 0.3.36 on a Xeon; ggml-org/llama.cpp#20824, #26954.
PROGRAM_WITHOUT_TILES = (
    "-c",
    """
from llama_cpp import llama_cpp

defaults = llama_cpp.llama_model_default_params


def with_plain_buffers():
    params = defaults()
    params.use_extra_bufts = False
    return params


llama_cpp.llama_model_default_params = with_plain_buffers

from llama_cpp.server.__main__ import main

main()
""",
)

_SAMPLING = frozenset(
    {
        "model", "user", "stream", "max_tokens", "min_tokens", "stop", "seed", "logprobs", "temperature", "top_p",
        "min_p", "top_k", "presence_penalty", "frequency_penalty", "repeat_penalty", "logit_bias", "logit_bias_type",
        "mirostat_mode", "mirostat_tau", "mirostat_eta", "grammar",
    }
)  # fmt: skip
FIELDS: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": _SAMPLING | {"messages", "response_format", "top_logprobs"},
    "/v1/completions": _SAMPLING | {"prompt", "suffix", "echo"},
    "/v1/embeddings": frozenset({"model", "user", "input"}),
}
CALLS = frozenset({"tools", "tool_choice", "functions", "function_call"})
_CALLING = frozenset({"chatml-function-calling", "functionary", "functionary-v1", "functionary-v2"})  # chat formats
# Fields that it passes over, with the one value that asks for nothing.
_NEUTRAL: Mapping[str, Any] = {"n": 1, "best_of": 1, "encoding_format": "float", "tools": [], "tool_choice": "none"}


def create(setting: Setting, ended: Callable[[int], None]) -> ForeignEngine:
    """The engine; `options.contextTokens` and `options.chatFormat` are followed, `args` are passed on.

    Raises:
        SourceError: the source has no GGUF file, or several.
        ImageError: the file is damaged: llama.cpp would say no more than that it ended.
    """
    gguf.read(model_file(setting))
    return ForeignEngine(setting, lambda port: command_line(setting, port), HEALTH_PATH, ended, follows(setting))


def follows(setting: Setting) -> Check:
    """What looks at the fields of requests."""
    words = {str((setting.spec.get("options") or {}).get("chatFormat")), *(setting.spec.get("args") or ())}
    calls = CALLS if words & _CALLING else frozenset()

    def check(path: str, content: bytes) -> Translation | None:
        if path not in FIELDS or not content:
            return None
        said = read_object(content)
        asked = {name: said[name] for name in said if said[name] not in (None, _NEUTRAL.get(name))}
        translation = None
        if path == "/v1/embeddings" and asked.get("encoding_format") == "base64":
            del asked["encoding_format"]
            translation = _in_base64
        refuse_others(asked, FIELDS[path] | calls)
        return translation

    return check


def _in_base64(answer: bytes) -> bytes:
    """An answer to /v1/embeddings with each vector as float32, little-endian, in base64.

    A model that does not pool its tokens has a vector for each of them, which has no such form: it stays as it is.
    """
    said = json.loads(answer)
    for item in said["data"]:
        vector = item["embedding"]
        if all(isinstance(number, int | float) for number in vector):
            item["embedding"] = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return json.dumps(said).encode()


def command_line(setting: Setting, port: int) -> list[str]:
    """The server's command line.

    Raises:
        SourceError: the source has no GGUF file, or several.
    """
    options = setting.spec.get("options") or {}
    argv = [
        sys.executable,
        *(PROGRAM_WITHOUT_TILES if multiplies_tiles() else PROGRAM),
        "--model",
        str(model_file(setting)),
        "--model_alias",
        setting.name,
    ]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--verbose", "false"]
    argv += ["--n_ctx", str(options.get("contextTokens") or CONTEXT_TOKENS)]
    if setting.threads > 0:
        argv += ["--n_threads", str(setting.threads), "--n_threads_batch", str(setting.threads)]
    if setting.device != "host":
        if setting.devices > 1:  # alike, and not by what is free on each at that moment
            argv += ["--tensor_split", *["1"] * setting.devices]
        argv += ["--n_gpu_layers", "-1"]
    if options.get("chatFormat"):
        argv += ["--chat_format", str(options["chatFormat"])]
    if setting.spec.get("task") == "embeddings":
        argv += ["--embedding", "true"]
    return [*argv, *(setting.spec.get("args") or ())]


def model_file(setting: Setting) -> Path:
    """The GGUF file.

    Raises:
        SourceError: the source has none, or several.
    """
    path = Path(source_path(setting))
    if path.is_file():
        return path
    found = sorted(path.rglob("*.gguf"))
    if len(found) != 1:
        raise SourceError(setting.subject, f"its source has {len(found)} GGUF files", "name one with source…path")
    return found[0]
