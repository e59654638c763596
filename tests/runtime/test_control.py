"""Commands over the control channel: in order, for this process and revision only, and answered while it works."""

import asyncio
import os

import pytest

from omnimodel.protocol.process import Evict, Ping, Settle, Start, Stop, Wake
from runtime.children import CommandFailed, handler, spec, until
from runtime.handler_texts import GOOD, ask, methods

PATH = "/v2/models/tiny/infer"


@pytest.fixture
async def child(serving, source):
    return await serving(spec(handler=handler(GOOD)), source)


async def test_a_late_command_for_another_process_is_refused_and_its_descriptors_are_closed(child, frames):
    await child.command(Evict())
    before = len(os.listdir(f"/proc/{child.pid}/fd"))
    descriptors = [frame.descriptor for frame in child.frames]
    for late in ({"instance": "another"}, {"generation": 7}, {"command_id": 1}):
        with pytest.raises(CommandFailed) as refused:
            await child.command(Wake([0]), descriptors, **late)
        assert refused.value.reply.reason == "Crashed"
    assert len(os.listdir(f"/proc/{child.pid}/fd")) == before
    assert (await child.post(PATH, ask()))[0] == 503
    await frames.wake(child, child.frames)
    assert (await child.post(PATH, ask()))[0] == 200


async def test_an_evict_closes_every_descriptor_of_its_frames(child, frames):
    await frames.evict(child, child.frames)
    before = len(os.listdir(f"/proc/{child.pid}/fd"))
    for _ in range(20):
        held = await frames.wake(child)
        await frames.evict(child, held)
    assert len(os.listdir(f"/proc/{child.pid}/fd")) == before
    assert "memfd" not in child.maps()


async def test_a_wake_with_the_wrong_number_of_frames_is_refused_and_the_right_one_still_works(child, frames):
    await child.command(Evict())
    with pytest.raises(CommandFailed, match="frames were sent"):
        await child.command(Wake([0, 1]), [frame.descriptor for frame in child.frames] * 2)
    await frames.wake(child, child.frames)
    assert (await child.post(PATH, ask()))[0] == 200


async def test_another_agent_is_told_what_the_commands_before_have_come_to(child, frames):
    async def tier():
        return (await child.command(Settle())).values["tier"]

    assert await tier() == "resident"
    await child.command(Evict())
    assert await tier() == "warm"
    with pytest.raises(CommandFailed):
        await child.command(Wake([]), [])
    assert await tier() == ""  # nobody knows what is mapped
    await frames.wake(child, child.frames)
    assert await tier() == "resident"


async def test_commands_before_start_and_a_second_start_are_refused(new_child, child):
    fresh = new_child()
    with pytest.raises(CommandFailed, match="wake came before a Start"):
        await fresh.command(Wake([]))
    with pytest.raises(CommandFailed, match="second one"):
        await child.start(child.spec, child.image)


async def test_a_damaged_image_is_refused_at_start(new_child, child, tmp_path):
    index = child.image / "index.json"
    index.write_text(index.read_text().replace("float32", "float64", 1))
    with pytest.raises(CommandFailed) as refused:
        await new_child().command(Start(child.spec, str(child.image), 4096, 16 << 20, "host", 1))
    assert refused.value.reply.reason == "BadArtifact"


async def test_pings_are_answered_while_a_build_takes_for_ever(new_child, source, serving, tmp_path):
    text = methods(
        build="def build(self):\n        if torch.empty(0).is_meta: time.sleep(3600)\n        return torch.nn.Linear(3, 2)"
    )
    image = tmp_path / "image-slow"
    await new_child().publish(spec("slow", handler=handler(text)), source, image)
    child = new_child()
    start = asyncio.create_task(child.start(spec("slow", handler=handler(text)), image))
    await asyncio.sleep(0)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    assert (await child.command(Ping())).ok
    await child.command(Stop(0.0))
    await child.ended()


