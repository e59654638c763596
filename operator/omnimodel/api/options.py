"""Options of each engine: what `runtime.options` can say, by task, and what is refused.

Engine python takes any: its handler reads them. Engine command has none of its own: what stands there is for templates.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

from omnimodel.api.amounts import BYTES
from omnimodel.api.fields import FLAG, Checked, choice, number, plain, refusal, whole
from omnimodel.api.meta import Violation
from omnimodel.api.names import SYNONYMS, normal
from omnimodel.api.runtime import DEFAULT_TASK, Runtime
from omnimodel.quantity import QuantityError, parse_bytes

PATH = ("spec", "runtime", "options")
TOKENS = whole(1, 1 << 24, "a number of tokens")


def _memory(value: Any) -> Any:
    """A quantity; what is wrong is said in the one sentence that an admission policy can say."""
    try:
        parse_bytes(value)
    except QuantityError:
        problem, _, cure = BYTES.schema["x-kubernetes-validations"][0]["message"].partition("; ")
        raise refusal(problem, cure) from None
    return value


MEMORY = Checked(_memory, BYTES.schema)


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        form: what it can be.
        description: one sentence.
        example: a value.
        required: whether it has to be there.
    """

    form: Checked
    description: str
    example: Any
    required: bool = False


_CONTEXT = Option(TOKENS, "Tokens of its cache of keys and values, shared by all requests.", 4096)
_LONGEST = Option(TOKENS, "The longest prompt with its answer; what the model allows when left out.", 8192)
_BATCH = Option(whole(1, 4096), "Answers computed at once; `limits.concurrency` when left out.", 16)
_TRUNCATE = Option(FLAG, "Whether a text that is too long is cut off; else it is refused, which is the default.", True)
OPTIONS: Mapping[tuple[str, str], Mapping[str, Option]] = {
    ("transformers", "text-generation"): {
        "contextTokens": _CONTEXT,
        "maxNewTokens": Option(TOKENS, "Tokens of an answer when a request does not say; 512 when left out.", 256),
        "maxBatch": _BATCH,
        "temperature": Option(number(0, 2), "When a request does not say; the checkpoint's own when left out.", 0.7),
        "topP": Option(number(0, 1), "When a request does not say; the checkpoint's own when left out.", 0.9),
        "topK": Option(whole(0, 1 << 24), "When a request does not say; 0, the default, is no limit.", 40),
    },
    ("transformers", "embeddings"): {
        "pooling": Option(choice("mean", "cls", "last"), "How tokens become one vector; mean when left out.", "cls"),
        "normalize": Option(FLAG, "Whether vectors have length 1; true when left out.", False),
        "truncate": _TRUNCATE,
    },
    ("transformers", "text-classification"): {"truncate": _TRUNCATE},
    ("transformers", "automatic-speech-recognition"): {},
    ("llamacpp", "text-generation"): {
        "contextTokens": Option(TOKENS, "Tokens of its context; 2048 when left out.", 4096),
        "chatFormat": Option(
            plain(64, empty=False), "Chat template of llama-cpp-python; that of the file when left out.", "chatml"
        ),
    },
    ("llamacpp", "embeddings"): {
        "contextTokens": Option(TOKENS, "The longest text; 2048 tokens when left out.", 512),
    },
    ("vllm", "text-generation"): {
        "contextTokens": _LONGEST,
        "maxBatch": _BATCH,
        "cacheMemory": Option(
            MEMORY,
            "Device memory of its cache of keys and values, a part of `resources.deviceMemory`, and like that the sum "
            "over all its devices.",
            "8Gi",
            True,
        ),
    },
    ("sglang", "text-generation"): {
        "contextTokens": _LONGEST,
        "maxBatch": _BATCH,
        "cacheTokens": Option(TOKENS, "Tokens of its cache of keys and values, shared by all requests.", 65536, True),
    },
}


def violations(runtime: Runtime) -> Iterator[Violation]:
    """What is wrong with the options of a runtime."""
    if runtime.engine == "command":
        yield from _unused(runtime)
    known = OPTIONS.get((runtime.engine, runtime.task or DEFAULT_TASK))
    if known is None:
        return
    for name, option in known.items():
        if option.required and name not in runtime.options:
            yield Violation(PATH, missing(runtime.engine, name), f"add {name}: {option.example}")
    for name, value in runtime.options.items():
        path = (*PATH, name)
        if name not in known:
            problem = f"is no option of engine {runtime.engine} for {runtime.task or DEFAULT_TASK}"
            yield Violation(path, problem, _instead(name, known), value)
        elif value is None:
            yield Violation(path, "has no value", "write one, or remove the line")
        else:
            try:
                known[name].form.check(value)
            except PydanticCustomError as error:
                found = error.context or {}
                yield Violation(path, str(found.get("problem")), str(found.get("cure")), value)


def missing(engine: str, name: str) -> str:
    """What is wrong without an option that has to be there."""
    return f"has no {name}: engine {engine} would take what it finds free on the GPU"


def _instead(name: str, known: Mapping[str, Option]) -> str:
    if not known:
        return "remove it: there are none"
    by_normal = {normal(option): option for option in known}
    meant = SYNONYMS.get(normal(name), "").rpartition(".")[2]
    near = difflib.get_close_matches(normal(name), by_normal, 1, 0.7)
    if normal(meant) in by_normal or near:
        return f"did you mean {by_normal[normal(meant) if normal(meant) in by_normal else near[0]]}?"
    return f"possible are {', '.join(known)}"


def _unused(runtime: Runtime) -> Iterator[Violation]:
    """What engine command is told by fields that it sees only through a template."""
    env = (value for value in runtime.env.values() if isinstance(value, str))
    expressions = " ".join(
        found for text in (*runtime.command, *runtime.args, *env) for found in re.findall(r"\{\{(.*?)\}\}", text)
    )
    for name in runtime.options:
        if not re.search(rf"\boptions\b.*\b{re.escape(name)}\b", expressions):
            cure = f"write {{{{ options.{name} }}}} in command, args or env, or remove it"
            yield Violation((*PATH, name), "is read by nobody: engine command knows only its command line", cure)
    if runtime.threads != "auto" and not re.search(r"\bthreads\b", expressions):
        cure = "write {{ threads }} in command, args or env, or remove it"
        problem = "is read by nobody: engine command knows only its command line"
        yield Violation(("spec", "runtime", "threads"), problem, cure)
