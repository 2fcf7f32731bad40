"""Every script with Transformer Engine's modules, under any layout, against it with local modules on one rank.

`local` runs the scripts one after the other; `script` runs one of them on what `local` left, so that a layout which one
script refuses is tested with the others. Both go through the functions behind the scripts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from megatron_spec.config import (
    ENGINE,
    LOCAL,
    BaseLayers,
    DecodeConfig,
    ObjectiveConfig,
    ParallelConfig,
    TrainConfig,
    TransformerImpl,
)
from tests.functional_tests.script_helpers import write_conversations
from tests.unit_tests.data.chat_fixtures import CHATML_MARKED, make_tokenizer
from tests.unit_tests.families.families import LONG, save
from tools.te_table import SCRIPTS

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "TP": {"tensor_model_parallel_size": 2},
    "TP SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP": {"pipeline_model_parallel_size": 2},
    "DP": {},
    "CP": {"context_parallel_size": 2},
    "EP": {"expert_model_parallel_size": 2},
}
"""One rank, then layouts of two."""

_WIDE: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, initializer_range=0.06,
)  # fmt: skip
_WIDE_OF: dict[str, dict[str, Any]] = {
    "mistral": dict(head_dim=64),
    "phi3": dict(rope_parameters=dict(LONG, short_factor=[1.1] * 12, long_factor=[3.0] * 12)),
    "qwen3": dict(head_dim=64),
    "qwen3_moe": dict(head_dim=64, moe_intermediate_size=256),
    "gpt_oss": dict(head_dim=64),
    "deepseek_v3": dict(
        num_key_value_heads=8, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, moe_intermediate_size=128,
    ),
}  # fmt: skip


def prepare(here: Path, family: str, wide: bool = False) -> Path:
    """Write base, conversations and the configuration of a draft.

    Args:
        wide: sizes that Transformer Engine's attention and grouped linears take.
    """
    here.mkdir(parents=True, exist_ok=True)
    tokenizer, sizes = make_tokenizer(CHATML_MARKED), {**_WIDE, **_WIDE_OF.get(family, {})} if wide else {}
    save(
        family, here / "base", vocab_size=len(tokenizer), max_position_embeddings=512,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|end|>"), **sizes,
    )  # fmt: skip
    tokenizer.save_pretrained(here / "base")
    write_conversations(here / "train.jsonl", 8)
    questions = [{"question_id": i, "turns": [f"red sky {i}"]} for i in range(2)]
    (here / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (here / "eagle.json").write_text(json.dumps({"capture_layer_ids": [0, 1, 2]}))
    return here


def local(here: Path, bf16: bool = False) -> None:
    """All scripts with local modules on one rank."""
    for script in SCRIPTS:
        _run(script, here, "local", LOCAL, "local", ParallelConfig(), bf16)


def script(name: str, here: Path, layout: str, *, base: bool, draft: bool, bf16: bool = False) -> str:
    """One script with Transformer Engine's modules in base or draft or both; the name of its results."""
    engine = [part for part, chosen in (("base", base), ("draft", draft)) if chosen]
    title = f"{layout} {' '.join(engine) or 'plain'}"
    impl: TransformerImpl = "transformer_engine" if draft else "local"
    _run(name, here, title, ENGINE if base else LOCAL, impl, ParallelConfig(**LAYOUTS[layout]), bf16)
    return title


