"""Rules of a DFlash or DSpark folder. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from megatron_spec.config import BlockConfig, UserError
from megatron_spec.export.bases import sglang_delivers_last_layer
from megatron_spec.export.block import unserved
from megatron_spec.export.check.finding import ALL, Engine, Finding, Folder
from megatron_spec.export.check.shared import check_fp8, check_rope, check_target
from megatron_spec.export.formats.block import config_of
from megatron_spec.export.formats.block_forms import plain_form, tensor_name


def check(folder: Folder) -> Iterator[Finding]:
    """Check all rules; most need a readable folder."""
    yield from _names(folder)
    yield from _form(folder)
    for rule in (_precision, served, _mask_token, _target_layers, check_rope, check_fp8, check_target):
        yield from rule(_plain(folder))


def check_speculators(folder: Folder) -> Iterator[Finding]:
    """A folder of speculators, which vLLM alone loads."""
    yield from speculators_served(folder)
    for rule in (_mask_token, _target_layers, check_target):
        yield from rule(_plain(folder))


def _plain(folder: Folder) -> Folder:
    """The folder in the form of z-lab; as it is if its config.json cannot be read."""
    try:
        config = plain_form(folder.config)
    except UserError:
        return folder
    return replace(folder, config=config, tensors={tensor_name(n): e for n, e in folder.tensors.items()})


def _block(folder: Folder) -> BlockConfig | None:
    return cast(BlockConfig, folder.reading.config) if folder.reading is not None else None


def _draft(folder: Folder) -> BlockConfig | None:
    """The draft as read, or as config.json alone describes it."""
    config = _block(folder)
    if config is None:
        with contextlib.suppress(UserError):
            config = config_of(folder.config)
    return config


def _names(folder: Folder) -> Iterator[Finding]:
    if folder.prefix:
        yield Finding(
            "prefix", "tensor names begin with 'model.', which vLLM adds itself", "remove 'model.' from the names",
            ("vllm",),
        )  # fmt: skip
    if folder.config.get("model_type") != "qwen3":
        yield Finding(
            "model_type", f"model_type is {folder.config.get('model_type')!r}: engines build the layers of Qwen 3",
            'write "model_type": "qwen3"',
        )  # fmt: skip


def _form(folder: Folder) -> Iterator[Finding]:
    """DSpark's heads as SpecForge and ModelOpt write them: vLLM does not start, and SGLang drops ModelOpt's."""
    plain = _plain(folder)
    keys = sorted(k for k in plain.config if k not in folder.config)
    names = sorted(n for n in folder.tensors if tensor_name(n) != n)
    other = folder.config.get("architectures") != plain.config.get("architectures")
    if other or keys or names:
        found = [f"config.json lacks {', '.join(keys)} at its top level"] if keys else []
        found += [f"architectures is {folder.config.get('architectures')}"] if other else []
        found += [f"{', '.join(names[:4])} ({len(names)}) have other names than engines read"] if names else []
        yield Finding(
            "form", "; ".join(found), "rewrite the folder with tools/check_export.py --fix", ALL if names else ("vllm",)
        )


def _precision(folder: Folder) -> Iterator[Finding]:
    """SGLang never quantises q, k and v; TensorRT-LLM slices keys and values out of the fused weight, losing scales.

    TensorRT-LLM joins the scales of gate and up only after a complete load, and loads block drafts in part, because
    they lack embedding and head.
    """
    fused = tuple(f".self_attn.{x}_proj.weight" for x in "qkv")
    codes = [n for n, e in folder.tensors.items() if e.dtype in ("F8_E4M3", "U8")]
    found = sorted(n for n in codes if n.endswith(fused))
    if found:
        yield Finding(
            "qkv", f"{', '.join(found[:4])} ({len(found)}) are quantised: SGLang silently loads the codes as numbers, "
            "TensorRT-LLM and older versions of vLLM compute keys and values of the context without their scales",
            "keep q_proj, k_proj and v_proj of a block draft in bf16; o_proj and the MLP may be quantised",
            ("sglang", "trtllm"),
        )  # fmt: skip
    merged = sorted(n for n in codes if n.endswith((".mlp.gate_proj.weight", ".mlp.up_proj.weight")))
    if merged:
        yield Finding(
            "served", f"{', '.join(merged[:4])} ({len(merged)}) are quantised: TensorRT-LLM loads a block draft in "
            "part, which leaves the common scale of gate and up at 1",
            "serve it with vLLM or SGLang, or keep them in bf16", ("trtllm",),
        )  # fmt: skip


def served(folder: Folder) -> Iterator[Finding]:
    """Masks and heads that an engine does not compute. Needs no tensors."""
    config = _draft(folder)
    for engine, why in unserved(config, _plain(folder).config).items() if config is not None else ():
        yield Finding(
            "served", f"{engine} does not compute this draft: {why}", "serve it with another engine, or train it the "
            "way this engine computes it", (cast(Engine, engine),),
        )  # fmt: skip


def speculators_served(folder: Folder) -> Iterator[Finding]:
    """Masks and heads of a folder of speculators that vLLM does not compute. Needs no tensors.

    vLLM 0.32.0 makes all layers of a DFlash draft causal, or none, by a key that speculators trains windows alone
    with; for DSpark it looks at `layer_types` only.
    """
    yield from served(folder)
    config, raw = _draft(folder), folder.config
    if config is None:
        return
    masks = [config.mask_of(i) for i in range(config.num_hidden_layers)]
    told = not raw.get("sliding_window_non_causal", True)
    computed = [window is not None if config.has_markov_head else told for _, window in masks]
    other = [i for i, (causal, _) in enumerate(masks) if causal != computed[i]]
    if other:
        seen = {True: "the earlier slots alone", False: "the complete block"}
        yield Finding(
            "causal", f"in this form vLLM lets a slot see {seen[computed[other[0]]]} in layers {other}, but the draft "
            f"was trained on {seen[masks[other[0]][0]]}", "rewrite the folder with tools/check_export.py --fix",
            ("vllm",),
        )  # fmt: skip


def _mask_token(folder: Folder) -> Iterator[Finding]:
    config, target = _block(folder), folder.base or {}
    if config is None:
        return
    ends: Any = target.get("eos_token_id", folder.config.get("eos_token_id"))
    used = [*(ends if isinstance(ends, list) else [ends]), target.get("bos_token_id")]
    if config.mask_token_id in used:
        yield Finding(
            "mask_token", f"the mask token {config.mask_token_id} begins or ends texts of the target",
            "train with a token that no text contains", warning=True,
        )  # fmt: skip


def _target_layers(folder: Folder) -> Iterator[Finding]:
    config, layers = _block(folder), (folder.base or {}).get("num_hidden_layers")
    if config is None or layers is None:
        return
    if config.num_target_layers != layers:
        yield Finding(
            "num_target_layers", f"num_target_layers is {config.num_target_layers}, the target has {layers} layers",
            "write the target's number, or use a draft of this target",
        )  # fmt: skip
    if layers - 1 in config.capture_layer_ids and not sglang_delivers_last_layer(folder.target_architecture):
        yield Finding(
            "capture_ids", f"the target's last layer ({layers - 1}) is captured, whose output SGLang never delivers",
            "train on layers before the last one, or serve with vLLM or TensorRT-LLM", ("sglang",),
        )  # fmt: skip
