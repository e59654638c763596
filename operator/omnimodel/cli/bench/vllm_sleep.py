"""`python vllm_sleep.py FOLDER ROUNDS`: seconds of vLLM's sleep (level 1) and wake, by an interpreter with it; JSON.

It imports nothing of this project, which such an interpreter need not have. The weights are vLLM's dummies of the shape
that FOLDER/config.json says: what is moved is bytes. Source of the calls: vLLM's documentation, "Sleep Mode".
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Measure, and print one line."""
    from vllm import LLM  # type: ignore[import-not-found]

    llm = LLM(
        model=sys.argv[1],
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        enforce_eager=True,
        max_model_len=1024,
        gpu_memory_utilization=0.3,
    )
    sleeps, wakes = [], []
    for _ in range(int(sys.argv[2])):
        began = time.perf_counter()
        llm.sleep(level=1)
        slept = time.perf_counter()
        llm.wake_up()
        sleeps.append(slept - began)
        wakes.append(time.perf_counter() - slept)
    print(json.dumps({"sleepSeconds": sleeps, "wakeSeconds": wakes}))


if __name__ == "__main__":  # vLLM starts its engine as a process that imports this file
    main()
