"""The draft vocabulary: the two stored tensors, and maps that must be refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_spec.config import UserError
from megatron_spec.drafts.vocab import DraftVocab


def test_offsets_and_members() -> None:
    vocab = DraftVocab(torch.tensor([1, 2, 5]), 7)
    assert vocab.d2t.tolist() == [1, 1, 3] and vocab.d2t.dtype == torch.int64
    assert vocab.t2d.tolist() == [False, True, True, False, False, True, False]
    assert vocab.draft_ids.tolist() == [-1, 0, 1, -1, -1, 2, -1]
    assert not vocab.is_full and DraftVocab.full(7).is_full and len(vocab) == 3


def test_saved_is_loaded(tmp_path: Path) -> None:
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


def test_refuses_files_that_contradict_themselves(tmp_path: Path) -> None:
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
