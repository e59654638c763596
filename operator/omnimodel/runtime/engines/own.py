"""Own engines: a handler's module bound to frames, its `predict` or its text generation behind HTTP."""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from omnimodel.errors import ImageError, OmniError, Reason
from omnimodel.memory.devices import open_window
from omnimodel.memory.image import ASSETS_FOLDER, Index, read_index
from omnimodel.memory.packing import pack_folder
from omnimodel.runtime import publishing, signature, tasks
from omnimodel.runtime.binding import Own, bind
from omnimodel.runtime.engines import TEXT_GENERATION, Setting, name_of, subject_of
from omnimodel.runtime.handlers import HandlerError, call, calling, load_class
from omnimodel.runtime.lane import Lane
from omnimodel.runtime.pipelining import wait_before_use
from omnimodel.runtime.quantization import FORMATS
from omnimodel.runtime.sdk import Model, Source
from omnimodel.runtime.widening import widen

if TYPE_CHECKING:
    from aiohttp import web

    from omnimodel.memory.devices import Window
    from omnimodel.protocol.process import Publish

log = logging.getLogger(__name__)

_PACKING_THREADS = 8  # each takes some 400 MiB with the frames of a GPU

_libc = ctypes.CDLL(None)


class Serving(Protocol):
    """What answers requests with a bound model."""

    @property
    def abandoned(self) -> bool:
        """See `engines.Engine`."""

    @property
    def tokens(self) -> dict[str, int]:
        """See `engines.Engine`."""

    def routes(self) -> list[web.RouteDef]:
        """What it answers."""

    def working_bytes(self) -> int:
        """See `engines.Engine`."""

    def resume(self) -> None:
        """The weights are there: compute."""

    def pause(self) -> int:
        """Return when nothing computes any more; how many requests go on after `resume`."""

    def trim(self) -> None:
        """Give back what can be made again, while paused."""

    def stop(self) -> None:
        """End threads that would keep the process alive."""


