"""The draft vocabulary: which D of the base's V tokens a draft can propose.

Stored in the engines' format: `d2t` int64 [D] has offsets (target id = draft id + d2t[draft id]), `t2d` bool [V] marks
the target ids in the draft vocabulary. D = V needs neither.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_spec.config import UserError
from megatron_spec.config.decoder import DecoderDraftConfig
from megatron_spec.runtime.files import replacing


def check_sizes(vocab: DraftVocab, config: DecoderDraftConfig) -> None:
    """Raise UserError unless the vocabulary has the sizes of the configuration."""
    wanted: tuple[int, int] = (config.draft_vocab_size, config.vocab_size)  # type: ignore[attr-defined]
    if (len(vocab), vocab.vocab_size) != wanted:
        raise UserError(
            f"draft vocabulary: found {len(vocab)} of {vocab.vocab_size} tokens, expected, by the configuration, "
            f"{wanted[0]} of {wanted[1]}"
        )


class DraftVocab:
    """Ascending target ids [D] of the draft vocabulary, out of a base vocabulary of `vocab_size` tokens.

    Raises UserError unless the ids are distinct, ascending and in range, and if they are just the first D (an all-zero
    d2t), which counting tokens never yields.
    """

    def __init__(self, target_ids: Tensor, vocab_size: int) -> None:
        ids = torch.as_tensor(target_ids).detach().cpu()
        if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1 or not 0 < len(ids) <= vocab_size:
            raise UserError(
                f"draft vocabulary: found {ids.dtype} of shape {list(ids.shape)}, expected a list of 1 to {vocab_size} "
                "integer token ids"
            )
        ids = ids.long()
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise UserError(
                f"draft vocabulary: ids from {int(ids.min())} to {int(ids.max())}, expected 0 to {vocab_size - 1}: "
                "was it counted with another tokenizer?"
            )
        if bool((ids.diff() <= 0).any()):
            raise UserError("draft vocabulary: target ids must be distinct and ascending")
        if len(ids) < vocab_size and int(ids[-1]) == len(ids) - 1:
            raise UserError(
                f"draft vocabulary: found the first {len(ids)} token ids (an all-zero d2t), which is not a calibrated "
                "vocabulary: count the tokens of the training set first"
            )
        self.target_ids = ids
        self.vocab_size = vocab_size

    @staticmethod
    def full(vocab_size: int) -> DraftVocab:
        """The whole base vocabulary."""
        return DraftVocab(torch.arange(vocab_size), vocab_size)

    def __len__(self) -> int:
        return len(self.target_ids)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DraftVocab)
            and self.vocab_size == other.vocab_size
            and torch.equal(self.target_ids, other.target_ids)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_full(self) -> bool:
        """True if D = V: draft ids are target ids."""
        return len(self) == self.vocab_size

    @property
    def d2t(self) -> Tensor:
        """int64 [D] offsets: target id - draft id."""
        return self.target_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """bool [V]: target ids in the draft vocabulary."""
        inside = torch.zeros(self.vocab_size, dtype=torch.bool)
        inside[self.target_ids] = True
        return inside

    @property
    def draft_ids(self) -> Tensor:
        """int64 [V] draft id of every target id, or -1."""
        ids = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        ids[self.target_ids] = torch.arange(len(self))
        return ids

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `d2t` and `t2d` as safetensors, under a temporary name that is then renamed."""
        with replacing(Path(path), self.d2t.nbytes + self.t2d.nbytes) as temporary:
            save_file({"d2t": self.d2t, "t2d": self.t2d}, temporary)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> DraftVocab:
        """Read the file of `save`. Raises UserError if tensors are missing or inconsistent."""
        if not Path(path).is_file():
            raise UserError(f"draft vocabulary: no file {os.fspath(path)}")
        try:
            tensors = load_file(os.fspath(path))
        except (SafetensorError, OSError) as e:
            raise UserError(f"draft vocabulary {os.fspath(path)} cannot be read ({e}): copy the file again") from None
        if not {"d2t", "t2d"} <= set(tensors):
            raise UserError(f"draft vocabulary {os.fspath(path)}: found {sorted(tensors)}, expected d2t and t2d")
        return DraftVocab.from_tensors(tensors["d2t"], tensors["t2d"])

    @staticmethod
    def from_tensors(d2t: Tensor, t2d: Tensor) -> DraftVocab:
        """From the two tensors of an export. Raises UserError if they are inconsistent."""
        vocab = DraftVocab(d2t.long() + torch.arange(len(d2t)), len(t2d))
        if not torch.equal(vocab.t2d, t2d.bool()):
            raise UserError("draft vocabulary: t2d marks other tokens than d2t lists")
        return vocab
