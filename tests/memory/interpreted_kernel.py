"""A program that runs the device's decoder in Triton's interpreter, on blocks that come in over stdin.

A process of its own, because whether Triton interprets is settled when it is imported.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


class InterpretedKernel:
    """The program, as its parent sees it."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": f"{ROOT / 'operator'}{os.pathsep}{ROOT / 'tests'}",
        }
        self.program = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "memory.interpreted_kernel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def unpack(self, block: np.ndarray, layout: Any) -> np.ndarray:
        """What the kernel writes: the block's values and eight more whose bits it must leave set."""
        pickle.dump((block, layout), self.program.stdin)
        self.program.stdin.flush()
        return pickle.load(self.program.stdout)

    def close(self) -> None:
        self.program.stdin.close()
        assert self.program.wait(60) == 0
        self.program.stdout.close()


def serve() -> None:
    import torch

    from omnimodel.memory.codec_kernel import unpack

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but answers goes where the parent reads
    while True:
        try:
            block, layout = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signed, unsigned = (torch.int16, np.uint16) if layout.item_bytes == 2 else (torch.int8, np.uint8)
        out = torch.full((layout.count + 8,), -1, dtype=signed)
        unpack(torch.from_numpy(block), out, layout)
        pickle.dump(out.numpy().view(unsigned), answers)
        answers.flush()


if __name__ == "__main__":
    serve()
