"""A dense HybridModel as base against the GPTModel with the same weights, in a world of two ranks (TP 2, then PP 2).

megatron-core before 0.18 calls the class MambaModel. S sequence, B micro-batch, H hidden, V padded vocabulary.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.families.hybrid import gpt_name, stored_pattern, transformer_layers
from megatron_spec.families.megatron_args import config_from_args
from megatron_spec.runtime import distributed
from megatron_spec.runtime.distributed import World
from tests.worlds import run_world

LAYERS, PADDED, CAPTURES = 4, 96, (0, 1, 3)
FUSED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
ARGS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "group_query_attention": True, "kv_channels": 12, "max_position_embeddings": 64, "norm_epsilon": 1e-5,
    "rotary_base": 10000, "vocab_size": 83, "position_embedding_type": "rope", "normalization": "RMSNorm",
    "swiglu": True, "add_bias_linear": False, "untie_embeddings_and_output_weights": True,
}  # fmt: skip


def _first(*names: str) -> Any:
    """The first of "module:Class" that this megatron-core has; None if it has none."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(f"megatron.core.{module}"), attribute)
        except (ImportError, AttributeError):
            continue
    return None


MODEL = _first("models.hybrid.hybrid_model:HybridModel", "models.mamba.mamba_model:MambaModel")
pytestmark = pytest.mark.skipif(MODEL is None, reason="this megatron-core has neither HybridModel nor MambaModel")
IS_NEW = MODEL is not None and MODEL.__name__ == "HybridModel"


def _config(world: World, num_layers: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=num_layers, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2,
        kv_channels=12, normalization="RMSNorm", layernorm_epsilon=1e-5, gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, tensor_model_parallel_size=world.tp_size,
        pipeline_model_parallel_size=world.pp_size, pipeline_dtype=torch.float32,
    )  # fmt: skip


def _local() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm")


def _gpt(world: World) -> Any:
    """megatron-core's own GPTModel with random weights; nothing of it is ours."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    block = TransformerBlockSubmodules(layer_specs=[_local()] * LAYERS, layer_norm=WrappedTorchNorm)
    gpt = GPTModel(_config(world, LAYERS), block, PADDED, 64, position_embedding_type="rope").eval()
    torch.manual_seed(world.tp_rank)
    for name, p in gpt.named_parameters():
        if "norm" in name:
            p.data.fill_(1.0).add_(torch.linspace(-0.3, 0.3, p.numel()))  # equal on every rank
        else:
            p.data.normal_(0, 0.2)
    for weight in (gpt.embedding.word_embeddings.weight, gpt.output_layer.weight):
        weight.data[max(0, 83 - world.tp_rank * len(weight)) :] = 0.0  # the padding, which an import clears
    return gpt


class _Foreign(nn.Module):
    """Stands in for a Mamba layer, which needs a GPU."""

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer_number, self.mixer = layer_number, nn.Linear(config.hidden_size, 8)

    def sharded_state_dict(self, prefix: str, offsets: Any, metadata: Any) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(), prefix)


def _hybrid(world: World, pattern: str, positions: str = "rope", extra: bool = False, fused: bool = False) -> Any:
    """megatron-core's own HybridModel, with a final norm that needs no Transformer Engine.

    Args:
        pattern: layers of all stages, "|" between them.
        extra: the attention layers have an MLP too.
        fused: checkpoints name the norms as Transformer Engine's layers do.
    """
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    base = _first("models.hybrid.hybrid_block:HybridStack", "ssm.mamba_block:MambaStack")
    kinds = _first("models.hybrid.hybrid_block:HybridStackSubmodules", "ssm.mamba_block:MambaStackSubmodules")

    class Stack(base):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, **options: Any) -> None:
            super().__init__(config, post_layer_norm=False, **options)
            self.post_layer_norm = True
            if self.post_process:
                self.final_norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    parts = _local().submodules
    mlp: dict[str, Any] = dict(pre_mlp_layernorm=parts.pre_mlp_layernorm, mlp=parts.mlp, mlp_bda=parts.mlp_bda)
    names = {"sharded_state_dict_keys_map": FUSED_NORMS if fused else {}}
    attention = TransformerLayerSubmodules(
        input_layernorm=parts.input_layernorm, self_attention=parts.self_attention, self_attn_bda=parts.self_attn_bda,
        **(mlp if extra else {}), **names,
    )  # fmt: skip
    submodules = kinds(
        mamba_layer=ModuleSpec(module=_Foreign),
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=TransformerLayerSubmodules(**mlp, **names)),
    )
    layers = pattern.replace("|", "")
    given = {"hybrid_layer_pattern": pattern} if IS_NEW else {"hybrid_override_pattern": layers}
    return MODEL(
        _config(world, len(layers)), ModuleSpec(module=Stack, submodules=submodules), PADDED, 64,
        pre_process=world.is_first_stage, post_process=world.is_last_stage, position_embedding_type=positions, **given,
    ).eval()  # fmt: skip


def _copy(gpt: Any, hybrid: Any) -> None:
    """The same weights, layer by layer: attention to layer 2i, MLP to layer 2i + 1."""
    for i, layer in enumerate(gpt.decoder.layers):
        attention, mlp = hybrid.decoder.layers[2 * i], hybrid.decoder.layers[2 * i + 1]
        attention.input_layernorm.load_state_dict(layer.input_layernorm.state_dict())
        attention.self_attention.load_state_dict(layer.self_attention.state_dict())
        mlp.pre_mlp_layernorm.load_state_dict(layer.pre_mlp_layernorm.state_dict())
        mlp.mlp.load_state_dict(layer.mlp.state_dict())
    hybrid.decoder.final_norm.load_state_dict(gpt.decoder.final_layernorm.state_dict())
    hybrid.embedding.load_state_dict(gpt.embedding.state_dict())
    hybrid.output_layer.load_state_dict(gpt.output_layer.state_dict())


def _batch() -> Any:
    from tests.tiny import make_batch

    return make_batch(2, 12, seed=3, vocab_size=83)


def _reference(gpt: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """(captures, state after the final norm) of megatron-core's own forward, by hooks of this test."""
    outputs: list[Tensor] = []
    modules = [*(gpt.decoder.layers[i] for i in CAPTURES), gpt.decoder.final_layernorm]
    hooks = [m.register_forward_hook(lambda _m, _i, out: outputs.append(out)) for m in modules]
    gpt(batch.tokens_BS, batch.positions_BS, None)
    for hook in hooks:
        hook.remove()
    captures = [out[0] if isinstance(out, tuple) else out for out in outputs[:-1]]
    return torch.cat(captures, dim=-1), outputs[-1]


