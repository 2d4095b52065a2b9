"""The contracts of models and tasks, and of what they may know about where they will run; the options of sampling and of adapters."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Protocol

from systolic.core.errors import OptionError, nearest
from systolic.core.ranges import NOT_NEGATIVE, POSITIVE, Needs, Range, check, check_needs
from systolic.job.data import Field
from systolic.job.layout import Axis, Layout, Remat
from systolic.job.optimizer import OptimizerKind
from systolic.job.precision import Precision, WeightFormat

if TYPE_CHECKING:
    import jax
    import numpy as np
    from flax import nnx

MOST_RANK = 2**14
"""Limit of an adapter's rank."""
RESERVED_TERMS = frozenset(
    [
        "kind",
        "step",
        "time",
        "elapsed",
        "name",
        "detail",
        "prompt",
        "text",
        "terms",
        "bad",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "examples_per_second",
        "num_steps",
        "step_seconds",
        "forecast_step_seconds",
        "forecast_ratio",
        "mfu",
        "data_wait",
        "device_wait",
        "memory_bytes",
        "eta_seconds",
    ]
)
"""Names in the records of training steps that no term of a task may have."""


class Target(Protocol):
    """Target of a program. Models choose kernels and shardings by it, never by the host's devices."""

    @property
    def platform(self) -> str:
        """``tpu``, ``gpu`` or ``cpu``."""
        ...

    @property
    def layout(self) -> Layout:
        """The definite layout: axis sizes, rematerialisation, microbatches."""
        ...

    @property
    def dtype(self) -> str:
        """The compute dtype, a numpy name."""
        ...

    @property
    def matmul_format(self) -> str | None:
        """Format that weight matmuls round their operands to, ``int8`` or ``fp8``; None leaves them."""
        ...

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format that matrices are rounded to before each use, in quantization-aware training."""
        ...

    @property
    def serves(self) -> bool:
        """Whether the program is a server's step: no gradient is taken of it."""
        ...

    @property
    def mesh(self) -> "jax.sharding.Mesh | jax.sharding.AbstractMesh":
        """The mesh the program is partitioned over."""
        ...

    def note(self, text: str) -> None:
        """Records once why something slower or larger was chosen ("head dim 80 rules out ...")."""
        ...

    def spec(self, *axes: str | None) -> "jax.sharding.PartitionSpec":
        """Partition of an array whose dims have these logical names."""
        ...

    def fit(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...]
    ) -> "jax.sharding.PartitionSpec":
        """:meth:`spec` of an array of this shape, less the mesh axes that don't divide a dim."""
        ...

    def constrain(self, array: "jax.Array", *axes: str | None) -> "jax.Array":
        """``array`` with its dims sharded as their logical names say."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelStats:
    """Sizes of a network that an analytic model of time and memory uses before any trace.

    ``whole`` and ``split`` are elements of one token (or example) in one layer, in the compute dtype;
    the tensor axis divides ``split`` and leaves ``whole``.
    """

    parameters: int
    layers: int = 1
    stream: int = 0
    """Elements of the residual stream per token: what full rematerialisation saves of a layer."""
    keys: int = 0
    """Elements of keys and values per token and layer, which the context axis gathers."""
    routed: int = 0
    """Copies of a token that a mixture sends to its experts; 0 in a dense model."""
    experts: int = 0
    """Experts of a mixture that drops no token: over an expert axis each device has rows for all tokens of the
    axis, and the tensor axis sums whole results. 0 in other models."""
    hidden: Mapping[Remat, int] = field(default_factory=dict)
    """Elements in rows of experts among the ``split`` elements that each policy saves."""
    vocab: int = 0
    kept: Mapping[Remat, tuple[int, int]] = field(default_factory=dict)
    """(whole, split) elements that each policy saves for the backward pass."""
    repeated: Mapping[Remat, float] = field(default_factory=dict)
    """Share of the forward pass's FLOPs that each policy recomputes."""


