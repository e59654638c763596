"""The transformers library's continuous batching: started, paused, trimmed and restarted by what a process is told.

Its pause stops the loop between two tokens and keeps the requests with their keys and values, which makes it the
fence of an evict. Traps it has, and what is done about them: one prompt larger than the cache ends the loop (lengths
are checked before), a loop that died refuses requests (it is started again), without sizes it takes 60 % of the
memory (they are always given), and it takes the frames of the weights and what is shared with the zygote for memory
of this process's own (it is told what is private).
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import mmap
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from omnimodel.errors import OmniError, Reason
from omnimodel.runtime.generation.counting import Computed, Count
from omnimodel.runtime.generation.footprint import working_bytes
from omnimodel.runtime.generation.sampling import KEY, Sampler, Sampling

log = logging.getLogger(__name__)

PAGE_TOKENS = 32
STEP_TOKENS = 256  # of prompts and generation in one forward pass
_MADV_DONTNEED = 4
_LATE_SECONDS = 30.0  # a step that was under way when its request was cancelled has ended by then

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Generated:
    """Tokens of one request so far, and whether they are all."""

    tokens: list[int]
    finished: bool


class Batching:
    """Generates tokens for many requests at once.

    Args:
        subject: the model, for messages.
        module: the bound model.
        context_tokens: how many tokens have room in the cache, of all requests together.
        requests: how many are in one forward pass at most.
    """

    def __init__(self, subject: str, module: Any, context_tokens: int, requests: int) -> None:
        self.capacity_tokens = -(-context_tokens // PAGE_TOKENS) * PAGE_TOKENS
        self._subject = subject
        self._module = module
        self._requests = max(1, min(requests, STEP_TOKENS))
        self._numbers = itertools.count()
        self._manager: Any = None
        self._starting = threading.Lock()
        self._pause: ExitStack | None = None
        self._paused = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._resumed: asyncio.Event | None = None
        self.active: set[str] = set()
        self.computed = Computed()

    def working_bytes(self) -> int:
        """See `engines.Engine`."""
        weight = next(self._module.parameters())
        return working_bytes(
            self._module.config, weight.element_size(), self.capacity_tokens, STEP_TOKENS, self._requests
        )

    async def generate(
        self, prompt: Sequence[int], limit_tokens: int, ends: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Generated, None]:
        """The tokens of one request, after each step; closing the iterator takes the request out of the batch.

        Args:
            prompt: its tokens; they must fit the cache together with the limit.
            limit_tokens: how many are generated at most.
            ends: tokens that end the text.
            sampling: how tokens are chosen.

        Raises:
            OmniError: the loop failed.
        """
        assert len(prompt) + limit_tokens <= self.capacity_tokens
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        request = f"r{next(self._numbers)}"
        count = Count(self.computed)

        def received(output: Any) -> None:  # also after the iterator was closed, of a step that was under way
            if output.generated_tokens:
                count.reach(len(prompt), len(output.generated_tokens))
            outputs.put_nowait(output)

        self.active.add(request)
        manager: Any = None
        finished = False
        try:
            manager = await self._started()
            manager.register_result_handler(request, received)
            await self._add(list(prompt), request, limit_tokens, list(ends) or [-1], sampling)
            while not finished:
                output = await outputs.get()
                if output.error:
                    finished = True
                    raise OmniError(self._subject, f"generation failed: {output.error}", reason=Reason.HANDLER_FAILED)
                finished = output.is_finished()
                yield Generated(output.generated_tokens, finished)
        finally:
            self.active.discard(request)
            if not finished and manager is not None:
                count.reach(min(len(prompt), _read(manager, request)), 0)
                manager.cancel_request(request)
                loop.call_later(_LATE_SECONDS, manager.output_router.result_handlers.pop, request, None)

    async def _started(self) -> Any:
        """The manager with its loop running; waits while the model is evicted and there is no loop to pause."""
        if self._resumed is None:
            self._loop, self._resumed = asyncio.get_running_loop(), asyncio.Event()
        while (manager := self._running()) is None:
            await self._resumed.wait()
            await asyncio.sleep(0)  # lets the event be cleared when the model was evicted again
        return manager

    async def _add(
        self, prompt: list[int], request: str, limit_tokens: int, ends: list[int], sampling: Sampling
    ) -> None:
        for _ in range(3):
            manager = await self._started()
            added = manager.add_request(
                prompt, request, max_new_tokens=limit_tokens, streaming=True, eos_token_id=ends, **{KEY: sampling}
            )
            if added is not None:
                return
            # The loop is ending: wait for it, then start it again.
            await asyncio.to_thread(manager._generation_thread.join, 1.0)  # noqa: SLF001
        raise OmniError(self._subject, "its generation loop does not run", reason=Reason.HANDLER_FAILED)

    def _running(self) -> Any:
        """The manager with its loop running, made with the first request and started again when it died.

        Returns:
            None when the loop cannot be started because the model is evicted.
        """
        with self._starting:
            if self._paused and (self._manager is None or not self._manager.is_running()):
                return None
            if self._manager is None:
                self._manager = self._make()
            if not self._manager.is_running():
                with torch.inference_mode():
                    self._manager.start()
            return self._manager

    def _make(self) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching import cache

        manager = self._module.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=self.capacity_tokens // PAGE_TOKENS,
                max_batch_tokens=STEP_TOKENS,
                max_requests_per_batch=self._requests,
                allow_block_sharing=False,
                use_cuda_graph=False,
                use_async_batching=False,
                auto_switch_to_flash=False,
            ),
        )
        if self._module.device.type == "cpu":
            cache.get_device_and_memory_breakdown = _own_memory
        processors = manager.logit_processor
        processors.logits_processor.append(Sampler())
        processors.tensors_required += 1
        processors.supported_keys[KEY] = Sampling
        processors.do_processing = True
        manager.warmup()  # makes the cache now, here, and no more on a CPU
        _drop_pages(manager.batch_processor.cache.cache_tensor)
        return manager

    # From the command thread

    def resume(self) -> None:
        """The weights are there."""
        with self._starting:
            self._paused = False
        if self._pause is not None:
            pause, self._pause = self._pause, None
            pause.close()
        self._tell(lambda resumed: resumed.set())

    def pause(self) -> int:
        """Return when no step is under way and none begins; how many requests wait for `resume`."""
        if not self._paused:
            with self._starting:
                self._paused = True  # from here on no loop is started
            self._tell(lambda resumed: resumed.clear())
            if self._manager is not None and self._manager.is_running():
                pause = ExitStack()
                try:
                    pause.enter_context(self._manager.pause())
                except RuntimeError:  # the loop ended before it could pause: nothing runs either
                    log.warning("generation loop had ended model=%s", self._subject)
                else:
                    self._pause = pause
        return len(self.active)

    def _tell(self, what: Callable[[asyncio.Event], None]) -> None:
        if self._resumed is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(what, self._resumed)

    def trim(self) -> None:
        """Give the cache's memory back when no request needs it; on a CPU its pages read as zeros afterwards."""
        processor = self._manager.batch_processor if self._manager is not None else None
        if self.active or processor is None or not self._paused:
            return
        if self._module.device.type == "cpu":
            _drop_pages(processor.cache.cache_tensor)
            return
        if self._pause is not None:  # without requests its loop takes no step
            self._pause.close()
            self._pause = None
        self._manager.stop(block=True, timeout=2.0, hard_stop=True)
        self._manager = None

    def stop(self) -> None:
        """End the loop's thread."""
        if self._manager is not None and self._manager.is_running():
            if self._pause is not None:
                return  # it waits, and ends with the process
            self._manager.stop(block=True, timeout=2.0, hard_stop=True)


def _read(manager: Any, request: str) -> int:
    """How many tokens of a request in the batch have been read; 0 of one that waits for its turn."""
    processor = manager.batch_processor
    state = processor.scheduler.active_requests.get(request) if processor is not None else None
    return 0 if state is None else int(state.position_offset)


def _own_memory() -> tuple[torch.device, int, int, int]:
    """What the library asks for: device, bytes it has in all, reserved and allocated."""
    import psutil

    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        private_bytes = sum(int(row.split()[1]) << 10 for row in file if row.startswith("Private_"))
    return torch.device("cpu"), psutil.virtual_memory().total, private_bytes, private_bytes


def _drop_pages(cache: torch.Tensor) -> None:
    """Give the memory of a cache of zeros back until it is written to."""
    if cache.device.type == "cpu":
        start = -(-cache.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (cache.data_ptr() + cache.numel() * cache.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            _libc.madvise(start, end - start, _MADV_DONTNEED)
