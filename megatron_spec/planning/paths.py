"""The fast paths of the package: the plain twin of each, what blocks it, and the test that compares the two.

They are resolved once, when a model is built, and the model keeps the result (`Paths`). Only the attention kernels
(`ops/attention.py`, with a table of their own) also depend on device, dtype and installed libraries. The reasons that
block a path are functions of its name in `base_paths`, `te_paths` and `draft_paths`; those of a path that depends on
another path, and of paths of neither model, are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from megatron_spec.config import ObjectiveConfig, UserError
from megatron_spec.config.machine import Kernels
from megatron_spec.planning import base_paths, draft_paths, te_paths
from megatron_spec.planning.setting import (
    Reasons,
    Setting,
    draft_engine,
    half_kernels,
    product_epilogues,
    wide_kernels,
)

__all__ = ["NO_PATHS", "OF_DECODING", "PATHS", "Path", "Paths", "Setting", "table"]


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


def _draft_head_fp8(s: Setting) -> Reasons:
    layer, sizes = PATHS["draft_fp8"].blocked(s), (0, 0)
    if s.draft is not None:
        sizes = (s.draft.hidden_size, s.draft.draft_vocab_size)
    uneven = any(size % 16 for size in sizes) and s.machine.kernels != "plain"
    kind = s.objective.loss_kind if s.objective is not None else "soft_ce"
    return {
        f"the draft's layer is not in fp8: {layer}": layer is not None,
        **draft_paths.loss_kernel(s),
        f"the loss is {kind}, not soft_ce or kl": kind not in ("soft_ce", "kl"),
        f"hidden size and draft vocabulary are {sizes}, not both multiples of 16": uneven,
    }


def _teacher_fp8(s: Setting) -> Reasons:
    base = PATHS["base_fp8"].blocked(s)
    split = s.parallel.tensor_model_parallel_size > 1
    return {
        f"the base's layers are not in fp8: {base}": base is not None,
        **half_kernels(s),
        "the base's LM head is split over tensor parallel ranks": split,
    }


def _optimizer_pass(s: Setting) -> Reasons:
    return {f"--optimizer-impl {s.optimizer_impl} does it": s.optimizer_impl != "auto", **half_kernels(s)}


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
        **draft_engine(s),
        "the base is split over several ranks": ranks > 1,
        "--transformer-impl transformer_engine builds the base": s.layers.engine,
        "the number of tokens per expert varies": s.base is not None and s.base.moe is not None and not grouped,
    }


_GPU, _TE = "tests/gpu/test_fast_paths.py", "tests/gpu/test_transformer_engine.py"
_PATHS = (
    Path(
        "base_direct",
        "base: its layers as a list of products, without modules; fused kernels in half precision on a GPU; plain "
        "operators for decoding elsewhere",
        "megatron-core's layers (base/spec.py)", "tests/unit_tests/base/test_direct.py", base_paths.base_direct,
    ),
    Path(
        "decode_kernels",
        "base, in decoding: one kernel from the projection of the new rows to their attention output; it writes the "
        "cache and reads only as much of it as the sequence has",
        "base_direct", "tests/unit_tests/base/test_direct.py", base_paths.decode_kernels,
    ),
    Path(
        "decode_products",
        "base, in decoding: gate and residual sums inside the products of up to 16 rows of at most three sequences; "
        "the LM head of these rows",
        "base_direct", "tests/unit_tests/base/test_direct.py", base_paths.decode_products,
    ),
    Path(
        "sample_kernel", "decoding: a token is sampled in two reads of the logits, which are not copied",
        "decoding/sampling.py", "tests/unit_tests/decoding/test_sampling.py", wide_kernels,
    ),
    Path(
        "draft_decode", "draft, in decoding: a layer of up to 16 rows in the seven kernels of `decode_products`",
        "drafts/layer.py", "tests/unit_tests/drafts/test_few_rows.py", draft_paths.draft_decode,
    ),
    Path(
        "grouped_experts", "base: two products for all experts of a layer instead of two for each; routing, "
        "permutation, activation and weighted sum in six kernels",
        "ops/moe.py, `mixed`", "tests/unit_tests/base/test_grouped_experts.py", base_paths.grouped_experts,
    ),
    Path(
        "product_epilogues",
        "base and draft, in training: the gate inside the product of gate and up, residual sums inside those of the "
        "base's attention output and MLP, and each row's largest logit and log-sum-exp inside those of the LM heads",
        "a product and another pass over memory", "tests/gpu/test_many_rows.py", product_epilogues,
    ),
    Path(
        "base_fp8", "base: its linears in real fp8 (E4M3) in training", "base_direct in bf16",
        f"{_GPU}::test_fp8_base", base_paths.base_fp8, "--base-fp8",
    ),
    Path(
        "te_attention", "base of Transformer Engine's modules: its attention, for batches without packing",
        "ops/attention.py", f"{_TE}::test_families", te_paths.te_attention,
    ),
    Path(
        "te_experts", "base of Transformer Engine's modules: its grouped linears for all experts of a layer",
        "ops/moe.py, `mixed`", f"{_TE}::test_families", te_paths.te_experts,
    ),
    Path(
        "te_fp8", "base of Transformer Engine's modules: its linears in fp8 in training", "the same modules in bf16",
        f"{_TE}::test_fp8_recipes", te_paths.te_fp8, "--fp8-format",
    ),
    Path(
        "draft_fused", "draft: the unroll with a hand-written backward", "drafts/unroll.py",
        "tests/unit_tests/drafts/test_fused_unroll.py", draft_paths.draft_fused,
    ),
    Path(
        "draft_fp8", "draft: the layer's products in real fp8 (E4M3)", "draft_fused in bf16",
        f"{_GPU}::test_fp8_draft", draft_paths.draft_fp8, "--draft-fp8",
    ),
    Path(
        "draft_head_fp8",
        "draft: its head's products in real fp8 (E4M3), together with the layer's: logits, input and weight gradient; "
        "frozen or trained", "fused_head in bf16", f"{_GPU}::test_fp8_head", _draft_head_fp8,
    ),
    Path(
        "teacher_fp8", "base: its head in real fp8 (E4M3), together with its layers, for the teacher",
        "teacher_kernel in bf16", f"{_GPU}::test_fp8_teacher", _teacher_fp8,
    ),
    Path(
        "draft_layer",
        "block drafts: norms with residual sums, heads and gate of a layer in one pass each, forward and backward; "
        "weight gradients go into the optimizer's buffers", "drafts/layer.py",
        "tests/unit_tests/drafts/test_fused_layer.py", draft_paths.draft_layer,
    ),
    Path(
        "block_kernel", "block drafts: attention of slots over context and block, forward and backward",
        "ops/block_attention.py", "tests/gpu/test_block_kernels.py", draft_paths.block_kernel,
    ),
    Path(
        "loss_kernel", "draft: loss, metrics and gradient of a row of logits in one pass", 
        "losses/vocab_parallel.py, losses/block.py", "tests/gpu/test_loss_kernels.py", draft_paths.loss_kernel,
    ),
    Path(
        "teacher_kernel", "base: restricted logits, log-sum-exp and argmax of a row in one pass", "drafts/teacher.py",
        "tests/gpu/test_loss_kernels.py", half_kernels,
    ),
    Path(
        "optimizer_pass",
        "optimizer: division by the row count, clipping, AdamW and weight copy in one pass, from the second step on",
        "megatron-core's optimizer", "tests/unit_tests/training/test_one_pass.py", _optimizer_pass,
    ),
    Path(
        "rounding_kernel", "fake quantisation: the E4M3 round trip in one pass", "quantization/rounding.py",
        "tests/gpu/test_fake_quant.py", _rounding_kernel,
    ),
    Path(
        "common_prompt", "decoding without a draft: identical prompts (drawn questions) are read once",
        "a prefill of each", "tests/unit_tests/decoding/test_common_prompt.py",
        lambda s: {"the base's layers do not run": s.base is None},
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
    "base_direct", "decode_kernels", "decode_products", "grouped_experts", "sample_kernel", "common_prompt",
    "cuda_graphs",
)  # fmt: skip
"""Paths of a base that decodes."""


class Paths:
    """The fast paths of a setting. Immutable.

    Attributes:
        blocked: {name: why it is off}, without the paths that are on.
    """

    def __init__(self, setting: Setting = Setting()) -> None:  # noqa: B008 (frozen)
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
        blocked = wide_kernels(self.setting) if {*names} & _WIDE else half_kernels(self.setting)
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
        return [f"{name:<17} {'off: ' + self.blocked[name] if name in self.blocked else 'on'}" for name in names]


NO_PATHS = Paths()
"""All off, for a model without resolved paths."""


def table() -> str:
    """All paths in Markdown (docs/performance.md)."""
    lines = ["| Path | What it does | Plain twin | Compared by |", "|---|---|---|---|"]
    for path in _PATHS:
        flag = f" ({path.flag})" if path.flag else ""
        lines.append(f"| `{path.name}`{flag} | {path.title} | {path.twin} | `{path.test}` |")
    return "\n".join(lines) + "\n"
