"""What the models of the catalogue say beyond their probes: to inputs that mean something, and to bad ones."""

import base64
import io
import wave

import numpy as np
import pytest
from aiohttp import FormData

pytestmark = [pytest.mark.models, pytest.mark.timeout(600)]


def tensor(name, data, datatype="BYTES", shape=None, **parameters):
    entry = {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data}
    return {"inputs": [entry | ({"parameters": parameters} if parameters else {})]}


def file(name, content: bytes):
    return tensor(name, [base64.b64encode(content).decode()], content_type="base64")


def wav(samples, rate=16_000) -> bytes:
    content = io.BytesIO()
    with wave.open(content, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.asarray(samples) * 32767).astype("<i2").tobytes())
    return content.getvalue()


async def infer(child, body):
    status, answer = await child.post("/v2/models/any/infer", body)
    assert status == 200, answer
    return {output["name"]: np.reshape(output["data"], output["shape"]) for output in answer["outputs"]}


async def test_one_model_understands_what_another_one_says(serve):
    speaker, listener = await serve("hibari-tts"), await serve("whisper-tiny")
    text = "The quick brown fox jumps over the lazy dog."
    status, speech = await speaker.post("/v1/audio/speech", {"input": text})
    assert status == 200
    assert (await speaker.post("/v1/audio/speech", {"input": text}))[1] == speech
    form = FormData()
    form.add_field("file", speech, filename="speech.wav", content_type="audio/wav")
    status, heard = await listener.post("/v1/audio/transcriptions", data=form)
    assert (status, heard) == (200, {"text": text})


@pytest.mark.parametrize("name", ["minilm", "wordllama"])
async def test_texts_of_one_meaning_lie_closer_than_others(name, serve):
    child = await serve(name)
    texts = ["A man is eating food.", "A man eats a meal.", "The stock market fell on Monday."]
    status, answer = await child.post("/v1/embeddings", {"input": texts})
    assert status == 200, answer
    vectors = np.array([entry["embedding"] for entry in answer["data"]])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4)
    assert vectors[0] @ vectors[1] > 0.5
    assert vectors[0] @ vectors[2] < 0.2


async def test_the_pitch_of_a_tone_is_its_frequency(serve):
    child = await serve("crepe")
    time = np.arange(2400) / 16_000
    for hertz in (110, 440, 880):
        answer = await infer(child, file("audio", wav(0.5 * np.sin(2 * np.pi * hertz * time))))
        assert len(answer["hertz"]) == 16
        np.testing.assert_allclose(answer["hertz"][5:-5], hertz, rtol=0.01)


async def test_a_forecast_of_a_wave_goes_on_as_the_wave_does(serve):
    child = await serve("fracast")
    wave_values = np.sin(np.arange(108) * 2 * np.pi / 12)
    answer = await infer(child, tensor("series", wave_values[:96].tolist(), "FP32", [1, 96]))
    assert answer["median"].shape == (1, 48)
    assert answer["quantiles"].shape == (1, 48, 9)
    assert np.corrcoef(answer["median"][0, :12], wave_values[96:])[0, 1] > 0.95
    assert (np.diff(answer["quantiles"], axis=2) >= 0).mean() > 0.95


async def test_silence_and_noise_are_no_speech(serve):
    child = await serve("silero-vad")
    noise = np.random.default_rng(0).normal(0, 0.05, 16_000)
    for samples in (np.zeros(16_000), noise):
        assert (await infer(child, file("audio", wav(samples))))["probabilities"].max() < 0.2


async def test_pictures_of_a_batch_are_embedded_as_each_of_them_is(serve):
    child = await serve("mobilenet-v2")
    pictures = np.random.default_rng(0).integers(0, 256, (2, 20, 30, 3))
    both = (await infer(child, tensor("images", pictures.ravel().tolist(), "UINT8", [2, 20, 30, 3])))["embeddings"]
    one = (await infer(child, tensor("images", pictures[1].ravel().tolist(), "UINT8", [1, 20, 30, 3])))["embeddings"]
    assert both.shape == (2, 1280)
    np.testing.assert_allclose(both[1], one[0], atol=1e-4)
    assert not np.allclose(both[0], both[1], atol=1e-2)


async def test_working_memory_does_not_grow_with_the_request(serve):
    child = await serve("resemblyzer")
    await infer(child, file("audio", wav(np.random.default_rng(0).normal(0, 0.1, 32_000))))
    before = child.private_bytes()
    await infer(child, file("audio", wav(np.random.default_rng(0).normal(0, 0.1, 1_500_000))))
    assert child.private_bytes() - before < 64 << 20


BAD = {
    "efficientnet-lite0": [(file("image", b"no picture"), "image"), (tensor("picture", ["x"]), "inputs")],
    "transnet-v2": [(file("film", b"GIF89a"), "film")],
    "fracast": [
        (tensor("series", [1.0, 2.0], "FP32", [1, 2]), "series"),
        (tensor("series", [], "FP32", [0, 9]), "series"),
        (
            {
                "inputs": [
                    *tensor("series", [1.0] * 9, "FP32", [1, 9])["inputs"],
                    *tensor("horizon", [0], "INT64")["inputs"],
                ]
            },
            "horizon",
        ),
    ],
    "mobilenet-v2": [
        (tensor("images", [], "UINT8", [0, 2, 2, 3]), "images"),
        (tensor("images", [], "UINT8", [1, 0, 2, 3]), "images"),
    ],
    "resemblyzer": [(file("audio", b"RIFF"), None), (file("audio", wav([])), "audio")],
    "silero-vad": [(file("audio", wav([])), "audio")],
    "crepe": [(file("audio", wav([])), "audio")],
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_with_the_name_of_what_is_wrong(name, serve):
    child = await serve(name)
    for body, parameter in BAD[name]:
        status, answer = await child.post("/v2/models/any/infer", body)
        assert status == 400, answer
        if parameter:
            assert parameter in answer.get("param", ""), answer


async def test_a_voice_or_a_language_that_is_not_there_is_refused(serve):
    speaker, listener = await serve("hibari-tts"), await serve("whisper-tiny")
    status, answer = await speaker.post("/v1/audio/speech", {"input": "Hello.", "voice": "alloy"})
    assert (status, answer["error"]["param"]) == (400, "voice")
    form = FormData({"language": "fr"})
    form.add_field("file", wav(np.zeros(1600)), filename="speech.wav", content_type="audio/wav")
    status, answer = await listener.post("/v1/audio/transcriptions", data=form)
    assert (status, answer["error"]["param"]) == (400, "language")