class OwnEngine:
    """See the module and `engines.Engine`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._window: Window | None = None
        self._serving: Serving | None = None
        self._empty: list[Own] = []  # memory of the process that has no values yet

    @property
    def abandoned(self) -> bool:
        """Whether a call of the handler goes on for nobody."""
        return self._serving is not None and self._serving.abandoned

    @property
    def tokens(self) -> dict[str, int]:
        """Where text is generated."""
        return {} if self._serving is None else self._serving.tokens

    def start(self) -> None:
        """Build on the meta device, bind, and load what belongs to the handler. Raises OmniError."""
        setting = self._setting
        subject = setting.subject
        index = read_index(setting.folder)
        set_threads(setting.threads)
        model = make_model(setting.spec, index.dtype, setting.device)
        model.assets = setting.folder / ASSETS_FOLDER
        with calling(subject, "build()"), torch.device("meta"), torch.no_grad():
            module = model.build()
        if module is not None and not isinstance(module, torch.nn.Module):
            raise HandlerError(
                subject, f"build() returned a {type(module).__name__}", "return a torch.nn.Module or None"
            )
        self._window = _window(setting, index)
        if module is not None:
            self._empty = bind(subject, module.eval(), index, self._window, model.mutable)
            if self._window is not None and setting.fence is not None:
                wait_before_use(module, index, self._window)
            if setting.device == "host":
                widen(module)
        elif index.tensors:
            raise ImageError(subject, "its image has tensors, but build() makes no module", "publish it again")
        model.module = module
        call(subject, "load()", model.load)
        self._serving = _serving(setting, model, index, self._window)
        gc.collect()
        trim_heap()

    def routes(self) -> list[web.RouteDef]:
        """The routes of the task."""
        assert self._serving is not None
        return self._serving.routes()

    def working_bytes(self) -> int:
        """What the engine or the handler knows of it."""
        assert self._serving is not None
        return self._serving.working_bytes()

    def wake(self, descriptors: list[int], fence_base: int | None = None) -> Mapping[str, Any]:
        """Map the frames and compute, each part of the model as soon as it has arrived."""
        assert self._serving is not None
        began = time.perf_counter()
        if self._window is not None:
            self._window.map(descriptors, fence_base=fence_base)
            self._fill(self._window)
        elif descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OmniError(self._setting.subject, "it was sent frames, but its image is empty")
        map_seconds = time.perf_counter() - began
        self._serving.resume()
        return {"mapSeconds": map_seconds}

    def _fill(self, window: Window) -> None:
        """Give what a forward pass writes to the values that were published, at the first wake."""
        if not self._empty:
            return
        window.settle()
        for own, published in self._empty:
            own.copy_(published)
        if any(own.is_cuda for own, _ in self._empty):
            torch.cuda.synchronize()  # whoever computes may do so in another stream
        self._empty = []

    def evict(self, *, trim: bool) -> int:
        """Close the fence, unmap, and give memory back."""
        assert self._serving is not None
        frozen = self._serving.pause()
        if self._window is not None:
            self._window.unmap()
        if trim:
            self._serving.trim()
            torch.cuda.empty_cache()  # nothing where CUDA was not started
            trim_heap()
        return frozen

    def stop(self) -> None:
        """End the threads that compute."""
        if self._serving is not None:
            self._serving.stop()


class Prediction:
    """Serves `predict`. A handler may read its weights in any order, on any stream: its steps begin when all are there.

    Args:
        setting: of the engine.
        model: the handler.
        window: of its weights; None when it has none.
    """

    def __init__(self, setting: Setting, model: Model, window: Window | None) -> None:
        predict = getattr(model, "predict", None)
        if predict is None:
            raise HandlerError(setting.subject, f"{type(model).__name__} has no predict()", "write one")
        try:
            self._lane = Lane(lambda: set_threads(setting.threads), partial(_step, window))
            count = getattr(model, "count_tokens", None)
            self._predictor = tasks.Predictor(setting.subject, setting.name, predict, self._lane, count)
        except signature.SignatureProblem as error:
            raise HandlerError(setting.subject, str(error), "annotate predict()") from error
        self._task = setting.spec["task"]
        engine = setting.spec["engine"]
        self._metadata = tasks.describe(setting.name, engine, self._task, self._predictor.signature)
        self._working_bytes = int(call(setting.subject, "working_bytes()", model.working_bytes))

    @property
    def abandoned(self) -> bool:
        """Whether `predict` goes on for nobody."""
        return self._lane.abandoned

    @property
    def tokens(self) -> dict[str, int]:
        """None: what a handler computes is its own affair."""
        return {}

    def routes(self) -> list[web.RouteDef]:
        """The routes of the task."""
        return tasks.routes(self._task, self._predictor, self._metadata)

    def working_bytes(self) -> int:
        """What the handler says."""
        return self._working_bytes

    def resume(self) -> None:
        """Open the fence."""
        self._lane.fence.open()

    def pause(self) -> int:
        """Close the fence."""
        self._lane.fence.close()
        return self._lane.working

    def trim(self) -> None:
        """Nothing to give back but the heap."""

    def stop(self) -> None:
        """The lane's thread ends with the process."""


def _step(window: Window | None) -> torch.inference_mode:
    if window is not None:
        window.settle()
    return torch.inference_mode()


def _serving(setting: Setting, model: Model, index: Index, window: Window | None) -> Serving:
    if setting.spec["task"] == TEXT_GENERATION:
        if setting.spec["engine"] != "transformers":
            raise OmniError(
                setting.subject,
                "engine python has no text-generation",
                "use engine transformers, or task infer with a generator",
                reason=Reason.INVALID_MANIFEST,
            )
        from omnimodel.runtime.generation.serving import TextGeneration

        return TextGeneration(setting, model, index)
    return Prediction(setting, model, window)