async def test_a_stop_lets_requests_finish_and_then_ends_the_process(serving, source):
    text = methods(predict="def predict(self, x: Array) -> dict:\n        time.sleep(0.5)\n        return {'y': x}")
    child = await serving(spec(handler=handler(text)), source)
    request = asyncio.create_task(child.post(PATH, ask()))
    await until(child.busy)
    assert (await child.command(Stop(20.0))).ok
    status, answer = await request
    assert (status, answer["outputs"][0]["data"]) == (200, [1, 2, 3])
    await child.ended()


async def test_sigterm_ends_the_process(child):
    os.kill(child.pid, 15)
    await child.ended()


async def test_the_process_ends_when_its_agent_is_gone(child):
    child.channel.close()
    await child.ended()


async def test_a_body_over_the_limit_is_413_with_the_limit(child):
    status, answer = await child.post(PATH, data=b"x" * (9 << 20))
    assert status == 413
    assert str(8 << 20) in answer["error"]
    assert answer["code"] == "request_too_large"


async def test_unknown_paths_and_methods_have_error_objects(child):
    status, answer = await child.post("/v1/nothing", {})
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    for method in ("DELETE", "GET"):
        async with child.session.request(method, PATH) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"].startswith(f"{method} /v2/models/tiny/infer is nothing")


async def test_readiness_follows_residency(child, frames):
    async def ready():
        async with child.session.get("/v2/health/ready") as response:
            return response.status

    assert await ready() == 200
    await child.command(Evict())
    assert await ready() == 503
    await frames.wake(child, child.frames)
    assert await ready() == 200


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": []}, "input x is missing"),
        ({"inputs": None}, "expected a list of objects"),
        ({"inputs": [{"name": "z"}]}, "there is no input 'z'; the model has x"),
        (ask(datatype="FP64"), "its datatype is FP32, not FP64"),
        (ask(shape=(3,)), "its shape is [-1, 3], not [3]"),
        (ask(shape=(1, 3), values=(1, 2)), "2 values do not fill the shape [1, 3]"),
        (ask(values=("a", "b", "c")), "does not hold FP32 values"),
        (ask(values=(True, False, True)), "does not hold FP32 values"),
        ({"inputs": ask()["inputs"] * 2}, "input x is given twice"),
        ({"parameters": {"temperature": 1}}, "Unsupported parameter: parameters.temperature"),
        ({"wibble": 1}, "Unsupported parameter: wibble"),
        ({"stream": True}, "Unsupported parameter: stream"),
        ({"outputs": [{"name": "q"}]}, "there is no output 'q'; the model has y"),
    ],
)
async def test_a_wrong_inference_request_is_refused_with_what_is_wrong(child, change, said):
    status, answer = await child.post(PATH, {**ask(), **change})
    assert status == 400
    assert said in answer["error"]


async def test_metadata_says_inputs_and_outputs(child):
    async with child.session.get("/v2/models/tiny") as response:
        described = await response.json()
    assert described["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert described["platform"] == "omnimodel_python"


async def test_four_hundred_requests_at_once_are_all_answered(child):
    answers = await asyncio.gather(*(child.post(PATH, ask((i, 0, 0))) for i in range(400)))
    assert [answer["outputs"][0]["data"] for _, answer in answers] == [[i + 1, i + 2] for i in range(400)]


async def test_a_request_whose_client_left_while_it_waited_is_never_run(serving, source):
    text = methods(
        predict="def predict(self, x: Array) -> dict:\n        print('ran', x[0, 0], flush=True)\n"
        "        while not os.path.exists(self.options['gate']): time.sleep(0.005)\n        return {'y': x}"
    )
    gate = source / "gate"
    child = await serving(spec(handler=handler(text), options={"gate": str(gate)}), source)
    first = asyncio.create_task(child.post(PATH, ask((1, 0, 0))))
    await until(lambda: "ran 1.0" in child.log())
    second = asyncio.create_task(child.post(PATH, ask((2, 0, 0))))

    async def in_flight(count):
        return (await child.command(Ping())).values["inFlight"] == count

    await until(lambda: in_flight(2))
    second.cancel()
    await until(lambda: in_flight(1))
    gate.touch()
    assert (await first)[0] == 200
    assert (await child.post(PATH, ask((3, 0, 0))))[0] == 200
    assert "ran 3.0" in child.log()
    assert "ran 2.0" not in child.log()
