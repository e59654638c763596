import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.fixture
def source(tmp_path):
    """A checkpoint of one linear layer."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({"weight": np.ones((2, 3), np.float32), "bias": np.float32([1, 2])}, folder / "model.safetensors")
    return folder


@pytest.fixture
def serving(new_child, frames, tmp_path):
    """Publish a model in one process, start it in another, and wake it."""

    async def serve(spec, source=None, dtype="float32", *, awake=True):
        source = source or tmp_path
        image = tmp_path / f"image-{spec['model']['name']}"
        await new_child().publish(spec, source, image, dtype)
        child = new_child()
        await child.start(spec, image)
        child.frames = await frames.wake(child) if awake else None
        return child

    return serve


@pytest.fixture
def published(new_child, frames, published_images):
    """Publish a model once per session, start it, and wake it."""

    async def serve(key, spec, source, dtype="float32", *, awake=True, threads=1):
        image = published_images / f"{key}-{dtype}"
        if not (image / "index.json").exists():
            await new_child().publish(spec, source, image, dtype)
        child = new_child()
        await child.start(spec, image, threads)
        child.frames = await frames.wake(child) if awake else None
        return child

    return serve
