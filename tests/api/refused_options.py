"""What an engine would ignore: options, types and limits that nobody reads."""

from __future__ import annotations

from typing import Any

from api.builders import COMMAND, LLAMACPP, SGLANG, TRANSFORMERS, VLLM

MODELS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "quantization Q4_K_M",
        {"runtime": {**TRANSFORMERS, "quantization": "Q4_K_M"}},
        ["runtime.quantization: 'Q4_K_M': is none of the possible words; write none, int8, fp8 or int4"],
    ),
    (
        "quantization llamacpp",
        {"runtime": {**LLAMACPP, "quantization": "int8"}},
        [
            "runtime.quantization: 'int8': quantization is for engines transformers and python only; remove it: the file of weights, or an argument of the program, says it"
        ],
    ),
    (
        "quantization command",
        {"runtime": {**COMMAND, "quantization": "fp8"}},
        [
            "runtime.quantization: 'fp8': quantization is for engines transformers and python only; remove it: the file of weights, or an argument of the program, says it"
        ],
    ),
    (
        "dtype llamacpp",
        {"runtime": {**LLAMACPP, "dtype": "float16"}},
        [
            "runtime.dtype: 'float16': dtype is for engines transformers and python only; remove it: the file of weights, or an argument of the program, says it"
        ],
    ),
    (
        "dtype command",
        {"runtime": {**COMMAND, "dtype": "bfloat16"}},
        [
            "runtime.dtype: 'bfloat16': dtype is for engines transformers and python only; remove it: the file of weights, or an argument of the program, says it"
        ],
    ),
    (
        "tokens of a handler",
        {"limits": {"inputTokens": 100, "outputTokens": 10}},
        [
            "limits.inputTokens: 100: only engine transformers counts tokens, for text-generation; remove it; requestBytes and responseBytes limit every model",
            "limits.outputTokens: 10: only engine transformers counts tokens, for text-generation; remove it; requestBytes and responseBytes limit every model",
        ],
    ),
    (
        "tokens of an embedder",
        {"runtime": {"engine": "transformers", "task": "embeddings"}, "limits": {"inputTokens": 100}},
        [
            "limits.inputTokens: 100: only engine transformers counts tokens, for text-generation; remove it; requestBytes and responseBytes limit every model"
        ],
    ),
    (
        "tokens of a GGUF file",
        {"runtime": LLAMACPP, "limits": {"outputTokens": 100}},
        [
            "limits.outputTokens: 100: only engine transformers counts tokens, for text-generation; remove it; requestBytes and responseBytes limit every model"
        ],
    ),
    (
        "option misspelt",
        {"runtime": {**TRANSFORMERS, "options": {"contextTokns": 4096}}},
        [
            "runtime.options.contextTokns: 4096: is no option of engine transformers for text-generation; did you mean contextTokens?"
        ],
    ),
    (
        "option in snake case",
        {"runtime": {**TRANSFORMERS, "options": {"max_new_tokens": 100}}},
        [
            "runtime.options.max_new_tokens: 100: is no option of engine transformers for text-generation; did you mean maxNewTokens?"
        ],
    ),
    (
        "option of another system",
        {"runtime": {**LLAMACPP, "options": {"num_ctx": 4096}}},
        [
            "runtime.options.num_ctx: 4096: is no option of engine llamacpp for text-generation; did you mean contextTokens?"
        ],
    ),
    (
        "option of another task",
        {"runtime": {"engine": "transformers", "task": "embeddings", "options": {"contextTokens": 512}}},
        [
            "runtime.options.contextTokens: 512: is no option of engine transformers for embeddings; possible are pooling, normalize, truncate"
        ],
    ),
    (
        "option where there are none",
        {"runtime": {"engine": "transformers", "task": "automatic-speech-recognition", "options": {"language": "en"}}},
        [
            "runtime.options.language: 'en': is no option of engine transformers for automatic-speech-recognition; remove it: there are none"
        ],
    ),
    (
        "option of another type",
        {"runtime": {**TRANSFORMERS, "options": {"temperature": "hot"}}},
        ["runtime.options.temperature: 'hot': is not a number; write one from 0 to 2"],
    ),
    (
        "option out of range",
        {"runtime": {**TRANSFORMERS, "options": {"topP": 1.5, "contextTokens": 0}}},
        [
            "runtime.options.topP: 1.5: is out of range; write a number from 0 to 1",
            "runtime.options.contextTokens: 0: is less than is possible; write a number of tokens from 1 to 16777216",
        ],
    ),
    (
        "option of a word",
        {"runtime": {"engine": "transformers", "task": "embeddings", "options": {"pooling": "max"}}},
        ["runtime.options.pooling: 'max': is none of the possible words; write mean, cls or last"],
    ),
    (
        "option without a value",
        {"runtime": {"engine": "transformers", "task": "text-classification", "options": {"truncate": None}}},
        ["runtime.options.truncate: has no value; write one, or remove the line"],
    ),
    (
        "option that no template names",
        {"runtime": {**COMMAND, "options": {"contextTokens": 4096}}},
        [
            "runtime.options.contextTokens: 4096: is read by nobody: engine command knows only its command line; write {{ options.contextTokens }} in command, args or env, or remove it"
        ],
    ),
    (
        "option threads that no template names",
        {"runtime": {**COMMAND, "threads": 4}},
        [
            "runtime.threads: 4: is read by nobody: engine command knows only its command line; write {{ threads }} in command, args or env, or remove it"
        ],
    ),
    (
        "option of vllm misspelt, and one of another engine",
        {"runtime": {**VLLM, "options": {"cacheMemory": "8Gi", "maxBatc": 8, "cacheTokens": 65536}}},
        [
            "runtime.options.maxBatc: 8: is no option of engine vllm for text-generation; did you mean maxBatch?",
            "runtime.options.cacheTokens: 65536: is no option of engine vllm for text-generation; possible are contextTokens, maxBatch, cacheMemory",
        ],
    ),
    (
        "option cacheMemory as a share",
        {"runtime": {**VLLM, "options": {"cacheMemory": "80%"}}},
        ["runtime.options.cacheMemory: '80%': is not a quantity of at least 1Mi; write one such as 24Gi or 1500M"],
    ),
    (
        "option cacheTokens in bytes",
        {"runtime": {**SGLANG, "options": {"cacheTokens": "8Gi"}}},
        [
            "runtime.options.cacheTokens: '8Gi': is not a whole number; write a number of tokens from 1 to 16777216",
        ],
    ),
    (
        "task of sglang",
        {"runtime": {**SGLANG, "task": "embeddings"}},
        ["runtime.task: 'embeddings': this engine does text-generation only; remove it, or write engine: transformers"],
    ),
    (
        "a server told to sleep by hand",
        {"runtime": {**SGLANG, "args": ["--enable-memory-saver"]}},
        [
            "runtime.args[0]: '--enable-memory-saver': --enable-memory-saver belongs to the system; remove it: spec.residency says when the model leaves the device"
        ],
    ),
]
