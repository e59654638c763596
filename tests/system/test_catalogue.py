"""The whole product on its example catalogue: fifteen real models in their sandboxes behind one address.

One system serves all tests, in their order; the last ones kill it, start it again, and stop it.
"""

from __future__ import annotations

import concurrent.futures
import io
import json
import os
import random
import signal
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from example_models import EXAMPLES, MODELS
from omnimodel.agent.supply import HOST_FRAME_BYTES
from omnimodel.cli.check import addressed
from omnimodel.errors import DispatchError
from omnimodel.protocol import probe as probes
from running import DEADLINE_SECONDS, Up, groups, leftovers, until
from system.conftest import Catalogue
from system.memory import Watch, children

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(900)]

CHAT = "smollm2"
STORY = {"model": CHAT, "messages": [{"role": "user", "content": "Tell me a long story about a river."}]}
STREAM_SECONDS = 6.0  # long enough for a stream to be frozen in, after its second of patience
KEPT = "silero-vad"
SENTENCE = "Please call me tomorrow."


def client(up: Up) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.address}/v1", api_key="none", timeout=DEADLINE_SECONDS, max_retries=0)


def check(up: Up) -> None:
    """Every model's known answer, as a person asks for it."""
    done = up.omni("check", "-o", "json", timeout=2 * DEADLINE_SECONDS)
    results = json.loads(done.stdout)["items"]
    assert [result for result in results if result["result"] != "passed"] == []
    assert len(results) == len(MODELS)
    assert done.returncode == 0


def test_every_model_serves(catalogue: Catalogue) -> None:
    first = catalogue.up.ready()
    assert first["ready"] is True
    assert first["failed"] == []
    assert first["errors"] == []
    assert first["models"] == len(MODELS)
    check(catalogue.up)


