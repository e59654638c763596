"""The endpoints of embeddings, speech and classification, in front of small handlers and of a real model."""

import base64
import io
import math
import wave

import aiohttp
import numpy as np
import pytest

from omnimodel.runtime.audio import read_wav, resample, write_wav
from omnimodel.runtime.requests import RequestError
from omnimodel.runtime.sdk import Audio
from runtime.children import CommandFailed, handler, spec

HEAD = """
import numpy as np
import torch
from omnimodel.runtime.sdk import Model, Audio

class Handler(Model):
    def build(self):
        return None
    def weights(self, source):
        return {}
"""
EMBED = (
    HEAD
    + """
    def predict(self, inputs: list[str]) -> np.ndarray:
        return np.array([[len(text), text.count("a")] for text in inputs])
"""
)
LISTEN = (
    HEAD
    + """
    def predict(self, audio: Audio, language: str | None = None) -> str:
        return f"{len(audio.samples)} samples at {audio.rate}, {language}"
"""
)
SPEAK = (
    HEAD
    + """
    def predict(self, text: str, voice: str | None = None, speed: float = 1.0) -> Audio:
        return Audio(np.sin(np.arange(int(len(text) * 100 / speed), dtype=np.float32)), 24000)
"""
)
CLASSIFY = (
    HEAD
    + """
    def predict(self, inputs: list[str]) -> list[dict[str, float]]:
        return [{"good": 0.25, "bad": 0.75} if "bad" in text else {"good": 1.0, "bad": 0.0} for text in inputs]
"""
)


def wav(samples, rate=16_000, channels=1, width=2):
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples)
    return content.getvalue()


def form(**fields):
    data = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        if isinstance(value, bytes):
            data.add_field(name, value, filename="a.wav", content_type="audio/wav")
        else:
            data.add_field(name, value)
    return data


async def test_embeddings_as_numbers_and_as_base64(serving):
    child = await serving(spec(task="embeddings", handler=handler(EMBED)))
    status, answer = await child.post("/v1/embeddings", {"input": ["banana", "x"], "model": "tiny"})
    assert status == 200
    assert [entry["embedding"] for entry in answer["data"]] == [[6, 3], [1, 0]]
    status, answer = await child.post("/v1/embeddings", {"input": "banana", "encoding_format": "base64"})
    assert np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4").tolist() == [6, 3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, 2]}, "input"),
        ({"input": "a", "dimensions": 2}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "wibble": 2}, "wibble"),
    ],
)
async def test_a_wrong_embeddings_request_names_the_field(serving, body, param):
    child = await serving(spec(task="embeddings", handler=handler(EMBED)))
    status, answer = await child.post("/v1/embeddings", body)
    assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("task", ["embeddings", "automatic-speech-recognition", "text-to-speech"])
async def test_a_predict_that_takes_nothing_is_said_at_start(serving, task):
    with pytest.raises(CommandFailed, match=r"predict\(\) takes no input"):
        await serving(spec(task=task, handler=handler(HEAD + "    def predict(self) -> str:\n        return 'a'\n")))


async def test_a_transcription_takes_a_form_with_a_wav_file_of_any_rate(serving):
    child = await serving(spec(task="automatic-speech-recognition", handler=handler(LISTEN)))
    path = "/v1/audio/transcriptions"
    upload = wav(bytes(2 * 2 * 44_100), 44_100, 2)
    status, answer = await child.post(path, data=form(file=upload, model="tiny", language="de"))
    assert (status, answer) == (200, {"text": "16000 samples at 16000, de"})
    status, answer = await child.post(path, data=form(file=upload, response_format="text"))
    assert answer == b"16000 samples at 16000, None\n"
    status, answer = await child.post(path, data=form(file=upload, response_format="verbose_json"))
    assert answer["duration"] == pytest.approx(1)
    for data, param in (
        (form(model="tiny"), "file"),
        (form(file=b"RIFFnot a wav"), "file"),
        (form(file=upload, response_format="srt"), "response_format"),
        (form(file=upload, prompt="x"), "prompt"),
        (form(file=upload, temperature="0.5"), "temperature"),
        (form(file=upload, temperature="warm"), "temperature"),
        (form(file=upload, wibble="1"), "wibble"),
        (form(file="text"), "file"),
    ):
        status, answer = await child.post(path, data=data)
        assert (status, answer["error"]["param"]) == (400, param), answer
    status, answer = await child.post(path, {"file": "x"})
    assert (status, answer["error"]["code"]) == (400, "invalid_form")


