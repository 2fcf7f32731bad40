"""The config.json fields of all families -> arguments of BaseConfig."""

from __future__ import annotations

from typing import Any

from megatron_spec.config import UserError
from megatron_spec.config.rope import read_rope


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _first(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def require(raw: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise UserError if fields are missing, naming them."""
    missing = [name for name in names if raw.get(name) is None]
    if missing:
        raise UserError(f"{where}: missing {', '.join(missing)}")


def refuse_true(raw: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    """Raise UserError for the first field that is set."""
    for name in names:
        if raw.get(name):
            raise UserError(f"{where}: {name} {raw[name]!r} is not supported for this family")


def window(size: int | None, layers: tuple[int, ...], positions: int) -> dict[str, Any]:
    """Arguments for a sliding window of some layers; none if it covers every position."""
    if not size or size >= positions or not layers:
        return {}
    return {"window": size, "window_layers": layers}


def sliding_layers(raw: dict[str, Any], where: str) -> tuple[int, ...] | None:
    """Layers with sliding attention in layer_types; None without layer_types.

    Raises UserError for other kinds of attention, another number of layers, and a missing window.
    """
    kinds, count = raw.get("layer_types"), raw["num_hidden_layers"]
    if kinds is None:
        return None
    others = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention", "attention"})
    if others:
        raise UserError(
            f"{where}: layer_types has {', '.join(others)}, which this family lacks; expected full_attention or "
            "sliding_attention"
        )
    if len(kinds) != count:
        raise UserError(f"{where}: layer_types has {len(kinds)} entries, expected one for each of {count} layers")
    found = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if found and raw.get("sliding_window") is None:
        raise UserError(
            f"{where}: layer_types has sliding_attention, but there is no window (sliding_window null or "
            "use_sliding_window false); expected its size"
        )
    return found


def has_rope(raw: dict[str, Any]) -> bool:
    """True if a rotary embedding is described."""
    return raw.get("rope_scaling") is not None or raw.get("rope_parameters") is not None


def check_consistent(raw: dict[str, Any], family: str, families: list[str], where: str) -> None:
    """Raise UserError for a model_type of another family, and for keys that change single layers or files."""
    kind = raw.get("model_type")
    if kind != family and kind in families:
        raise UserError(
            f"{where}: found model_type {kind!r} beside architectures {raw['architectures']}, which are another "
            "family: correct the wrong one"
        )
    for name in ("per_layer_config", "transformers_weights"):
        if raw.get(name):
            raise UserError(f"{where}: {name} is not supported: every layer is the same, in the usual files; remove it")


def all_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    """Indices of all layers."""
    return tuple(range(raw["num_hidden_layers"]))


def common(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The common arguments of BaseConfig. Raises UserError naming the field that is missing or not supported."""
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    require(raw, needed, where)
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported; expected 'silu'")
    heads = raw["num_attention_heads"]
    return dict(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        max_position_embeddings=raw.get("max_position_embeddings", 2048),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=read_rope(raw, where),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        torch_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        bos_token_id=_first(raw.get("bos_token_id")),
        eos_token_ids=_ids(raw.get("eos_token_id")),
        pad_token_id=_first(raw.get("pad_token_id")),
    )


def fp8_block(quantization_config: dict[str, Any], where: str) -> tuple[int, int]:
    """(rows, columns) of a block of block-wise fp8 weights. Raises UserError for other kinds of fp8."""
    size = quantization_config.get("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise UserError(
            f"{where}: the base is already quantised (fp8 with weight_block_size {size!r}; expected two integers, as "
            "[128, 128] in DeepSeek's files); use the original in bf16"
        )
    if quantization_config.get("fmt", "e4m3") != "e4m3":
        raise UserError(f"{where}: fp8 format {quantization_config['fmt']!r} is not supported; expected 'e4m3'")
    return size[0], size[1]
