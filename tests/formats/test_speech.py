"""A folder of transformers' Whisper writes down speech and is scored as transformers does it."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile
import tokenizers
import torch
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

import systolic
from systolic.core.errors import DataError, OptionError
from systolic.data.audio import Recordings, Writing, cut, log_mel, read_sound
from systolic.formats.jobs import job_of, speech_job, writing_of
from systolic.formats.source import Source, open_source
from systolic.inference.model import set_up_here
from systolic.inference.predictor import Predictor, SpeechReader
from systolic.inference.rows import Bucket
from systolic.job import Batch, Optimizer
from tests.models import speech
from tests.speech import needs_recordings, needs_weights, recording, tiny_en

PROMPT, END = [100, 98], 99
SUPPRESSED, SUPPRESSED_FIRST = [3, 5, 8], [99, 40]
KEY = jax.random.key(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """See :func:`write_folder`."""
    return write_folder(tmp_path / "model")


def write_folder(tmp_path: Path) -> Path:
    """The small model with a tokenizer of a word an id."""
    tmp_path.mkdir(exist_ok=True)
    words = {f"w{number}": number for number in range(98)}
    special = ["<|notimestamps|>", "<|endoftext|>", "<|startoftranscript|>"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    made.save(str(tmp_path / "tokenizer.json"))
    theirs = speech.foreign(speech.TINY)
    theirs.save_pretrained(tmp_path)
    about = {"suppress_tokens": SUPPRESSED, "begin_suppress_tokens": SUPPRESSED_FIRST}
    (tmp_path / "generation_config.json").write_text(json.dumps(about))
    return tmp_path


def sounds(folder: Path) -> list[Path]:
    """Noise of 0.3 s and of 1.4 s, which is three windows of at most 0.6 s."""
    rng = np.random.default_rng(0)
    files = [folder / "short.wav", folder / "long.flac"]
    for file, seconds in zip(files, (0.3, 1.4), strict=True):
        soundfile.write(file, rng.normal(scale=0.1, size=int(8_000 * seconds)), 8_000)
    return files


def greedy(features: np.ndarray) -> list[int]:
    """Most likely token after token by transformers, without a cache."""
    theirs, tokens = speech.foreign(speech.TINY), list(PROMPT)
    spectrogram = torch.tensor(features.T[None])
    while len(tokens) < speech.TINY.positions:
        with torch.no_grad():
            logits = theirs(spectrogram, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
        first = SUPPRESSED_FIRST if len(tokens) == len(PROMPT) else []
        logits[[*SUPPRESSED, *first]] = -torch.inf
        tokens.append(int(logits.argmax()))
        if tokens[-1] == END:
            break
    return [token for token in tokens if token < 98]


def test_texts_and_losses_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    model = systolic.open(folder)
    short, long = sounds(folder)
    answers = model.predict([short, folder / "none.wav", long])
    windows = [[log_mel(part, 60, 20) for part in cut(read_sound(f), 9600)] for f in (short, long)]
    assert [len(each) for each in windows] == [1, 3]
    expected = [" ".join(f"w{i}" for part in each for i in greedy(part)) for each in windows]
    assert answers[0] == {"text": expected[0]}
    assert "none.wav is not a file" in answers[1]["error"]
    assert answers[2] == {"text": expected[1]}
    assert expected[0]

    (folder / "m.jsonl").write_text(json.dumps({"audio": "short.wav", "text": "w7 w9 w11"}))
    bundle = systolic.open(systolic.import_model(folder, tmp_path / "bundle", parity=False).path)
    metrics = bundle.evaluate(path=folder / "m.jsonl")[str(folder / "m.jsonl")]
    tokens = torch.tensor([[*PROMPT, 7, 9, 11]])
    with torch.no_grad():
        spectrogram = torch.tensor(windows[0][0].T[None])
        chances = speech.foreign(speech.TINY)(
            spectrogram, decoder_input_ids=tokens
        ).logits.log_softmax(-1)
    nats = [
        -float(chances[0, place, i]) for place, i in zip(range(1, 5), (7, 9, 11, END), strict=True)
    ]
    assert metrics["loss"] == pytest.approx(sum(nats) / 4, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("above_no_speech", "above_mean", "kept"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
def test_an_unlikely_text_without_speech_is_left_out(
    folder: Path, above_no_speech: bool, above_mean: bool, kept: bool
) -> None:
    """Both figures are those of transformers; the thresholds lie beside them."""
    plain = json.loads((folder / "tokenizer.json").read_text())
    silent = {**plain["added_tokens"][0], "id": 97, "content": "<|nospeech|>"}
    plain["added_tokens"] = [silent, *plain["added_tokens"]]
    words = {word: number for word, number in plain["model"]["vocab"].items() if number != 97}
    plain["model"]["vocab"] = words
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    short, _ = sounds(folder)
    features = log_mel(next(iter(cut(read_sound(short), 9600))), 60, 20)
    text = greedy(features)
    assert 97 not in text
    ended = len(PROMPT) + len(text) < speech.TINY.positions
    written = [*text, END] if ended else text
    with torch.no_grad():
        logits = speech.foreign(speech.TINY)(
            torch.tensor(features.T[None]), decoder_input_ids=torch.tensor([[*PROMPT, *text]])
        ).logits[0]
    no_speech = float(logits[0].softmax(-1)[97])
    logits[:, SUPPRESSED] = -torch.inf
    logits[len(PROMPT) - 1, SUPPRESSED_FIRST] = -torch.inf
    chances = logits.log_softmax(-1)[len(PROMPT) - 1 :]
    log_chances = [float(row[token]) for row, token in zip(chances, written, strict=False)]
    mean = sum(log_chances) / len(written)

    file = folder / "generation_config.json"
    thresholds = {
        "no_speech_threshold": no_speech * (1.01 if above_no_speech else 0.99),
        "logprob_threshold": mean + (0.01 if above_mean else -0.01),
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | thresholds))
    (answer,) = systolic.open(folder).predict([short])
    assert answer == {"text": " ".join(f"w{i}" for i in text) if kept else ""}


def test_digital_silence_has_no_text(folder: Path) -> None:
    file = folder / "silence.wav"
    soundfile.write(file, np.zeros(8_000), 16_000)
    assert systolic.open(folder).predict([file]) == [{"text": ""}]


MANY = ["<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]


@pytest.mark.parametrize(
    ("fields", "says", "assumed"),
    [
        ({"language": "german", "task": "translate"}, MANY[1:3], ""),
        ({"language": "de"}, [MANY[1], MANY[3]], ""),
        ({"language": "<|de|>", "task": "transcribe"}, [MANY[1], MANY[3]], ""),
        ({"forced_decoder_ids": [[1, 102], [2, 103]]}, MANY[1:3], ""),
        ({"forced_decoder_ids": [[1, None], [2, 103]]}, [MANY[0], MANY[2]], "English"),
        ({}, [MANY[0], MANY[3]], "English"),
    ],
)
def test_language_and_task_are_those_of_its_files(
    folder: Path, fields: dict[str, object], says: list[str], assumed: str
) -> None:
    source, file = many(folder), folder / "generation_config.json"
    file.write_text(json.dumps(fields))
    writing = writing_of(source, folder / "tokenizer.json", replace(speech.TINY, vocab=51_865))
    ids = {name: 101 + number for number, name in enumerate(MANY)}
    assert writing.prompt == (100, *(ids[name] for name in says), 98)
    assert writing.assumed == assumed
    notes = Recordings(writing=writing).notes()
    assert [assumed in line for line in notes] == ([True] if assumed else [])


def test_a_language_that_the_tokenizer_lacks_is_refused(folder: Path) -> None:
    source = many(folder)
    (folder / "generation_config.json").write_text(json.dumps({"language": "klingon"}))
    with pytest.raises(OptionError, match=r"language 'klingon', for which .* <\|klingon\|>"):
        writing_of(source, folder / "tokenizer.json", replace(speech.TINY, vocab=51_865))


def many(folder: Path) -> Source:
    """The folder with tokens of two languages and two tasks from 101 on."""
    plain = json.loads((folder / "tokenizer.json").read_text())
    like = plain["added_tokens"][0]
    plain["added_tokens"] += [
        {**like, "id": 101 + number, "content": name} for number, name in enumerate(MANY)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    return open_source(folder)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    plain = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(plain | {"added_tokens": []}))
    with pytest.raises(DataError, match="is not the tokenizer of a Whisper"):
        systolic.open(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(OptionError, match=r"has no tokenizer\.json"):
        systolic.open(folder)


@pytest.mark.slow
def test_a_folder_is_fine_tuned_on_a_manifest_and_its_run_writes_down(
    folder: Path, tmp_path: Path
) -> None:
    short, _ = sounds(folder)
    rows = [{"audio": short.name, "text": "w7 w9 w11"}] * 8
    manifest = folder / "m.jsonl"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    job = job_of(open_source(folder))
    assert isinstance(job.data, Recordings)
    made = replace(
        job,
        data=replace(job.data, path=manifest, validation=manifest),
        start=folder,
        steps=40,
        batch=Batch(total=4),
        optimizer=Optimizer(learning_rate=2e-2, weight_decay=0.0),
    )
    before = systolic.open(folder).evaluate(path=manifest)[str(manifest)]["loss"]
    systolic.train(made, run=tmp_path / "run")
    model = systolic.open(tmp_path / "run", job=made)
    assert model.evaluate("validation")["validation"]["loss"] < 0.2 * before
    assert model.predict([short]) == [{"text": "w7 w9 w11"}]


@needs_weights
def test_ctranslate2_has_the_sizes_and_tokens_of_tiny_en() -> None:
    source = open_source(tiny_en())
    assert source.model.num_parameters == 37_184_256
    assert (source.kind, source.dtype) == ("ctranslate2", "float16")
    assert source.config["decoder_start_token_id"] == 50_257


def test_other_models_of_ctranslate2_are_refused(tmp_path: Path) -> None:
    name = b"TransformerSpec\0"
    head = (6).to_bytes(4, "little") + len(name).to_bytes(2, "little") + name
    (tmp_path / "model.bin").write_bytes(head + bytes(8))
    with pytest.raises(
        OptionError, match="is a TransformerSpec in format 6, and only a WhisperSpec"
    ):
        open_source(tmp_path)


@pytest.mark.slow
@needs_weights
@needs_recordings
def test_tiny_en_writes_down_real_phrases(tmp_path: Path) -> None:
    phrases = {
        "agent-alreadyon": "That agent is already logged on. Please enter your agent number followed by the pound key.",
        "agent-pass": "Please enter your password followed by the pound key.",
        "all-circuits-busy-now": "All circuits are busy now.",
        "auth-thankyou": "Thank you.",
        "cannot-complete-as-dialed": "Your call cannot be completed as dialed.",
        "check-number-dial-again": "Please check the number and dial again.",
        "conf-getpin": "Please enter the conference pin number.",
        "conf-invalidpin": "That pin is invalid for this conference.",
        "conf-locked": "This conference is locked.",
        "invalid": "I am sorry, that's not a valid extension. Please try again.",
        "please-try-again": "Please try again.",
        "vm-goodbye": "Goodbye.",
    }
    answers = systolic.open(tiny_en()).predict([recording(name) for name in phrases])
    texts = {name: answer["text"] for name, answer in zip(phrases, answers, strict=True)}

    assert systolic.open(tiny_en()).predict([silent_after(tmp_path)]) == [
        {"text": texts["agent-pass"]}
    ]
    # That of benchmarks/whisper_wer.py: lower case, no punctuation, one form of numbers, "I'm" as "I am".
    words = EnglishTextNormalizer({})
    wrong = {
        name: texts[name] for name, said in phrases.items() if words(texts[name]) != words(said)
    }
    assert wrong == {}


def silent_after(folder: Path) -> Path:
    """A phrase, a hum and digital silence, for which models write "you"."""
    hum = np.random.default_rng(0).normal(scale=1e-3, size=40 * 16_000)
    phrase = read_sound(recording("agent-pass"))
    soundfile.write(
        folder / "long.wav", np.concatenate([phrase, hum, np.zeros(70 * 16_000)]), 16_000
    )
    return folder / "long.wav"


def test_each_recording_is_written_in_the_language_that_is_asked_for(folder: Path) -> None:
    job = speech_job(many(folder), texts=True)
    job = replace(job, model=replace(speech.MODEL, vocab=105))
    ways = {
        code: replace(
            job, data=replace(job.data, writing=Writing(prompt=(100, index, 104, 98), end=99))
        )
        for code, index in (("en", 101), ("de", 102))
    }
    wave = np.random.default_rng(0).normal(scale=0.1, size=9_000).astype(np.float32)
    rng, params, alone = np.random.default_rng(1), None, {}
    for code, one in ways.items():
        steps = set_up_here(one).steps
        if params is None:  # Wider than at the start of training, so that texts differ.
            shapes = jax.eval_shape(steps.network.init, KEY)
            params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
        reader = SpeechReader(steps)
        run = Predictor(reader.form, *params)
        (row,) = reader.read(wave).rows
        (output,) = run([row], Bucket(rows=2))
        alone[code] = output["tokens"].tolist()
        assert reader.language(reader.read(wave)) == {"en": "english", "de": "german"}[code]
        if code == "en":
            asked = [reader.read(wave, reader.prompt(name)) for name in ("german", "EN")]
            together = run([one.rows[0] for one in asked], Bucket(rows=2))
            assert [reader.language(one) for one in asked] == ["german", "english"]
            for name in ("klingon", "french", "transcribe", "<|transcribe|>"):
                with pytest.raises(OptionError, match=r"language is .* does not know it"):
                    reader.prompt(name)
    assert [one["tokens"].tolist() for one in together] == [alone["de"], alone["en"]]
    assert alone["en"] != alone["de"]


def test_tokens_that_the_model_lacks_are_refused(folder: Path) -> None:
    job = speech_job(many(folder), texts=True)
    said = Writing(prompt=(100, 101, 98), end=99)
    few = replace(job, model=replace(speech.MODEL, vocab=102), data=replace(job.data, writing=said))
    reader = SpeechReader(set_up_here(few).steps)
    assert reader.prompt("en").tolist() == [100, 101, 98]
    told = "language is 'de', whose token has the id 102, and the model has 0 to 101; leave it out"
    with pytest.raises(OptionError, match=told):
        reader.prompt("de")
    for wrong in (replace(said, prompt=(100, -1, 98)), replace(said, suppressed=(102,))):
        with pytest.raises(OptionError, match=r"use ids .*, and the model has 102; give the"):
            SpeechReader(set_up_here(replace(few, data=replace(few.data, writing=wrong))).steps)
    file, model = folder / "generation_config.json", replace(speech.TINY, vocab=51_865)
    file.write_text(json.dumps({"forced_decoder_ids": [[1, "en"], [2, 103]]}))
    with pytest.raises(DataError, match="is not the tokenizer of a Whisper"):
        writing_of(open_source(folder), folder / "tokenizer.json", model)


def test_a_model_of_one_language_takes_no_other(folder: Path) -> None:
    reader = SpeechReader(systolic.open(folder).setup.steps)
    assert reader.prompt("en").tolist() == reader.prompt("").tolist() == PROMPT
    assert reader.language(reader.read(np.zeros(800, np.float32))) == "english"
    with pytest.raises(OptionError, match="language is 'de', and the model writes English alone"):
        reader.prompt("de")
