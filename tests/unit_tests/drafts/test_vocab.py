"""The draft vocabulary: the two stored tensors, and maps that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_spec.build import resolve_paths
from megatron_spec.checkpoint.spec import BaseLink, CheckpointSpec
from megatron_spec.config import BaseConfig, ParallelConfig, UserError, presets
from megatron_spec.config.structure import share
from megatron_spec.drafts.linear import Placement
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.families.names import padded_vocab
from megatron_spec.planning.layouts import check_draft_parallel


def test_offsets_and_members() -> None:
    vocab = DraftVocab(torch.tensor([1, 2, 5]), 7)
    assert vocab.d2t.tolist() == [1, 1, 3] and vocab.d2t.dtype == torch.int64
    assert vocab.t2d.tolist() == [False, True, True, False, False, True, False]
    assert vocab.draft_ids.tolist() == [-1, 0, 1, -1, -1, 2, -1]
    assert not vocab.is_full and DraftVocab.full(7).is_full and len(vocab) == 3


def test_save_and_load(tmp_path: Path) -> None:
    vocab = DraftVocab(torch.tensor([1, 2, 5]), 7)
    vocab.save(tmp_path / "v.safetensors")
    assert DraftVocab.load(tmp_path / "v.safetensors") == vocab != DraftVocab(torch.tensor([1, 2, 6]), 7)
    assert [p.name for p in tmp_path.iterdir()] == ["v.safetensors"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2], "all-zero d2t"), ([1, 1, 2], "distinct"), ([2, 1, 3], "ascending"), ([1, 2, 7], "0 to 6"),
        ([-1, 2, 3], "0 to 6"), ([], "1 to 7"), ([[1, 2]], "shape"),
    ],
)  # fmt: skip
def test_refuses(ids: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 7)


def test_inconsistent_files_are_refused(tmp_path: Path) -> None:
    vocab = DraftVocab(torch.tensor([1, 2, 5]), 7)
    path = tmp_path / "v.safetensors"
    save_file({"d2t": vocab.d2t, "t2d": ~vocab.t2d}, path)
    with pytest.raises(UserError, match="t2d"):
        DraftVocab.load(path)
    save_file({"d2t": vocab.d2t}, path)
    with pytest.raises(UserError, match="expected d2t and t2d"):
        DraftVocab.load(path)
    with pytest.raises(UserError, match="no file"):
        DraftVocab.load(tmp_path / "absent")


@pytest.mark.parametrize("total", [5, 31, 96, 32_001, 128_257])
def test_rows_per_rank(total: int) -> None:
    """The shards of the base's ranks, without padding."""
    for ranks in (1, 2, 3, 4, 8):
        parts = [share(total, ranks, rank) for rank in range(ranks)]
        assert [i for part in parts for i in part] == list(range(total))
        width = padded_vocab(total, ranks) // ranks
        assert all(part.start == min(rank * width, total) and len(part) <= width for rank, part in enumerate(parts))


def test_layouts_of_an_indivisible_vocabulary() -> None:
    base = BaseConfig("llama", 64, 96, 8, 16, 8, 4, 32_001, 64)
    own = presets.eagle_config(base, overrides={"own_embed_tokens": True})
    drafts = [presets.eagle_config(base, kind) for kind in ("eagle3", "eagle1", "eagle-mtp")]
    block = presets.block_config(base, "dspark", {"mask_token_id": 7})
    for ranks in (2, 4, 8):
        for config in (*drafts, own, block, presets.medusa_config(base)):
            assert config.draft_vocab_size == 32_001
            check_draft_parallel(config, ParallelConfig(tensor_model_parallel_size=ranks))


def test_a_vocabulary_too_small_for_its_ranks() -> None:
    class Four:
        size, rank = staticmethod(lambda: 4), staticmethod(lambda: 0)

    place = Placement(Four())  # type: ignore[arg-type]
    assert place.vocabulary(7, 3).shape == (2, 3)
    with pytest.raises(UserError, match="a vocabulary of 6 leaves some of 4 tensor parallel ranks without a token"):
        place.vocabulary(6, 3)


@pytest.mark.parametrize(("tokens", "ranks", "fits"), [(7, 4, True), (6, 4, False), (9, 4, False), (3, 2, True)])
def test_it_is_refused_before_weights_load(tokens: int, ranks: int, fits: bool) -> None:
    """The last rank has the fewest tokens: none of 9 over four, which hold three, three and three."""
    base = BaseConfig("llama", 64, 96, 8, 16, 8, 4, 32_001, 64)
    config = presets.eagle_config(base, overrides={"draft_vocab_size": tokens})
    parallel = ParallelConfig(tensor_model_parallel_size=ranks)
    if fits:
        check_draft_parallel(config, parallel)
        return
    with pytest.raises(UserError, match=f"{ranks} leaves some ranks without a token of a vocabulary of {tokens}"):
        check_draft_parallel(config, parallel)
    spec = CheckpointSpec(BaseLink("base", "hf", "0" * 64, base), config)
    with pytest.raises(UserError, match="without a token"):
        resolve_paths(spec, parallel, torch.float32)
