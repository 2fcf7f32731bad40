"""Medusa heads under the names of the reference code (with or without prefix), vLLM and TensorRT-LLM. No torch.

Values missing in config.json are derived from the tensors.
"""

from __future__ import annotations

import re

from megatron_spec.config import BaseConfig, MedusaConfig
from megatron_spec.config.structure import draft_tensors
from megatron_spec.export.formats.keys import LAYER, check_keys
from megatron_spec.export.formats.reading import (
    Problem,
    Reading,
    Source,
    checked,
    integer,
    meaningless,
)

_PREFIX = r"^(?:model\.)?(?:medusa_heads?\.)?"
_BLOCK = re.compile(
    _PREFIX + r"(?:(\d+)\.(?:medusa_layers\.)?(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)$"
)
_HEAD = re.compile(_PREFIX + r"(?:(\d+)\.(?:lm_head|\d+)|lm_heads\.(\d+))\.weight$")
_NEUTRAL = {"original_lm_head": False, "logit_scale": 1.0, "medusa_hidden_act": "silu"}
"""Key -> the only supported value."""
_USED = LAYER | _NEUTRAL.keys() | {"medusa_num_heads", "num_heads", "medusa_num_layers", "truncated_vocab_size"}
"""Keys that describe the target's layers."""
_REASONS = {
    "token_map": "a Medusa draft with a reduced vocabulary (vLLM's truncated_vocab_size) is not supported",
    "lm_head.weight": "a draft that contains the target's LM head (original_lm_head) is not supported",
}


def canonical(name: str) -> str | None:
    """Name of the parameter stored in a tensor, or None."""
    if found := _BLOCK.match(name):
        head, layer = (found[1], found[2]) if found[1] is not None else (found[3], found[4])
        return f"heads.{head}.blocks.{layer}.linear.{found[5]}"
    if found := _HEAD.match(name):
        return f"heads.{found[1] if found[1] is not None else found[2]}.lm_head.weight"
    return None


def is_block(name: str) -> bool:
    """True for a tensor of a block of some head."""
    return _BLOCK.match(name) is not None


class Medusa:
    """Reader of Medusa heads under every published naming."""

    def matches(self, source: Source) -> bool:
        """Match by config.json or by tensor names."""
        named = "Medusa" in source.architectures or source.raw.get("model_type") == "medusa"
        return named or any(map(is_block, source.entries))

    def read(self, source: Source, base: BaseConfig | None) -> Reading:
        """See `Format`."""
        names: dict[str, str | None] = {}
        for stored in sorted(source.entries):
            name = canonical(stored)
            if name is not None and name not in names:
                names[name] = stored
        config = self._config(source, names)
        for name in draft_tensors(config):
            if name.endswith(".bias"):
                names.setdefault(name, None)  # missing biases count as zero
        reading = Reading(source, config, names, meaningless(source.entries))
        return checked(reading, base, _REASONS, self._options(source) + self._counts(source, config))

    def _config(self, source: Source, names: dict[str, str | None]) -> MedusaConfig:
        heads = {int(name.split(".")[1]) for name in names}
        layers = {int(name.split(".")[3]) for name in names if ".blocks." in name}
        first = names.get("heads.0.lm_head.weight")
        if not heads or not layers or first is None:
            raise source.problem("missing", "the tensors of head 0 are missing", "copy the folder again")
        shape = source.entries[first].shape
        if len(shape) != 2:
            fix = "write the head as [vocabulary, hidden size]"
            raise source.problem("shape", f"{first} is {list(shape)}", fix)
        width = integer(source.raw, "hidden_size", source, shape[-1])
        vocab = integer(source.raw, "vocab_size", source, shape[0])
        count = integer(source.raw, "medusa_num_heads", source, source.raw.get("num_heads") or max(heads) + 1)
        default_layers = source.raw.get("num_hidden_layers") if "num_heads" in source.raw else None
        depth = integer(source.raw, "medusa_num_layers", source, default_layers or max(layers) + 1)
        return MedusaConfig(num_heads=count, hidden_size=width, vocab_size=vocab, num_layers=depth)

    def _counts(self, source: Source, config: MedusaConfig) -> list[Problem]:
        """Report heads or blocks beyond those of config.json once, not per unread tensor."""
        found = [c.split(".") for c in map(canonical, source.entries) if c is not None]
        heads = 1 + max(int(name[1]) for name in found)
        blocks = 1 + max(int(name[3]) for name in found if name[2] == "blocks")
        problems = []
        for what, says, there in (("heads", config.num_heads, heads), ("blocks", config.num_layers, blocks)):
            if there != says:
                wrong = f"config.json says {says} {what}{' per head' if what == 'blocks' else ''}, the tensors hold"
                problems.append(Problem("missing" if there < says else "config", f"{wrong} {there}", "make them agree"))
        return problems

    def _options(self, source: Source) -> list[Problem]:
        problems = []
        truncated = source.raw.get("truncated_vocab_size")
        if truncated is not None and truncated != source.raw.get("vocab_size"):
            found = f"truncated_vocab_size is {truncated}"
            problems.append(Problem("option", found, "a Medusa draft with a reduced vocabulary is not supported"))
        for key, neutral in _NEUTRAL.items():
            if source.raw.get(key, neutral) != neutral:
                problems.append(Problem("option", f"{key} is {source.raw[key]!r}", "not supported here"))
        return problems + check_keys(source, source.raw, _USED)
