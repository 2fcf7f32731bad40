"""The fast paths of the package: the plain twin of each, what blocks it, and the test that compares the two.

They are resolved once, when a model is built, and the model keeps the result (`Paths`). Only the attention kernels
(`ops/attention.py`, with a table of their own) also depend on device, dtype and installed libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from megatron_spec.config import (
    LOCAL,
    BaseConfig,
    BaseLayers,
    BlockConfig,
    DraftConfig,
    EagleConfig,
    Fp8Recipe,
    ObjectiveConfig,
    OptimizerImpl,
    ParallelConfig,
    QuantConfig,
    UserError,
)
from megatron_spec.config.machine import Kernels, Machine

MOST_WHOLE_ROWS = 8 << 30
"""Maximum bytes of the full sequence on every rank in the fused unroll under sequence parallelism."""

ROWS_AT_ONCE = 65536
"""Most rows of a weight-gradient product of the fused unroll: bounds the memory of its backward at long sequences."""
MOST_GATES = 8 << 30
"""Bytes of gate and up activations over all steps above which the fused unroll computes them again in its backward."""


def keeps_gates(rows: float, intermediate_size: float, width: int) -> bool:
    """True if the fused unroll keeps gate and up of `rows` rows, those of all steps, of `width`-byte values."""
    return rows * 2 * intermediate_size * width <= MOST_GATES


def whole_rows_bytes(hidden_size: int, rows: float, steps: int, width: int) -> float:
    """Bytes of the residual stream and its norms in the fused unroll, for `rows` rows of `width`-byte values."""
    return 9.0 * hidden_size * rows * steps * width


@dataclass(frozen=True)
class Setting:
    """Everything that determines the fast paths of a run."""

    machine: Machine = field(default_factory=Machine)
    dtype: str = "float32"
    """Data type of base and draft."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    base: BaseConfig | None = None
    """None: the base's layers do not run (features come from disk)."""
    draft: DraftConfig | None = None
    objective: ObjectiveConfig | None = None
    """None: unknown yet; `Paths.under` adds it."""
    quant: QuantConfig | None = None
    """Active fake quantisation."""
    layers: BaseLayers = LOCAL
    """What the base's layers are built from."""
    rows: int = 0
    """Rows of a micro-batch (its size times its length); 0: unknown yet."""
    wanted: tuple[str, ...] = ()
    """Opt-in paths that were requested."""
    off: tuple[str, ...] = ()
    """Paths turned off for comparison."""
    plain: bool = False
    """No fast paths."""
    draft_transformer_engine: bool = False
    """The draft's linears and norms are Transformer Engine's modules."""
    draft_fp8_recipe: Fp8Recipe | None = None
    """Transformer Engine's recipe for the draft's linears in training."""
    optimizer_impl: OptimizerImpl = "auto"
    """Whose optimizer was asked for."""


Reasons = dict[str, bool]
"""{reason why a path cannot run: whether it applies}."""


@dataclass(frozen=True)
class Path:
    """One fast path.

    Attributes:
        title: what it does, for the docs.
        twin: the plain code with the same result.
        test: the test that compares the two.
        reasons: what blocks it.
        flag: opts in; None: on wherever it can run.
    """

    name: str
    title: str
    twin: str
    test: str
    reasons: Callable[[Setting], Reasons]
    flag: str | None = None

    def blocked(self, setting: Setting) -> str | None:
        """Why it is off, or None."""
        if setting.plain:
            return "--plain turns it off"
        if self.name in setting.off:
            return "turned off"
        if self.flag is not None and self.name not in setting.wanted:
            return f"not requested ({self.flag})"
        return next((reason for reason, holds in self.reasons(setting).items() if holds), None)


def _kernels(s: Setting) -> Reasons:
    real = s.machine.kernels != "plain"
    return {
        "there is no GPU": real and not s.machine.gpu,
        "Triton is missing": s.machine.kernels == "none",
        f"weights are in {s.dtype}, not in half precision (--bf16)": real and s.dtype not in ("bfloat16", "float16"),
    }


def _wide_kernels(s: Setting) -> Reasons:
    """Of kernels that take fp32, too."""
    return {
        "there is no GPU": s.machine.kernels != "plain" and not s.machine.gpu,
        "Triton is missing": s.machine.kernels == "none",
        "weights are in float64": s.machine.kernels != "plain" and s.dtype == "float64",
    }


