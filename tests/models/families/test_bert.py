"""BERT against transformers: outputs, logits of masked tokens, and weights there and back; old files."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from systolic.core.errors import OptionError
from systolic.job import Field
from systolic.models.encoder.config import Encoder
from systolic.models.families import family
from tests.models.foreign import Held, converted, relative, returned, saved, structure
from tests.tiers import some

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}


def made(name: str, seed: int = 0, **fields: Any) -> Any:
    torch.manual_seed(seed)
    module = getattr(transformers, name)(transformers.BertConfig(**{**SIZES, **fields})).eval()
    for key, tensor in module.state_dict().items():
        if "LayerNorm" in key or key.endswith("bias"):
            tensor.add_(0.2 * torch.randn_like(tensor))
    return module


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, types, and which tokens are there, of two rows of unequal length."""
    rng = np.random.default_rng(0)
    there = (np.arange(20) < np.array([[20], [13]])).astype(np.int32)
    return rng.integers(0, 60, (2, 20)), rng.integers(0, 2, (2, 20)), there


def hidden(ours: Any, tokens: np.ndarray, types: np.ndarray, there: np.ndarray) -> Any:
    positions = np.broadcast_to(np.arange(20), tokens.shape)
    return jax.jit(lambda *given: ours(*given))(tokens, there, positions, types)


@pytest.mark.parametrize(
    "fields",
    some([{}, {"hidden_act": "gelu_new"}, {"hidden_act": "relu"}], [{"hidden_act": "gelu_new"}]),
)
@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_bert_agrees_with_transformers(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    theirs = made(name, **fields)
    config, tensors = known_file(theirs, tmp_path)
    known = family(config, "the model")
    ours, arrays = converted(known, config, tensors)
    tokens, types, there = rows()
    with torch.no_grad():
        expected = theirs(
            torch.tensor(tokens),
            attention_mask=torch.tensor(there),
            token_type_ids=torch.tensor(types),
        )
    made_here = hidden(ours, tokens, types, there)
    real = there.astype(bool)
    if name == "BertModel":
        assert relative(made_here[real], expected.last_hidden_state.numpy()[real]) <= 1e-4
        assert relative(ours.pooled(made_here), expected.pooler_output.numpy()) <= 1e-4
    else:
        places = jnp.asarray(np.broadcast_to(np.arange(20), tokens.shape))
        logits = jax.jit(lambda *given: ours.logits(*given))(made_here, places)
        assert relative(logits[real], expected.logits.numpy()[real]) <= 1e-4
    model = known.model(config)
    assert isinstance(model, Encoder)
    count = sum(one.numel() for one in theirs.parameters())
    assert structure(model).num_parameters == model.num_parameters == count

    back = returned(known, config, arrays)
    assert set(back) == set(tensors)
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(back[key], tensor.array)
    assert known.model(known.config(model)) == model


def known_file(theirs: Any, folder: Path) -> tuple[Any, Any]:
    config, tensors = saved(theirs, folder)
    return family(config, "the model").canonical(config, tensors)


def test_an_exported_encoder_opens_in_transformers(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    theirs = made("BertForMaskedLM")
    config, tensors = known_file(theirs, tmp_path / "theirs")
    known = family(config, "the model")
    _, arrays = converted(known, config, tensors)
    home = tmp_path / "ours"
    home.mkdir()
    back = {
        key: np.ascontiguousarray(value) for key, value in returned(known, config, arrays).items()
    }
    save_file(back, home / "model.safetensors")
    transformers.PretrainedConfig(**known.config(known.model(config))).save_pretrained(home)
    again, report = transformers.BertForMaskedLM.from_pretrained(home, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.tensor(rows()[0])
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, theirs(tokens).logits)


def test_old_files_and_files_with_other_parts(tmp_path: Path) -> None:
    """The hub's bert-base-uncased: gamma and beta, a pooler and a head for next sentences beside masked tokens."""
    theirs = made("BertForPreTraining")
    config, tensors = saved(theirs, tmp_path)
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): one
        for key, one in tensors.items()
    }
    old["bert.embeddings.position_ids"] = Held(np.arange(24)[None])
    known = family(config, "the model")
    tokens, types, there = rows()
    with torch.no_grad():
        told = theirs.bert(
            torch.tensor(tokens),
            attention_mask=torch.tensor(there),
            token_type_ids=torch.tensor(types),
        ).last_hidden_state.numpy()
    for architectures, head in ((["BertForMaskedLM"], True), (["BertModel"], False), ([], True)):
        settled = known.canonical({**config, "architectures": architectures}, old)
        ours, _ = converted(known, *settled)
        model = known.model(settled[0])
        assert isinstance(model, Encoder)
        assert (model.head, model.pooler) == (head, not head)
        real = there.astype(bool)
        assert relative(hidden(ours, tokens, types, there)[real], told[real]) <= 1e-4
    bare = {key: one for key, one in tensors.items() if ".pooler." not in key and "cls." not in key}
    settled = known.canonical({**config, "architectures": ["BertModel"]}, bare)
    model = known.model(settled[0])
    assert isinstance(model, Encoder)
    assert (model.head, model.pooler) == (False, False)
    known.conversion(settled[0]).check(settled[1], "the model")


def test_flops_of_an_encoder_without_places_leave_the_head_out() -> None:
    model = Encoder(layers=2, d_model=32, d_ff=64, heads=4, vocab=60, head=False)
    row = {"tokens": Field(shape=(16,), dtype="int32")}
    assert model.flops(row) == 2 * 2 * 16 * (4 * 32 * 32 + 2 * 32 * 64 + 2 * 16 * 32)


@pytest.mark.parametrize(
    "fields",
    [{"position_embedding_type": "relative_key"}, {"is_decoder": True}, {"hidden_act": "silu"}],
)
def test_what_is_not_followed_is_one_line(fields: dict[str, Any]) -> None:
    config = {"model_type": "bert", **fields}
    with pytest.raises(OptionError, match=next(iter(fields))) as caught:
        family(config, "it").model(config)
    assert "\n" not in str(caught.value)
