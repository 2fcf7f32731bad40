"""Verification: which path of proposed tokens is accepted, and the bonus token (docs/algorithms.md#verification).

exact      A node is accepted if it is the token that the base chooses after its parent: the argmax, or at a temperature
           > 0 a sample drawn with the random number of that position. A greedy draft token is then accepted with the
           base's probability of it, and the text is the one that the base alone samples.
rejection  Tokens drawn from q are accepted with probability min(1, p/q), else replaced by a sample from max(p - q, 0)
           (speculative sampling, arXiv 2302.01318 and 2211.17192): the base's distribution, with more tokens accepted
           than above.
typical    Accepted if p > min(threshold, alpha * exp(-entropy of p)) (Medusa, arXiv 2401.10774 section 2.3.1).
relaxed    In a thinking phase, accepted among the base's top relaxed_topk tokens within relaxed_delta of the best
           log-probability.

The last two change the text. B rows of the batch, N nodes, S = N + 1 verification rows, P = depth + 1 path rows, V
vocabulary (this rank's shard).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_spec.config import DecodeConfig
from megatron_spec.decoding import sampling
from megatron_spec.decoding.tree import Tree, longest_path


@dataclass
class Drafted:
    """A proposal in the form that is verified, equal on all ranks.

    Attributes:
        tokens_BN: tokens of the nodes.
        valid_BN: bool, nodes that may be accepted.
        tree: shape of the tree; None: a chain.
        depth: depth of the deepest node.
        q_BNV: see Proposal.
    """

    tokens_BN: Tensor
    valid_BN: Tensor
    tree: Tree | None
    depth: int
    q_BNV: Tensor | None = None


@dataclass
class Verdict:
    """Result of a verification.

    Attributes:
        path_BP: int64 verification rows of the accepted path, from row 0; None for a chain, where they are 0, 1, 2, ...
        emitted_BP: int64 accepted tokens, then the bonus token; entries after it are meaningless.
        accepted_B: int64 number of accepted draft tokens.
    """

    path_BP: Tensor | None
    emitted_BP: Tensor
    accepted_B: Tensor


@dataclass
class Draws:
    """Uniform random numbers in [0, 1) for sampling, [B, P], one per position from the first new token on.

    Attributes:
        choose_BP: to sample the base's tokens.
        accept_BP: to accept draft tokens (rejection sampling).
    """

    choose_BP: Tensor
    accept_BP: Tensor


def choose(
    logits_NV: Tensor, uniform_N: Tensor, config: DecodeConfig, group: dist.ProcessGroup, kernels: Any = None
) -> Tensor:
    """int64 [N] the base's tokens: the argmax, or samples at the configured temperature, top_k and top_p.

    Args:
        kernels: see `sampling.sample`.
    """
    if config.temperature == 0:
        return sampling.argmax(logits_NV, group)
    if config.top_k or config.top_p < 1.0:
        scaled_NV = sampling.likely(logits_NV.float() / config.temperature, config.top_k, config.top_p, group)
        return sampling.sample(scaled_NV, uniform_N, 1.0, group, kernels)
    return sampling.sample(logits_NV, uniform_N, config.temperature, group, kernels)


def verify(
    logits_BSV: Tensor, drafted: Drafted, draws: Draws, config: DecodeConfig, group: dist.ProcessGroup,
    thinking_BS: Tensor | None = None, kernels: Any = None,
) -> Verdict:  # fmt: skip
    """Choose the accepted path and the bonus token of every row.

    Args:
        logits_BSV: logits of the verification rows.
        thinking_BS: bool, verification rows inside a thinking phase (relaxed acceptance).
        kernels: see `sampling.sample`.
    """
    if drafted.q_BNV is not None:
        return _reject(logits_BSV, drafted, draws, config, group)
    B, S, V = logits_BSV.shape
    depth_BS = _depths(drafted, B)
    uniform_N = draws.choose_BP.gather(1, depth_BS).flatten()
    chosen_BS = choose(logits_BSV.flatten(0, 1), uniform_N, config, group, kernels).view(B, S)
    if S == 1:
        return Verdict(None, chosen_BS, chosen_BS.new_zeros(B))
    parent_row_BN = torch.arange(S - 1, device=chosen_BS.device).expand(B, -1)
    if drafted.tree is not None:
        parent_row_BN = drafted.tree.parent_row_BN
    ok_BN, score_BN = drafted.tokens_BN == chosen_BS.gather(1, parent_row_BN), None
    if not config.lossless:
        after_NV = logits_BSV.gather(1, parent_row_BN[:, :, None].expand(-1, -1, V)).flatten(0, 1)
        if config.typical_acceptance:
            ok_BN, score_BN = _typical(after_NV, drafted, parent_row_BN, config, group)
        elif thinking_BS is not None:
            relaxed_BN = _relaxed(after_NV, drafted.tokens_BN, config, group)
            ok_BN = ok_BN | (relaxed_BN & thinking_BS.gather(1, parent_row_BN))
    ok_BN = ok_BN & drafted.valid_BN
    if drafted.tree is None:
        path_BP, accepted_B = None, ok_BN.long().cumprod(dim=1).sum(dim=1)
        rows_BP = torch.arange(S, device=ok_BN.device).expand(B, -1)
    else:
        path_BP, accepted_B = longest_path(ok_BN, parent_row_BN, drafted.tree.depth_BN, drafted.depth, score_BN)
        rows_BP = path_BP
    emitted_BP = chosen_BS.gather(1, rows_BP)
    if not config.lossless:  # an accepted token may differ from the base's choice
        accepted_BP = torch.arange(rows_BP.shape[1] - 1, device=ok_BN.device) < accepted_B[:, None]
        taken_BP = drafted.tokens_BN.gather(1, (rows_BP[:, 1:] - 1).clamp(min=0))
        emitted_BP = torch.cat([torch.where(accepted_BP, taken_BP, emitted_BP[:, :-1]), emitted_BP[:, -1:]], dim=1)
    return Verdict(path_BP, emitted_BP, accepted_B)


def _depths(drafted: Drafted, batch: int) -> Tensor:
    """int64 [B, S] distance of each verification row from the last known token."""
    tokens_BN = drafted.tokens_BN
    if drafted.tree is None:
        return torch.arange(tokens_BN.shape[1] + 1, device=tokens_BN.device).expand(batch, -1)
    return torch.cat([tokens_BN.new_zeros(batch, 1), drafted.tree.depth_BN], dim=1)


def _typical(
    after_NV: Tensor, drafted: Drafted, parent_row_BN: Tensor, config: DecodeConfig, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """(accepted if its parent is, score of the path up to the node), both [B, N]."""
    scaled_NV = after_NV.float() / config.temperature
    tokens_BN = drafted.tokens_BN
    logp_N = sampling.at(scaled_NV, tokens_BN.flatten(), group) - sampling.log_normalizer(scaled_NV, group)
    bar_N = (config.posterior_alpha * (-sampling.entropy(scaled_NV, group)).exp()).clamp(max=config.posterior_threshold)
    logp_BN = logp_N.view_as(tokens_BN)
    total_BN = logp_BN
    if drafted.tree is not None:  # breaks ties between equally long paths by likelihood
        total_BN = (drafted.tree.above_BSS[:, 1:, 1:].float() @ logp_BN.clamp(min=-1e4)[:, :, None])[:, :, 0]
    return (logp_N.exp() > bar_N).view_as(tokens_BN), 0.999 * total_BN.clamp(max=0.0).exp()


def _relaxed(after_NV: Tensor, tokens_BN: Tensor, config: DecodeConfig, group: dist.ProcessGroup) -> Tensor:
    """bool [B, N] accepted if its parent is. Differences of log-probabilities are differences of logits."""
    top_Nk, ids_Nk = sampling.topk(after_NV, config.relaxed_topk, group)
    near_Nk = top_Nk >= top_Nk[:, :1] - config.relaxed_delta
    return ((ids_Nk == tokens_BN.flatten()[:, None]) & near_Nk).any(dim=1).view_as(tokens_BN)


def _reject(
    logits_BSV: Tensor, drafted: Drafted, draws: Draws, config: DecodeConfig, group: dist.ProcessGroup
) -> Verdict:
    """Speculative sampling along a chain."""
    assert drafted.q_BNV is not None
    B, S, _ = logits_BSV.shape
    scaled_NV = sampling.likely(
        logits_BSV.flatten(0, 1).float() / config.temperature, config.top_k, config.top_p, group
    )
    p_BSV = sampling.probabilities(scaled_NV, group).view(B, S, -1)
    q_BNV = torch.nn.functional.pad(drafted.q_BNV, (0, p_BSV.shape[2] - drafted.q_BNV.shape[2]))
    token_BN1 = drafted.tokens_BN[:, :, None]
    p_BN, q_BN = (x.gather(2, token_BN1)[:, :, 0] for x in (p_BSV[:, :-1], q_BNV))
    ok_BN = (draws.accept_BP[:, : S - 1] * q_BN < p_BN) & drafted.valid_BN
    accepted_B = ok_BN.long().cumprod(dim=1).sum(dim=1)
    # The bonus token comes from max(p - q, 0) after a rejected token, from p after the last proposed one (q = 0 there).
    counts_BN = torch.cat([drafted.valid_BN, drafted.valid_BN.new_zeros(B, 1)], dim=1)
    at_B11 = accepted_B[:, None, None].expand(-1, 1, p_BSV.shape[2])
    q_BSV = torch.cat([q_BNV, torch.zeros_like(q_BNV[:, :1])], dim=1) * counts_BN[:, :, None]
    p_BV, q_BV = p_BSV.gather(1, at_B11)[:, 0], q_BSV.gather(1, at_B11)[:, 0]
    rest_BV = (p_BV - q_BV).clamp(min=0.0)
    rest_BV = torch.where(rest_BV.sum(dim=1, keepdim=True) > 0, rest_BV, p_BV)  # p = q within rounding
    own_B = sampling.draw(rest_BV, draws.choose_BP.gather(1, accepted_B[:, None])[:, 0])
    emitted_BP = torch.cat([drafted.tokens_BN, drafted.tokens_BN.new_zeros(B, 1)], dim=1)
    return Verdict(None, emitted_BP.scatter(1, accepted_B[:, None], own_B[:, None]), accepted_B)


def thinking_rows(tokens_BL: Tensor, length_B: Tensor, drafted: Drafted, config: DecodeConfig) -> Tensor:
    """bool [B, S]: the token after this verification row is in a thinking phase.

    Args:
        tokens_BL: the text; `length_B` of its tokens are known.
    """
    begin, end = config.begin_thinking_phase_token, config.end_thinking_phase_token
    batch, N = drafted.tokens_BN.shape
    here_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    known_BL = here_L < length_B[:, None]
    last_begin_B, last_end_B = (
        ((tokens_BL == token) & known_BL).long().mul(here_L + 1).amax(dim=1) for token in (begin, end)
    )
    inside_BS = (last_begin_B > last_end_B)[:, None].expand(-1, N + 1)
    parent_BN = torch.arange(N, device=tokens_BL.device).expand(batch, -1)
    parent_BN = parent_BN if drafted.tree is None else drafted.tree.parent_row_BN
    for _ in range(drafted.depth):
        inherited_BN = inside_BS.gather(1, parent_BN)
        inside_BN = (inherited_BN | (drafted.tokens_BN == begin)) & (drafted.tokens_BN != end)
        inside_BS = torch.cat([inside_BS[:, :1], inside_BN], dim=1)
    return inside_BS