def _fp8(s: Setting) -> Reasons:
    real = s.machine.kernels != "plain"
    return {
        f"weights are in {s.dtype}, not in bf16 (--bf16)": real and s.dtype != "bfloat16",
        "the GPU has no fp8 tensor cores (compute capability 9.0, Hopper, or newer)": real and not s.machine.fp8,
    }


def missing_features(base: BaseConfig, tp_size: int) -> Reasons:
    """Features of a base that the direct forward does not support."""
    rope, heads = base.rope, base.num_key_value_heads
    found = {
        "latent attention": base.mla is not None,
        "a sliding window": base.window is not None,
        "attention sinks": base.attention_sinks,
        "a partial rotary embedding": rope.partial_rotary_factor != 1.0,
        f"a rotary embedding of type {rope.type}": rope.type in ("yarn", "longrope"),
        "fewer key/value heads than tensor parallel ranks": heads % tp_size != 0,
    }
    return {f"the base has {name}": present for name, present in found.items()}


def _base_direct(s: Setting) -> Reasons:
    if s.base is None:
        return {"the base's layers do not run": True}
    quantised = s.quant is not None and (s.quant.base != "none" or s.quant.kv_cache != "none")
    return {
        "--transformer-impl transformer_engine builds the base": s.layers.engine,
        **missing_features(s.base, s.parallel.tensor_model_parallel_size),
        "its experts shard the sequence (--sequence-parallel)": s.parallel.sequence_parallel and s.base.moe is not None,
        "the base is fake-quantised": quantised,
    }


def _decode_kernels(s: Setting) -> Reasons:
    return {**_base_direct(s), **_wide_kernels(s)}


def _decode_products(s: Setting) -> Reasons:
    return {
        **_decode_kernels(s),
        "rows are scaled after the products, which overflow in float16": s.dtype == "float16",
        "products are summed over tensor parallel ranks": s.parallel.tensor_model_parallel_size > 1,
    }


def _draft_decode(s: Setting) -> Reasons:
    config = s.draft
    if not isinstance(config, EagleConfig):
        return {"the draft does not run on its own output (EAGLE, MTP)": True}
    odd = s.machine.kernels == "triton" and (config.num_attention_heads * config.head_dim) % 16 != 0
    odd = odd or (s.machine.kernels == "triton" and (config.num_key_value_heads * config.head_dim) % 16 != 0)
    return {
        **_draft_engine(s),
        **_wide_kernels(s),
        "rows are scaled after the products, which overflow in float16": s.dtype == "float16",
        "products are summed over tensor parallel ranks": s.parallel.tensor_model_parallel_size > 1,
        "the draft has latent attention or experts": config.mla is not None or config.moe is not None,
        "the draft has a sliding window": config.sliding_window is not None,
        "the draft has a partial rotary embedding": config.rope.partial_rotary_factor != 1.0,
        "the widths of the draft's queries or keys are no multiples of 16": odd,
        "the draft is fake-quantised": s.quant is not None and s.quant.draft != "none",
    }


