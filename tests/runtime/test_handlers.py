"""Handlers that are wrong in every way people find: each ends in a sentence that says what, and the process lives."""

import asyncio
import json

import aiohttp
import pytest

from omnimodel.protocol.process import Evict
from runtime.children import CommandFailed, collect, handler, spec, until
from runtime.handler_texts import GOOD, HEAD, ask, methods

PUBLISH_FAULTS = {
    "it does not import": (
        HEAD + "import no_such_package_of_ours\n",
        "handler:Handler",
        "needs no_such_package_of_ours",
    ),
    "it has a syntax error": ("def broken(:\n", "handler:Handler", "SyntaxError"),
    "the module does not exist": (GOOD, "elsewhere:Handler", "no module elsewhere"),
    "there is no such class": (GOOD, "handler:Other", "no class Other; it has Handler"),
    "the class is no Model": ("class Handler: pass\n", "handler:Handler", "no omnimodel.runtime.sdk.Model"),
    "the entry names no class": (GOOD, "handler", "module:Class"),
    "importing it ends the process": ("raise SystemExit(3)\n", "handler:Handler", "ended the process (sys.exit)"),
    "__init__ takes arguments": (methods(init="def __init__(self, size): pass"), "handler:Handler", "takes arguments"),
    "build raises": (
        methods(build='def build(self):\n        raise ValueError("no\\nluck")'),
        "handler:Handler",
        "ValueError: no luck",
    ),
    "build returns something else": (
        methods(build="def build(self):\n        return 5"),
        "handler:Handler",
        "build() returned a int",
    ),
    "build is not there": (
        HEAD + "class Handler(Model):\n    def predict(self, x: str) -> str: ...\n",
        "handler:Handler",
        "NotImplementedError",
    ),
    "weights returns a list": (
        methods(weights="def weights(self, source):\n        return [1]"),
        "handler:Handler",
        "weights() returned a list",
    ),
    "weights returns objects": (
        methods(weights='def weights(self, source):\n        return {"weight": "x"}'),
        "handler:Handler",
        "weight as a str",
    ),
    "a name is missing": (
        methods(weights='def weights(self, source):\n        return {"weight": torch.ones(2, 3)}'),
        "handler:Handler",
        "no values for bias",
    ),
    "a name is unexpected": (
        methods(weights='def weights(self, source):\n        return {**source.weights(), "wight": torch.ones(1)}'),
        "handler:Handler",
        "values for wight, which the module does not have",
    ),
    "a shape is wrong": (
        methods(
            weights='def weights(self, source):\n        return {"weight": torch.ones(3, 2), "bias": torch.ones(2)}'
        ),
        "handler:Handler",
        "size mismatch for weight",
    ),
    "a file of the source is not there": (
        methods(weights='def weights(self, source):\n        return source.torch("*.pth")'),
        "handler:Handler",
        "no file *.pth",
    ),
    "a tensor is a plain attribute": (
        methods(
            build="def build(self):\n        m = torch.nn.Linear(3, 2)\n        m.table = torch.ones(3)\n        return m"
        ),
        "handler:Handler",
        "neither parameters nor buffers: table",
    ),
    "predict is not annotated": (
        methods(predict="def predict(self, x):\n        return x"),
        "handler:Handler",
        "x of predict has no annotation",
    ),
    "predict takes what has no tensor form": (
        methods(predict="def predict(self, x: set) -> dict:\n        return x"),
        "handler:Handler",
        "write str, bytes, int",
    ),
}


@pytest.mark.parametrize("fault", PUBLISH_FAULTS)
async def test_publishing_says_what_is_wrong_when(fault, new_child, source, tmp_path):
    text, entry, said = PUBLISH_FAULTS[fault]
    child = new_child()
    with pytest.raises(CommandFailed) as failed:
        await child.publish(spec(handler=handler(text, entry)), source, tmp_path / "image")
    assert said in failed.value.reply.message
    assert "\n" not in failed.value.reply.message
    assert not (tmp_path / "image" / "index.json").exists()
    await child.ended()