def test_the_models_need_three_times_what_the_device_has(catalogue: Catalogue) -> None:
    """The ratio of footprints as measured, weights in whole frames and working memory of every model, to the budget."""
    pool = catalogue.pool()
    footprints = [catalogue.status(name)["footprint"] for name in MODELS]
    frames = sum(-(-found["weightsBytes"] // HOST_FRAME_BYTES) for found in footprints)
    needed_bytes = frames * HOST_FRAME_BYTES + sum(found["workingBytes"] for found in footprints)
    assert pool["overcommitRatio"] == round(needed_bytes / pool["budgetBytes"], 3)
    assert pool["overcommitRatio"] >= 3
    planned = json.loads(catalogue.up.omni("plan", str(EXAMPLES / "catalog"), "-o", "json").stdout)
    assert [found["overcommitRatio"] for found in planned["pools"]] == [pool["overcommitRatio"]]


def test_an_evicted_model_comes_back_with_the_same_bits(catalogue: Catalogue) -> None:
    catalogue.answers = {name: catalogue.ask(name) for name in MODELS}
    for name in MODELS:
        if name == KEPT:
            with pytest.raises(DispatchError, match="keepResident"):
                catalogue.up.client.evict("default", name, DEADLINE_SECONDS)
            continue
        assert catalogue.up.client.evict("default", name, DEADLINE_SECONDS)["tier"] in {"warm", "cold"}
        (entry,) = catalogue.status(name)["residency"]
        assert (entry["tier"] == "resident", entry["deviceBytes"]) == (False, 0)
    wakes = {name: catalogue.status(name)["residency"][0]["wakes"] for name in MODELS if name != KEPT}
    assert {name: catalogue.ask(name) for name in MODELS} == catalogue.answers
    assert all(catalogue.status(name)["residency"][0]["wakes"] > count for name, count in wakes.items())


# Every endpoint, by the clients that people have


def test_a_chat_streams(catalogue: Catalogue) -> None:
    question = {"model": CHAT, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    chat = client(catalogue.up).chat.completions
    whole = chat.create(**question, temperature=0, max_tokens=12)
    chunks = list(chat.create(**question, temperature=0, max_tokens=12, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert len(chunks) > 3


def test_texts_become_vectors(catalogue: Catalogue) -> None:
    texts = ["A man is eating food.", "A man eats a meal.", "The stock market fell on Monday."]
    answer = client(catalogue.up).embeddings.create(model="minilm", input=texts, encoding_format="float")
    one, same, other = (item.embedding for item in answer.data)
    assert dot(one, same) > 0.5 > dot(one, other)


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_speech_is_made_and_understood(catalogue: Catalogue) -> None:
    spoken = client(catalogue.up).audio.speech.create(
        model="hibari-tts", voice="heart", input=SENTENCE, response_format="wav"
    )
    with wave.open(io.BytesIO(spoken.content)) as sound:
        seconds = sound.getnframes() / sound.getframerate()
    assert 0.5 < seconds < 6
    heard = client(catalogue.up).audio.transcriptions.create(
        model="whisper-tiny", file=("speech.wav", spoken.content, "audio/wav")
    )
    assert heard.text.strip() == SENTENCE


def test_as_much_as_a_model_takes_ends_none_of_its_processes(catalogue: Catalogue) -> None:
    asked, longest = client(catalogue.up), "word " * 500
    for name in ("minilm", "hibari-tts"):
        catalogue.ask(name)
    pids = {name: catalogue.process(name)["pid"] for name in ("minilm", "hibari-tts")}
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda _: asked.embeddings.create(model="minilm", input=[longest] * 4), range(4))
        assert [len(answer.data) for answer in answers] == [4] * 4
    spoken = [
        asked.audio.speech.create(model="hibari-tts", voice="heart", input=("A river. " * 223)[:2000]) for _ in range(2)
    ]
    assert all(len(sound.content) > 1_000_000 for sound in spoken)
    with pytest.raises(openai.BadRequestError, match="has 4096 characters, and 2000 can be spoken"):
        asked.audio.speech.create(model="hibari-tts", voice="heart", input="A" * 4096)
    assert {name: catalogue.process(name)["pid"] for name in pids} == pids


def test_the_inference_protocol_describes_a_model_and_asks_it(catalogue: Catalogue) -> None:
    described = catalogue.up.client.request("GET", "/v2/models/crepe")
    assert described.status == 200
    inputs = [tensor["name"] for tensor in json.loads(described.body)["inputs"]]
    question = MODELS["crepe"]["spec"]["probe"]["json"]
    assert inputs == [tensor["name"] for tensor in question["inputs"]]
    status, answer = catalogue.up.infer("crepe", question)
    assert status == 200, answer
    assert answer["model_name"] == "crepe"
    listed = {model.id for model in client(catalogue.up).models.list()}
    assert set(MODELS) <= listed


def test_a_foreign_server_is_confined_and_ends_with_its_eviction(catalogue: Catalogue) -> None:
    catalogue.ask("magika")
    process = catalogue.process("magika")
    assert process["isolationLevel"] == "namespaces"
    (server,) = [pid for pid in children(process["pid"]) if b"server.py" in command_line(pid)]
    for namespace in ("mnt", "net", "pid", "ipc", "uts"):
        assert os.readlink(f"/proc/{server}/ns/{namespace}") != os.readlink(f"/proc/self/ns/{namespace}"), namespace
    assert psutil.Process(server).uids().real not in {0, os.getuid()}
    assert process["cgroup"].rpartition("/")[2] in Path(f"/proc/{server}/cgroup").read_text()
    catalogue.up.client.evict("default", "magika", DEADLINE_SECONDS)
    until(lambda: not psutil.pid_exists(server), "the foreign server to be gone")
    assert psutil.pid_exists(process["pid"])


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# Memory


def test_the_budget_holds_at_every_moment_for_the_ledger_and_for_what_processes_really_hold(
    catalogue: Catalogue,
) -> None:
    order = random.Random(5)
    names = [order.choice(list(MODELS)) for _ in range(36)]
    wakes = sum(catalogue.status(name)["residency"][0]["wakes"] for name in MODELS)
    with Watch(catalogue.up) as watch, concurrent.futures.ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(catalogue.ask, names))
    assert watch.over == []
    assert answers == [catalogue.answers[name] for name in names]
    assert sum(catalogue.status(name)["residency"][0]["wakes"] for name in MODELS) - wakes > 10
    budget_bytes = catalogue.pool()["budgetBytes"]
    assert watch.samples > 20
    assert budget_bytes / 2 < watch.most_real_bytes
    assert budget_bytes / 2 < watch.most_ledger_bytes


def test_a_stream_is_frozen_for_another_model_and_loses_nothing(catalogue: Catalogue) -> None:
    began = time.monotonic()
    tried = len(list(stream(catalogue.up, 24)))
    tokens = min(240, max(48, round(tried * STREAM_SECONDS / (time.monotonic() - began))))
    expected = "".join(stream(catalogue.up, tokens))
    before = freezes(catalogue.up)
    came: list[tuple[float, str]] = []
    streaming = threading.Thread(target=listen, args=(catalogue.up, tokens, came))
    streaming.start()
    until(lambda: len(came) > 5 or not streaming.is_alive(), "the first tokens")
    probe = MODELS["whisper-tiny"]["spec"]["probe"]
    asked = probes.request(addressed(probe, "whisper-tiny"))
    with Watch(catalogue.up) as watch:
        answer = catalogue.up.client.request(asked.method, asked.path, asked.body, asked.headers, DEADLINE_SECONDS)
        answered = time.monotonic()
        streaming.join(DEADLINE_SECONDS)
    assert probes.failures(probe, answer.status, answer.headers, answer.body) == []
    assert "".join(text for _, text in came) == expected
    assert came[-1][0] > answered, "the other model's answer came in the middle of the stream"
    assert freezes(catalogue.up) > before
    assert catalogue.up.events(name=CHAT, reason="Frozen")
    assert watch.over == []
    assert watch.frozen_samples > 0, "what was frozen is seen, too"
    assert watch.most_frozen_bytes > 16 << 20, "a chat of some length, and all that its process has for itself"


def listen(up: Up, tokens: int, came: list[tuple[float, str]]) -> None:
    """Note the pieces of a text and when each came."""
    for text in stream(up, tokens):
        came.append((time.monotonic(), text))


def stream(up: Up, tokens: int) -> Iterator[str]:
    """The pieces of a text."""
    terms = {"temperature": 0, "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    for chunk in client(up).chat.completions.create(**STORY, **terms, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def freezes(up: Up) -> float:
    """How often the chat model was frozen, as the metrics tell."""
    text = up.client.request("GET", "/metrics").body.decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    wanted = {"model": CHAT, "cause": "freeze"}.items()
    return sum(
        sample.value for sample in samples if sample.name == "omni_swaps_total" and wanted <= sample.labels.items()
    )


# The end


def test_after_a_kill_it_serves_again_without_publishing_anew(catalogue: Catalogue) -> None:
    images = catalogue.images()
    assert len(images) == len(MODELS) - 1, "magika has weights of its own"
    catalogue.kill_and_start_again()
    assert catalogue.up.ready()["failed"] == []
    assert catalogue.images() == images
    assert [process for process in catalogue.killed if process.is_running()] == []
    assert {name: catalogue.ask(name) for name in MODELS} == catalogue.answers


def test_ctrl_c_leaves_nothing(catalogue: Catalogue) -> None:
    control_groups = groups(catalogue.up)
    assert control_groups
    processes = [*catalogue.killed, *catalogue.up.descendants()]
    assert catalogue.up.stop(signal.SIGINT) == 0, "".join(catalogue.up.messages)
    assert leftovers(catalogue.state_dir, processes) == []
    assert [path for path in control_groups if path.exists()] == []
    assert list(catalogue.temporary.iterdir()) == []
    assert "Traceback" not in "".join(catalogue.up.messages)
