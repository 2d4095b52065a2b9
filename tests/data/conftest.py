"""A small real tokenizer."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the array flows through cells while pulses beat"] * 50, trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(file))
    return file