async def test_a_failed_command_has_the_last_lines_of_the_traceback_with_the_handlers_own_line(
    new_child, source, tmp_path
):
    text = methods(
        build="def build(self):\n        return self.helper()\n    def helper(self):\n        return 1 / 0  # here"
    )
    with pytest.raises(CommandFailed) as failed:
        await new_child().publish(spec(handler=handler(text)), source, tmp_path / "image")
    assert "return 1 / 0  # here" in failed.value.reply.detail
    assert failed.value.reply.reason == "HandlerFailed"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no file"),
        ({"model.safetensors": b"\xff" * 100}, "model.safetensors"),
        ({"model.pt": b"not a pickle"}, "model.pt"),
    ],
    ids=["there is none", "hostile safetensors", "hostile checkpoint"],
)
async def test_a_bad_checkpoint_is_named(files, problem, new_child, tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(CommandFailed) as failed:
        await new_child().publish(spec(handler=handler(GOOD)), folder, tmp_path / "image")
    assert problem in failed.value.reply.message
    assert failed.value.reply.reason in ("BadArtifact", "SourceNotFound")


async def test_build_that_differs_when_serving_is_an_image_that_does_not_fit(serving, source):
    text = methods(
        build="def build(self):\n        meta = torch.empty(0).is_meta\n        return torch.nn.Linear(3, 4 if meta else 2)"
    )
    with pytest.raises(CommandFailed, match=r"weight has the shape \[2, 3\] in its image and \[4, 3\] in build"):
        await serving(spec(handler=handler(text)), source)


async def test_a_tensor_that_would_stay_on_meta_is_named(serving, source):
    text = methods(
        build="def build(self):\n        m = torch.nn.Linear(3, 2)\n"
        "        if torch.empty(0).is_meta: m.late = torch.ones(2)\n        return m"
    )
    with pytest.raises(CommandFailed, match="no values for late"):
        await serving(spec(handler=handler(text)), source)


async def test_load_that_raises_is_said_at_start(serving, source):
    text = methods(load='def load(self):\n        raise OSError("no tokenizer")')
    with pytest.raises(CommandFailed, match=r"load\(\) raised OSError: no tokenizer"):
        await serving(spec(handler=handler(text)), source)


async def test_predict_that_raises_is_a_500_with_the_sentence_and_the_next_request_is_served(serving, source):
    text = methods(
        predict="def predict(self, x: Array) -> dict:\n        if x[0, 0] < 0: raise ValueError('negative')\n"
        "        if x[0, 0] == 0: raise RequestError('x must not be zero', param='x')\n"
        "        if x[0, 0] == 9: sys.exit(3)\n        return {'y': x}"
    )
    child = await serving(spec(handler=handler(text)), source)
    path = "/v2/models/tiny/infer"
    status, answer = await child.post(path, ask((-1, 2, 3)))
    assert status == 500
    assert "predict() raised ValueError: negative" in answer["error"]
    status, answer = await child.post(path, ask((0, 2, 3)))
    assert (status, answer) == (400, {"error": "x must not be zero", "param": "x"})
    status, answer = await child.post(path, ask((9, 2, 3)))
    assert status == 500
    assert "sys.exit" in answer["error"]
    assert (await child.post(path, ask()))[0] == 200


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("None", "returned NoneType"),
        ("{'y': {}}", "returned dict for y"),
        ("{'y': [[1], [1, 2]]}", "ragged"),
        ("object()", "returned object"),
    ],
)
async def test_predict_that_returns_the_wrong_type_is_a_500_that_says_so(serving, source, value, said):
    text = methods(predict=f"def predict(self, x: Array) -> dict:\n        return {value}")
    child = await serving(spec(handler=handler(text)), source)
    status, answer = await child.post("/v2/models/tiny/infer", ask())
    assert status == 500
    assert said in answer["error"]


@pytest.mark.parametrize(
    ("task", "predict", "path", "body"),
    [
        (
            "embeddings",
            "def predict(self, inputs: list[str]) -> np.ndarray:\n        return np.ones(3)",
            "/v1/embeddings",
            {"input": "a"},
        ),
        (
            "text-to-speech",
            "def predict(self, text: str) -> Audio:\n        return b'x'",
            "/v1/audio/speech",
            {"input": "a"},
        ),
        (
            "text-classification",
            "def predict(self, inputs: list[str]) -> list:\n        return ['a']",
            "/v2/models/tiny/infer",
            ask(["a"], "inputs", "BYTES", (1,)),
        ),
    ],
    ids=["embeddings", "speech", "classification"],
)
async def test_a_task_says_what_its_predict_must_return(serving, source, task, predict, path, body):
    child = await serving(spec(handler=handler(methods(predict=predict)), task=task), source)
    status, answer = await child.post(path, body)
    assert status == 500, answer
    assert "predict() returned" in json.dumps(answer)


