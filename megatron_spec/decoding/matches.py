"""The lookup beside a draft, on the device: what followed the longest suffix of the text that occurred before.

The match of a position of a text is how many tokens up to it equal the last tokens of the text. After k more tokens it
is k plus the match of k positions before, if the k tokens up to it are the new ones; else the number of them that are,
from the last one back. So a step that adds few tokens compares few, however long matches are. The longest match, the
first one of equals, is where a suffix automaton (`drafters.lookup`) finds it.

B rows, L length of the token buffer, P tokens that a step may add, N proposed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def matches_of(text: Sequence[int]) -> list[int]:
    """The match of every position of a text; 0 for the last one. (The Z function of the reversed text.)"""
    back = list(reversed(text))
    found, first, end = [0] * len(back), 0, 0  # back[first:end] equals the beginning of back
    for i in range(1, len(back)):
        size = min(found[i - first], end - i) if i < end else 0
        while i + size < len(back) and back[size] == back[i + size]:
            size += 1
        found[i] = size
        if i + size > end:
            first, end = i, i + size
    return found[::-1]


def extended(matches_BL: Tensor, tokens_BL: Tensor, before_B: Tensor, after_B: Tensor, most: int) -> Tensor:
    """int32 [B, L] matches of texts that have grown.

    Args:
        matches_BL: those of before; 0 from the last token on.
        tokens_BL: int64 tokens, not negative, the new ones included; those after a text are meaningless.
        before_B: int64 lengths without the new tokens.
        after_B: int64 lengths, at most P more.
        most: P.
    """
    at_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    # Distance from a position or the last token; small integers, because the largest tensor here consists of them.
    back_P = torch.arange(most - 1, -1, -1, dtype=torch.int16, device=tokens_BL.device)
    last_BP = tokens_BL.gather(1, (after_B[:, None] - 1 - back_P).clamp(min=0))
    ending_BLP = torch.nn.functional.pad(tokens_BL, (most - 1, 0), value=-1).unfold(1, most, 1)
    new_BL = torch.where(ending_BLP == last_BP[:, None], most, back_P).amin(dim=2)
    grown_B1 = (after_B - before_B)[:, None]
    earlier_BL = at_L - grown_B1
    before_BL = torch.where(earlier_BL >= 0, matches_BL.gather(1, earlier_BL.clamp(min=0)), 0)
    found_BL = torch.where(new_BL < grown_B1, new_BL, grown_B1 + before_BL)
    return torch.where(at_L < after_B[:, None] - 1, found_BL, 0).to(torch.int32)


def looked_up(
    matches_BL: Tensor, tokens_BL: Tensor, length_B: Tensor, threshold: int, count: int
) -> tuple[Tensor, Tensor]:
    """(int64 [B, N] tokens after the first one of the longest matches, int64 [B] how many of them are known).

    Args:
        length_B: int64 lengths of the texts.
        threshold: a match of fewer tokens counts as none: 0 known tokens.
        count: N.
    """
    longest_B, end_B = matches_BL.max(dim=1)  # the first one of equals
    at_BN = end_B[:, None] + 1 + torch.arange(count, device=end_B.device)
    tokens_BN = tokens_BL.gather(1, at_BN.clamp(max=tokens_BL.shape[1] - 1))
    known_B = torch.where(longest_B >= threshold, length_B - 1 - end_B, 0)
    return tokens_BN, known_B.clamp(max=count)