def _save(folder: Path, model: Any, args: dict[str, Any], world: World) -> None:
    from megatron.core import dist_checkpointing

    from megatron_spec.checkpoint.results import results_in_this_process

    if world.rank == 0:
        (folder / "iter_0000007").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()
    state = {"model": model.sharded_state_dict(), "args": argparse.Namespace(**args), "iteration": 7}
    with results_in_this_process():
        dist_checkpointing.save(state, str(folder / "iter_0000007"))


def _load(folder: Path, model: Any) -> Any:
    from megatron.core import dist_checkpointing

    with torch.serialization.safe_globals([argparse.Namespace]):
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder / "iter_0000007"))
    model.load_state_dict(state["model"])
    return model


def _message(run: Any) -> str:
    try:
        run()
    except UserError as e:
        return str(e)
    return ""


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _hybrid_args(pattern: str) -> dict[str, Any]:
    key = "hybrid_layer_pattern" if IS_NEW else "hybrid_override_pattern"
    return {**ARGS, "num_layers": len(pattern.replace("|", "")), key: pattern, "is_hybrid_model": True}


@torch.no_grad()
def _tensor_parallel(root: Path) -> dict[str, Any]:
    """TP 2: wrapped against megatron-core's own forward; both models saved."""
    from megatron_spec.base.model import FrozenBase
    from megatron_spec.base.schedule import run_base
    from megatron_spec.checkpoint.base_import import inspect_base, load_base

    world = distributed.initialize(ParallelConfig(tensor_model_parallel_size=2))
    batch, gpt, found = _batch(), _gpt(world), {}
    hybrid = _hybrid(world, "*-" * LAYERS)
    _copy(gpt, hybrid)
    expected = _reference(gpt, batch)
    _save(root / "gpt", gpt, ARGS, world)
    _save(root / "hybrid", hybrid, _hybrid_args("*-" * LAYERS), world)
    fused = _hybrid(world, "*-" * LAYERS, fused=True)
    _copy(gpt, fused)
    keys = [getattr(tensor, "key", "") for tensor in fused.sharded_state_dict().values()]
    found["fused names"] = sum("layer_norm_weight" in key for key in keys) == 2 * LAYERS
    _save(root / "fused", fused, _hybrid_args("*-" * LAYERS), world)
    config = inspect_base(root / "gpt").config
    found["same configuration"] = inspect_base(root / "hybrid").config == config
    wrapped = FrozenBase.wrap([hybrid], config, world, CAPTURES)
    reference = FrozenBase.wrap(gpt, config, world, CAPTURES)
    captures, state = run_base(wrapped, [batch])[0]
    found["features"], found["captures"] = torch.equal(state, expected[1]), torch.equal(captures, expected[0])
    found["logits"] = torch.equal(wrapped.logits(state), reference.logits(state))
    found["weights"] = _equal(wrapped.weights(), reference.weights())
    found["linears"] = [name for name, _ in wrapped.linears()] == [name for name, _ in reference.linears()]
    found["expected"] = [x.tolist() for x in expected]

    def wrap(model: Any) -> str:
        return _message(lambda: FrozenBase.wrap(model, config, world, CAPTURES))

    found["mamba"] = wrap(_hybrid(world, "M*-M*-"))
    found["order"] = wrap(_hybrid(world, "**--"))
    found["depth"] = wrap(_hybrid(world, "*-*-"))
    found["positions"] = wrap(_hybrid(world, "*-" * LAYERS, positions="none"))
    found["extra"] = wrap(_hybrid(world, "*-" * LAYERS, extra=True))
    found["other"] = wrap(nn.Linear(2, 2))
    mamba = _hybrid(world, "*-M*-")
    _save(root / "mamba", mamba, _hybrid_args("*-M*-"), world)
    found["stored arguments"] = _message(lambda: inspect_base(root / "mamba"))
    _save(root / "unmarked", mamba, {**ARGS, "num_layers": 2}, world)
    found["stored layers"] = _message(lambda: load_base(inspect_base(root / "unmarked"), world))
    return found


