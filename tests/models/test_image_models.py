"""ResNet, MobileNetV2, ViT and CNN: what they compute, count, refuse and learn."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from systolic.core.errors import LayoutError, OptionError
from systolic.inference import predictor
from systolic.inference.predictor import FixedForm, Predictor
from systolic.inference.rows import Bucket, Row
from systolic.job import Field, Layout, Model, Remat
from systolic.models.layers import convolve, max_pool
from systolic.models.vision.config import (
    CNN,
    Depth,
    MobileNetV2,
    Padding,
    Pixels,
    Preset,
    ResNet,
    Stem,
    ViT,
)
from systolic.models.vision.module import sincos
from systolic.steps import jaxpr
from systolic.steps.step_functions import StepFunctions
from systolic.steps.tasks import Classification
from tests.models.decoders import drawn
from tests.models.images import CLASSES, COLOURED, MODELS, batch, noisy, steps
from tests.tiers import some


def start(of):
    return jax.jit(of.network.init)(jax.random.key(0))


def forward(of, params, rest, image, train=False):
    return of.network.module(params, rest, train)(image)


MECHANISMS = ("resnet-basic", "vit-token")
"""Models that do not differ in an option alone."""


@pytest.mark.parametrize("name", some(list(MODELS), MECHANISMS))
def test_logits_have_the_compute_dtype_statistics_stay_float32_and_flops_are_those_of_the_program(
    name: str,
) -> None:
    # On a CPU some convolutions are sums of shifted pictures, in which no matmul is counted.
    model = MODELS[name]
    of = steps(model, "bfloat16", platform="tpu")

    def run(key, image):
        params, rest = of.network.init(key)
        module = of.network.module(of.network.cast(params), rest, train=True)
        return params, module(image), of.network.variables(module)

    params, logits, rest = jax.eval_shape(run, jax.random.key(0), batch(of)["image"])
    assert (logits.shape, logits.dtype) == ((8, CLASSES), "bfloat16")
    assert {p.dtype.name for p in params.values()} == {"float32"}
    assert {r.dtype.name for r in rest.values()} <= {"float32"}
    image = jax.ShapeDtypeStruct((1, 16, 16, 3), "uint8")
    counted = jaxpr.count(partial(forward, of), of.network.params, of.network.model_state, image)
    assert model.flops(of.job.data.fields()) == counted


MATTER = ["vit-token"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("mobilenet", marks=pytest.mark.slow),
        *some(["cnn", "resnet-basic", "resnet-bottleneck", "vit-mean", "vit-token"], MATTER),
    ],
)
def test_every_parameter_matters(name: str) -> None:
    of = steps(MODELS[name])
    # Between a linear bottleneck and the next statistics of a batch lies nothing but a 1x1 convolution, so that
    # training moves no bias of a bottleneck's norm, in any MobileNetV2.
    train = name != "mobilenet"
    params, rest = drawn(of.network)
    if (
        not train
    ):  # with statistics of one, only weights of their usual size keep gradients up to the stem
        params, rest = jax.jit(of.network.init)(jax.random.key(0))
        params = noisy(params)
    image = batch(of)["image"]

    def loss(params):
        logits = forward(of, params, rest, image, train=train)
        return jnp.sum(logits * jnp.cos(jnp.arange(logits.size).reshape(logits.shape)))

    gradients = jax.jit(jax.grad(loss))(params)
    still = [name for name, g in gradients.items() if float(jnp.abs(g).max()) < 1e-5]
    assert still == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "resnet-basic", "vit-mean"])
def test_loss_falls_and_an_image_alone_gets_the_logits_it_gets_in_a_batch(name: str) -> None:
    of = steps(MODELS[name], batch=32)
    state = jax.jit(of.init)(jax.random.key(0))
    train = jax.jit(of.train)
    losses = []
    for seed in range(60):
        state, metrics = train(state, batch(of, seed))
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-5:]) < 0.7 * losses[0]
    evaluate = jax.jit(partial(forward, of, state.params, state.model_state))
    image = batch(of)["image"]
    np.testing.assert_allclose(evaluate(image[:1])[0], evaluate(image)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["resnet-basic", pytest.param("vit-mean", marks=pytest.mark.slow)])
def test_rematerialised_blocks_give_the_same_step(name: str) -> None:
    def after(of):
        params, rest = drawn(of.network)
        image = batch(of)["image"]

        def loss(params):
            module = of.network.module(params, rest, train=True)
            return jnp.sum(jnp.sin(module(image))), of.network.variables(module)

        program = jax.jit(jax.grad(loss, has_aux=True)).lower(params).compile()
        return program(params), str(program.as_text()).count("convolution(")

    (plain, few), (again, more) = (
        after(steps(MODELS[name], remat=remat)) for remat in (Remat.none, Remat.full)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), plain, again)
    # Without a scan around a ResNet's blocks the compiler would find both computations to be one.
    assert more > few or name != "resnet-basic"


@pytest.mark.parametrize(
    ("model", "below"),
    [
        # XLA does not count the taps of a convolution that lie on the padding.
        (ResNet(), 0.04),
        (ViT.preset(Preset.base), 0.0),
    ],
)
def test_flops_agree_with_the_compilers_count(model: Model, below: float) -> None:
    of = steps(model)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), "uint8")
    run = jax.jit(partial(forward, of)).trace(of.network.params, of.network.model_state, image)
    if isinstance(model, ViT):
        one, two = (
            jax.jit(partial(forward, short))
            .trace(short.network.params, short.network.model_state, image)
            .lower()
            .cost_analysis()["flops"]
            for short in (steps(replace(model, layers=1)), steps(replace(model, layers=2)))
        )
        # A loop's body is counted once, so whole models of one and two layers are compared.
        compiled = one + 11 * (two - one)
    else:
        compiled = run.lower().cost_analysis()["flops"]
    assert model.flops(of.job.data.fields()) * (1 - below) <= compiled
    assert compiled <= 1.02 * model.flops(of.job.data.fields())


PUBLISHED: dict[str, tuple[Model, float, float]] = {
    # He et al. 2016 and torchvision's tables; Touvron et al. 2021, table 1.
    "resnet-18": (ResNet(depth=Depth.d18), 11.69, 1.81),
    "resnet-34": (ResNet(depth=Depth.d34), 21.80, 3.66),
    "resnet-50": (ResNet(depth=Depth.d50), 25.56, 4.09),
    "resnet-101": (ResNet(depth=Depth.d101), 44.55, 7.80),
    "resnet-152": (ResNet(depth=Depth.d152), 60.19, 11.51),
    "vit-tiny": (ViT.preset(Preset.tiny), 5.7, 1.25),
    "vit-small": (ViT.preset(Preset.small), 22.0, 4.6),
    "vit-base": (ViT.preset(Preset.base), 86.5, 17.5),
}
"""Millions of parameters and billions of multiply-adds."""


@pytest.mark.parametrize(
    ("model", "millions", "gigamacs"),
    [
        pytest.param(*one.values[0], marks=one.marks, id=one.id)
        for one in some(PUBLISHED, ("resnet-18", "resnet-50", "vit-tiny", "vit-base"))
    ],
)
def test_sizes_are_the_published_ones(model: Model, millions: float, gigamacs: float) -> None:
    of = steps(model)
    assert of.network.num_parameters / 1e6 == pytest.approx(millions, rel=0.01)
    field = {"image": Field(shape=(224, 224, 3), dtype="uint8")}
    assert model.flops(field) / 2e9 == pytest.approx(gigamacs, rel=0.02)


def test_batch_statistics_are_those_of_the_batch() -> None:
    of = steps(CNN(channels=(4,), num_classes=CLASSES, pixels=COLOURED))
    params, rest = start(of)
    image = batch(of)["image"]
    module = of.network.module(params, rest, train=True)
    module(image)
    after = of.network.variables(module)
    pixels = (image / 255.0 - COLOURED.mean) / COLOURED.std
    out = jax.lax.conv_general_dilated(
        pixels.astype(np.float32),
        params["convs/0/kernel"],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(after["convs/0/norm/mean"], 0.1 * out.mean((0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(after["convs/0/norm/var"], 0.9 + 0.1 * out.var((0, 1, 2)), rtol=1e-4)
    before = of.network.module(params, after, train=False)
    before(image)
    jax.tree.map(np.testing.assert_array_equal, of.network.variables(before), after)


@pytest.mark.slow
def test_parameters_start_with_their_standard_deviations() -> None:
    of = steps(ResNet(depth=Depth.d10, width=32, num_classes=CLASSES, pixels=COLOURED))
    params, _ = start(of)
    for path, value in params.items():
        if path.endswith("kernel") and value.ndim == 4:
            height, width, _, conv_out = value.shape
            # He et al. 2015: the variance that keeps gradients of ReLU layers.
            assert value.std() == pytest.approx((2 / (height * width * conv_out)) ** 0.5, rel=0.05)
            assert abs(value.mean()) < 0.05 * value.std() + 4 * value.std() / value.size**0.5
    assert params["head/kernel"].std() == pytest.approx(0.01, rel=0.1)
    assert not np.array_equal(params["blocks/0/convs/0/kernel"], params["blocks/0/convs/1/kernel"])

    of = steps(ViT(layers=2, d_model=64, d_ff=128, heads=4, patch=4, pixels=COLOURED))
    params, _ = start(of)
    for name, fan_in in (("blocks/project", 64), ("blocks/up", 64), ("blocks/down", 128)):
        assert params[name].std() == pytest.approx(fan_in**-0.5, rel=0.05)
        assert not np.array_equal(params[name][0], params[name][1])
    assert not params["head/kernel"].any()


@pytest.mark.parametrize("depth", [Depth.d10, Depth.d14])
def test_residual_branches_start_as_nothing(depth: Depth) -> None:
    of = steps(ResNet(depth=depth, width=4, num_classes=CLASSES, pixels=COLOURED))
    params, _ = start(of)
    last = len([n for n in params if n.startswith("blocks/0/convs/") and n.endswith("kernel")]) - 1
    assert not params[f"blocks/0/convs/{last}/norm/scale"].any()
    assert (params["blocks/0/convs/0/norm/scale"] == 1).all()


def test_sincos_positions_are_all_different() -> None:
    table = sincos(14, 64)
    distance = np.linalg.norm(table[:, None] - table[None], axis=-1)
    assert table.shape == (196, 64)
    assert distance[~np.eye(196, dtype=bool)].min() > 0.5


def test_parameters_are_split_by_their_logical_axes() -> None:
    of = steps(MODELS["vit-mean"])
    assert of.network.axes["blocks/project"] == ("layers", "embed", None, "heads", "head_dim")
    of = steps(MODELS["resnet-basic"])
    assert of.network.axes["stem/kernel"] == (None, None, "conv_in", "conv_out")


@pytest.mark.parametrize(
    ("model", "layout", "says"),
    [
        (ResNet(), Layout(tensor=2), "layout.tensor is 2 but a ResNet"),
        (CNN(), Layout(pipeline=2), "layout.pipeline is 2 but a CNN"),
        (
            ViT.preset(Preset.tiny),
            Layout(tensor=2),
            "layout.tensor 2 does not divide model.heads 3",
        ),
        (ViT.preset(Preset.small), Layout(context=2), "layout.context is 2 but a ViT"),
        (
            ViT.preset(Preset.small),
            Layout(fsdp=5),
            "layout.fsdp 5 does not divide model.d-model 384",
        ),
    ],
)
def test_layouts_that_do_not_divide_are_refused(model: Model, layout: Layout, says: str) -> None:
    with pytest.raises(LayoutError, match=says) as caught:
        model.check(layout)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (ResNet(), Layout(fsdp=4)),
        (MobileNetV2(), Layout(fsdp=16)),
        (CNN(channels=(32, 64)), Layout(data=4)),
        (ViT.preset(Preset.tiny), Layout(tensor=3, fsdp=4)),
        (ViT.preset(Preset.base), Layout(tensor=4, fsdp=64)),
    ],
)
def test_shrunk_models_are_small_and_fit_the_layout(model: Model, layout: Layout) -> None:
    small = model.shrink(layout)
    small.check(layout)
    assert steps(small).network.num_parameters < 0.2 * steps(model).network.num_parameters


@pytest.mark.parametrize(
    "make",
    [
        lambda: ViT(patch=15),
        lambda: ViT(heads=5),
        lambda: ResNet(width=0),
        lambda: CNN(channels=()),
        lambda: Pixels(channels=1),
        lambda: Pixels(std=(0.0,)),
    ],
)
def test_impossible_sizes_are_refused(make) -> None:
    with pytest.raises(OptionError) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_stems_differ_in_resolution() -> None:
    field = {"image": Field(shape=(64, 64, 3), dtype="uint8")}
    costs = [
        ResNet(depth=Depth.d18, stem=stem, pixels=Pixels(size=64)).flops(field)
        for stem in (Stem.imagenet, Stem.half, Stem.small)
    ]
    assert costs[0] < costs[1] / 3
    assert costs[1] < costs[2] / 3


def test_flops_of_resnet_50_are_those_by_hand() -> None:
    # Multiply-adds at 224 x 224, output side by side: the stem, then each stage's first block with its
    # projection and stride (in the 3x3 convolution), then its other blocks, then the head.
    macs = 112**2 * 7 * 7 * 3 * 64
    inner, width, side = 64, 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        before, side = side, side if stage == 0 else side // 2
        out = 4 * inner
        macs += before**2 * width * inner + side**2 * (9 * inner**2 + inner * out + width * out)
        macs += (blocks - 1) * side**2 * (out * inner + 9 * inner**2 + inner * out)
        width, inner = out, 2 * inner
    macs += 2048 * 1000
    assert macs == 4_089_184_256
    of = steps(ResNet())
    field = {
        "image": Field(shape=(224, 224, 3), dtype="uint8", axes=("height", "width", "channel"))
    }
    assert ResNet().flops(field) == 2 * macs
    # Training: twice that again for gradients, less the one of the pixels, which nothing needs.
    stem = 112**2 * 7 * 7 * 3 * 64
    assert ResNet().input_flops(field) == 2 * stem
    mine = of.job.data.fields()
    model = of.job.model
    assert of.step_flops == of.batch_size * (3 * model.flops(mine) - model.input_flops(mine))


@pytest.mark.parametrize(
    ("size", "stride", "padding", "shape", "dtype"),
    [
        (3, 2, ((1, 1), (1, 1)), (2, 11, 14, 3), "float32"),
        (3, 2, ((1, 1), (1, 1)), (2, 12, 9, 3), "bfloat16"),
        (2, 2, "SAME", (2, 7, 8, 3), "float32"),
        (2, 2, "VALID", (2, 7, 8, 3), "float32"),
        (3, 1, "SAME", (1, 5, 6, 2), "float32"),
        (2, 3, "VALID", (1, 11, 10, 2), "float32"),
    ],
)
def test_max_pooling_on_a_cpu_has_the_gradient_of_xla(
    size: int, stride: int, padding: Any, shape: tuple[int, ...], dtype: str
) -> None:
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.integers(0, 4, shape), dtype)  # with many equals
    known = partial(
        nnx.max_pool, window_shape=(size, size), strides=(stride, stride), padding=padding
    )
    weights = jnp.asarray(draw.integers(-8, 8, known(x).shape), dtype)  # sums of these are exact
    on_cpu = steps(MODELS["cnn"]).target
    gradients = [
        jax.jit(jax.grad(lambda x, pool=pool: (pool(x) * weights).sum()))
        for pool in (known, lambda x: max_pool(on_cpu, x, size, stride, padding))
    ]
    np.testing.assert_array_equal(*(gradient(x) for gradient in gradients))
    scatters = ["select_and_scatter" in gradient.lower(x).as_text() for gradient in gradients]
    assert scatters == [True, False]
    on_tpu = replace(on_cpu, platform="tpu")
    traced = jax.make_jaxpr(lambda x: max_pool(on_tpu, x, size, stride, padding))(x)
    assert "custom_vjp" not in str(traced)


def test_max_pooling_on_a_cpu_loses_nothing_behind_a_norm() -> None:
    """XLA computes norm and ReLU again in the gradient, rounded otherwise than the maxima that were kept."""
    draw = np.random.default_rng(0)
    pictures, kernel, after = (
        jnp.asarray(draw.normal(size=shape) / width, jnp.float32)
        for shape, width in (((16, 28, 28, 8), 1), ((3, 3, 8, 32), 8), ((3, 3, 32, 32), 17))
    )
    weights = kernel, jnp.ones(32), jnp.zeros(32)

    def loss(pool: Any, weights: Any) -> jax.Array:
        kernel, scale, bias = weights
        x = convolve(pictures, kernel, 1, (1, 1), (1, 1))
        mean = x.mean((0, 1, 2))
        spread = jnp.maximum((x * x).mean((0, 1, 2)) - mean * mean, 0)
        x = jax.nn.relu((x - mean) * (jax.lax.rsqrt(spread + 1e-5) * scale) + bias)
        return jnp.sum(convolve(pool(x), after, 1, (1, 1), (1, 1)) ** 2)

    on_cpu = steps(MODELS["cnn"]).target
    # As users compile it: without optimisation nothing is rounded otherwise.
    full = {
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
        "xla_cpu_use_fusion_emitters": True,
    }
    known, found = (
        jax.jit(jax.grad(partial(loss, pool))).lower(weights).compile(full)(weights)
        for pool in (
            partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2)),
            lambda x: max_pool(on_cpu, x, 2, 2, "VALID"),
        )
    )
    for one, other in zip(known, found, strict=True):
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(one)


@pytest.mark.parametrize("padding", Padding)
def test_a_mobilenet_on_a_cpu_alone_has_no_convolution(padding: Padding) -> None:
    model = replace(MODELS["mobilenet"], padding=padding, pixels=Pixels(size=17))
    on_cpu, elsewhere = (steps(model, platform=name) for name in ("cpu", "tpu"))
    draw = np.random.default_rng(2)
    weights = [
        {
            name: value + draw.uniform(0, 0.5, value.shape).astype(np.float32)
            for name, value in of.items()
        }
        for of in start(on_cpu)
    ]
    programs = [jax.jit(of.predict).lower(*weights, batch(on_cpu)) for of in (on_cpu, elsewhere)]
    own, plain = (program.compile()(*weights, batch(on_cpu)) for program in programs)
    for name, wanted in plain.items():
        np.testing.assert_allclose(own[name], wanted, rtol=1e-4, atol=1e-5)
    assert [program.as_text().count("stablehlo.convolution") for program in programs] == [0, 52]


@pytest.mark.parametrize("rows", [7, 8])
def test_a_batch_on_a_cpu_is_answered_in_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = steps(MODELS["cnn"], batch=rows)
    weights, image = start(of), batch(of)["image"]
    examples = [Row(arrays={"image": picture}) for picture in image]
    bucket = Bucket(rows=rows)
    whole = Predictor(FixedForm(of), *weights)(examples, bucket)
    # The largest array has the patches of the second convolution, 16 x 16 x 36 floats a picture.
    monkeypatch.setattr(predictor, "PIECE_BYTES", 4 * 16 * 16 * 36 * 5)
    pieces = Predictor(FixedForm(of), *weights)
    for own, wanted in zip(pieces(examples, bucket), whole, strict=True):
        for name, value in wanted.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-5, atol=1e-6)
    text = pieces._compiled[bucket].func.as_text()
    assert ("[4,16,16,4]" in text, "[8,16,16,4]" in text) == (rows == 8, False)


class OwnTask(Classification):
    """A task that is not of this package."""


def test_the_cores_of_a_cpu_answer_parts_of_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    of = steps(MODELS["cnn"], batch=8)
    weights, image = start(of), batch(of)["image"]
    examples = [Row(arrays={"image": picture}) for picture in image]
    eight, four, two = (Bucket(rows=rows) for rows in (8, 4, 2))
    monkeypatch.setattr(predictor, "num_cpus", lambda: 2)
    threads = ThreadPoolExecutor(2)
    monkeypatch.setattr(predictor, "_threads", lambda: threads)
    whole = Predictor(FixedForm(of), *weights)
    wanted = whole(examples, eight)
    half = jaxpr.count(of.predict, *weights, {name: a[:4] for name, a in batch(of).items()})
    for least, own in ((half, four), (half + 1, eight)):
        monkeypatch.setattr(predictor, "CORE_MFLOPS", least / 1e6)
        assert Predictor(FixedForm(of), *weights).of_core(eight) == own
    assert Predictor(FixedForm(of), *weights).of_core(Bucket(rows=7)) == Bucket(rows=7)
    # Examples of another's task may depend on each other.
    alien = StepFunctions(replace(of.job, task=OwnTask()), of.target)
    assert Predictor(FixedForm(alien), *weights).of_core(eight) == eight
    monkeypatch.setattr(predictor, "CORE_MFLOPS", half / 2e6)
    parts = Predictor(FixedForm(of), *weights)
    # Of two rows a core would have one; they share the program of four.
    assert [parts.of_core(bucket) for bucket in (eight, four, two)] == [four, two, two]
    assert parts.compile(four) is not None
    assert parts.compile(two) is None
    assert parts.compile(eight) is not None
    together, program = Barrier(2, timeout=60), parts._compiled[four]
    parts._compiled[four] = lambda part: (together.wait(), program(part))[1]
    found = parts(examples[:5], eight)
    assert len(found) == 5
    for own, expected in zip(found, wanted, strict=False):
        for name, value in expected.items():
            np.testing.assert_allclose(own[name], value, rtol=1e-5, atol=1e-6)
