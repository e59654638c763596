import pytest


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
