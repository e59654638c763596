"""The endpoints of every task but text generation, in front of a model's `predict`."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from aiohttp import web

from omnimodel.runtime import signature as signatures
from omnimodel.runtime.application import send_events
from omnimodel.runtime.audio import read_wav, write_wav
from omnimodel.runtime.handlers import HandlerError, calling
from omnimodel.runtime.requests import (
    RequestError,
    flag_of,
    invalid,
    number_of,
    read_object,
    refuse_others,
    text_of,
    texts_of,
    unsupported,
)
from omnimodel.runtime.sdk import Audio

if TYPE_CHECKING:
    from omnimodel.runtime.lane import Lane

EMBEDDINGS = "embeddings"
CLASSIFICATION = "text-classification"
TRANSCRIPTION = "automatic-speech-recognition"
SPEECH = "text-to-speech"
INFER = "infer"

_TASK_OUTPUTS: dict[str, list[dict[str, Any]]] = {
    EMBEDDINGS: [{"name": "output", "datatype": "FP32", "shape": [-1, -1]}],
    CLASSIFICATION: [
        {"name": "label", "datatype": "BYTES", "shape": [-1]},
        {"name": "score", "datatype": "FP32", "shape": [-1]},
        {"name": "scores", "datatype": "BYTES", "shape": [-1]},
    ],
}
_SPEEDS = (0.25, 4.0)  # Source: the OpenAI API's limits of `speed`

T = TypeVar("T")


class Predictor:
    """A model's `predict`, called in its lane.

    Args:
        subject: the model, for messages.
        name: the model's name in answers.
        predict: the handler's function.
        lane: where it runs.
        count: counts the tokens of texts for `usage`; None when the model has no tokens.
    """

    def __init__(
        self,
        subject: str,
        name: str,
        predict: Callable[..., Any],
        lane: Lane,
        count: Callable[[list[str]], int] | None = None,
    ) -> None:
        self.subject = subject
        self.name = name
        self.signature = signatures.read(predict)
        self.count = count
        self.streams = inspect.isgeneratorfunction(predict)
        self._predict = predict
        self._lane = lane
        self.takes = {argument.name for argument in self.signature.inputs}

    async def __call__(self, **arguments: Any) -> Any:
        """One answer; a generator's values as a list."""
        if self.streams:
            return [value async for value in self.stream(**arguments)]
        return await self._lane.call(lambda: self._run(arguments))

    def _run(self, arguments: dict[str, Any]) -> Any:
        with calling(self.subject, "predict()"):
            answer = self._predict(**arguments)
        if isinstance(answer, Iterator):
            raise HandlerError(self.subject, "predict() returned an iterator", "write it with yield, as a generator")
        return answer

    async def stream(self, **arguments: Any) -> AsyncGenerator[Any, None]:
        """The values of a generator, as they come."""
        async with aclosing(self._lane.stream(self._values(arguments))) as values:
            async for value in values:
                yield value

    def _values(self, arguments: dict[str, Any]) -> Iterator[Any]:
        with calling(self.subject, "predict()"):
            yield from self._predict(**arguments)

    async def aside(self, work: Callable[[], T]) -> T:
        """Do what takes its time in the thread that computes, lest it hold up everybody's requests."""
        return await self._lane.call(work)

    def optional(self, **arguments: Any) -> dict[str, Any]:
        """The arguments that `predict` takes, of those that are not None.

        Raises:
            RequestError: a request sets one that it does not take.
        """
        for name, value in arguments.items():
            if value is not None and name not in self.takes:
                raise unsupported(name)
        return {name: value for name, value in arguments.items() if value is not None}

    def wrong(self, what: str, answer: Any) -> HandlerError:
        """The error for an answer of the wrong type."""
        return HandlerError(self.subject, f"predict() returned {_kind(answer)}", f"return {what}")


