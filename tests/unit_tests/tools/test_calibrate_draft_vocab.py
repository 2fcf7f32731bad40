import argparse
import json

import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.drafts.vocab import DraftVocab
from tests.unit_tests.data.chat_fixtures import CHATML, disk_of, make_tokenizer, talk, write_lines
from tools import calibrate_draft_vocab

DATA = [talk(("user", "zzzzzz"), ("assistant", "aaab")), talk(("user", "q"), ("assistant", "acb"))]


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "base"
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer) + 3, "eos_token_id": 1}))
    return folder, tokenizer


def run(model, data, size, out, *more):
    flags = ["--model", str(model), "--data", str(data), "--draft-vocab-size", str(size), "--save-dir", str(out), *more]
    calibrate_draft_vocab.calibrate(calibrate_draft_vocab.make_parser().parse_args(flags))


def test_writes_the_vocabulary_and_its_coverage(model, tmp_path, capsys):
    folder, tokenizer = model
    data, out = write_lines(tmp_path / "d.jsonl", DATA), tmp_path / "vocab"
    run(folder, data, 4, out)
    # supervised: 4 x a, 2 x b, 1 x c, 2 x <|end|>; <eos> and what turns end with are always in
    a, b, end = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "<|end|>"))
    vocab = DraftVocab.load(out / "draft_vocab.safetensors")
    assert vocab.target_ids.tolist() == sorted([a, b, end, tokenizer.eos_token_id])
    assert vocab.vocab_size == len(tokenizer) + 3
    d2t = torch.load(out / "d2t.pt", weights_only=True)
    assert (d2t + torch.arange(4)).tolist() == vocab.target_ids.tolist() and d2t.dtype == torch.int64
    report = json.loads((out / "coverage.json").read_text())
    assert (report["supervised_tokens"], report["covered_tokens"]) == (9, 8)
    assert report["coverage"] == pytest.approx(8 / 9) and report["always_included"] == [1, 3]
    assert report["curve"][-1] == [vocab.vocab_size, 1.0] and (out / "coverage.png").stat().st_size > 1000
    said = capsys.readouterr().out
    assert "88.89%" in said and "100.000%" in said
    assert "never occur" not in said  # only <eos>, which is always in: fewer tokens would cover less
    run(folder, data, 4, out)
    with pytest.raises(UserError, match=r"has another vocabulary, which a draft may"):
        run(folder, data, 3, out)
    assert DraftVocab.load(out / "draft_vocab.safetensors") == vocab
    run(folder, data, 3, tmp_path / "three")
    assert {3, 1} < set(DraftVocab.load(tmp_path / "three" / "draft_vocab.safetensors").target_ids.tolist())


def test_full_disk_is_a_user_error_without_partial_files(model, tmp_path):
    folder, _ = model
    data, out, cache = write_lines(tmp_path / "d.jsonl", DATA), tmp_path / "vocab", tmp_path / "cache"
    with disk_of(10), pytest.raises(UserError, match=rf"{cache}/\S+ cannot be written: larger than a file may be"):
        run(folder, data, 4, out, "--data-cache-path", str(cache))
    assert list(cache.rglob("*.bin")) == [] and not out.exists()
    run(folder, data, 4, out, "--data-cache-path", str(cache))
    whole = {p.name: p.read_bytes() for p in out.iterdir()}
    limits = [10, *(len(content) - 1 for content in whole.values())]
    for index, limit in enumerate(limits):  # an earlier result stays as it was, a new one does not appear
        for place in (out, tmp_path / f"new{index}"):
            said = rf"{place}\S* cannot be written: (larger than a file may be|no space left on the disk) .*: "
            with disk_of(limit), pytest.raises(UserError, match=said) as error:
                run(folder, data, 4, place, "--data-cache-path", str(cache))
            assert "\n" not in str(error.value) and ".tmp" not in str(error.value)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == whole
    assert {p.name for p in tmp_path.iterdir()} == {"base", "cache", "d.jsonl", "vocab"}


