import pytest

from catalog_models.catalogue import dtype_of, process_spec


@pytest.fixture
def serve(packages, published_images, new_child, frames):
    """Wake a model in a process of its own."""

    async def serve(name):
        spec = await process_spec(name, packages)
        image = published_images / name
        if not image.exists():
            await new_child().publish(spec, await packages.source(name), image, dtype_of(name))
        child = new_child()
        await child.start(spec, image)
        child.frames = await frames.wake(child)
        return child

    return serve