@torch.no_grad()
def _pipeline(root: Path) -> dict[str, Any]:
    """PP 2: the saved HybridModel in megatron-core's own model and in ours."""
    from megatron_spec.base.model import FrozenBase
    from megatron_spec.base.schedule import run_base, run_base_everywhere
    from megatron_spec.checkpoint.base_import import inspect_base, load_base, load_ends
    from megatron_spec.ops.visibility import Visibility

    world = distributed.initialize(ParallelConfig(pipeline_model_parallel_size=2))
    batch, reference = _batch(), inspect_base(root / "hybrid")
    whole = load_base(inspect_base(root / "gpt"), world, CAPTURES)
    imported = load_base(reference, world, CAPTURES)
    fused = load_base(inspect_base(root / "fused"), world, CAPTURES)
    hybrid = _load(root / "hybrid", _hybrid(world, "*-*-|*-*-"))
    wrapped = FrozenBase.wrap(hybrid, reference.config, world, CAPTURES)
    found: dict[str, Any] = {
        "imported": _equal(dict(imported.named_parameters()), dict(whole.named_parameters())),
        "fused": _equal(dict(fused.named_parameters()), dict(whole.named_parameters())),
        "wrapped": _equal(wrapped.weights(), whole.weights()),
        "ends": torch.equal(load_ends(reference, world).head_weight, whole.head_weight)
        and torch.equal(wrapped.embedding_weight, whole.embedding_weight)
        and torch.equal(wrapped.head_weight, whole.head_weight),
        "counts": wrapped.stage_counts,
    }
    for name, base in (("imported", imported), ("wrapped", wrapped)):
        captures, state = run_base_everywhere(base, batch, Visibility.causal())
        found[f"features {name}"] = [captures.tolist(), state.tolist()]
    found["uneven"] = _message(
        lambda: FrozenBase.wrap(_hybrid(world, "*-*|-*-*-" if IS_NEW else "*-*-*-"), reference.config, world, ())
    )
    run_base(wrapped, [batch, batch])  # the refusal came on every rank: the pipeline still works
    return found


def _library(root: Path) -> list[tuple[float, dict[str, float]]]:
    """(loss of a fresh draft, ranges of the quantised base), of the imported GPTModel and the wrapped HybridModel."""
    import megatron_spec
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.config import ObjectiveConfig, QuantConfig
    from megatron_spec.quantization.attach import base_amax_state

    world = distributed.initialize(ParallelConfig(pipeline_model_parallel_size=2))
    imported = load_base(inspect_base(root / "gpt"), world, CAPTURES)
    found, batches = [], [_batch(), _batch()]
    for name, model in (("gpt", imported), ("hybrid", [_load(root / "hybrid", _hybrid(world, "*-*-|*-*-"))])):
        spec = megatron_spec.convert(
            model, [("eagle", {"capture_layer_ids": list(CAPTURES)})], base_path=root / name,
            objective=ObjectiveConfig(ttt_steps=2),
        )  # fmt: skip
        loss = sum(float(x.total) for x in spec(batches))
        megatron_spec.quantize(spec, [batches], QuantConfig(base="fp8"))
        found.append((loss, base_amax_state(spec.base)))
    return found


