"""P-EAGLE as in its paper: all rows of all depths in one forward under a dense mask."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_spec.batch import Features
from megatron_spec.config import ObjectiveConfig
from tests.unit_tests.drafts.plain_eagle3 import PlainEagle, _rms, plain_row_loss, plain_supervised


class PlainPEagle(PlainEagle):
    """The layers of the plain EAGLE-3 over rows (j, d)."""

    kept_TBS: Tensor
    """Rows that each depth keeps."""

    def conversation(self, f: Features, b: int, objective: ObjectiveConfig, stats: Tensor) -> Tensor:
        batch, S, temperature = f.batch, f.batch.tokens_BS.shape[1], objective.temperature
        tokens, turns, documents = (x[b].tolist() for x in (batch.tokens_BS, batch.turns_BS, batch.documents_BS))
        z = f.state_SBH[:, b] @ self.ends.head.T
        places = [(j, d) for d in range(objective.ttt_steps) for j in range(S) if self.kept_TBS[d, b, j]]
        table = self.p.get("embed_tokens.weight", self.ends.table)
        captures, m = f.captures_SBC[:, b], self.p["mask_hidden"].flatten()
        mask_token = self.config.mask_token_id
        h = torch.stack([captures[j] if d == 0 else m for j, d in places]) @ self.p["fc.weight"].T
        e = torch.stack([
            table[mask_token] if d else table[tokens[j + 1]] if j + 1 < S else torch.zeros_like(table[0])
            for j, d in places
        ])  # fmt: skip
        positions = torch.tensor([int(batch.positions_BS[b, j]) + d for j, d in places])
        window = self.config.sliding_window or S + len(places)
        mask = torch.tensor([
            [
                ((c == 0 and i <= j and documents[i] == documents[j]) or (i == j and c <= d)) and j + d - i - c < window
                for i, c in places
            ]
            for j, d in places
        ])  # fmt: skip
        for layer in range(len(self.prefixes)):
            h = self.layer(layer, h, e, positions, mask, [])
        logits = _rms(h, self.p["norm.weight"], self.config.rms_norm_eps) @ self.p["lm_head.weight"].T
        total = torch.zeros((), dtype=h.dtype)
        for n, (j, d) in enumerate(places):
            if not plain_supervised(turns, documents, j, d, objective.alignment):
                continue
            teacher, best = z[j + 1 + d], int(z[j + 1 + d].argmax())
            p, q = (teacher[self.ids] / temperature).softmax(-1), (logits[n] / temperature).softmax(-1)
            stats[d, 1] += int(self.ids[q.argmax()]) == best
            stats[d, 2] += torch.minimum(p, q).sum().detach()
            stats[d, 3] += 1
            if best in self.ids.tolist() or not objective.in_vocab_only:
                loss = plain_row_loss(objective.loss_kind, p, q, int(p.argmax()))
                stats[d, 0] += loss.detach()
                total = total + objective.decay**d * loss
        return total
