"""Embedding and head of the base without its layers: all that training on stored features needs of it.

V padded vocabulary, H hidden, TP tensor parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_spec.base import ends
from megatron_spec.config import BaseConfig
from megatron_spec.families.names import padded_vocab
from megatron_spec.runtime.distributed import World


class EndsOnly(nn.Module):
    """Fulfils `drafts.contract.BaseEnds`; NaN until loaded.

    Attributes:
        embedding_weight: [V / TP, H] this rank's rows.
        head_weight: [V / TP, H] this rank's rows; the embedding itself when they are tied.
    """

    def __init__(
        self, config: BaseConfig, world: World, dtype: torch.dtype, padded_vocab_size: int | None = None
    ) -> None:
        super().__init__()
        self.config, self.world, self.dtype, self.vocab_size = config, world, dtype, config.vocab_size
        rows = (padded_vocab_size or padded_vocab(config.vocab_size, world.tp_size)) // world.tp_size

        def new() -> nn.Parameter:
            """NaN until it is loaded."""
            nan = torch.full((rows, config.hidden_size), float("nan"), dtype=dtype, device=world.device)
            return nn.Parameter(nan, requires_grad=False)

        self.embedding_weight = new()
        self.head_weight = self.embedding_weight if config.tie_word_embeddings else new()

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """See `BaseEnds.embed`."""
        scattered = self.world.parallel.sequence_parallel
        return ends.embed(tokens_BS, self.embedding_weight, self.world.tp, scattered, self.vocab_size)

    def logits(self, state_SBH: Tensor) -> Tensor:
        """See `BaseEnds.logits`."""
        world = self.world
        return ends.logits(
            state_SBH, self.head_weight, self.vocab_size, world.tp, world.parallel.sequence_parallel
        )  # fmt: skip
