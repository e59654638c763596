"""The built-in handlers: models of the transformers library, from a checkpoint folder or a GGUF file."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omnimodel.errors import ImageError, SourceError
from omnimodel.runtime.engines import TEXT_GENERATION, llama_gguf
from omnimodel.runtime.requests import RequestError
from omnimodel.runtime.sdk import Audio, Model, Source
from omnimodel.runtime.tasks import CLASSIFICATION, EMBEDDINGS, TRANSCRIPTION

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

_NAMED_AT_MOST = 8
_BATCH_TEXTS = 32
_BATCH_TOKENS = 1024  # padding included: what a forward pass takes depends on them
_WHISPER_SECONDS = 30


class Pretrained(Model):
    """What all of them share."""

    auto = ""  # the library's class that finds the model's class by its configuration
    drops_pooler = False  # its weights are often missing, and nothing reads what it makes

    def build(self) -> torch.nn.Module:
        """The library's model for the published configuration."""
        import transformers

        config = transformers.AutoConfig.from_pretrained(self.assets, local_files_only=True)
        module = getattr(transformers, self.auto).from_config(config, dtype=self.dtype, attn_implementation="sdpa")
        fitted: torch.nn.Module = self._fitted(module)
        return fitted

    def publish(self, source: Source) -> torch.nn.Module:
        """Load the checkpoint, and keep its configuration and tokenizer."""
        with tempfile.TemporaryDirectory() as own:
            return self._publish(source, *_checkpoint(source, Path(own)))

    def _publish(self, source: Source, folder: Path, gguf: str) -> torch.nn.Module:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        module: Any = None
        if gguf and self.auto == TextGeneration.auto:
            module = llama_gguf.load(f"source {source.path.name}", folder / gguf, self.dtype)
        if module is None:
            module = self._from_library(source, folder, gguf)
        module.config.save_pretrained(self.assets)
        if getattr(module, "generation_config", None) is not None and module.can_generate():
            module.generation_config.save_pretrained(self.assets)
        self.keep(folder, {"gguf_file": gguf} if gguf else {})
        found: torch.nn.Module = module
        return found

    def _from_library(self, source: Source, folder: Path, gguf: str) -> Any:
        """Load the checkpoint the library's way."""
        import transformers

        from_file: dict[str, str] = {"gguf_file": gguf} if gguf else {}
        # An image holds dense tensors: blocks of a GGUF file are unpacked here, once.
        dense = {"quantization_config": transformers.GgufConfig(dequantize=True)} if gguf else {}
        subject = f"source {source.path.name}"
        try:
            module, info = getattr(transformers, self.auto).from_pretrained(
                folder, dtype=self.dtype, local_files_only=True, output_loading_info=True, **from_file, **dense
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            text = " ".join(str(error).split())[:600]
            raise ImageError(subject, f"transformers cannot load it: {text}", "correct source or task") from error
        module = self._fitted(module)
        missing = [name for name in info["missing_keys"] if not (self.drops_pooler and "pooler." in name)]
        if missing:
            raise ImageError(subject, f"it has no values for {_some(missing)}", "use a checkpoint made for this task")
        if info["unexpected_keys"]:
            log.warning("tensors left out names=%s", _some(list(info["unexpected_keys"])))
        if gguf and hasattr(module.config, "quantization_config"):
            del module.config.quantization_config
        if getattr(module.config, "quantization_config", None) is not None:
            raise ImageError(subject, "its weights are quantized", "use a checkpoint with full weights, or a GGUF file")
        return module

    def keep(self, folder: Path, from_file: dict[str, str]) -> None:
        """Write what else serving needs into the assets."""
        import transformers

        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **from_file)
        except (OSError, ValueError, KeyError) as error:
            text = " ".join(str(error).split())[:400]
            raise ImageError(f"source {folder.name}", f"its tokenizer cannot be loaded: {text}") from error
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise ImageError(f"source {folder.name}", "its tokenizer has no fast version", "add a tokenizer.json")
        tokenizer.save_pretrained(self.assets)
        described = {
            "chatTemplate": tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
            "specialTokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
            "maxLength": min(int(tokenizer.model_max_length), 1 << 31),
        }
        (self.assets / TOKENS_FILE).write_text(json.dumps(described), encoding="utf-8")

    def _fitted(self, module: Any) -> Any:
        if self.drops_pooler and getattr(module, "pooler", None) is not None:
            module.pooler = None
        return module


