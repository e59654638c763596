"""Text to tokens and back: chat templates, and text that grows token by token without broken characters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omnimodel.runtime.engines.transformers import TOKEN_CHARACTERS, TOKENS_FILE, read_tokenizer
from omnimodel.runtime.requests import RequestError, invalid

if TYPE_CHECKING:
    import tokenizers

_PIECE_CHARACTERS = 1 << 15


class Tokens:
    """The tokenizer of a published model, loaded when it is first used.

    Args:
        assets: the published small files.
    """

    def __init__(self, assets: Path) -> None:
        described = json.loads((assets / TOKENS_FILE).read_text(encoding="utf-8"))
        self.chat_template: str | None = described["chatTemplate"]
        self._special: Mapping[str, str] = described["specialTokens"]
        self._assets = assets
        self._tokenizer: tokenizers.Tokenizer | None = None

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer itself."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self._assets)
        return self._tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text, with those the tokenizer puts around every plain prompt unless `special` is false."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def exceeds(self, text: str, most: int) -> bool:
        """Whether a long text surely has more tokens than `most`.

        It is looked at piece by piece: all at once it could take more memory than the process has.
        """
        if len(text) <= _PIECE_CHARACTERS:
            return False
        if len(text) > most * TOKEN_CHARACTERS:
            return True
        count = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            count += len(self.encode(text[start : start + _PIECE_CHARACTERS], special=False))
            if count > 2 * most:  # what a cut adds is a few tokens
                return True
        return False

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as the model reads it, up to where the answer begins.

        Raises:
            RequestError: the template refuses the messages, or there is none.
        """
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self.chat_template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        try:
            texts, _ = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.chat_template,
                add_generation_prompt=True,
                **self._special,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise invalid("messages", f"the model's chat template refuses them: {error}") from error
        text: str = texts[0]
        return text

    def size(self) -> int:
        """How many tokens there are."""
        count: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        return count


class Text:
    """The text of one answer while its tokens arrive.

    Args:
        tokens: of the model.
        stops: texts that end the answer and are no part of it.
    """

    def __init__(self, tokens: Tokens, stops: Sequence[str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokens.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = stops
        self._seen: list[int] = []
        self._raw = ""  # all text decoded so far
        self._sent = 0  # characters of it that were given out
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> str:
        """Text that is certain with the tokens of the answer so far (all of them, each time longer)."""
        for token in tokens[len(self._seen) :]:
            self._seen.append(token)
            piece = self._stream.step(self._tokenizer, token)
            if piece:
                self._raw += piece
                if self._find_stop():
                    break
        return self._give(len(self._raw) - (0 if self.stopped else self._held()))

    def end(self) -> str:
        """The rest, when no more tokens come: half a character too, as its replacement."""
        if not self.stopped:
            whole: str = self._tokenizer.decode(self._seen, skip_special_tokens=True)
            if whole.startswith(self._raw):
                self._raw = whole
                self._find_stop()
        return self._give(len(self._raw))

    def _find_stop(self) -> bool:
        found = [place for stop in self._stops if (place := self._raw.find(stop, self._sent)) >= 0]
        if found:
            self._raw = self._raw[: min(found)]
            self.stopped = True
        return self.stopped

    def _held(self) -> int:
        """How many last characters could be the beginning of a stop."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._raw) - self._sent), 0, -1):
            if any(stop.startswith(self._raw[-size:]) for stop in self._stops):
                return size
        return 0

    def _give(self, until: int) -> str:
        text = self._raw[self._sent : until]
        self._sent = max(self._sent, until)
        return text