def _grouped_experts(s: Setting) -> Reasons:
    moe = s.base.moe if s.base is not None else None
    real, sizes = s.machine.kernels != "plain", (0, 0)
    if s.base is not None and moe is not None:
        sizes = (s.base.hidden_size, moe.intermediate_size // s.parallel.tensor_model_parallel_size)
    return {
        "the base has no experts": moe is None,
        "--transformer-impl transformer_engine builds the base": s.layers.engine,
        "there is no GPU": real and not s.machine.gpu,
        f"weights are in {s.dtype}, not in bf16 (--bf16)": real and s.dtype != "bfloat16",
        "this torch has no grouped products (2.10 has)": not s.machine.grouped_products,
        f"hidden size and width of an expert per rank are {sizes}, not multiples of 8": any(x % 8 for x in sizes),
        "the base is fake-quantised": s.quant is not None and s.quant.base != "none",
    }


def _engine(s: Setting) -> Reasons:
    return {"--transformer-impl local builds the base": not s.layers.engine, "there is no GPU": not s.machine.gpu}


def _half(s: Setting) -> Reasons:
    return {f"weights are in {s.dtype}, not in half precision (--bf16)": s.dtype not in ("bfloat16", "float16")}


def _head_sizes(*sizes: int) -> Reasons:
    reason = f"heads of keys and values have {sizes} dimensions, not multiples of 8 up to 256"
    return {reason: any(size % 8 or size > 256 for size in sizes)}


def _te_attention(s: Setting) -> Reasons:
    base, parallel = s.base, s.parallel
    if base is None:
        return {"the base's layers do not run": True}
    return {
        **_engine(s),
        **_half(s),
        "ranks share the sequence (context parallelism)": parallel.context_parallel_size > 1,
        "the base has fewer key/value heads than tensor parallel ranks": bool(
            base.num_key_value_heads % parallel.tensor_model_parallel_size
        ),
        **_head_sizes(base.head_dim, base.value_dim),
    }


def _te_experts(s: Setting) -> Reasons:
    return {
        **_engine(s), **_half(s), "the base has no experts": s.base is None or s.base.moe is None,
    }  # fmt: skip


def _te_fp8(s: Setting) -> Reasons:
    base, multiple = s.base, 128 if s.layers.recipe == "blockwise" else 16
    sizes = () if base is None else linear_sizes(base, s.parallel.tensor_model_parallel_size)
    return {
        "the base's layers do not run": base is None,
        **_engine(s),
        **_fp8(s),
        "the base is fake-quantised": s.quant is not None and (s.quant.base != "none" or s.quant.kv_cache != "none"),
        # Transformer Engine updates all ranges after a forward of either; ranks without supervised rows run no draft.
        "context parallel ranks would wait for one another (--fp8-recipe delayed and --draft-fp8-recipe)": (
            s.layers.recipe == "delayed" and s.draft_fp8_recipe is not None and s.parallel.context_parallel_size > 1
        ),
        f"inputs and outputs of the base's linears per rank are {sizes}, not all multiples of {multiple}": any(
            size % multiple for size in sizes
        ),
    }


def linear_sizes(base: BaseConfig, tp_size: int) -> tuple[int, ...]:
    """Different sizes of the inputs and outputs of the linears in the base's layers, on each tensor parallel rank."""
    heads, H = base.num_attention_heads // tp_size, base.hidden_size
    sizes = {H, heads * base.value_dim}
    if base.mla is not None:
        mla = base.mla
        sizes |= {mla.kv_lora_rank, mla.kv_lora_rank + mla.rope_head_dim, heads * base.head_dim}
        sizes |= {heads * (mla.nope_head_dim + mla.v_head_dim), mla.q_lora_rank or H}
    else:
        sizes.add((base.num_attention_heads + 2 * base.num_key_value_heads) * base.head_dim // tp_size)
    layers = range(base.num_layers)
    if not all(base.has_experts(layer) for layer in layers):
        sizes.add(base.intermediate_size // tp_size)
    if base.moe is not None:
        sizes |= {
            width // tp_size for width in (base.moe.intermediate_size, base.moe.shared_intermediate_size) if width
        }
    return tuple(sorted(sizes))


def _base_fp8(s: Setting) -> Reasons:
    sizes = (0, 0, 0)
    if s.base is not None:
        width = s.base.intermediate_size // s.parallel.tensor_model_parallel_size
        sizes = (s.base.hidden_size, width, s.base.head_dim)
    uneven = f"hidden size, intermediate size per rank and head size are {sizes}, not all multiples of 16"
    experts = {"the base has experts": s.base is not None and s.base.moe is not None}
    odd = s.machine.kernels != "plain" and any(size % 16 for size in sizes)
    return {**_base_direct(s), **experts, **_kernels(s), **_fp8(s), uneven: odd}


def _draft_engine(s: Setting) -> Reasons:
    return {"--draft-transformer-impl transformer_engine builds the draft": s.draft_transformer_engine}


def _draft_fused(s: Setting) -> Reasons:
    config = s.draft
    if not isinstance(config, EagleConfig) or not config.reads_captures:
        return {"the draft is not EAGLE-3": True}
    steps = s.objective.ttt_steps if s.objective is not None else 0
    rows = s.rows / s.parallel.context_parallel_size
    whole = whole_rows_bytes(config.hidden_size, rows, steps, 2) if s.parallel.sequence_parallel else 0
    odd = s.machine.kernels == "triton" and (config.head_dim < 16 or config.head_dim % 8 != 0)
    clipped = s.quant is not None and s.quant.draft != "none" and s.quant.clipped_ste
    return {
        **_draft_engine(s),
        "the draft proposes all tokens in one forward (P-EAGLE)": config.parallel_drafting,
        **_kernels(s),
        "draft steps are detached": s.objective is not None and s.objective.detach,
        "there are fewer key/value heads than tensor parallel ranks": bool(
            config.num_key_value_heads % s.parallel.tensor_model_parallel_size
        ),
        "the draft has several layers": config.num_hidden_layers > 1,
        "the draft has an embedding of its own": config.own_embedding,
        "the draft feeds back a normed state (norm_output)": config.norm_output,
        f"the draft's layer has {', '.join(config.layer_options)}": bool(config.layer_options),
        f"the draft's head size is {config.head_dim}": odd,
        "fake quantisers clip gradients": clipped,
        "the full sequence would take too much memory under sequence parallelism": whole > MOST_WHOLE_ROWS,
    }


def _draft_fp8(s: Setting) -> Reasons:
    return {
        "the draft is fake-quantised": s.quant is not None and s.quant.draft != "none",
        **_draft_fused(s),
        "tensor parallel ranks would round parts of a row separately": s.parallel.tensor_model_parallel_size > 1,
        **_fp8(s),
    }


def _draft_head_fp8(s: Setting) -> Reasons:
    layer, sizes = PATHS["draft_fp8"].blocked(s), (0, 0)
    if s.draft is not None:
        sizes = (s.draft.hidden_size, s.draft.draft_vocab_size)
    uneven = any(size % 16 for size in sizes) and s.machine.kernels != "plain"
    kind = s.objective.loss if s.objective is not None else "soft_ce"
    return {
        f"the draft's layer is not in fp8: {layer}": layer is not None,
        **_loss_kernel(s),
        f"the loss is {kind}, not soft_ce or kl": kind not in ("soft_ce", "kl"),
        f"hidden size and draft vocabulary are {sizes}, not both multiples of 16": uneven,
    }


def _teacher_fp8(s: Setting) -> Reasons:
    base = PATHS["base_fp8"].blocked(s)
    split = s.parallel.tensor_model_parallel_size > 1
    return {
        f"the base's layers are not in fp8: {base}": base is not None,
        **_kernels(s),
        "the base's LM head is split over tensor parallel ranks": split,
    }


def _block_kernel(s: Setting) -> Reasons:
    return {
        "the draft is not a block draft": not isinstance(s.draft, BlockConfig),
        **_kernels(s),
        "its plain twin runs instead": s.machine.kernels == "plain",
    }


def _draft_layer(s: Setting) -> Reasons:
    config = s.draft
    if not isinstance(config, BlockConfig):
        return {"the draft is not a block draft": True}
    return {
        **_draft_engine(s),
        **_kernels(s),
        "the draft is fake-quantised": s.quant is not None and s.quant.draft != "none",
        "the draft has a partial rotary embedding": config.rope.partial_rotary_factor != 1.0,
        "there are fewer key/value heads than tensor parallel ranks": bool(
            config.num_key_value_heads % s.parallel.tensor_model_parallel_size
        ),
    }


KERNEL_LOSSES = ("soft_ce", "kl", "hard_ce", "tv", "ce_l1")
"""Losses that have a kernel."""


def _loss_kernel(s: Setting) -> Reasons:
    kind = s.objective.loss if s.objective is not None else "soft_ce"
    return {**_kernels(s), f"the loss {kind} has no kernel": kind not in KERNEL_LOSSES}


def _optimizer_pass(s: Setting) -> Reasons:
    return {f"--optimizer-impl {s.optimizer_impl} does it": s.optimizer_impl != "auto", **_kernels(s)}


def _rounding_kernel(s: Setting) -> Reasons:
    return {
        "there is no GPU": not s.machine.gpu,
        "Triton is missing": s.machine.kernels == "none",
        "values are in float64": s.dtype == "float64",
    }


def _cuda_graphs(s: Setting) -> Reasons:
    parallel = s.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    ranks *= parallel.expert_model_parallel_size
    grouped = PATHS["grouped_experts"].blocked(s) is None
    return {
        "there is no GPU": not s.machine.gpu,
        **_draft_engine(s),
        "the base is split over several ranks": ranks > 1,
        "--transformer-impl transformer_engine builds the base": s.layers.engine,
        "the number of tokens per expert varies": s.base is not None and s.base.moe is not None and not grouped,
    }


_GPU, _TE = "tests/gpu/test_fast_paths.py", "tests/gpu/test_transformer_engine.py"
_PATHS = (
    Path(
        "base_direct",
        "base: its layers as a list of products, without modules; fused kernels in half precision on a GPU, plain "
        "operators for decoding anywhere",
        "megatron-core's layers (base/spec.py)", "tests/unit_tests/base/test_direct.py", _base_direct,
    ),
    Path(
        "decode_kernels",
        "base, in decoding: from the projection of the new rows to their attention in one kernel, which writes the "
        "cache and reads as much of it as the sequence has",
        "base_direct", "tests/unit_tests/base/test_direct.py", _decode_kernels,
    ),
    Path(
        "decode_products", "base, in decoding: norms, gate and residual sums inside the products of up to 16 rows "
        "of at most three sequences",
        "base_direct", "tests/unit_tests/base/test_direct.py", _decode_products,
    ),
    Path(
        "sample_kernel", "decoding: a token is sampled in two reads of the logits, which are not copied",
        "decoding/sampling.py", "tests/unit_tests/decoding/test_sampling.py", _wide_kernels,
    ),
    Path(
        "draft_decode", "draft, in decoding: a layer of up to 16 rows in the five kernels of `decode_products`",
        "drafts/layer.py", "tests/unit_tests/drafts/test_few_rows.py", _draft_decode,
    ),
    Path(
        "grouped_experts", "base: two products for all experts of a layer, instead of two for each; choice, order of "
        "rows, activation and weighted sum in six kernels",
        "ops/moe.py, `mixed`", "tests/unit_tests/base/test_grouped_experts.py", _grouped_experts,
    ),
    Path(
        "base_fp8", "base: its linears in real fp8 (E4M3) in training", "base_direct in bf16",
        f"{_GPU}::test_fp8_base", _base_fp8, "--base-fp8",
    ),
    Path(
        "te_attention", "base of Transformer Engine's modules: its attention, for batches without packing",
        "ops/attention.py", f"{_TE}::test_families", _te_attention,
    ),
    Path(
        "te_experts", "base of Transformer Engine's modules: its grouped linears for all experts of a layer",
        "ops/moe.py, `mixed`", f"{_TE}::test_families", _te_experts,
    ),
    Path(
        "te_fp8", "base of Transformer Engine's modules: its linears in fp8 in training", "the same modules in bf16",
        f"{_TE}::test_fp8_recipes", _te_fp8, "--fp8-format",
    ),
    Path(
        "draft_fused", "draft: the unroll with its backward written by hand", "drafts/unroll.py",
        "tests/unit_tests/drafts/test_fused_unroll.py", _draft_fused,
    ),
    Path(
        "draft_fp8", "draft: the layer's products in real fp8 (E4M3)", "draft_fused in bf16",
        f"{_GPU}::test_fp8_draft", _draft_fp8, "--draft-fp8",
    ),
    Path(
        "draft_head_fp8",
        "draft: its head's products in real fp8 (E4M3), with the layer's: logits, input and weight gradient; frozen or "
        "trained", "fused_head in bf16", f"{_GPU}::test_fp8_head", _draft_head_fp8,
    ),
    Path(
        "teacher_fp8", "base: its head in real fp8 (E4M3), with its layers, for the teacher", "teacher_kernel in bf16",
        f"{_GPU}::test_fp8_teacher", _teacher_fp8,
    ),
    Path(
        "draft_layer",
        "block drafts: norms with residual sums, heads and gate of a layer in one pass each, forward and backward; "
        "weight gradients into the optimizer's buffers", "drafts/layer.py",
        "tests/unit_tests/drafts/test_fused_layer.py", _draft_layer,
    ),
    Path(
        "block_kernel", "block drafts: attention of slots over context and block, forward and backward",
        "ops/block_attention.py", "tests/gpu/test_block_kernels.py", _block_kernel,
    ),
    Path(
        "loss_kernel", "draft: loss, metrics and gradient of a row of logits in one pass", 
        "losses/vocab_parallel.py, losses/block.py", "tests/gpu/test_loss_kernels.py", _loss_kernel,
    ),
    Path(
        "teacher_kernel", "base: restricted logits, log-sum-exp and argmax of a row in one pass", "drafts/teacher.py",
        "tests/gpu/test_loss_kernels.py", _kernels,
    ),
    Path(
        "optimizer_pass",
        "optimizer: division by the rows, clipping, AdamW and copy of the weights in one pass, from the second step on",
        "megatron-core's optimizer", "tests/unit_tests/training/test_one_pass.py", _optimizer_pass,
    ),
    Path(
        "rounding_kernel", "fake quantisation: the E4M3 round trip in one pass", "quantization/rounding.py",
        "tests/gpu/test_fake_quant.py", _rounding_kernel,
    ),
    Path(
        "cuda_graphs", "decoding: steps are recorded and replayed", "the same functions, called",
        "tests/unit_tests/decoding/test_replay.py", _cuda_graphs,
    ),
)  # fmt: skip
PATHS = {path.name: path for path in _PATHS}
_WIDE = {"decode_kernels", "decode_products", "draft_decode", "sample_kernel"}
"""Paths whose kernels take fp32, too."""
OF_DECODING = (
    "base_direct", "decode_kernels", "decode_products", "grouped_experts", "sample_kernel", "cuda_graphs"
)  # fmt: skip
"""Paths of a base that decodes."""


class Paths:
    """The fast paths of a setting. Immutable.

    Attributes:
        blocked: {name: why it is off}, without the paths that are on.
    """

    def __init__(self, setting: Setting = Setting()) -> None:
        self.setting = setting
        reasons = {name: path.blocked(setting) for name, path in PATHS.items()}
        self.blocked = {name: reason for name, reason in reasons.items() if reason is not None}
        self._next: Paths | None = None

    def on(self, name: str) -> bool:
        """True if the path is on."""
        assert name in PATHS, name
        return name not in self.blocked

    def kernels(self, *names: str) -> Kernels:
        """Implementation of the kernels for these paths (`ops.backend.load`); 'none' unless all of them are on."""
        blocked = _wide_kernels(self.setting) if {*names} & _WIDE else _kernels(self.setting)
        can = not self.setting.plain and not any(blocked.values())
        return self.setting.machine.kernels if can and all(map(self.on, names)) else "none"

    def under(self, objective: ObjectiveConfig) -> Paths:
        """The paths with this objective."""
        if self.setting.objective == objective:
            return self
        if self._next is None or self._next.setting.objective != objective:
            self._next = Paths(replace(self.setting, objective=objective))
        return self._next

    def asked_for(self, *names: str) -> Paths:
        """The paths with these opt-in paths requested."""
        return Paths(replace(self.setting, wanted=tuple(dict.fromkeys((*self.setting.wanted, *names)))))

    def without(self, *names: str) -> Paths:
        """The paths with these turned off."""
        return Paths(replace(self.setting, off=(*self.setting.off, *names)))

    def check(self) -> None:
        """Raise UserError, with the reason, if a requested path cannot run."""
        for name in self.setting.wanted:
            if name in self.blocked:
                flag = PATHS[name].flag
                raise UserError(f"{flag} cannot run here: {self.blocked[name]}; leave {flag} out, or change that")

    def to_dict(self) -> dict[str, str]:
        """{name: 'on' or why it is off}."""
        return {name: self.blocked.get(name, "on") for name in PATHS}

    def lines(self, names: Iterable[str] = PATHS) -> list[str]:
        """One line per path, for the log."""
        return [f"{name:<16} {'off: ' + self.blocked[name] if name in self.blocked else 'on'}" for name in names]


NO_PATHS = Paths()
"""All off, for a model without resolved paths."""


def table() -> str:
    """All paths in Markdown (docs/performance.md)."""
    lines = ["| Path | What it does | Plain twin | Compared by |", "|---|---|---|---|"]
    for path in _PATHS:
        flag = f" ({path.flag})" if path.flag else ""
        lines.append(f"| `{path.name}`{flag} | {path.title} | {path.twin} | `{path.test}` |")
    return "\n".join(lines) + "\n"