def routes(task: str, predictor: Predictor, metadata: dict[str, Any]) -> list[web.RouteDef]:
    """The routes of a task."""
    own = {
        EMBEDDINGS: ("/v1/embeddings", _embeddings),
        TRANSCRIPTION: ("/v1/audio/transcriptions", _transcriptions),
        SPEECH: ("/v1/audio/speech", _speech),
    }
    found = []
    if task in own:
        path, handler = own[task]
        if not predictor.signature.inputs:
            raise HandlerError(predictor.subject, "predict() takes no input", f"give it one, as {task} has it")
        found.append(web.post(path, lambda request: handler(predictor, request)))

    async def describe(_: web.Request) -> web.Response:
        return web.json_response(metadata)

    async def infer(request: web.Request) -> web.StreamResponse:
        return await _infer(task, predictor, request)

    # Not the metadata of a model `X/infer`: who asks for an answer by GET is told to POST.
    return [*found, web.get("/v2/models/{name:.+(?<!/infer)}", describe), web.post("/v2/models/{name:.+}/infer", infer)]


def describe(name: str, engine: str, task: str, signature: signatures.Signature) -> dict[str, Any]:
    """The metadata of a model in the Open Inference Protocol."""
    outputs = [argument.describe() for argument in signature.outputs]
    return {
        "name": name,
        "versions": [],
        "platform": f"omnimodel_{engine}",
        "inputs": [argument.describe() for argument in signature.inputs],
        "outputs": _TASK_OUTPUTS.get(task, outputs),
    }