async def test_recognition_answers_inference_requests_too(serving):
    child = await serving(spec(task="automatic-speech-recognition", handler=handler(LISTEN)))
    entry = {
        "name": "audio",
        "datatype": "BYTES",
        "shape": [1],
        "data": [base64.b64encode(wav(bytes(3200))).decode()],
        "parameters": {"content_type": "base64"},
    }
    _, answer = await child.post("/v2/models/tiny/infer", {"inputs": [entry], "id": "7"})
    assert answer["outputs"][0]["data"] == ["1600 samples at 16000, None"]
    assert answer["id"] == "7"


async def test_speech_is_a_wav_file(serving):
    child = await serving(spec(task="text-to-speech", handler=handler(SPEAK)))
    status, content = await child.post("/v1/audio/speech", {"input": "hello", "voice": "x", "speed": 0.5})
    assert status == 200
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getframerate(), file.getnframes(), file.getsampwidth()) == (24_000, 1000, 2)
    for body, param in (
        ({}, "input"),
        ({"input": " "}, "input"),
        ({"input": "a", "speed": 9}, "speed"),
        ({"input": "a", "response_format": "mp3"}, "response_format"),
        ({"input": "a", "instructions": "sing"}, "instructions"),
    ):
        status, answer = await child.post("/v1/audio/speech", body)
        assert (status, answer["error"]["param"]) == (400, param)


async def test_classification_has_the_best_label_its_score_and_all_scores(serving):
    child = await serving(spec(task="text-classification", handler=handler(CLASSIFY)))
    body = {"inputs": [{"name": "inputs", "datatype": "BYTES", "shape": [2], "data": ["bad", "fine"]}]}
    _, answer = await child.post("/v2/models/tiny/infer", body)
    found = {output["name"]: output["data"] for output in answer["outputs"]}
    assert found["label"] == ["bad", "good"]
    assert found["score"] == [0.75, 1.0]
    assert found["scores"][0] == '{"bad": 0.75, "good": 0.25}'


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_pcm_width_is_read(width):
    values = {
        1: b"\xff\x80\x00",
        2: b"\xff\x7f\0\0\0\x80",
        3: b"\xff\xff\x7f\0\0\0\0\0\x80",
        4: b"\xff\xff\xff\x7f\0\0\0\0\0\0\0\x80",
    }
    found = read_wav(wav(values[width], width=width)).samples
    np.testing.assert_allclose(found, [1, 0, -1], atol=0.01)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_resampling_keeps_a_tone(rate):
    seconds, tone = 0.5, 440
    found = resample(np.sin(2 * np.pi * tone * np.arange(int(seconds * rate)) / rate).astype(np.float32), rate, 16_000)
    expected = np.sin(2 * np.pi * tone * np.arange(len(found)) / 16_000)
    assert len(found) == math.floor(seconds * 16_000)
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=2e-3)


def test_resampling_takes_away_what_the_lower_rate_cannot_carry():
    tone = np.sin(2 * np.pi * 12_000 * np.arange(24_000) / 48_000).astype(np.float32)
    assert np.abs(resample(tone, 48_000, 16_000)[200:-200]).max() < 0.01


def test_a_wav_file_comes_back_as_it_was():
    samples = np.linspace(-1, 1, 1000, dtype=np.float32)
    np.testing.assert_allclose(read_wav(write_wav(Audio(samples))).samples, samples, atol=1e-4)


@pytest.mark.parametrize("content", [b"", b"RIFF", wav(b"\0\0")[:20], b"ID3" + bytes(100), wav(b"\0\0", rate=1)])
def test_what_is_no_wav_file_is_a_bad_request(content):
    with pytest.raises(RequestError, match="Invalid value for file") as caught:
        read_wav(content)
    assert "()" not in caught.value.message