def _run(
    script: str, here: Path, title: str, layers: BaseLayers, impl: TransformerImpl, parallel: ParallelConfig, bf16: bool
) -> None:
    from megatron_spec.commands.convert import convert
    from megatron_spec.commands.decode import generate, validate
    from megatron_spec.commands.export import export
    from megatron_spec.commands.features import extract_features
    from megatron_spec.commands.finetune import finetune
    from megatron_spec.commands.quantize import quantize

    draft, run, fp8 = (str(here / f"{name} local") for name in ("convert", "finetune", "quantize"))
    out, data, questions = str(here / f"{script} {title}"), str(here / "train.jsonl"), str(here / "questions.jsonl")
    goal, common = ObjectiveConfig(ttt_steps=2), {"layers": layers, "parallel": parallel}
    greedy = DecodeConfig(max_draft_len=2, max_new_tokens=6, batch_size=2)
    train = TrainConfig(
        2, micro_batch_size=1, global_batch_size=4, lr=1e-3, lr_decay_style="constant", adam_eps=1e-5, bf16=bf16
    )
    half: dict[str, Any] = {"bf16": bf16}
    of_draft: dict[str, Any] = {"draft_transformer_impl": impl}
    calls: dict[str, Callable[[], Any]] = {
        "convert": lambda: convert(
            str(here / "base"), out, algorithm="eagle", eagle_algorithm="eagle3",
            eagle_config=str(here / "eagle.json"), **half, **common,
        ),
        "finetune": lambda: finetune(
            draft, out, data, train=train, objective=goal, seq_length=64, **of_draft, **common
        ),
        "quantize": lambda: quantize(
            run, out, data, samples=4, seq_length=64, micro_batch_size=2, objective=goal, **half, **of_draft, **common
        ),
        "extract": lambda: extract_features(draft, out, data, seq_length=64, micro_batch_size=2, **half, **common),
        "validate": lambda: validate(
            questions, load=fp8, output=out, draft_lens=(2,), decode=greedy.replace(max_draft_len=3),
            **half, **of_draft, **common,
        ),
        "generate": lambda: generate(
            questions, out, load=run, decode=greedy, **half, **of_draft, **common
        ),
        "export": lambda: export(fp8, out, extra_modules=True, **half, **of_draft, **common),
    }  # fmt: skip
    calls[script]()


@contextmanager
def calls_of_engine() -> Iterator[list[str]]:
    """The classes of Transformer Engine's own linears that run in a block, one entry a call."""
    import transformer_engine.pytorch as te

    calls: list[str] = []
    with ExitStack() as patches:
        for cls in (te.Linear, te.LayerNormLinear):  # megatron-core's wrappers are made from them
            forward = cls.forward

            def counted(self: Any, *args: Any, forward: Any = forward, **fields: Any) -> Any:
                calls.append(type(self).__name__)
                return forward(self, *args, **fields)

            patches.enter_context(mock.patch.object(cls, "forward", counted))
        yield calls


# What the scripts wrote


def _tensors(folder: Path, pattern: str) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob(pattern)):
        found |= {f"{file.relative_to(folder)} {name}": tensor for name, tensor in load_file(file).items()}
    return found


def _checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    from megatron.core.dist_checkpointing import load_plain_tensors

    from megatron_spec.checkpoint.spec import resolve
    from megatron_spec.runtime import distributed

    distributed.initialize()  # reading is a collective, of this process alone
    every = load_plain_tensors(str(resolve(folder) / "dist"))
    return {name: t for name, t in every.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}


def _ranges(folder: Path) -> dict[str, torch.Tensor]:
    from megatron_spec.checkpoint.spec import resolve

    found = json.loads((resolve(folder) / "base_amax.json").read_text())
    return {name: torch.tensor(value) for name, value in found.items()}


def results(script: str, here: Path, title: str) -> dict[str, torch.Tensor]:
    """Everything that a script found, as tensors; text as its bytes."""
    path = here / f"{script} {title}"
    if script == "convert":
        return _checkpoint(path)
    if script == "finetune":
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return {name: torch.tensor([line[name] for line in lines]) for name in ("loss", "grad_norm")}
    if script == "quantize":
        return {**_ranges(path), **{f"draft {name}": t for name, t in _checkpoint(path).items() if "amax" in name}}
    if script == "extract":
        return _tensors(path, "*.safetensors")
    if script == "export":
        return _tensors(path, "*/model.safetensors")
    if script == "validate":
        report = json.loads(path.read_text())
        kept = ("text_identical", "acceptance_length", "num_prompts")
        return {name: torch.tensor(float(report[name])) for name in kept if name in report}
    return {"text": torch.tensor(list(path.read_bytes()))}


def distances(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative difference of every result; infinite for one of another name or shape."""
    gaps = dict.fromkeys(found.keys() ^ expected.keys(), float("inf"))
    for name in found.keys() & expected.keys():
        a, b = found[name].double(), expected[name].double()
        same = a.shape == b.shape
        gaps[name] = float((a - b).norm() / b.norm().clamp_min(1e-9)) if same else float("inf")
    return gaps