async def test_predict_that_never_returns_does_not_keep_the_process_from_answering_pings(serving, source, tmp_path):
    begun = tmp_path / "begun"
    endless = f"open({str(begun)!r}, 'w').close()\n        while True: time.sleep(0.01)"
    text = methods(predict=f"def predict(self, x: Array) -> dict:\n        {endless}")
    child = await serving(spec(handler=handler(text)), source)
    task = asyncio.create_task(child.post("/v2/models/tiny/infer", ask()))
    await until(begun.exists)
    # An evict cannot be acknowledged while the forward pass runs: the agent kills such a process. Pings go on.
    evict = asyncio.create_task(child.command(Evict()))
    done, _ = await asyncio.wait([evict], timeout=0.3)
    assert not done
    evict.cancel()
    await asyncio.gather(evict, return_exceptions=True)
    assert child.alive()
    task.cancel()


async def test_a_process_that_exits_in_the_middle_of_a_response_breaks_the_connection_and_no_more(serving, source):
    text = methods(
        predict="def predict(self, x: Array) -> Iterator[dict]:\n        yield {'y': x}\n        os._exit(7)"
    )
    child = await serving(spec(handler=handler(text)), source)
    seen = []
    with pytest.raises(aiohttp.ClientError):
        await collect(child.events("/v2/models/tiny/infer", {**ask(), "stream": True}), seen)
    assert len(seen) == 1
    await child.ended()


async def test_a_handler_that_prints_a_lot_is_served_all_the_same(serving, source):
    text = methods(
        predict="def predict(self, x: Array) -> dict:\n        print('spam ' * 2_000_000)\n        return {'y': x}"
    )
    child = await serving(spec(handler=handler(text)), source)
    status, _ = await child.post("/v2/models/tiny/infer", ask())
    assert status == 200


async def test_a_generator_streams_and_is_closed_when_its_client_leaves(serving, source, tmp_path):
    text = methods(
        predict="def predict(self, x: Array) -> Iterator[dict]:\n        try:\n            for i in range(1000_000):\n"
        "                yield {'i': i}\n        finally:\n            print('generator closed', flush=True)"
    )
    child = await serving(spec(handler=handler(text)), source)
    async with child.session.post("/v2/models/tiny/infer", json={**ask(), "stream": True}) as response:
        lines = [await response.content.readuntil(b"\n\n") for _ in range(3)]
        assert [json.loads(line[6:])["outputs"][0]["data"] for line in lines] == [[0], [1], [2]]
        response.close()
    await until(lambda: "generator closed" in child.log())
    await until(child.idle)


async def test_a_generator_is_frozen_between_two_values(serving, source, frames):
    text = methods(
        predict="def predict(self, x: Array) -> Iterator[dict]:\n        for i in range(300):\n"
        "            yield {'y': self.module(torch.from_numpy(x) + i).numpy()}"
    )
    child = await serving(spec(handler=handler(text)), source)
    seen = []

    async def read():
        async for event in child.events("/v2/models/tiny/infer", {**ask(), "stream": True}):
            seen.append(json.loads(event)["outputs"][0]["data"])

    task = asyncio.create_task(read())
    await until(lambda: len(seen) >= 3)
    reply = await frames.evict(child, child.frames, freeze=True)
    assert reply.values["frozen"] == 1
    child.frames = await frames.wake(child)
    await task
    assert seen == [[7 + 3 * i, 8 + 3 * i] for i in range(300)]


async def test_a_stream_that_fails_in_the_middle_ends_with_an_error_event_and_a_broken_connection(serving, source):
    text = methods(
        predict="def predict(self, x: Array) -> Iterator[dict]:\n        yield {'y': x}\n        raise ValueError('half')"
    )
    child = await serving(spec(handler=handler(text)), source)
    seen = []
    with pytest.raises(aiohttp.ClientError):
        await collect(child.events("/v2/models/tiny/infer", {**ask(), "stream": True}), seen)
    assert "half" in seen[-1]["error"]


async def test_a_model_without_a_module_has_no_frames(serving, source):
    text = HEAD + (
        "class Handler(Model):\n    def build(self):\n        return None\n"
        "    def weights(self, source):\n        (self.assets / 'words.txt').write_text('one two')\n        return {}\n"
        "    def load(self):\n        self.words = (self.assets / 'words.txt').read_text().split()\n"
        "    def predict(self, index: int) -> str:\n        return self.words[index]\n"
    )
    child = await serving(spec(handler=handler(text)), source)
    _, answer = await child.post("/v2/models/tiny/infer", ask([1], "index", "INT64", [1]))
    assert answer["outputs"] == [{"name": "output", "datatype": "BYTES", "shape": [1], "data": ["two"]}]
    await child.command(Evict())
