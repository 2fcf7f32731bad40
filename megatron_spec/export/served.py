"""Which engines compute a draft as it was trained, said when a draft is made and not after it was trained. No torch."""

from __future__ import annotations

from megatron_spec.config import BaseConfig, BlockConfig, DraftConfig, EagleConfig, UserError
from megatron_spec.config.rope import mscale
from megatron_spec.export.block import unserved
from megatron_spec.export.layout import SERVED_BY

ENGINES = ("trtllm", "vllm", "sglang")


def check_exportable(config: DraftConfig, base: BaseConfig) -> list[str]:
    """What some engines will not do with such a draft, in words.

    Raises UserError for a draft that export could not write, or that no engine computes as it is trained.
    """
    if isinstance(config, BlockConfig):
        return _block(config, base)
    if not isinstance(config, EagleConfig) or config.of_base:
        return []
    _check_rope(config)
    options = [name for name in SERVED_BY if getattr(config, name)]
    engines = [e for e in ENGINES if all(e in SERVED_BY[name] for name in options)]
    if not engines:
        raise UserError(f"{' with '.join(options)}: no engine computes a draft with both: leave one of them out")
    said = []
    if options:
        said.append(f"{', '.join(options)}: only {' and '.join(engines)} computes such a draft")
    said += _last_layer(config, base)
    if config.is_module:
        said.append(
            "no engine loads an eagle-mtp draft of this base today: it can be trained, measured and exported in a "
            "format of this package alone; eagle3 and medusa are served"
        )
    return said


def _last_layer(config: EagleConfig | BlockConfig, base: BaseConfig) -> list[str]:
    if base.num_layers - 1 not in config.capture_layer_ids:
        return []
    return [
        f"layer {base.num_layers - 1} is the base's last one, whose output SGLang never delivers to a draft: capture "
        "earlier layers to serve with it"
    ]


def _block(config: BlockConfig, base: BaseConfig) -> list[str]:
    _check_rope(config)
    lost = unserved(config)
    said = [f"{engine} will not serve this draft as it is trained: {why}" for engine, why in lost.items()]
    if set(lost) == set(ENGINES):
        said.append("no engine serves such a draft today: it can be trained, measured and exported alone")
    return said + _last_layer(config, base)


def _check_rope(config: EagleConfig | BlockConfig) -> None:
    rope = config.rope
    if rope.type == "longrope":
        raise UserError("rope type longrope in a draft: no export holds it; use default, linear, llama3 or yarn")
    if rope.type == "yarn" and rope.attention_factor != mscale(rope.factor):
        raise UserError(
            f"yarn with attention_factor {rope.attention_factor}: engines take {mscale(rope.factor):.6g} for factor "
            f"{rope.factor} regardless of a draft's config.json; leave attention_factor out (rope_scaling derives it)"
        )