class Model(ABC):
    """A frozen value that builds a Flax NNX module."""

    @abstractmethod
    def build(self, rngs: "nnx.Rngs", target: Target) -> "nnx.Module":
        """The module, initialised in float32. Called under ``jit``, so that weights are created sharded.

        A parameter says how it may be sharded with ``nnx.Param(value, out_sharding=("embed", "mlp"))``
        (logical names); one without names gets a generic rule.
        """

    def check(self, layout: Layout) -> None:
        """Raises LayoutError where the layout's axes don't divide this model; before any compile."""
        del layout

    @property
    def is_convolutional(self) -> bool:
        """Whether dense convolutions are most of its work; programs for a CPU are then compiled with flags of their own."""
        return False

    def check_batch(self, examples: int) -> None:
        """Raises OptionError where a pass of so many examples can't be trained on; before any compile."""
        del examples

    def check_precision(self, precision: Precision) -> None:
        """Raises OptionError where the precision rounds matmuls to a format that this model has none in."""
        wanted = precision.matmul_format
        if wanted is not None and wanted not in self.matmul_formats():
            raise OptionError(
                f"precision is {precision.value}, which {type(self).__name__} has no matmuls for; use bf16 or f32"
            )
        if precision.weight_format is not None and not self.has_quantizable():
            raise OptionError(
                f"precision is {precision.value}, and {type(self).__name__} has no matrices to quantize; use bf16 or f32"
            )

    def check_effects(self, precision: Precision) -> None:
        """Raises OptionError for a field that has no effect, beside the others or at this precision."""
        del precision

    def check_optimizer(self, kind: OptimizerKind) -> None:
        """Raises OptionError for an update rule that the model's own factors of updates don't fit."""
        del kind

    def update_factor(self, path: str, kind: OptimizerKind) -> float:
        """Factor of a rule's updates of the parameter at a path, beside the learning rate; decay has none."""
        del path, kind
        return 1.0

    def check_training(self, batch: "Callable[[], Mapping[str, np.ndarray]]") -> tuple[str, ...]:
        """Compares a training step with that of the framework that the model comes from; warnings of what was not.

        Args:
            batch: Reads a few first examples of the training data, name to array [examples, ...].

        Raises:
            OptionError: the steps differ.
        """
        del batch
        return ()

    def lasting(self) -> frozenset[str]:
        """Names of the fields that a resume may not change: with another value the weights would not fit, or change their meaning."""
        return frozenset()

    def flops(self, fields: Mapping[str, Field]) -> float | None:
        """Matmul FLOPs of one example's forward pass (2 per multiply-add); ``None``: counted from the program."""
        del fields
        return None

    def input_flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs, of :meth:`flops`, of matmuls whose operand is the input itself, so that no gradient of it is computed."""
        del fields
        return 0.0

    def weight_flops(self, fields: Mapping[str, Field]) -> float:
        """FLOPs, of :meth:`flops`, of products with weights: where these are frozen, no gradient of them is computed."""
        del fields
        return 0.0

    def adaptable(self) -> Mapping[str, int]:
        """Matrices that can have an adapter, by name: the elements of A and B together over all layers at rank 1.

        A name is the last of a parameter's path; all parameters of the name that are no expert's are meant.
        """
        return {}

    def quantizable(self, path: str) -> bool:
        """Whether the parameter at a path is a matrix that may be stored in fewer bits.

        Norms, biases, routers and a network's first convolution are none.
        """
        return path.rpartition("/")[2] in self.adaptable()

    def has_quantizable(self) -> bool:
        """Whether any parameter is :meth:`quantizable`."""
        return bool(self.adaptable()) or type(self).quantizable is not Model.quantizable

    def fewest_bits(self, path: str) -> int:
        """Bits that the codes of a quantizable matrix have at least: 8 where 4 cost too much."""
        del path
        return 4

    def prefill_flops(self, sequence: int) -> float | None:
        """Matmul FLOPs of reading a prompt of ``sequence`` tokens into a cache; ``None``: counted from the program."""
        del sequence
        return None

    def decode_flops(self, sequence: int) -> float | None:
        """Matmul FLOPs of token ``sequence`` over a cache of those before it; ``None``: counted from the program."""
        del sequence
        return None

    def axes(self) -> frozenset[Axis]:
        """Mesh axes that can split the model; any model can be replicated and have its parameters sharded."""
        return frozenset((Axis.data, Axis.fsdp))

    def policies(self) -> frozenset[Remat]:
        """Rematerialisation policies that the model follows."""
        return frozenset((Remat.none,))

    def matmul_formats(self) -> frozenset[str]:
        """Formats narrower than the compute dtype that the weight matmuls can round to: int8, fp8."""
        return frozenset()

    def outline(self, layout: Layout) -> ModelStats | None:
        """Sizes for an analytic model; ``None``: only parameters and FLOPs are known, from a trace.

        ``layout`` says which activations its policies name.
        """
        del layout
        return None

    def slots_per_token(self) -> float:
        """Slots of a mixture's experts over those that a uniform choice fills; 1 in a model without slots."""
        return 1.0

    def shrink(self, layout: Layout) -> "Model":
        """A small model of the same structure that the same layout divides, for rehearsals."""
        del layout
        return self