async def _embeddings(predictor: Predictor, request: web.Request) -> web.Response:
    body = read_object(await request.read())
    refuse_others(body, ("model", "input", "encoding_format", "user", "dimensions"))
    if body.get("dimensions") is not None:
        raise unsupported("dimensions", "this model's embeddings have one size")
    encoding = text_of(body, "encoding_format", default="float")
    if encoding not in ("float", "base64"):
        raise invalid("encoding_format", f"it is float or base64, not {encoding}")
    texts = texts_of(body, "input")
    answer = await predictor(**{predictor.signature.inputs[0].name: texts})
    vectors = embedding_array(predictor, answer, len(texts))
    count = predictor.count
    tokens = await predictor.aside(lambda: count(texts)) if count else 0
    return web.json_response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _vector(vector, encoding)}
                for index, vector in enumerate(vectors)
            ],
            "model": body.get("model") or predictor.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def embedding_array(predictor: Predictor, answer: Any, count: int) -> np.ndarray[Any, Any]:
    """An answer of an embedding model as float32 of shape (count, n).

    Raises:
        HandlerError: it is none.
    """
    if hasattr(answer, "detach"):
        answer = answer.detach().float().cpu().numpy()
    try:
        vectors = np.asarray(answer, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise predictor.wrong("an array of shape (texts, dimensions)", answer) from error
    if vectors.ndim != 2 or len(vectors) != count:
        raise HandlerError(
            predictor.subject,
            f"predict() returned an array of shape {list(vectors.shape)} for {count} texts",
            "return an array of shape (texts, dimensions)",
        )
    return vectors


def _vector(vector: np.ndarray[Any, Any], encoding: str) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


async def _transcriptions(predictor: Predictor, request: web.Request) -> web.Response:
    if not request.content_type.startswith("multipart/"):
        raise RequestError("The body must be multipart/form-data with a part named file", code="invalid_form")
    try:
        form = await request.post()
    except (ValueError, AssertionError) as error:
        raise RequestError(f"The form cannot be read: {error}", code="invalid_form") from error
    refuse_others(form, ("file", "model", "language", "response_format", "temperature", "prompt"))
    upload = form.get("file")
    if upload is None:
        raise RequestError("Missing required parameter: file", param="file", code="missing_required_parameter")
    content = upload.file.read() if isinstance(upload, web.FileField) else upload
    if isinstance(content, str):
        raise invalid("file", "it must be an upload with a file name")
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    if fields.get("temperature", "0") not in ("", "0", "0.0"):
        raise unsupported("temperature", "this model decodes greedily")
    style = fields.get("response_format") or "json"
    if style not in ("json", "text", "verbose_json"):
        raise invalid("response_format", f"it is json, text or verbose_json, not {style}")
    arguments = predictor.optional(language=fields.get("language") or None, prompt=fields.get("prompt") or None)
    audio = await predictor.aside(lambda: read_wav(bytes(content)))
    text = await predictor(**{predictor.signature.inputs[0].name: audio}, **arguments)
    if isinstance(text, list) and predictor.streams:
        text = "".join(text)
    if not isinstance(text, str):
        raise predictor.wrong("the text", text)
    if style == "text":
        return web.Response(text=text + "\n")
    if style == "json":
        return web.json_response({"text": text})
    seconds = len(audio.samples) / audio.rate
    return web.json_response(
        {"task": "transcribe", "language": fields.get("language"), "duration": seconds, "text": text}
    )


async def _speech(predictor: Predictor, request: web.Request) -> web.Response:
    body = read_object(await request.read())
    refuse_others(body, ("model", "input", "voice", "speed", "response_format"))
    style = text_of(body, "response_format", default="wav")
    if style != "wav":
        raise unsupported("response_format", f"this server writes wav, not {style}")
    speed = number_of(body, "speed", *_SPEEDS, 1.0)
    voice = text_of(body, "voice", default="") or None
    text = text_of(body, "input")
    if not text.strip():
        raise invalid("input", "it is empty")
    arguments = predictor.optional(voice=voice, speed=speed if speed != 1.0 or "speed" in predictor.takes else None)
    answer = await predictor(**{predictor.signature.inputs[0].name: text}, **arguments)
    if not isinstance(answer, Audio):
        raise predictor.wrong("an omnimodel.runtime.sdk.Audio", answer)
    return web.Response(body=write_wav(answer), content_type="audio/wav")


async def _infer(task: str, predictor: Predictor, request: web.Request) -> web.StreamResponse:
    if "Inference-Header-Content-Length" in request.headers:
        raise unsupported("Inference-Header-Content-Length", "binary tensors are not supported; send JSON")
    body = read_object(await request.read())
    stream = flag_of(body, "stream")
    body.pop("stream", None)
    arguments = signatures.decode(predictor.signature, body)
    answer_id = body.get("id")

    def response(answer: Any) -> dict[str, Any]:
        outputs = signatures.select(_encoded(task, predictor, answer), body)
        named = {} if answer_id is None else {"id": answer_id}
        return {"model_name": request.match_info["name"], **named, "outputs": outputs}

    if stream:
        if not predictor.streams:
            raise unsupported("stream", "this model answers at once")

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            async with aclosing(predictor.stream(**arguments)) as values:
                async for value in values:
                    yield response(value)

        return await send_events(request, events(), done=False)
    if predictor.streams:
        answers = [response(value) async for value in predictor.stream(**arguments)]
        return web.json_response({**answers[-1], "outputs": _joined(answers)} if answers else response({}))
    return web.json_response(response(await predictor(**arguments)))


def _joined(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The outputs of a whole generator: each output's values one after another."""
    joined: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for output in answer["outputs"]:
            if output["name"] not in joined:
                joined[output["name"]] = {**output, "data": list(output["data"]), "shape": list(output["shape"])}
            else:
                joined[output["name"]]["data"] += output["data"]
                joined[output["name"]]["shape"][0] += output["shape"][0]
    return list(joined.values())


def _encoded(task: str, predictor: Predictor, answer: Any) -> list[dict[str, Any]]:
    if task == CLASSIFICATION:
        if not isinstance(answer, list) or not all(isinstance(scores, dict) for scores in answer):
            raise predictor.wrong("a list with a dict of label to score per text", answer)
        ordered = [sorted(scores.items(), key=lambda item: -item[1]) for scores in answer]
        return [
            signatures.encode({"label": [scores[0][0] for scores in ordered]})[0],
            signatures.encode({"score": np.array([scores[0][1] for scores in ordered], np.float32)})[0],
            signatures.encode({"scores": [json.dumps(dict(scores)) for scores in ordered]})[0],
        ]
    if task == EMBEDDINGS:
        return signatures.encode({"output": embedding_array(predictor, answer, len(answer))})
    if isinstance(answer, Audio):
        answer = {"audio": np.asarray(answer.samples, np.float32), "rate": answer.rate}
    try:
        return signatures.encode(answer)
    except TypeError as error:
        raise HandlerError(predictor.subject, str(error)) from error


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
