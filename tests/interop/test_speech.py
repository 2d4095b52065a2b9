"""A folder of transformers' Whisper writes down speech and is scored as transformers does it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tokenizers
import torch
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

import systolic
from systolic.core.errors import DataError, OptionError
from systolic.data.audio.recordings import Recordings
from systolic.data.audio.sound import cut, log_mel, read_sound
from systolic.interop.jobs import job_of
from systolic.interop.source import open_source
from systolic.job import Batch, Optimizer
from tests.models import speech
from tests.speech import needs_recordings, needs_weights, recording, tiny_en

PROMPT, END = [100, 98], 99
SUPPRESSED, SUPPRESSED_FIRST = [3, 5, 8], [99, 40]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The small model with a tokenizer of a word an id."""
    tmp_path = tmp_path / "model"
    tmp_path.mkdir()
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
def test_tiny_en_writes_down_real_phrases() -> None:
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

    # That of benchmarks/whisper_wer.py: lower case, no punctuation, one form of numbers, "I'm" as "I am".
    words = EnglishTextNormalizer({})
    wrong = {
        name: texts[name] for name, said in phrases.items() if words(texts[name]) != words(said)
    }
    assert wrong == {}