def test_vocabulary_of_a_draft_is_reused(model, tmp_path, monkeypatch):
    folder, tokenizer = model
    draft, out = tmp_path / "draft", tmp_path / "vocab"
    (draft / "dist").mkdir(parents=True)
    (draft / "dist" / "metadata.json").touch()
    vocab = DraftVocab(torch.tensor([1, 3, 70, 90]), len(tokenizer) + 3)
    vocab.save(draft / "vocab.safetensors")
    (draft / "spec.json").touch()
    data = write_lines(tmp_path / "d.jsonl", DATA)
    flags = ["--load", str(draft), "--model", str(folder), "--data", str(data), "--save-dir", str(out)]
    parser = calibrate_draft_vocab.make_parser()
    calibrate_draft_vocab.calibrate(parser.parse_args(flags))
    assert DraftVocab.load(out / "draft_vocab.safetensors") == vocab
    with pytest.raises(UserError, match=r"has a draft vocabulary of 4 tokens, and its head has no others"):
        calibrate_draft_vocab.calibrate(parser.parse_args([*flags, "--draft-vocab-size", "5"]))
    with pytest.raises(UserError, match=r"give --model and --draft-vocab-size, or --load"):
        calibrate_draft_vocab.calibrate(parser.parse_args(flags[2:]))


def test_advice_on_sizes_near_the_whole_vocabulary(model, tmp_path, capsys):
    folder, tokenizer = model
    data, size = write_lines(tmp_path / "d.jsonl", DATA), len(tokenizer) + 3
    with pytest.raises(UserError, match=rf"--draft-vocab-size {size - 2} selects the first {size - 2} of {size} ids"):
        run(folder, data, size - 2, tmp_path / "vocab")
    run(folder, data, 9, tmp_path / "nine")
    # a, b, c, <|end|> and <eos> are all that is needed
    assert "note: 4 of them never occur" in (said := capsys.readouterr().out) and "--draft-vocab-size 5 covers" in said


@pytest.mark.parametrize("free", [True, False])
def test_a_smaller_vocabulary_is_no_advice_for_a_draft_that_exists(tmp_path, capsys, free):
    report = {
        "curve": [], "draft_vocab_size": 9, "vocab_size": 9, "coverage": 1.0, "supervised_tokens": 9,
        "distinct_tokens": 5, "draft_tokens_never_seen": 4, "data": "d.jsonl",
    }  # fmt: skip
    calibrate_draft_vocab.say(tmp_path, report, free)
    assert ("--draft-vocab-size 5 covers" in capsys.readouterr().out) == free


def test_megatron_base_with_a_tokenizer_elsewhere(model, tmp_path):
    folder, _ = model
    base = tmp_path / "megatron"
    base.mkdir()
    args = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "vocab_size": 300,
        "max_position_embeddings": 64,
    }  # fmt: skip
    torch.save({"args": argparse.Namespace(**args)}, base / "common.pt")
    (base / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (base / ".metadata").touch()
    data = write_lines(tmp_path / "d.jsonl", DATA)
    run(base, data, 4, tmp_path / "vocab", "--tokenizer", str(folder))
    assert DraftVocab.load(tmp_path / "vocab" / "draft_vocab.safetensors").vocab_size == 300
    with pytest.raises(UserError, match=r"megatron: found no tokenizer.json"):
        run(base, data, 4, tmp_path / "other")


def test_invalid_flags_are_refused_early(model, tmp_path):
    folder, tokenizer = model
    data = write_lines(tmp_path / "d.jsonl", DATA)
    with pytest.raises(UserError, match=f"expected 1 to the base's vocab_size {len(tokenizer) + 3}"):
        run(folder, data, len(tokenizer) + 4, tmp_path / "vocab")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(UserError, match=r"is not empty"):
        run(folder, data, 4, tmp_path / "mine")
    with pytest.raises(UserError, match=r"absent.jsonl does not exist"):
        run(folder, tmp_path / "absent.jsonl", 4, tmp_path / "vocab")
    assert not (tmp_path / "vocab").exists()