TOKENS_FILE = "tokens.json"
TOKEN_CHARACTERS = 64  # no text has tokens that long on average


class TextGeneration(Pretrained):
    """A causal language model; `generation.serving` answers with it."""

    auto = "AutoModelForCausalLM"


class Encoder(Pretrained):
    """A model over whole texts."""

    def load(self) -> None:
        """The tokenizer is loaded with the first request: it is larger than all the rest of an idle process."""
        self._tokenizer: tokenizers.Tokenizer | None = None
        described = json.loads((self.assets / TOKENS_FILE).read_text(encoding="utf-8"))
        config = self.module.config
        self._longest = min(described["maxLength"], getattr(config, "max_position_embeddings", 1 << 31))
        self._padding = int(config.pad_token_id or 0)

    def batches(self, texts: list[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Token ids and attention masks of all texts in order, a few at a time, padded to the longest among them.

        Raises:
            RequestError: a text is longer than the model can read.
        """
        batch: list[list[int]] = []
        for ids in (self._tokens(index, text) for index, text in enumerate(texts)):
            width = max([len(ids), *map(len, batch)])
            if batch and (len(batch) >= _BATCH_TEXTS or width * (len(batch) + 1) > _BATCH_TOKENS):
                yield self._padded(batch)
                batch = []
            batch.append(ids)
        yield self._padded(batch)

    def _tokens(self, index: int, text: str) -> list[int]:
        """Tokens of one text: those of all, or of one without end, could take more memory than the process has."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self.assets)
        most_characters = self._longest * TOKEN_CHARACTERS
        encoding = self._tokenizer.encode(text[:most_characters])
        if len(encoding.ids) > self._longest or len(text) > most_characters:
            if not self.options.get("truncate"):
                count = str(len(encoding.ids)) if len(text) <= most_characters else f"more than {self._longest}"
                raise RequestError(
                    f"Invalid value for input: text {index} has {count} tokens, "
                    f"the model reads at most {self._longest}",
                    param="input",
                    code="context_length_exceeded",
                )
            encoding.truncate(self._longest)
        ids: list[int] = encoding.ids
        return ids

    def _padded(self, batch: list[list[int]]) -> dict[str, torch.Tensor]:
        width = max(map(len, batch))
        ids = torch.full((len(batch), width), self._padding, dtype=torch.long)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for row, tokens in enumerate(batch):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        return {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}

    def working_bytes(self) -> int:
        """The largest forward pass: a batch that is full, or one text as long as the model can read."""
        config = self.module.config
        hidden, wide = getattr(config, "hidden_size", 0), getattr(config, "intermediate_size", 0)
        longest = self._longest if self._longest < 1 << 31 else 0
        tokens = max(_BATCH_TOKENS, longest)
        found: int = tokens * (12 * hidden + 4 * wide) * self.dtype.itemsize  # measured: about 9 and 3
        return found

    def count_tokens(self, texts: list[str]) -> int:
        """Tokens of texts, for `usage`."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return sum(len(tokenizer.encode(text[: self._longest * TOKEN_CHARACTERS]).ids) for text in texts)


class Embeddings(Encoder):
    """Embeddings; `options.pooling` is mean (default), cls or last, `options.normalize` is true by default."""

    auto = "AutoModel"
    drops_pooler = True

    def predict(self, inputs: list[str]) -> np.ndarray[Any, Any]:
        """One vector a text."""
        pooling = self.options.get("pooling", "mean")
        rows = []
        for encoded in self.batches(inputs):
            hidden = self.module(**encoded).last_hidden_state.float()
            mask = encoded["attention_mask"]
            if pooling == "cls":
                vectors = hidden[:, 0]
            elif pooling == "last":
                vectors = hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
            else:
                vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            if self.options.get("normalize", True):
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            rows.append(vectors.cpu().numpy())
        return np.concatenate(rows)


class TextClassification(Encoder):
    """Labels of texts with their scores."""

    auto = "AutoModelForSequenceClassification"

    def predict(self, inputs: list[str]) -> list[dict[str, float]]:
        """Every label's score, per text."""
        labels = self.module.config.id2label
        several = self.module.config.problem_type == "multi_label_classification" or len(labels) == 1
        answers = []
        for encoded in self.batches(inputs):
            logits = self.module(**encoded).logits.float()
            scores = logits.sigmoid() if several else logits.softmax(-1)
            answers += [{str(labels[i]): score for i, score in enumerate(row)} for row in scores.tolist()]
        return answers


class SpeechRecognition(Pretrained):
    """A Whisper model."""

    auto = "AutoModelForSpeechSeq2Seq"

    def keep(self, folder: Path, from_file: dict[str, str]) -> None:
        """The tokenizer and the feature extractor's configuration."""
        super().keep(folder, from_file)
        name = "preprocessor_config.json"
        if (folder / name).is_file():
            shutil.copyfile(folder / name, self.assets / name)

    def load(self) -> None:
        """The feature extractor and the tokenizer come with the first request."""
        self._processor: Any = None

    def predict(self, audio: Audio, language: str | None = None) -> str:
        """The text of a recording, 30 seconds at a time."""
        import transformers

        if self._processor is None:
            extractor = transformers.WhisperFeatureExtractor(feature_size=self.module.config.num_mel_bins)
            self._processor = (extractor, read_tokenizer(self.assets))
        extractor, tokenizer = self._processor
        options: dict[str, Any] = {}
        if getattr(self.module.generation_config, "is_multilingual", False):
            options = {"task": "transcribe", **({"language": language} if language else {})}
        elif language not in (None, "en", "english"):
            raise RequestError(f"Invalid value for language: the model knows en only, not {language}", param="language")
        size = _WHISPER_SECONDS * audio.rate
        texts = []
        for start in range(0, max(len(audio.samples), 1), size):
            part = audio.samples[start : start + size]
            features = extractor(part, sampling_rate=audio.rate, return_tensors="pt").input_features
            tokens = self.module.generate(features.to(self.device, self.dtype), do_sample=False, num_beams=1, **options)
            texts.append(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True).strip())
        return " ".join(text for text in texts if text)


HANDLERS: dict[str, type[Model]] = {
    TEXT_GENERATION: TextGeneration,
    EMBEDDINGS: Embeddings,
    CLASSIFICATION: TextClassification,
    TRANSCRIPTION: SpeechRecognition,
}


def read_tokenizer(assets: Path) -> tokenizers.Tokenizer:
    """The published tokenizer."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(assets / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _checkpoint(source: Source, own: Path) -> tuple[Path, str]:
    """The folder of a checkpoint, and the name of the GGUF file in it when it is one.

    Args:
        own: an empty folder. The library lists the folder that a file is in, and of a source that is one file a sandbox
            need not show what is around it.
    """
    if source.path.is_file():
        if source.path.suffix == ".gguf":
            alone = own / source.path.parent.name
            alone.mkdir()
            (alone / source.path.name).symlink_to(source.path)
            return alone, source.path.name
        raise SourceError(f"source {source.path.name}", "it is no GGUF file", "give the checkpoint's folder")
    configs = [file for file in source.files("config.json") if list(file.parent.glob("*.safetensors*"))]
    configs = configs or [file for file in source.files("config.json") if list(file.parent.glob("*.bin"))]
    if (source.path / "config.json") in configs:
        return source.path, ""
    if len(configs) == 1:
        return configs[0].parent, ""
    gguf = source.files("*.gguf")
    if not configs and len(gguf) == 1:
        return gguf[0].parent, gguf[0].name
    found = f"{len(configs)} checkpoint folders and {len(gguf)} GGUF files"
    raise SourceError(
        f"source {source.path.name}", f"it has {found}, and must have exactly one", "name one with source…path"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return ", ".join(sorted(names)[:_NAMED_AT_MOST]) + more
