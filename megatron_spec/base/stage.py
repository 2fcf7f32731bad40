"""What a pipeline stage of the frozen base holds: layers, linears and weights of a megatron-core model.

Only this module, `core_model.py`, `model.py` and `spec.py` depend on megatron-core's model classes: other packages read
a base through `layers`, `linears`, `weights` and `sharded_weights`.

H hidden, V padded vocabulary, TP tensor parallel size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from megatron_spec.base import placement, te
from megatron_spec.base.core_model import CoreModel
from megatron_spec.base.ends import Ends
from megatron_spec.base.modules import ReplicatedLinear
from megatron_spec.base.spec import own_name
from megatron_spec.config import BaseConfig
from megatron_spec.families.names import Experts
from megatron_spec.runtime.distributed import World

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


class CoreStage(Ends):
    """Weights of this stage, and embedding and head on every stage.

    Attributes:
        core: megatron-core's model of this stage, as transformer layers.
        model: the model itself.
        stage: what this stage holds, receives and sends.
        stage_counts: layers of every stage.
        capture_layer_ids: layers whose outputs are captured, global, from 0.
    """

    def __init__(
        self, config: BaseConfig, world: World, core: CoreModel, stages: list[placement.Stage], dtype: torch.dtype
    ) -> None:
        super().__init__(config, world, dtype)
        self.core, self.model = core, core.model
        self.stage = stages[world.pp_rank]
        self.capture_layer_ids = stages[-1].captures_out
        self.stage_counts = [stage.count for stage in stages]
        # Stages without embedding or head get a copy of its shard; a tied head is the embedding itself.
        rows = self.model.vocab_size // world.tp_size
        self.embedding_copy = None if self.model.pre_process else self.new_end(rows)
        self.head_copy = None if self.model.post_process or config.tie_word_embeddings else self.new_end(rows)

    @property
    def embedding_weight(self) -> Tensor:
        """[V / TP, H] this rank's rows of the embedding."""
        return self.model.embedding.word_embeddings.weight if self.embedding_copy is None else self.embedding_copy

    @property
    def head_weight(self) -> Tensor:
        """[V / TP, H] this rank's rows of the head; rows past the true vocabulary are padding."""
        if self.config.tie_word_embeddings:
            return self.embedding_weight
        return self.model.output_layer.weight if self.head_copy is None else self.head_copy

    @torch.no_grad()
    def share_ends(self) -> None:
        """Send the embedding of the first stage and the head of the last one to all stages (after loading)."""
        if self.world.pp_size == 1:
            return
        ranks = dist.get_process_group_ranks(self.world.pp)
        dist.broadcast(self.embedding_weight.data, ranks[0], group=self.world.pp)
        if not self.config.tie_word_embeddings:
            dist.broadcast(self.head_weight.data, ranks[-1], group=self.world.pp)
        elif self.model.post_process and not self.model.pre_process:
            self.model.output_layer.weight.data.copy_(self.embedding_weight)

    def layers(self) -> Iterator[tuple[int, Any]]:
        """(number in the complete base, layer) for each layer of this stage."""
        return enumerate(self.core.layers, self.stage.first)

    def linears(self) -> Iterator[tuple[str, Any]]:
        """(name, linear) of this stage, without linears that include a norm (`te.separate_norms`).

        Names are the same in every parallel layout: "layers.3.mlp.linear_fc1".
        """
        kinds = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear, *te.linear_types())
        first = self.experts.first
        for number, layer in self.layers():
            for name, module in layer.named_modules():
                if isinstance(module, kinds):
                    name = _EXPERT.sub(lambda found: str(int(found[0]) + first), name)
                    yield f"layers.{number}.{name}", module

    def weights(self) -> dict[str, nn.Parameter]:
        """Parameters of this stage, under the names that `families.names` gives them."""
        return {own_name(name): parameter for name, parameter in self.core.weights().items()}

    def sharded_weights(self, prefix: str, numbered: bool) -> dict[str, tuple[nn.Parameter, Any]]:
        """name -> (parameter, megatron-core's ShardedTensor: its place in a distributed checkpoint).

        Args:
            prefix: prefix of the keys in the checkpoint.
            numbered: layers are stored one by one, not stacked.
        """
        metadata = {"non_homogeneous_layers": True} if numbered else None
        state = self.model.sharded_state_dict(prefix=prefix, metadata=metadata)
        return {name: (parameter, state[prefix + name]) for name, parameter in self.model.named_parameters()}

    def normed(self, state_SBH: Tensor) -> Tensor:
        """The state after the final norm (last stage)."""
        out: Tensor = self.core.final_norm(state_SBH)
        return out

    @property
    def experts(self) -> Experts:
        """Experts of each layer on this rank."""
        ep = self.world.parallel.expert_model_parallel_size
        return Experts.of(self.config, self.world.base_groups.ep.rank() if ep > 1 else 0, ep)