def make_model(spec: Mapping[str, Any], dtype: str, device: str) -> Model:
    """The handler of a spec: the user's, or the built-in one of the task.

    Raises:
        HandlerError: it cannot be loaded.
    """
    subject = subject_of(spec)
    handler = spec.get("handler") or {}
    entry = handler.get("entry")
    if entry:
        paths = (spec.get("environment") or {}).get("paths") or []
        kind = load_class(subject, entry, handler.get("files") or {}, paths)
    elif spec["engine"] == "transformers":
        from omnimodel.runtime.engines.transformers import HANDLERS

        kind = HANDLERS[spec["task"]]
    else:
        raise HandlerError(subject, "engine python needs runtime.handler", "name a class, module:Class")
    with calling(subject, f"{kind.__name__}()"):
        if _takes_arguments(kind):
            raise HandlerError(subject, f"{kind.__name__}.__init__ takes arguments", "use load() instead")
        model = kind()
    model.options = dict(spec.get("options") or {})
    model.files = dict(handler.get("files") or {})
    model.dtype = publishing.torch_dtype(subject, dtype or "auto")
    model.device = torch_device(device)
    return model


def _takes_arguments(kind: type[Model]) -> bool:
    """Whether a class is made with arguments.

    Of one without an `__init__` inspect would touch every module there is: 8 MiB that would be the zygote's no more.
    """
    return kind.__init__ is not object.__init__ and bool(inspect.signature(kind).parameters)


def torch_device(device: str) -> str:
    """What torch calls a device of the agent."""
    return "cpu" if device == "host" else device


def publish_own(command: Publish, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """See `engines.publish`."""
    spec = command.spec
    subject = subject_of(spec)
    began = time.perf_counter()
    quantization = "" if spec.get("quantization") in (None, "none") else str(spec["quantization"])
    if quantization and quantization not in FORMATS:
        raise OmniError(
            subject,
            f"engine {spec['engine']} has no quantization {quantization}",
            f"write {' or '.join(FORMATS)}, or leave runtime.quantization out",
            reason=Reason.INVALID_MANIFEST,
        )
    set_threads(command.threads)
    model = make_model(spec, command.dtype, "host")
    metadata: dict[str, Any] = {"engine": spec["engine"], "task": spec["task"]}
    if spec["task"] != TEXT_GENERATION and hasattr(model, "predict"):
        try:
            found = signature.read(model.predict)
        except signature.SignatureProblem as error:
            raise HandlerError(subject, str(error), "annotate predict()") from error
        described = tasks.describe(name_of(spec), spec["engine"], spec["task"], found)
        metadata |= {"inputs": described["inputs"], "outputs": described["outputs"]}
    # A python handler builds in the dtypes that its weights have, unless the manifest names one; the library's own
    # models are loaded in the right dtype, and keep what must stay precise.
    cast = model.dtype if spec["engine"] == "python" and spec.get("dtype") not in (None, "", "auto") else None
    output = Path(command.output)
    index = publishing.publish(
        subject,
        model,
        Source(command.source),
        output,
        cast=cast,
        quantization=quantization,
        metadata=metadata,
        progress=progress,
    )
    if command.packed_frame_bytes:
        threads = min(max(1, command.threads), _PACKING_THREADS)
        index = pack_folder(output, command.packed_frame_bytes, threads, partial(progress, "packing"))
    return {
        "weightsBytes": index.weights_bytes,
        "tensors": len(index.tensors),
        "seconds": round(time.perf_counter() - began, 3),
    }


def _window(setting: Setting, index: Index) -> Window | None:
    if not index.bytes:
        return None
    if index.bytes > setting.image_bytes:
        raise ImageError(setting.subject, f"its image has {index.bytes} bytes, the agent said {setting.image_bytes}")
    window = open_window(setting.device, -(-setting.image_bytes // setting.frame_bytes), setting.frame_bytes)
    if setting.fence is not None:
        window.follow(setting.fence)
    return window


def set_threads(threads: int) -> None:
    """How many threads a forward pass of the calling thread may use."""
    if threads > 0:
        torch.set_num_threads(threads)


def trim_heap() -> None:
    """Give free heap pages back to the system."""
    _libc.malloc_trim(0)