def _cases(root: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    found: dict[str, Any] = {"tp2": _tensor_parallel(Path(root))}
    parallel_state.destroy_model_parallel()
    found["pp2"] = _pipeline(Path(root))
    found["library"] = _library(Path(root))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(2, _cases, str(tmp_path_factory.mktemp("hybrid")))


@pytest.mark.parametrize(
    "what", ["features", "captures", "logits", "weights", "linears", "same configuration", "fused names"]
)
def test_equals_the_gpt_model(found: list[dict[str, Any]], what: str) -> None:
    """Wrapped at TP 2: bit for bit what hooks see in megatron-core's own forward of the GPTModel."""
    assert all(rank["tp2"][what] for rank in found)


@pytest.mark.parametrize("what", ["imported", "fused", "wrapped", "ends"])
def test_the_weights_of_a_pipeline(found: list[dict[str, Any]], what: str) -> None:
    """Saved by a HybridModel at TP 2, read at PP 2: the GPTModel's, bit for bit."""
    assert all(rank["pp2"][what] for rank in found)
    assert found[0]["pp2"]["counts"] == [2, 2]


@pytest.mark.parametrize("what", ["imported", "wrapped"])
def test_the_features_of_a_pipeline(found: list[dict[str, Any]], what: str) -> None:
    for rank in found:
        for here, there in zip(rank["pp2"][f"features {what}"], rank["tp2"]["expected"], strict=True):
            torch.testing.assert_close(torch.tensor(here), torch.tensor(there), rtol=1e-5, atol=1e-5)


def test_the_library_on_either_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        (loss, ranges), (hybrid_loss, hybrid_ranges) = rank["library"]
        assert loss > 0 and hybrid_loss == pytest.approx(loss, rel=1e-5)
        assert len(ranges) == LAYERS * 4 * 2 and hybrid_ranges == pytest.approx(ranges, rel=1e-4)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mamba", "found Mamba .layers 0, 3. in the pattern M.-M.-, expected attention"),
        ("order", "in turn"),
        ("depth", "found 2 transformer layers .*expected 4"),
        ("positions", "position_embedding_type='none', expected 'rope'"),
        ("extra", "found pre_mlp_layernorm, mlp in layer 0"),
        ("other", "found Linear, expected megatron-core's GPTModel or HybridModel"),
        ("stored arguments", "iter_0000007: found Mamba .layers 2."),
        ("stored layers", "iter_0000007: found Mamba .layers 2. in the pattern .-M.-"),
    ],
)
def test_what_is_refused(found: list[dict[str, Any]], case: str, message: str) -> None:
    for rank in found:
        assert re.search(message, rank["tp2"][case]), rank["tp2"][case]


def test_a_pair_on_two_stages_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "in whole pairs on every pipeline stage" in rank["pp2"]["uneven"]


@pytest.mark.parametrize(
    ("pattern", "counts"), [("*-", [1]), ("*-*-|*-", [2, 1]), ("|*-", [0, 1]), ("*-|*-*-|*-", [1, 2, 1])]
)
def test_patterns(pattern: str, counts: list[int]) -> None:
    assert transformer_layers(pattern, "x") == counts


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("GE*-D+", r"Gated DeltaNet \(layers 0\); mixture-of-experts \(layers 1\); sparse attention .*; latent"),
        ("*-X", "'X' .layers 2."),
        ("M" * 20, r"Mamba \(layers 0, 1, 2, 3, 4, 5, 6, 7, ...\)"),
        ("-*", "in turn"),
        ("*-*", "in turn"),
        ("*|-", "in whole pairs"),
    ],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        transformer_layers(pattern, "x")


def test_the_kinds_of_stored_layers() -> None:
    inside = [
        "mixer.in_proj.weight", "self_attention.in_proj.weight", "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_kv_down_proj.weight", "mlp.linear_fc1.weight", "mlp.router.weight",
    ]  # fmt: skip
    names = [f"decoder.layers.{i}.{name}" for i, name in enumerate(inside)]
    sparse = ["decoder.layers.7.self_attention.core_attention.indexer.linear_wk.weight"]
    sparse.append("decoder.layers.7.self_attention.linear_kv_down_proj.weight")
    assert stored_pattern([*reversed(names), "output_layer.weight", *reversed(sparse)]) == "MG*+-E?D"


def test_names_of_a_gpt_model() -> None:
    assert gpt_name("decoder.layers.6.input_layernorm.weight") == "decoder.layers.3.input_layernorm.weight"
    assert gpt_name("decoder.layers.17.mlp.linear_fc1.weight") == "decoder.layers.8.mlp.linear_fc1.weight"
    assert gpt_name("decoder.final_norm.weight") == "decoder.final_layernorm.weight"
    assert gpt_name("output_layer.weight") == "output_layer.weight"


def test_arguments_of_a_hybrid_model() -> None:
    plain = config_from_args(ARGS, "x")
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        assert config_from_args({**ARGS, "num_layers": 8, name: "*-*-|*-*-"}, "x") == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M*-"}, "found Mamba"),
        ({"hybrid_layer_pattern": "*-*-/*-"}, "found prediction layers"),
        ({"is_hybrid_model": True, "hybrid_layer_pattern": None}, "without hybrid_layer_pattern"),
    ],
)
def test_arguments_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_from_args({**ARGS, **changes}, "x")