class TokenScorer(ABC):
    """A module of a language model that scores targets itself, so that the logits of a batch need not exist at once.

    It may sow ``router_loss`` and ``dropped``, f32[] each, as ``nnx.Intermediate``. A module without
    this contract is called with ``inputs`` for the logits [batch, sequence, vocab].
    """

    @abstractmethod
    def score(
        self,
        read: "Callable[[jax.Array, jax.Array], Any]",
        targets: "jax.Array",
        inputs: "tuple[jax.Array, jax.Array, jax.Array]",
    ) -> Any:
        """Result of ``read`` on the logits and the targets, under the layout's loss chunks.

        Args:
            read: Turns logits [..., vocab] and targets int32[...] into a tree of arrays [...].
            targets: int32[batch, sequence].
            inputs: tokens, segments and positions, int32[batch, sequence] each; a token sees earlier
                tokens of its own segment only, and positions count within the segment.

        Returns:
            The tree, its arrays [batch, sequence].
        """


class IncrementalDecoder(ABC):
    """A module of a language model that generates token by token over a cache.

    The cache is a pytree of arrays. Rows of a batch are independent of each other, so that prompts of
    different lengths share one: each row has its own count of tokens.
    """

    @property
    def max_positions(self) -> int | None:
        """Positions that the model can take, for learned ones; ``None`` where there is no limit.

        No prompt, padding included, is longer. A cache may have room for more, and :meth:`extend` may
        be called for some positions beyond: what it returns for these is not used, but must not raise.
        """
        return None

    @abstractmethod
    def empty_cache(self, batch: int, capacity: int, dtype: Any) -> Any:
        """A cache with room for ``capacity`` positions of ``batch`` rows, its keys and values in ``dtype``."""

    @abstractmethod
    def cache_axes(self) -> Any:
        """The cache's tree with the logical names of each array's dims, a tuple, in place of the array.

        ``batch`` names the dim of rows.
        """

    @abstractmethod
    def prefill(
        self, tokens: "jax.Array", count: "jax.Array", capacity: int, dtype: Any
    ) -> "tuple[jax.Array, Any]":
        """Reads the start of each row.

        Args:
            tokens: int32[batch, n], padded at the end: no token sees what comes after it.
            count: int32[batch]: how many of the n are real.
            capacity: Positions that the cache has room for.
            dtype: Of the cache's keys and values.

        Returns:
            What :meth:`logits` takes, [batch, n, d_model], and the cache.
        """

    @abstractmethod
    def logits(self, hidden: "jax.Array") -> "jax.Array":
        """Logits [batch, n, vocab] of the last layer's output [batch, n, d_model]."""

    @abstractmethod
    def extend(self, tokens: "jax.Array", cache: Any) -> "tuple[jax.Array, Any]":
        """Reads the next token of each row, int32[batch]: logits [batch, vocab] and the cache with the tokens in it."""


class Mean(NamedTuple):
    """A weighted mean kept as its two sums, so that parts of a batch add up exactly."""

    total: "jax.Array"
    """f32[]: sum of weighted values."""
    weight: "jax.Array"
    """f32[]: sum of weights."""


