"""A GPU as the simulator takes it: which of :mod:`systolic.sim.gpu`'s prices each op of XLA's GPU compiler takes.

The compute stream runs cuBLAS's, cuDNN's and XLA's own kernels one after another; NCCL's run beside them on a stream of
their own, one after another too, over NVLink or the network.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from systolic.chips import Slice
from systolic.hlo import Computation, Groups, Instruction, Module, Shape
from systolic.hlo.shape import HOST
from systolic.sim import gpu
from systolic.sim.gpu import AttentionCall
from systolic.sim.incomplete import FREE_TARGETS, MOVED_TARGETS, fused_calls
from systolic.sim.network import CollectiveCost, switched
from systolic.sim.price import FREE, DevicePrices, OpPrice
from systolic.sim.rates import number_format, peaks_of
from systolic.sim.roofline import IrregularRates, Peaks, gpu_peaks, irregular, note, without_tiles
from systolic.sim.timeline import PricedBy, Resource
from systolic.sim.traffic import written_bytes
from systolic.sim.work import Work, work_of

STREAM = "collectives"
"""Lane of NCCL's kernels, which run one after another."""
CUBLAS, FMHA, CONVOLUTION = "__cublas", "__cudnn$fmha", "__cudnn$conv"
"""Beginnings of the targets of cuBLAS's matmuls, cuDNN's attention and cuDNN's convolutions."""
_TRANSCENDENTAL = frozenset(
    {"exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "erf"}
    | {"rsqrt", "sqrt", "cbrt", "sine", "cosine", "tan", "power", "atan2", "divide"}
)
_NO_WORK = FREE | {"broadcast", "iota", "reshape", "copy", "transpose", "slice", "dynamic-slice"}
_WORKSPACE = ("u8", "s8")
"""Dtypes of the arrays in which libraries keep what they need, after a call's results."""
_NO_WORKSPACE = "u8[0]{0})"
"""End of the result of a call whose workspace is not known."""
_SCORES = 64
"""Rows and columns to which the array of all scores is filled up."""
BIASED = "a mask that is no causal one or window comes to cuDNN's attention as a bias, whose gradient it computes through an array of all scores: more memory and time"
_PRODUCTS = ("dot", "convolution")
_DIMS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class MatmulSizes:
    """A product of m x k by k x n, ``batch`` times."""

    batch: int
    m: int
    n: int
    k: int
    dtypes: tuple[str, str, str]
    """HLO dtypes of both operands and the result."""
    highest: bool = False
    """Whether f32 is to be multiplied as such, not as TF32."""

    @property
    def flops(self) -> float:
        """FLOPs, 2 a multiply-add, 8 one of complex numbers."""
        return 2.0 * gpu.real_products(*self.dtypes[:2]) * self.batch * self.m * self.n * self.k


def attention_flops(call: AttentionCall) -> float:
    """FLOPs of a call of attention: two matmuls forward and five backward, of the pairs of tokens that its mask leaves."""
    pairs = gpu.pairs_seen(call["q_len"], call["kv_len"], call["causal"], call["window"])
    products = 10.0 if call["backward"] else 4.0
    return products * call["batch"] * call["heads"] * call["head_dim"] * pairs


def scores_bytes(call: AttentionCall) -> int:
    """Bytes of the gradients of all scores, which cuDNN keeps where a bias has a gradient of its own."""
    rows, columns = (-(-call[name] // _SCORES) * _SCORES for name in ("q_len", "kv_len"))
    return 2 * call["batch"] * call["heads"] * rows * columns


def workspace_bytes(call: AttentionCall, with_bias: bool) -> int:
    """Memory that cuDNN's attention takes beside its arrays: none forward.

    Backward a sum for each row of the scores and dQ, both in f32; in place of dQ the gradients of all scores where a bias has
    a gradient (NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h).
    """
    if not call["backward"]:
        return 0
    rows = 4 * call["batch"] * call["heads"] * call["q_len"]
    return rows + (scores_bytes(call) if with_bias else rows * call["head_dim"])


def add_workspaces(module: Module) -> None:
    """Gives the calls of cuDNN's attention the workspace that they take on a GPU: without one the compiler does not know it."""
    for computation in module.computations.values():
        for call in computation:
            if not call.target.startswith(FMHA) or not call.shape_text.endswith(_NO_WORKSPACE):
                continue
            sizes = attention_of(computation, call)
            if sizes is not None and (size := workspace_bytes(sizes, has_bias_gradient(call))):
                head = call.shape_text.removesuffix(_NO_WORKSPACE)
                call.shape_text = f"{head}u8[{size}]{{0}})"


def has_bias_gradient(call: Instruction) -> bool:
    """Whether a backward call of attention returns the gradient of a bias, after those of queries, keys and values."""
    return sum(shape.dtype not in _WORKSPACE for shape in call.shape.arrays()) > 3


def gpu_device(on: Slice, ids: Sequence[int]) -> DevicePrices:
    """A device of a GPU slice; ``ids`` has the number of each device of the mesh, host after host.

    Raises:
        NotFoundError: the catalogue lacks its peak or its bandwidth.
    """
    device = _Gpu(on, gpu_peaks(on), ids)
    return DevicePrices(
        peaks=peaks_of(on.chip),
        hbm=device.hbm,
        host=device.host,
        link=on.chip.ici_bytes_per_second_per_link or device.host,
        turn_seconds=0.0,
        price=device.price,
        collective=device.collective,
        on_sparse_core=lambda cost: cost,
        between=lambda _: device.host,  # no GPU program has transfers between slices
    )


@dataclass(frozen=True)
class _Gpu:
    on: Slice
    reached: Peaks
    """Rates of kernels that no price knows."""
    ids: Sequence[int]

    @property
    def hbm(self) -> float:
        """Bytes/s of device memory."""
        return self.on.chip.hbm_bytes_per_second or self.reached.memory

    @property
    def host(self) -> float:
        """Bytes/s of the link to the host, one way: PCIe, else device memory's, as no source has that of NVLink to Grace."""
        return self.on.chip.pcie_bytes_per_second_per_chip or self.hbm

    def collective(
        self, kind: str, groups: Groups, out_bytes: float, in_bytes: float
    ) -> CollectiveCost:
        """Cost of a collective, with its lanes."""
        placed = replace(
            groups, groups=tuple(tuple(self.ids[n] for n in group) for group in groups.groups)
        )
        cost = switched(self.on).collective(kind, placed, out_bytes, in_bytes)
        if not cost.lanes:
            return cost
        seconds = gpu.collective_seconds(self.on, kind, max(out_bytes, in_bytes), placed)
        return replace(cost, seconds=seconds, lanes=(STREAM, *cost.lanes))

    def price(
        self, module: Module, computation: Computation, instruction: Instruction, _: bool = False
    ) -> OpPrice | None:
        """Price of an op; None where it takes no time."""
        opcode, target = instruction.opcode, instruction.target
        if opcode in FREE or target in FREE_TARGETS:
            return None
        if opcode == "custom-call":
            return self._call(module, computation, instruction)
        if (hosted := hosted_bytes(computation, instruction)) > 0:
            return OpPrice(hosted / self.host, Resource.host, PricedBy.bytes, bytes=hosted)
        if opcode == "fusion" and (held := fused_calls(module, instruction)):
            return _together([self._call(module, inner, call) for inner, call in held])
        return self._kernel(module, computation, instruction)

    def _kernel(
        self, module: Module, computation: Computation, instruction: Instruction
    ) -> OpPrice:
        """Price of a kernel that XLA writes itself, matmuls of Triton among them."""
        work = work_of(module, computation, instruction)
        work = without_tiles(module, computation, instruction, work)
        written = min(written_bytes(module, instruction), work.bytes)
        inner = module.callee(instruction, "calls") if instruction.opcode == "fusion" else None
        flops, transcendental = _elementwise(module, inner, instruction)
        memory = gpu.elementwise_seconds(
            self.on.chip, work.bytes - written, written, flops, transcendental
        )
        products = [self._matmul(sizes) for sizes in _products(module, computation, instruction)]
        seconds = sum(product.seconds for product in products)
        paid = self._paid(max(seconds, memory), work, PricedBy.roofline)
        if products:
            largest = max(products, key=lambda product: product.seconds)
            return replace(paid, by=PricedBy.kernel, number_format=largest.number_format)
        return self._irregular(module, computation, instruction, work, paid)

    def _irregular(
        self,
        module: Module,
        computation: Computation,
        instruction: Instruction,
        work: Work,
        paid: OpPrice,
    ) -> OpPrice:
        """The price with an estimate and its range, where it is a sort, a gather or another op that its bytes do not price."""
        rates = IrregularRates(
            memory=self.reached.memory,
            operations=self.reached.of("f32"),
            is_cpu=False,
            launch_seconds=gpu.launch_seconds(self.on.chip),
        )
        ruled = irregular(module, computation, instruction, work, rates)
        if ruled is None:
            return paid
        seconds = max(paid.seconds, ruled.seconds)
        if ruled.seconds >= paid.seconds:
            resource = Resource.hbm if ruled.on_memory else Resource.vpu
            paid = replace(paid, resource=resource, by=ruled.by)
        return replace(
            paid,
            seconds=seconds,
            low=max(min(paid.seconds, seconds), ruled.low),
            high=max(ruled.high, seconds),
            note=note(ruled.by, rates),
        )

    def _paid(self, seconds: float, work: Work, by: PricedBy) -> OpPrice:
        """A kernel's price: no less than the time from one kernel's start to the next one's."""
        launch, peaks = gpu.launch_seconds(self.on.chip), peaks_of(self.on.chip)
        matrix = work.flops / peaks.get(number_format(work.dtype), peaks["bf16"])
        resource = Resource.mxu if matrix >= work.bytes / self.hbm else Resource.hbm
        if not work.flops and work.bytes / self.hbm < seconds / 3:
            resource = Resource.vpu
        return OpPrice(
            max(seconds, launch),
            Resource.host if seconds < launch else resource,
            by,
            work.flops,
            work.bytes,
            vector_flops=work.vector_flops,
            padding_flops=work.padding_flops,
            number_format=number_format(work.dtype),
        )

    def _call(self, module: Module, computation: Computation, call: Instruction) -> OpPrice:
        """Price of a call of a library."""
        moved = _moved(computation, call)
        target = call.target
        if target.startswith(FMHA) and (attention := attention_of(computation, call)) is not None:
            seconds = gpu.attention_seconds(self.on.chip, **attention)
            work = Work(attention_flops(attention), moved, attention["dtype"])
            if not attention["backward"] or not has_bias_gradient(call):
                return self._paid(seconds, work, PricedBy.kernel)
            # Written by one kernel and read by the next.
            seconds += 2 * scores_bytes(attention) / gpu.memory_rate(self.on.chip)
            return replace(self._paid(seconds, work, PricedBy.kernel), note=BIASED)
        sizes = None
        if target.startswith(CUBLAS):
            sizes = cublas_sizes(computation, call)
        elif target.startswith(CONVOLUTION):
            sizes = convolution_sizes(computation, call)
        if sizes is not None:
            return self._matmul(sizes, moved)
        by = PricedBy.bytes if target in MOVED_TARGETS else PricedBy.nothing
        paid = self._paid(
            gpu.elementwise_seconds(self.on.chip, moved, 0.0, 0.0, 0.0), Work(0.0, moved), by
        )
        return self._irregular(module, computation, call, Work(0.0, moved), paid)

    def _matmul(self, sizes: MatmulSizes, moved: float = 0.0) -> OpPrice:
        """Price of a product, no less than what ``moved`` bytes take."""
        seconds = gpu.matmul_seconds(
            self.on.chip,
            sizes.batch,
            sizes.m,
            sizes.n,
            sizes.k,
            *sizes.dtypes,
            highest=sizes.highest,
        )
        floor = moved / gpu.memory_rate(self.on.chip)
        paid = self._paid(
            max(seconds, floor), Work(sizes.flops, dtype=sizes.dtypes[0]), PricedBy.kernel
        )
        resource = Resource.hbm if floor > seconds else paid.resource
        form = gpu.matmul_format(*sizes.dtypes[:2], sizes.highest)
        return replace(paid, bytes=moved, resource=resource, number_format=form)


def is_highest(call: Instruction) -> bool:
    """Whether a product multiplies f32 as such: by its operands' precision (``high`` is TF32 too), or by its algorithm."""
    config = call.config.get("gemm_backend_config", call.config).get("precision_config", {})
    words = f"{config} {call.attribute('operand_precision')} {call.attribute('algorithm')}".lower()
    return "highest" in words or "dot_f32_f32_f32" in words


def _together(calls: Sequence[OpPrice]) -> OpPrice:
    """Price of several calls in one fusion, one after another."""
    longest = max(calls, key=lambda paid: paid.seconds)
    return replace(
        longest,
        seconds=sum(paid.seconds for paid in calls),
        flops=sum(paid.flops for paid in calls),
        bytes=sum(paid.bytes for paid in calls),
    )


def _moved(computation: Computation, call: Instruction) -> float:
    """Bytes of a call's operands and results, without its workspace."""
    results = [shape for shape in call.shape.arrays() if shape.dtype not in _WORKSPACE]
    shapes = [*computation.operand_shapes(call), *(results or call.shape.arrays())]
    return float(sum(shape.bytes_in(0) for shape in shapes))


def hosted_bytes(computation: Computation, instruction: Instruction) -> float:
    """Bytes that an op copies between device and host; 0 of any other op."""
    if instruction.opcode not in ("copy", "dynamic-slice", "dynamic-update-slice", "fusion"):
        return 0.0
    result = list(instruction.shape.arrays())
    if any(shape.space == HOST for shape in result):
        sources = [*computation.operand_shapes(instruction)]
        return float(min((s.bytes for s in (*result, *sources) if s.elements > 1), default=0))
    if any(s.space == HOST for s in computation.operand_shapes(instruction)):
        return float(sum(shape.bytes for shape in result))
    return 0.0


def _elementwise(
    module: Module, inner: Computation | None, instruction: Instruction
) -> tuple[float, float]:
    """Operations of the f32 lanes, and those of the special function units."""
    if inner is None:
        elements = float(sum(shape.elements for shape in instruction.shape.arrays()))
        if instruction.opcode in _TRANSCENDENTAL:
            return 0.0, elements
        return (0.0 if instruction.opcode in _NO_WORK else elements), 0.0
    flops = transcendental = 0.0
    for held in inner:
        within = module.callee(held, "calls") if held.opcode == "fusion" else None
        if held.opcode in _PRODUCTS:
            continue
        more, special = _elementwise(module, within, held)
        flops, transcendental = flops + more, transcendental + special
    return flops, transcendental


def _products(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[MatmulSizes]:
    """Matmuls of an op, those that a fusion holds at any depth."""
    if instruction.opcode == "fusion":
        inner = module.callee(instruction, "calls")
        for held in inner:
            yield from _products(module, inner, held)
    elif instruction.opcode == "dot":
        yield _sizes(
            computation.operand_shapes(instruction),
            instruction.shape,
            _numbers(instruction.attribute("lhs_batch_dims")),
            _numbers(instruction.attribute("lhs_contracting_dims")),
            is_highest(instruction),
        )
    elif instruction.opcode == "convolution":
        sizes = convolution_sizes(computation, instruction)
        if sizes is not None:
            yield sizes


def _numbers(text: str | None) -> list[int]:
    return [int(n) for n in _DIMS.findall(text or "")]


def _sizes(
    operands: Sequence[Shape],
    out: Shape,
    batch_dims: Sequence[int],
    contracted: Sequence[int],
    highest: bool,
) -> MatmulSizes:
    lhs, rhs = operands[:2]
    batch = math.prod(lhs.dims[dim] for dim in batch_dims)
    depth = math.prod(lhs.dims[dim] for dim in contracted)
    each = max(batch * depth, 1)
    return MatmulSizes(
        batch,
        lhs.elements // each,
        rhs.elements // each,
        depth,
        (lhs.dtype, rhs.dtype, out.dtype),
        highest,
    )


def cublas_sizes(computation: Computation, call: Instruction) -> MatmulSizes | None:
    """Sizes of a matmul of cuBLAS; None where its config does not say them."""
    config = call.config.get("gemm_backend_config", call.config)
    numbers = config.get("dot_dimension_numbers")
    operands = computation.operand_shapes(call)
    if numbers is None or len(operands) < 2:
        return None
    out = next(iter(call.shape.arrays()))
    batch, contracted = (
        [int(n) for n in numbers.get(f"lhs_{kind}_dimensions", ())]
        for kind in ("batch", "contracting")
    )
    return _sizes(operands, out, batch, contracted, is_highest(call))


def convolution_sizes(computation: Computation, call: Instruction) -> MatmulSizes | None:
    """Sizes of the matmul that a convolution is: positions of the output by features, over the window and the inputs of one."""
    labels = call.attribute("dim_labels") or ""
    kernel_labels = labels.partition("_")[2].partition("->")[0]
    arrays = [*computation.operand_shapes(call)[:2], next(iter(call.shape.arrays()))]
    if not kernel_labels or len(arrays) < 3:
        return None
    # cuDNN's gradients have the labels of the forward convolution, whose output one of their operands is.
    out, kernel = arrays[2], arrays[1]
    if "BackwardInput" in call.target:
        out = arrays[0]
    elif "BackwardFilter" in call.target:
        out, kernel = arrays[1], arrays[2]
    features = kernel.dims[kernel_labels.index("o")]
    return MatmulSizes(
        1,
        out.elements // max(features, 1),
        features,
        kernel.elements // max(features, 1),
        (arrays[0].dtype, arrays[1].dtype, arrays[2].dtype),
        is_highest(call),
    )


def attention_of(computation: Computation, call: Instruction) -> AttentionCall | None:
    """Sizes of a call of cuDNN's attention; None where its config does not say them."""
    config = call.config.get("cudnn_fmha_backend_config", {})
    backward = "Backward" in call.target
    product = "bmm2_grad_gemm2" if backward else "bmm1"
    numbers = config.get(f"{product}_dot_dimension_numbers", {})
    operands = computation.operand_shapes(call)
    if len(operands) < 3 or len(operands[0].dims) != 4:
        return None
    # [batch, sequence, heads, head dim] unless heads come first.
    at = int(numbers.get("lhs_batch_dimensions", (0, 2))[-1])
    query, key = operands[0].dims, operands[1].dims
    return AttentionCall(
        batch=query[0],
        heads=query[at],
        kv_heads=key[at],
        q_len=query[3 - at],
        kv_len=key[3 - at],
        head_dim=query[3],
        causal="CAUSAL" in str(config.get("mask_type", "")),
        window=int(config.get("sliding_window_length", 0)),
        backward=backward,
        dtype=operands[0].dtype,
    )
