"""The two ends of the frozen base, embedding and head, over this rank's vocabulary shard, with or without its layers.

S sequence, B micro-batch, H hidden, V padded vocabulary, TP tensor parallel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn

from megatron_spec.config import BaseConfig
from megatron_spec.families.names import padded_vocab
from megatron_spec.ops.embedding import embed
from megatron_spec.ops.fp8 import Fp8Matrix
from megatron_spec.runtime.distributed import World


class Ends(nn.Module):
    """Implements `drafts.contract.BaseEnds`; a subclass provides the two weights.

    Attributes:
        config: architecture of the base.
        world: process groups.
        dtype: data type of the weights.
        vocab_size: true size of the vocabulary; rows past it are padding.
        head_fp8: the head in fp8, for the teacher (`base.direct.run_in_fp8`).
    """

    head_fp8: Fp8Matrix | None = None

    def __init__(self, config: BaseConfig, world: World, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.world, self.dtype, self.vocab_size = config, world, dtype, config.vocab_size

    def new_end(self, rows: int) -> nn.Parameter:
        """A frozen weight [rows, H], NaN until it is loaded."""
        shape = (rows, self.config.hidden_size)
        nan = torch.full(shape, float("nan"), dtype=self.dtype, device=self.world.device)
        return nn.Parameter(nan, requires_grad=False)

    @property
    def embedding_weight(self) -> Tensor:
        """[V / TP, H] this rank's rows of the embedding."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """[V / TP, H] this rank's rows of the head; rows past the true vocabulary are padding."""
        raise NotImplementedError

    def embed(self, tokens_BS: Tensor, known: bool = False) -> Tensor:
        """[S, B, H] token embeddings; scattered to [S / TP, B, H] under sequence parallelism.

        Args:
            known: the ids were chosen by a model, or checked before.
        """
        scattered = self.world.parallel.sequence_parallel
        return embed(tokens_BS, self.embedding_weight, self.world.tp, scattered, self.vocab_size, known)

    def logits(self, state_SBH: Tensor) -> Tensor:
        """[S, B, V / TP] logits of this rank's vocabulary shard (full sequence); padding rows are -inf.

        Differentiable in the state (the gradient is summed over tensor parallel ranks), for drafts that train through
        the frozen head.
        """
        weight, tp = self.head_weight, self.world.tp
        if self.world.parallel.sequence_parallel:
            state_SBH = gather_from_sequence_parallel_region(state_SBH, tensor_parallel_output_grad=True, group=tp)
        else:
            state_SBH = copy_to_tensor_model_parallel_region(state_SBH, group=tp)
        # Rows: torch would multiply a transposed state, as decoding's is, by sequence, and read the head for each.
        out = F.linear(state_SBH.flatten(0, 1), weight).view(*state_SBH.shape[:2], len(weight))
        real_rows = min(max(self.vocab_size - tp.rank() * weight.shape[0], 0), weight.shape[0])
        if real_rows < weight.shape[0]:
            out[..., real_rows:] = float("-inf")
        return out


class EndsOnly(Ends):
    """Embedding and head without layers: all that training on stored features needs. NaN until loaded."""

    def __init__(
        self, config: BaseConfig, world: World, dtype: torch.dtype, padded_vocab_size: int | None = None
    ) -> None:
        super().__init__(config, world, dtype)
        rows = (padded_vocab_size or padded_vocab(config.vocab_size, world.tp_size)) // world.tp_size
        self.embedding = self.new_end(rows)
        self.head = self.embedding if config.tie_word_embeddings else self.new_end(rows)

    @property
    def embedding_weight(self) -> nn.Parameter:
        """[V / TP, H] this rank's rows of the embedding."""
        return self.embedding

    @property
    def head_weight(self) -> nn.Parameter:
        """[V / TP, H] this rank's rows of the head; the embedding itself when they are tied."""
        return self.head