class Task(ABC):
    """Loss and metrics, a frozen value."""

    shares: ClassVar[Collection[str]] = ("*accuracy",)
    """Terms that are shares of 1 and shown in per cent; ``*`` in a name stands for any text."""

    @abstractmethod
    def terms(
        self, model: Any, batch: Mapping[str, "jax.Array"], train: bool
    ) -> "Mapping[str, jax.Array | Mean]":
        """Named values of a batch; ``loss`` is minimised, the others are reported, under any name but :data:`RESERVED_TERMS`.

        A value is f32[batch], one number an example (averaged over the examples that are not
        padding), or a :class:`Mean`.
        """

    def outputs(self, model: Any, batch: Mapping[str, "jax.Array"]) -> "Mapping[str, jax.Array]":
        """Outputs of ``predict``: name to array [batch, ...]."""
        return {
            name: value
            for name, value in self.terms(model, batch, False).items()
            if not isinstance(value, Mean)
        }


def check_terms(task: Task, names: Collection[str]) -> None:
    """Checks the names of a task's terms.

    Raises:
        OptionError: a name is reserved, none is ``loss``, or the shares are a text.
    """
    kind = type(task).__name__
    for name in names:
        if name in RESERVED_TERMS:
            raise OptionError(
                f"the task {kind} has a term {name!r}, which records of training steps use for a figure of their own; give it another name, such as 'task_{name}'"
            )
    if isinstance(task.shares, str):
        raise OptionError(
            f"shares of the task {kind} is {task.shares!r}; give the names of terms in a tuple: ({task.shares!r},)"
        )
    if "loss" not in names:
        raise OptionError(
            f"the task {kind} has no term 'loss' to minimise{nearest('loss', names)}; it has {', '.join(sorted(names))}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling of the next token from the logits.

    Raises:
        OptionError: a value out of its range.
    """

    temperature: Annotated[float, NOT_NEGATIVE] = 0.8
    """Softmax temperature; 0 is greedy, larger is more varied."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """Sample from the k most likely tokens; 0 samples from all."""
    top_p: Annotated[float, Range(above=0, most=1)] = 0.95
    """Sample from the most likely tokens that together have this probability; 1 samples from all."""

    def __post_init__(self) -> None:
        check(self)


class AdapterKind(enum.Enum):
    """Kind of fine-tuning."""

    none = "none"
    """All weights train."""
    lora = "lora"
    """Low-rank matrices beside frozen weights train (LoRA, Hu et al. 2021)."""
    qlora = "qlora"
    """LoRA whose frozen matrices beside them are stored in 4 bits (nf4; QLoRA, Dettmers et al. 2023)."""


ADAPTS = Needs(
    "--adapter lora", "all weights train", lambda adapter: adapter.kind is not AdapterKind.none
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Adapters of a model's matrices: x W + scale (x A) B, where only A [inputs, rank] and B [rank, outputs] train.

    B starts at zero, so that training begins with the model as it was.

    Raises:
        OptionError: a number outside its range, or a setting without adapters.
    """

    kind: AdapterKind = AdapterKind.none
    rank: Annotated[int, Range(least=1, most=MOST_RANK), ADAPTS] = 16
    """Columns of A and rows of B."""
    alpha: Annotated[float, POSITIVE, ADAPTS] = 32.0
    """The products are scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], ADAPTS] = ()
    """Names of the matrices that get adapters; () for all of attention and MLP."""

    def __post_init__(self) -> None:
        check(self)
        check_needs(self, "adapter")

    def __bool__(self) -> bool:
        """Whether weights are frozen and adapters train."""
        return self.kind is not AdapterKind.none

    @property
    def scale(self) -> float:
        """Factor of (x A) B."""
        return self.alpha / self.rank

    def check(self, model: str, names: Collection[str]) -> None:
        """Checks the targets against the matrices of a model that can have adapters.

        Args:
            model: Name of the model's class.
            names: Of its matrices.

        Raises:
            OptionError: it has none, or a target is none of them.
        """
        if not self:
            return
        if not names:
            raise OptionError(
                f"adapter is {self.kind.value}, and {model} has no matrices that take adapters; train all of it with --adapter none"
            )
        for target in self.targets:
            if target not in names:
                raise OptionError(
                    f"adapter targets have {target!r}{nearest(target, names)}; {model} has {', '.join(sorted(names))}"
                )
