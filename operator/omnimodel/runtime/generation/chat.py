"""Bodies of `/v1/chat/completions` and `/v1/completions`: what they may hold, and how the answers look."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnimodel.runtime.generation.sampling import Sampling
from omnimodel.runtime.requests import (
    RequestError,
    flag_of,
    integer_of,
    invalid,
    kind_of,
    number_of,
    refuse_others,
    unsupported,
)

_COMMON = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "ignore_eos",
    "user",
    "n",
)
_CHAT = (*_COMMON, "messages", "max_completion_tokens")
_COMPLETION = (*_COMMON, "prompt")
# Fields with the one value that asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,),
    "echo": (False,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "store": (False,),
    "modalities": (["text"],),
}
_STOPS = 4  # Source: the OpenAI API's limit
_BIASES = 300  # Source: the OpenAI API's limit


@dataclass(frozen=True)
class Defaults:
    """What holds where a request says nothing, and its limits.

    Args:
        new_tokens: generated at most, where a request does not say.
        new_tokens_limit, prompt_tokens_limit: what a request may have at most.
        context_tokens: prompt and answer together.
    """

    temperature: float
    top_p: float
    top_k: int
    new_tokens: int
    new_tokens_limit: int
    prompt_tokens_limit: int
    context_tokens: int


@dataclass(frozen=True)
class Ask:
    """One request for generated text.

    Args:
        messages: of a chat; empty for a plain completion.
        prompt: of a plain completion: text or tokens.
        new_tokens: asked for; None when the request does not say.
    """

    model: str
    messages: list[dict[str, str]]
    prompt: str | list[int]
    sampling: Sampling
    new_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    ignore_end: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created_seconds: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return bool(self.messages)


def read(body: dict[str, Any], *, chat: bool, name: str, defaults: Defaults) -> Ask:
    """Check a body.

    Raises:
        RequestError: naming the first field that is wrong, or that this server does not follow.
    """
    body = {key: value for key, value in body.items() if value is not None and value not in _NEUTRAL.get(key, ())}
    refuse_others(body, _CHAT if chat else _COMPLETION)
    if integer_of(body, "n", 1, 128) not in (None, 1):
        raise unsupported("n", "one answer a request")
    limits = [
        integer_of(body, key, 1, 1 << 31)
        for key in ("max_completion_tokens", "max_tokens")
        if body.get(key) is not None
    ]
    if len(set(limits)) > 1:
        raise invalid("max_tokens", "it differs from max_completion_tokens")
    stream = flag_of(body, "stream")
    return Ask(
        model=str(body.get("model") or name),
        messages=_messages(body) if chat else [],
        prompt="" if chat else _prompt(body),
        sampling=_sampling(body, defaults),
        new_tokens=limits[0] if limits else None,
        stops=_stops(body),
        stream=stream,
        usage=_usage(body, stream=stream),
        ignore_end=flag_of(body, "ignore_eos"),
    )


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if messages is None:
        raise RequestError("Missing required parameter: messages", param="messages", code="missing_required_parameter")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "expected a list with at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(place, f"expected an object, got {kind_of(message)}")
    for key, value in message.items():
        if key not in ("role", "content", "name") and value not in (None, []):
            raise unsupported(f"{place}.{key}")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise invalid(f"{place}.role", f"it is system, developer, user or assistant, not {role!r}")
    content = message.get("content")
    if isinstance(content, list):
        parts = []
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else kind_of(part)
                raise unsupported(f"{place}.content[{number}]", f"this model reads text, not {kind}")
            parts.append(part["text"])
        content = "".join(parts)
    if not isinstance(content, str):
        raise invalid(f"{place}.content", f"expected a string, got {kind_of(content)}")
    return {"role": "system" if role == "developer" else role, "content": content}


def _prompt(body: Mapping[str, Any]) -> str | list[int]:
    prompt = body.get("prompt")
    if prompt is None:
        raise RequestError("Missing required parameter: prompt", param="prompt", code="missing_required_parameter")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return prompt
    if isinstance(prompt, list) and all(isinstance(item, str | list) for item in prompt):
        raise unsupported("prompt", "one prompt a request")
    raise invalid("prompt", "expected a string or a list of tokens")


def _sampling(body: Mapping[str, Any], defaults: Defaults) -> Sampling:
    temperature = number_of(body, "temperature", 0, 2, defaults.temperature)
    top_p = number_of(body, "top_p", 0, 1, defaults.top_p)
    top_k = integer_of(body, "top_k", 0, 1 << 31)
    biases = body.get("logit_bias") or {}
    if not isinstance(biases, dict) or len(biases) > _BIASES:
        raise invalid("logit_bias", f"expected an object of at most {_BIASES} tokens")
    bias = {}
    for token in biases:
        if not token.isdecimal():
            raise invalid("logit_bias", f"{token!r} is no token")
        bias[int(token)] = number_of(biases, token, -100, 100, 0.0)
    seed = integer_of(body, "seed", -(1 << 63), (1 << 63) - 1)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=defaults.top_k if top_k is None else top_k,
        frequency_penalty=number_of(body, "frequency_penalty", -2, 2, 0.0),
        presence_penalty=number_of(body, "presence_penalty", -2, 2, 0.0),
        bias=bias,
        **({} if seed is None else {"seed": seed}),
    )


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
        raise invalid("stop", "expected a string or a list of strings")
    if len(stops) > _STOPS:
        raise invalid("stop", f"at most {_STOPS} of them")
    return tuple(stops)


def _usage(body: Mapping[str, Any], *, stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options", "it needs stream: true")
    if not isinstance(options, dict):
        raise invalid("stream_options", f"expected an object, got {kind_of(options)}")
    refuse_others({f"stream_options.{key}": 0 for key in options}, ("stream_options.include_usage",))
    return flag_of(options, "include_usage")


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """The `usage` of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def answer(ask: Ask, text: str, finish: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """A whole answer."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    if ask.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    kind = "chat.completion" if ask.chat else "text_completion"
    return {**_head(ask, kind), "choices": [choice], "usage": dict(counts)}


def chunk(ask: Ask, text: str | None, finish: str | None = None, *, first: bool = False) -> dict[str, Any]:
    """One event of a streamed answer."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    if ask.chat:
        role = {"role": "assistant"} if first else {}
        choice["delta"] = role | ({} if text is None else {"content": text})
    else:
        choice["text"] = text or ""
    return {**_head(ask, "chat.completion.chunk" if ask.chat else "text_completion"), "choices": [choice]}


def usage_chunk(ask: Ask, counts: Mapping[str, int]) -> dict[str, Any]:
    """The last event of a streamed answer that asked for its usage."""
    kind = "chat.completion.chunk" if ask.chat else "text_completion"
    return {**_head(ask, kind), "choices": [], "usage": dict(counts)}


def _head(ask: Ask, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if ask.chat else "cmpl"
    return {"id": f"{prefix}-{ask.id}", "object": kind, "created": ask.created_seconds, "model": ask.model}
