"""Pictures and sound over HTTP, with models that compute: what is read, and what is refused in the protocol's own words."""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
import soundfile
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

import systolic
from systolic.data.image.pictures import Preparation
from systolic.formats.hugging_face.preprocessor import OutsidePictures
from systolic.inference.predictor import Predictor
from systolic.inference.rows import Bucket, Row
from systolic.serving.batch.buckets import BatchOptions, InputLimits, Shapes
from systolic.serving.batch.model import batch_model
from systolic.serving.registry import ServedBatch
from systolic.steps.step_functions import StepFunctions
from tests.formats import test_speech
from tests.models import images
from tests.serving.http.running import Running, running

OPTIONS = BatchOptions(
    shapes=Shapes(largest=2, programs=1), limits=InputLimits(pixels=100_000, seconds=3.0)
)
CLASSES = tuple(f"class {number}" for number in range(images.CLASSES))
DATA = OutsidePictures(preparation=Preparation(side=16, shorter=18), classes=CLASSES)


@pytest.fixture(scope="module")
def looking() -> Any:
    """A small network with weights, and the answer that it gives a picture's content."""
    plain = images.steps(images.MODELS["cnn"])
    steps = StepFunctions(replace(plain.job, data=DATA), plain.target)
    state = jax.jit(steps.init)(jax.random.key(0))
    params = images.noisy(state.params)
    made = batch_model("pictures", steps, params, state.model_state, OPTIONS)
    run = Predictor(made._intake.form, params, state.model_state)

    def expected(content: bytes) -> dict[str, Any]:
        (output,) = run([Row(arrays=DATA.read(content, "it"))], Bucket(rows=2))
        return {
            "name": [CLASSES[i] for i in output["label"]],
            "probability": output["probability"],
        }

    return made, expected


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small model of speech."""
    return systolic.open(test_speech.write_folder(tmp_path_factory.mktemp("speech")))


@pytest.fixture(scope="module")
def server(looking: Any, speech: Any) -> Iterator[Running]:
    weights = speech.weights
    listening = batch_model(
        "sounds", speech.setup.steps, weights.params, weights.model_state, OPTIONS
    )
    models = [
        ServedBatch(name="pictures", model=looking[0]),
        ServedBatch(name="sounds", model=listening),
    ]
    with running(models) as found:
        yield found


def picture(kind: str, mode: str = "RGB", size: tuple[int, int] = (40, 30), **more: Any) -> bytes:
    depth = {"RGB": 3, "RGBA": 4, "LA": 2}.get(mode)
    shape = size[::-1] if depth is None else (*size[::-1], depth)
    draw = np.random.default_rng(0)
    if mode == "I;16":
        pixels = Image.fromarray(draw.integers(0, 65_536, shape).astype(np.uint16))
    else:
        pixels = Image.fromarray(draw.integers(0, 256, shape).astype(np.uint8), mode)
    out = io.BytesIO()
    pixels.save(out, kind, **more)
    return out.getvalue()


GOOD = {
    "jpeg": picture("JPEG"),
    "png": picture("PNG"),
    "grey jpeg": picture("JPEG", "L"),
    "png of 16 bits": picture("PNG", "I;16"),
    "transparent png": picture("PNG", "RGBA"),
    "grey and transparent": picture("PNG", "LA"),
}
BAD = {
    "truncated": (picture("JPEG")[:-300], "the image is damaged"),
    "truncated png": (picture("PNG")[:-300], "the image is damaged"),
    "huge": (picture("PNG", "L", (400, 251)), "400 x 251 pixels, and at most 100000"),
    "empty": (b"", "the image is not a picture"),
    "text": (b"no picture", "the image is not a picture"),
}


def infer(server: Running, name: str, *contents: bytes) -> triton.InferResult:
    """Triton's client, with bytes as they are."""
    sent = triton.InferInput(name, [len(contents)], "BYTES")
    sent.set_data_from_numpy(np.array([*contents, b""], object)[:-1], binary_data=True)
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    return client.infer("pictures" if name == "image" else "sounds", [sent])


def predict(server: Running, name: str, *contents: bytes) -> httpx.Response:
    """TensorFlow Serving's rows."""
    rows = [{"b64": base64.b64encode(one).decode()} for one in contents]
    model = "pictures" if name == "image" else "sounds"
    with server.client() as http:
        return http.post(f"/v1/models/{model}:predict", json={"instances": rows})


