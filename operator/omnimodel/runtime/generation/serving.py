"""Serves a causal language model: OpenAI's two text endpoints on continuous batching."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from omnimodel.errors import OmniError, Reason
from omnimodel.runtime.application import send_events
from omnimodel.runtime.generation import chat
from omnimodel.runtime.generation.batching import Batching
from omnimodel.runtime.generation.tokens import Text, Tokens
from omnimodel.runtime.requests import RequestError, invalid, read_object

if TYPE_CHECKING:
    from omnimodel.memory.image import Index
    from omnimodel.runtime.engines import Setting
    from omnimodel.runtime.sdk import Model

CONTEXT_TOKENS = 4096
NEW_TOKENS = 512
REQUESTS = 16


@dataclass(frozen=True)
class Piece:
    """What a step added to an answer; `finish` is set in the last one."""

    text: str
    tokens: int
    finish: str | None


class TextGeneration:
    """See the module and `own.Serving`."""

    def __init__(self, setting: Setting, model: Model, index: Index) -> None:
        del index
        self._name = setting.name
        self._tokens = Tokens(model.assets)
        config = model.module.config
        limits = setting.spec.get("limits") or {}
        self._defaults, cache_tokens = _defaults(setting.subject, model, limits)
        self._ends = _ends(model)
        self._vocabulary = int(config.vocab_size)
        requests = int(model.options.get("maxBatch") or limits.get("concurrency") or REQUESTS)
        self._batching = Batching(setting.subject, model.module, cache_tokens, requests)

    @property
    def abandoned(self) -> bool:
        """Never: a request whose client has left is taken out of the batch."""
        return False

    @property
    def tokens(self) -> dict[str, int]:
        """Of all requests so far."""
        computed = self._batching.computed
        return {"promptTokens": computed.prompt, "generatedTokens": computed.generated}

    def routes(self) -> list[web.RouteDef]:
        """Chat and plain completions."""
        return [web.post("/v1/chat/completions", self._chat), web.post("/v1/completions", self._completions)]

    def working_bytes(self) -> int:
        """The cache, full, and the largest step over it."""
        return self._batching.working_bytes()

    def resume(self) -> None:
        """Let the batch go on."""
        self._batching.resume()

    def pause(self) -> int:
        """Stop the batch between two tokens."""
        return self._batching.pause()

    def trim(self) -> None:
        """Give back the cache."""
        self._batching.trim()

    def stop(self) -> None:
        """End the batch's thread."""
        self._batching.stop()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, is_chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, is_chat=False)

    async def _respond(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        body = read_object(await request.read())
        ask = chat.read(body, chat=is_chat, name=self._name, defaults=self._defaults)
        prompt = self._prompt(ask)
        limit_tokens = self._limit(ask, len(prompt))
        if ask.stream:
            return await send_events(request, self._events(ask, prompt, limit_tokens), done=True)
        text, count, finish = "", 0, "length"
        async with aclosing(self._pieces(ask, prompt, limit_tokens)) as pieces:
            async for piece in pieces:
                text += piece.text
                count, finish = piece.tokens, piece.finish or finish
        return web.json_response(chat.answer(ask, text, finish, chat.usage(len(prompt), count)))

    async def _events(
        self, ask: chat.Ask, prompt: list[int], limit_tokens: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        count = 0
        first = True
        async with aclosing(self._pieces(ask, prompt, limit_tokens)) as pieces:
            async for piece in pieces:
                if first and ask.chat:
                    yield chat.chunk(ask, "", first=True)
                first = False
                count = piece.tokens
                if piece.text:
                    yield chat.chunk(ask, piece.text)
                if piece.finish:
                    yield chat.chunk(ask, None, piece.finish)
        if ask.usage:
            yield chat.usage_chunk(ask, chat.usage(len(prompt), count))

    async def _pieces(self, ask: chat.Ask, prompt: list[int], limit_tokens: int) -> AsyncGenerator[Piece, None]:
        text = Text(self._tokens, ask.stops)
        ends = () if ask.ignore_end else self._ends
        async with aclosing(self._batching.generate(prompt, limit_tokens, ends, ask.sampling)) as steps:
            async for step in steps:
                new = text.add(step.tokens)
                if step.finished and not text.stopped:
                    new += text.end()
                if text.stopped or step.finished:
                    ended = text.stopped or (step.tokens and step.tokens[-1] in ends)
                    yield Piece(new, len(step.tokens), "stop" if ended else "length")
                    return
                yield Piece(new, len(step.tokens), None)

    def _prompt(self, ask: chat.Ask) -> list[int]:
        prompt = self._tokens.chat_text(ask.messages) if ask.chat else ask.prompt
        if isinstance(prompt, str):
            if self._tokens.exceeds(prompt, self._most_prompt_tokens):
                raise self._too_long(ask, f"more than {self._most_prompt_tokens}")
            prompt = self._tokens.encode(prompt, special=not ask.chat)
        if not prompt:
            raise invalid("prompt", "it is empty")
        if max(prompt) >= self._vocabulary:
            raise invalid("prompt", f"{max(prompt)} is no token of this model")
        return prompt

    def _limit(self, ask: chat.Ask, prompt_tokens: int) -> int:
        """How many tokens may be generated.

        Raises:
            RequestError: prompt and answer do not fit.
        """
        defaults = self._defaults
        takes = "messages take" if ask.chat else "prompt takes"
        if any(token >= self._vocabulary for token in ask.sampling.bias):
            raise invalid("logit_bias", f"the model has {self._vocabulary} tokens")
        if prompt_tokens > self._most_prompt_tokens:
            raise self._too_long(ask, str(prompt_tokens))
        room = defaults.context_tokens - prompt_tokens
        if ask.new_tokens is None:
            return min(defaults.new_tokens, room)
        if ask.new_tokens > defaults.new_tokens_limit:
            raise invalid("max_tokens", f"{ask.new_tokens} is more than the {defaults.new_tokens_limit} allowed here")
        if ask.new_tokens > room:
            raise RequestError(
                f"This model's context has {defaults.context_tokens} tokens; the {takes} {prompt_tokens} of them "
                f"and max_tokens asks for {ask.new_tokens} more",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return ask.new_tokens

    @property
    def _most_prompt_tokens(self) -> int:
        return min(self._defaults.prompt_tokens_limit, self._defaults.context_tokens - 1)

    def _too_long(self, ask: chat.Ask, tokens: str) -> RequestError:
        place = "messages" if ask.chat else "prompt"
        have = "have" if ask.chat else "has"
        return RequestError(
            f"The {place} {have} {tokens} tokens, this model takes at most {self._most_prompt_tokens}",
            param=place,
            code="context_length_exceeded",
        )


def _ends(model: Model) -> tuple[int, ...]:
    """Tokens that end an answer."""
    found: Any = None
    path = model.assets / "generation_config.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if found is None:
        found = model.module.config.eos_token_id
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def _defaults(subject: str, model: Model, limits: dict[str, Any]) -> tuple[chat.Defaults, int]:
    options = model.options
    published: dict[str, Any] = {}
    path = model.assets / "generation_config.json"
    if path.is_file():
        published = json.loads(path.read_text(encoding="utf-8"))
    cache_tokens = _whole(subject, options, "contextTokens") or CONTEXT_TOKENS
    longest = int(getattr(model.module.config, "max_position_embeddings", 0) or cache_tokens)
    context_tokens = min(cache_tokens, longest)
    most = int(limits.get("outputTokens") or context_tokens)
    return chat.Defaults(
        temperature=float(options.get("temperature", published.get("temperature", 1.0))),
        top_p=float(options.get("topP", published.get("top_p", 1.0))),
        top_k=int(options.get("topK", 0)),
        new_tokens=min(_whole(subject, options, "maxNewTokens") or NEW_TOKENS, most),
        new_tokens_limit=most,
        prompt_tokens_limit=int(limits.get("inputTokens") or context_tokens),
        context_tokens=context_tokens,
    ), cache_tokens


def _whole(subject: str, options: Any, name: str) -> int:
    value = options.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 1 <= value <= 1 << 24:
        raise OmniError(
            subject,
            f"runtime.options.{name} is {value!r}",
            "write a number of tokens, such as 4096",
            reason=Reason.INVALID_MANIFEST,
        )
    return value
