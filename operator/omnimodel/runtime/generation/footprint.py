"""What working memory text generation comes to need beyond what a first short answer shows."""

from __future__ import annotations

from typing import Any

_SAMPLING_BYTES = 48  # a token of the vocabulary while one row is drawn: probabilities, their order, noise


def working_bytes(config: Any, item_bytes: int, context_tokens: int, step_tokens: int, requests: int) -> int:
    """Bytes of a full cache and of the largest step over it.

    A short answer touches little of either: the cache's pages take memory when they are written, and a step's tensors
    grow with its tokens and with what it reads back.

    Args:
        config: of the library's model.
        item_bytes: of one number in the weights' dtype, which the cache has too.
        context_tokens: that have room in the cache.
        step_tokens: of all requests in one forward pass.
        requests: in one forward pass.

    Returns:
        0 when the configuration does not say what is needed to know, as with models that are no plain transformers.
    """
    config = config.get_text_config(decoder=True)
    try:
        hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
        heads, wide = int(config.num_attention_heads), int(config.intermediate_size)
        vocabulary = int(config.vocab_size)
    except (AttributeError, TypeError):
        return 0
    kept_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head = int(getattr(config, "head_dim", None) or hidden // heads)
    cache_bytes = 2 * layers * kept_heads * head * context_tokens * item_bytes
    read_tokens = context_tokens + step_tokens
    # Keys and values are read from the cache, repeated for each head, and laid out for the kernel.
    read_bytes = 2 * (kept_heads + 2 * heads) * head * read_tokens * item_bytes
    mask_bytes = 2 * step_tokens * read_tokens * item_bytes
    layer_bytes = step_tokens * (4 * hidden + 3 * wide) * item_bytes
    # Logits come in the weights' dtype, are made float32, and once more when somebody samples.
    logits_bytes = vocabulary * (requests * (item_bytes + 8) + _SAMPLING_BYTES)
    return cache_bytes + read_bytes + mask_bytes + layer_bytes + logits_bytes