def test_pictures_of_every_kind(server: Running, looking: Any) -> None:
    wanted = {kind: looking[1](content) for kind, content in GOOD.items()}
    found = infer(server, "image", *GOOD.values())
    rows = predict(server, "image", *GOOD.values()).json()["predictions"]
    for index, (kind, one) in enumerate(wanted.items()):
        names = [name.decode() for name in found.as_numpy("name")[index]]
        assert names == rows[index]["name"] == one["name"], kind
        for chances in (found.as_numpy("probability")[index], rows[index]["probability"]):
            np.testing.assert_allclose(chances, one["probability"], rtol=1e-5, err_msg=kind)
    assert len({tuple(one["probability"]) for one in wanted.values()}) == len(GOOD)


def test_pictures_as_base64_in_json(server: Running) -> None:
    """As MLServer's clients send them; strings that do not say so are refused, as Triton's client sends what is UTF-8."""
    wanted = infer(server, "image", GOOD["png"], GOOD["jpeg"]).as_numpy("probability")
    texts = [base64.b64encode(GOOD[kind]).decode() for kind in ("png", "jpeg")]
    sent = {"name": "image", "shape": [2, 1], "datatype": "BYTES", "data": texts}

    def answer(**more: Any) -> Any:
        with server.client() as http:
            return http.post("/v2/models/pictures/infer", json={"inputs": [{**sent, **more}]})

    coded = {"content_type": "base64"}
    listed = {one["name"]: one["data"] for one in answer(parameters=coded).json()["outputs"]}
    np.testing.assert_allclose(listed["probability"], wanted.reshape(-1), rtol=1e-6)
    refused = answer(parameters=coded, data=["%", "é"])
    assert (refused.status_code, "are no base64" in refused.json()["error"]) == (400, True)
    plain = triton.InferInput("image", [2, 1], "BYTES")
    plain.set_data_from_numpy(np.array(texts, object)[:, None], binary_data=False)
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    with pytest.raises(InferenceServerException, match='base64 with "parameters"'):
        client.infer("pictures", [plain])


@pytest.mark.parametrize("kind", BAD)
def test_pictures_that_can_not_be_read(server: Running, kind: str) -> None:
    content, says = BAD[kind]
    with pytest.raises(InferenceServerException, match=says) as caught:
        infer(server, "image", content)
    assert caught.value.status() == "400"
    answer = predict(server, "image", content)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert says in answer.json()["error"]
    # Good ones are answered after it.
    assert predict(server, "image", GOOD["png"]).status_code == 200


def sound(kind: str, rate: int, channels: int = 1, seconds: float = 0.5) -> bytes:
    wave = np.random.default_rng(0).normal(scale=0.1, size=(int(rate * seconds), 1))
    out = io.BytesIO()
    soundfile.write(out, np.repeat(wave, channels, axis=1), rate, format=kind)
    return out.getvalue()


SOUNDS = {
    "wav": sound("WAV", 16_000),
    "flac": sound("FLAC", 16_000),
    "another rate": sound("WAV", 44_100),
    "stereo": sound("FLAC", 16_000, 2),
    "ogg": sound("OGG", 8_000),
}
NO_SOUNDS = {
    "empty": b"",
    "no samples": sound("WAV", 16_000, seconds=0.0),
    "truncated": sound("FLAC", 16_000)[:40],
    "text": b"no sound",
    "too long": sound("FLAC", 8_000, seconds=3.5),
}


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_recordings_of_every_kind(
    server: Running, client: openai.OpenAI, speech: Any, tmp_path: Path
) -> None:
    files = [tmp_path / f"{number}" for number in range(len(SOUNDS))]
    for file, content in zip(files, SOUNDS.values(), strict=True):
        file.write_bytes(content)
    wanted = [one["text"] for one in speech.predict(files)]
    assert all(wanted)
    found = infer(server, "audio", *SOUNDS.values())
    assert [text.decode() for text in found.as_numpy("text")] == wanted
    rows = predict(server, "audio", *SOUNDS.values()).json()["predictions"]
    assert [row["text"] for row in rows] == wanted
    for (kind, content), text in zip(SOUNDS.items(), wanted, strict=True):
        made = client.audio.transcriptions.create(model="sounds", file=(f"a.{kind}", content))
        assert made.text == text, kind
    # Two channels of one sound are that sound.
    assert wanted[3] == wanted[1]


@pytest.mark.parametrize("kind", NO_SOUNDS)
def test_recordings_that_can_not_be_read(server: Running, client: openai.OpenAI, kind: str) -> None:
    content = NO_SOUNDS[kind]
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model="sounds", file=("a.wav", content))
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(InferenceServerException) as refused:
        infer(server, "audio", content)
    assert refused.value.status() == "400"
    answer = predict(server, "audio", content)
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    made = client.audio.transcriptions.create(model="sounds", file=("a.wav", SOUNDS["wav"]))
    assert made.text
