"""What the zygote imports before it forks, so that every model's process has it from its first instruction on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

REHEARSAL = "omnimodel.runtime.rehearsal"
PRELOAD = (
    "numpy",
    "torch",
    "aiohttp.web",
    "safetensors.torch",
    "tokenizers",
    "transformers",
    "transformers.generation.utils",
    "transformers.generation.continuous_batching",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.bert.modeling_bert",
    "transformers.models.whisper.modeling_whisper",
    "transformers.models.whisper.feature_extraction_whisper",
    "transformers.utils.chat_template_utils",
    "jinja2.sandbox",
    "psutil",
    "omnimodel.memory.devices.host_window",
    "omnimodel.runtime.serve",
    "omnimodel.runtime.engines.own",
    "omnimodel.runtime.engines.transformers",
    "omnimodel.runtime.generation.serving",
    "omnimodel.runtime.generation.batching",
    REHEARSAL,
)
_UNWANTED = "torchao"  # the transformers library imports it wherever it finds it; only quantized models need it


def preload(modules: Sequence[str], said: Callable[[str, int, int], None]) -> list[str]:
    """Import modules; those that are not installed are passed over, and so is what only some models need.

    Returns:
        The modules that were not found.
    """
    absent = []
    sys.modules[_UNWANTED] = None  # type: ignore[assignment] # as the import system has it: not to be found
    try:
        for index, name in enumerate(modules):
            said(name, index, len(modules))
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                absent.append(f"{name} ({error})")
        if "torch" in modules and "torch" in sys.modules:
            _tiny_models()
    finally:
        del sys.modules[_UNWANTED]
    return absent


def _tiny_models() -> None:
    """Build models without storage: loads what the libraries import late, and runs nothing."""
    import torch

    with torch.device("meta"):
        torch.nn.Linear(2, 2)(torch.empty(1, 2))
        torch.zeros(2).cos()
        if "transformers.models.llama.modeling_llama" in sys.modules:
            from transformers import LlamaConfig, LlamaForCausalLM

            LlamaForCausalLM._from_config(  # noqa: SLF001 - the library's own way to build without weights
                LlamaConfig(
                    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
                )
            )
        if "transformers.models.bert.modeling_bert" in sys.modules:
            from transformers import BertConfig, BertModel

            BertModel._from_config(  # noqa: SLF001
                BertConfig(hidden_size=12, num_hidden_layers=1, intermediate_size=8, vocab_size=8)
            )
