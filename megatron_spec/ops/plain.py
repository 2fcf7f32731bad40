"""Plain twins of all operators: attention with S x (k+1)S scores and autograd, and those of the Triton kernels.

They document the arithmetic, and run the fast paths where kernels cannot (tests on a CPU, also in fp64): arithmetic is
in the input's dtype. Arguments and results are those of the kernel of the same name.

S rows, B batch, N query heads, G key/value heads, D head size, k number of branches, R flattened rows, H hidden, M
intermediate, T draft steps, D (of logits) this rank's shard of the draft vocabulary, V vocabulary, U teacher rows.
Decoding: as in `kernels/decode.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_spec.ops.fp8 import LARGEST, SMALLEST, Fp8Matrix
from megatron_spec.ops.plain_experts import choose_experts as choose_experts
from megatron_spec.ops.plain_experts import gate_rows as gate_rows
from megatron_spec.ops.plain_experts import mix_rows as mix_rows
from megatron_spec.ops.plain_experts import sort_rows as sort_rows
from megatron_spec.ops.visibility import visible_slots


def ttt_mask(documents_BS: Tensor, branches: int) -> Tensor:
    """bool [B, S, (k+1) S]: causal inside the document for the trunk, the diagonal for every branch."""
    S = documents_BS.shape[1]
    same = documents_BS[:, :, None] == documents_BS[:, None, :]
    causal = torch.ones(S, S, dtype=torch.bool, device=same.device).tril()
    diagonal = torch.eye(S, dtype=torch.bool, device=same.device).expand_as(same)
    return torch.cat([same & causal] + [diagonal] * branches, dim=2)


def merged_attention(
    q_SBND: Tensor, trunk: tuple[Tensor, Tensor], branches: list[tuple[Tensor, Tensor]], documents_BS: Tensor
) -> Tensor:
    """Twin of `ttt_attention.merged_attention`: [S, B, N * D]."""
    n = q_SBND.shape[2] // trunk[0].shape[2]
    keys = torch.cat([trunk[0], *(k for k, _ in branches)]).repeat_interleave(n, 2)
    values = torch.cat([trunk[1], *(v for _, v in branches)]).repeat_interleave(n, 2)
    scores = torch.einsum("sbnd,tbnd->bnst", q_SBND, keys) / math.sqrt(q_SBND.shape[-1])
    scores = scores.masked_fill(~ttt_mask(documents_BS, len(branches))[:, None], -math.inf)
    return torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), values).flatten(2)


def norm_forward(
    a_RH: Tensor,
    eps: float,
    b_RH: Tensor | None = None,
    sum_RH: Tensor | None = None,
    first: tuple[Tensor, Tensor] | None = None,
    second: tuple[Tensor, Tensor] | None = None,
    place_R: Tensor | None = None,
) -> Tensor:
    """`kernels.rows.norm_forward`."""
    x = a_RH
    if b_RH is not None:
        assert sum_RH is not None
        x = sum_RH.copy_(a_RH + b_RH)
    rstd = (x.square().mean(1) + eps).rsqrt()
    normed = x * rstd[:, None]
    if first is not None:
        first[1].copy_(normed * first[0])
    if second is not None:
        kept = torch.arange(len(x), device=x.device) if place_R is None else (place_R >= 0).nonzero()[:, 0]
        second[1][kept if place_R is None else place_R[kept].long()] = (normed * second[0])[kept]
    return rstd


def norm_partials(H: int, device: torch.device) -> Tensor:
    """`kernels.rows.norm_partials`."""
    return torch.zeros(1, H, dtype=torch.float64, device=device)


def norm_backward(
    x_RH: Tensor,
    rstd_R: Tensor,
    dx_RH: Tensor | None,
    first: tuple[Tensor, Tensor, Tensor] | None = None,
    second: tuple[Tensor, Tensor, Tensor] | None = None,
    place_R: Tensor | None = None,
    add_RH: Tensor | None = None,
) -> None:
    """`kernels.rows.norm_backward`."""
    normed, g = x_RH * rstd_R[:, None], torch.zeros_like(x_RH)
    for (dy, w, dw), place in (
        *(((first, None),) if first is not None else ()),
        *(((second, place_R),) if second is not None else ()),
    ):
        if place is not None:
            padded = torch.cat([dy, dy.new_zeros(1, dy.shape[1])])
            dy = padded[place.long()]  # -1 selects the row of zeros
        dw += (dy * normed).sum(0)
        g += dy * w
    if dx_RH is not None:
        dx = rstd_R[:, None] * (g - normed * (g * normed).mean(1, keepdim=True))
        dx_RH.copy_(dx if add_RH is None else dx + add_RH)


def _rotate(x_RhD: Tensor, tables: tuple[Tensor, Tensor], sign: int) -> Tensor:
    cos, sin = (t[:, None].to(x_RhD.dtype) for t in tables)
    a, b = x_RhD.chunk(2, -1)
    return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin], -1)


def rotary_forward(
    x_RX: Tensor, tables: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor | None, heads: int, kv_heads: int,
    e_EX: Tensor | None = None, place_R: Tensor | None = None, grouped: bool = False,
    norms: tuple[Tensor, Tensor] | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """`kernels.rows.rotary_forward`."""
    if e_EX is not None:
        x_RX = x_RX + (e_EX[: len(x_RX)] if place_R is None else e_EX[place_R])
    if grouped:
        parts = x_RX.unflatten(1, (kv_heads, heads // kv_heads + 2, -1))
        q_RND, k_RGD, v_RGD = parts[:, :, :-2].flatten(1, 2), parts[:, :, -2], parts[:, :, -1]
    else:
        x = x_RX.unflatten(1, (heads + 2 * kv_heads, -1))
        q_RND, k_RGD, v_RGD = x.split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q_RND, k_RGD = (
            x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w
            for x, w in zip((q_RND, k_RGD), norms, strict=True)
        )
    q.copy_(_rotate(q_RND, tables, 1).flatten(1))
    k.copy_(_rotate(k_RGD, tables, 1).flatten(1))
    if v is not None:
        v.copy_(v_RGD.flatten(1))


def rotary_backward(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], x_RX: Tensor, heads: int, kv_heads: int,
    norms: tuple[Tensor, tuple[Tensor, Tensor], Tensor] | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """`kernels.rows.rotary_backward`."""
    D, count = 2 * tables[0].shape[1], (heads, kv_heads, kv_heads)
    dq, dk, dv = (x.view(len(x), n, D).to(x_RX.dtype) for x, n in zip((q, k, v), count, strict=True))
    found = [_rotate(dq, tables, -1), _rotate(dk, tables, -1)]
    if norms is not None:
        before_RX, weights, partial = norms
        before = before_RX.unflatten(1, (-1, D)).split(count, 1)
        for i in range(2):
            rstd = (before[i].square().mean(-1, keepdim=True) + eps).rsqrt()
            normed, g = before[i] * rstd, found[i] * weights[i]
            partial[:, i * D : (i + 1) * D] += (found[i] * normed).sum((0, 1))
            found[i] = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
    x_RX.copy_(torch.cat([*found, dv], 1).flatten(1))


def gated_forward(x_RX: Tensor, h_RM: Tensor) -> None:
    """`kernels.rows.gated_forward`."""
    gate, up = x_RX.chunk(2, 1)
    h_RM.copy_(torch.nn.functional.silu(gate) * up)


def gated_backward(x_RX: Tensor, dh_RM: Tensor, h_RM: Tensor) -> None:
    """`kernels.rows.gated_backward`."""
    gate, up = (x.clone() for x in x_RX.chunk(2, 1))
    gated_forward(x_RX, h_RM)
    sig = gate.sigmoid()
    x_RX.copy_(torch.cat([dh_RM * up * (sig + gate * sig * (1 - sig)), dh_RM * gate * sig], 1))


def _places(rows: int, B: int, place_R: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    place = torch.arange(rows, device=device) if place_R is None else place_R
    return place % B, place // B


def _scores(q_RX: Tensor, k_TRY: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Queries [R, N, D], scores [k, R, N]."""
    q, k = q_RX.unflatten(1, (-1, D)), k_TRY.unflatten(2, (-1, D))
    if len(k) == 0:  # its number of rows may differ, when later steps have fewer
        return q, q.new_zeros(0, *q.shape[:2])
    k = k.repeat_interleave(q.shape[1] // k.shape[2], 2)
    return q, (q * k).sum(-1) * D**-0.5


def merge_forward(
    q_RX: Tensor, o0_BSND: Tensor, lse_BNS: Tensor, k_TRY: Tensor, v_TRY: Tensor, out_RX: Tensor,
    place_R: Tensor | None = None,
) -> None:  # fmt: skip
    """`kernels.branch.merge_forward`."""
    B, _, N, D = o0_BSND.shape
    b, s = _places(len(q_RX), B, place_R, q_RX.device)
    _, scores = _scores(q_RX, k_TRY, D)
    trunk = lse_BNS[b, :, s]
    lse = torch.cat([trunk[None], scores]).logsumexp(0)
    out = o0_BSND[b, s] * (trunk - lse).exp()[..., None]
    for score, v_RY in zip(scores, v_TRY, strict=True):
        v = v_RY.unflatten(1, (-1, D))
        out += (score - lse).exp()[..., None] * v.repeat_interleave(N // v.shape[1], 1)
    out_RX.copy_(out.flatten(1))
    lse_BNS[b, :, s] = lse


def merge_backward(
    q_RX: Tensor, o_RX: Tensor, do_RX: Tensor, lse_BNS: Tensor, k_TRY: Tensor, v_TRY: Tensor, dq0_BSND: Tensor,
    dq_RX: Tensor, dk_TRY: Tensor, dv_TRY: Tensor, first: bool, place_R: Tensor | None = None,
) -> None:  # fmt: skip
    """`kernels.branch.merge_backward`."""
    B, _, N, D = dq0_BSND.shape
    b, s = _places(len(q_RX), B, place_R, q_RX.device)
    q, scores = _scores(q_RX, k_TRY, D)
    do, o = (x.unflatten(1, (N, D)) for x in (do_RX, o_RX))
    dq = dq0_BSND[b, s].clone()
    for i, score in enumerate(scores):
        k, v = (x[i].unflatten(1, (-1, D)) for x in (k_TRY, v_TRY))
        G = k.shape[1]
        p = (score - lse_BNS[b, :, s]).exp()
        ds = p * ((do * v.repeat_interleave(N // G, 1)).sum(-1) - (do * o).sum(-1)) * D**-0.5
        dq += ds[..., None] * k.repeat_interleave(N // G, 1)
        for total, part in ((dk_TRY, ds[..., None] * q), (dv_TRY, p[..., None] * do)):
            found = part.unflatten(1, (G, -1)).sum(2).flatten(1)
            total[i] = found if first else total[i] + found
    dq_RX.copy_(dq.flatten(1))


def shifted_sum(
    x_NW: Tensor, R: int, later: int, steps: int, B: int, place_P: Tensor | None = None, first_P: Tensor | None = None
) -> Tensor:
    """`kernels.rows.shifted_sum`."""
    identity = torch.arange(R, device=x_NW.device)
    places = [identity if place is None else place.long() for place in (first_P, *[place_P] * (steps - 1))]
    out = x_NW.new_zeros(len(places[0]) + (steps - 1) * B, x_NW.shape[1])
    for k, place in enumerate(places):
        rows = (place >= 0).nonzero()[:, 0]
        start = 0 if k == 0 else R + (k - 1) * later
        out[rows + k * B] += x_NW[start + place[rows]]
    return out


def largest(logits_RD: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.loss.largest`."""
    u_RD = logits_RD / temperature
    return u_RD.amax(1), u_RD.logsumexp(1), u_RD.argmax(1)


def soft_shard(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, weight_R: Tensor, lse_R: Tensor,
    temperature: float, kl: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.soft_shard`."""
    logq = logits_RD / temperature - lse_R[:, None]
    logp = teacher_UD[rows_R] / temperature - teacher_lse_U[rows_R, None]
    p, q = logp.exp(), logq.exp()
    logits_RD.copy_((q - p) * weight_R[:, None] / temperature)
    return (p * (logp - logq) if kl else -p * logq).sum(1), p.minimum(q).sum(1)


def soft_rows(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, weight_R: Tensor, temperature: float,
    kl: bool, rounded: Fp8Matrix | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.soft_rows`."""
    _, lse_R, best_R = largest(logits_RD, temperature)
    told = (teacher_UD, teacher_lse_U, rows_R, weight_R)
    loss_R, overlap_R = soft_shard(logits_RD, *told, lse_R, temperature, kl)
    if rounded is not None:
        found = quantize(logits_RD)
        rounded.values.copy_(found.values)
        rounded.scale.copy_(found.scale)
    return loss_R, overlap_R, best_R


def _probabilities(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, lse_R: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    q_RD = (logits_RD / temperature - lse_R[:, None]).exp()
    return q_RD, (teacher_UD[rows_R] / temperature - teacher_lse_U[rows_R, None]).exp()


def _columns(rows_R: Tensor, column_U: Tensor, D: int) -> Tensor:
    """[R, D] True at the label of each row."""
    return torch.arange(D, device=rows_R.device)[None] == column_U[rows_R, None]


def mixed_sums(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, column_U: Tensor, lse_R: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.mixed_sums`."""
    q, p = _probabilities(logits_RD, teacher_UD, teacher_lse_U, rows_R, lse_R, temperature)
    logq = logits_RD / temperature - lse_R[:, None]
    label_R = (logq * _columns(rows_R, column_U, logits_RD.shape[1])).sum(1)
    return label_R, p.minimum(q).sum(1), (q * (q < p)).sum(1)


def mixed_gradient(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, column_U: Tensor, weight_R: Tensor,
    lse_R: Tensor, mass_R: Tensor, temperature: float, weights: tuple[float, float],
) -> None:  # fmt: skip
    """`kernels.loss.mixed_gradient`."""
    a, b = weights
    q, p = _probabilities(logits_RD, teacher_UD, teacher_lse_U, rows_R, lse_R, temperature)
    label = _columns(rows_R, column_U, logits_RD.shape[1])
    gradient = a * (q - label.to(q.dtype)) + 2 * b * q * (mass_R[:, None] - (q < p).to(q.dtype))
    logits_RD.copy_(gradient * weight_R[:, None] / temperature)


def mixed_rows(
    logits_RD: Tensor, teacher_UD: Tensor, teacher_lse_U: Tensor, rows_R: Tensor, column_U: Tensor, weight_R: Tensor,
    temperature: float, weights: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`kernels.loss.mixed_rows`."""
    _, lse_R, best_R = largest(logits_RD, temperature)
    told = (teacher_UD, teacher_lse_U, rows_R, column_U)
    label_R, overlap_R, mass_R = mixed_sums(logits_RD, *told, lse_R, temperature)
    mixed_gradient(logits_RD, *told, weight_R, lse_R, mass_R, temperature, weights)
    return 2 * weights[1] * (1 - overlap_R) - weights[0] * label_R, overlap_R, best_R


def teacher_rows(
    whole_RV: Tensor, target_ids_D: Tensor, draft_ids_V: Tensor, temperature: float, logits_RD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`kernels.loss.teacher_rows`."""
    logits_RD.copy_(whole_RV[:, target_ids_D])
    argmax_R = whole_RV.argmax(1)
    id_R = draft_ids_V[argmax_R]
    inside_R = id_R >= 0
    lse_R = (logits_RD / temperature).logsumexp(1)
    return lse_R, argmax_R, torch.where(inside_R, id_R, logits_RD.argmax(1)), inside_R


def decode_attention(
    x_RX: Tensor, tables: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], first_B: Tensor, heads: int,
    kv_heads: int, key_slots: int, bias_X: Tensor | None = None, norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0, above_BSM: Tensor | None = None, grouped: bool = True,
) -> Tensor:  # fmt: skip
    """`kernels.decode.decode_attention`."""
    (B,), R, D = first_B.shape, len(x_RX), cache[0].shape[3]
    tables = (tables[0][:, : D // 2], tables[1][:, : D // 2])
    S, x = R // B, x_RX if bias_X is None else x_RX + bias_X
    q, k, v = (x.new_empty(R, n * D) for n in (heads, kv_heads, kv_heads))
    rotary_forward(x, tables, q, k, v, heads, kv_heads, grouped=grouped, norms=norms, eps=eps)
    slots_BS = first_B[:, None] + torch.arange(S, device=x.device)
    b_B1 = torch.arange(B, device=x.device)[:, None]
    for kept, new in zip(cache, (k, v), strict=True):
        kept[b_B1, slots_BS] = new.view(S, B, kv_heads, D).transpose(0, 1)
    keys, values = (kept[:, :key_slots].repeat_interleave(heads // kv_heads, 2) for kept in cache)
    if above_BSM is None:
        seen_BSL = torch.arange(key_slots, device=x.device) <= slots_BS[:, :, None]
    else:
        seen_BSL = visible_slots(first_B + S - above_BSM.shape[2], above_BSM, key_slots)
    scores = torch.einsum("sbnd,blnd->bnsl", q.view(S, B, heads, D), keys) * D**-0.5
    shares = scores.masked_fill(~seen_BSL[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnsl,blnd->sbnd", shares, values).reshape(R, heads * D)


def few_rows_product(
    x_RH: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None = None, norm_H: Tensor | None = None,
    eps: float = 0.0, gated: bool = False, rest_RO: Tensor | None = None,
    second: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:  # fmt: skip
    """`kernels.decode.few_rows_product`."""
    inputs = [
        x if norm is None else x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * norm
        for x, norm in ((x_RH, norm_H), *((second,) if second is not None else ()))
    ]
    out = torch.cat(inputs, 1) @ torch.cat(list(weights)).t()
    out = out if biases is None else out + torch.cat(list(biases))
    if gated:
        gate, up = out.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    return out if rest_RO is None else rest_RO + out


CHUNK = 8
"""Logits of a chunk of `chunk_masses`; small, because tests have small vocabularies."""


def _weights(logits_NV: Tensor, top_N: Tensor, temperature: float) -> Tensor:
    """fp64 [N, C, chunk]."""
    p = (logits_NV.float() / temperature - top_N[:, None]).exp().double()
    return torch.nn.functional.pad(p, (0, -p.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))


def chunk_masses(logits_NV: Tensor, top_N: Tensor, temperature: float) -> Tensor:
    """`kernels.sample.chunk_masses`."""
    return _weights(logits_NV, top_N, temperature).sum(2)


def find_in_chunk(
    logits_NV: Tensor, top_N: Tensor, temperature: float, chunk_N: Tensor, rest_N: Tensor
) -> Tensor:  # fmt: skip
    """`kernels.sample.find_in_chunk`."""
    p = _weights(logits_NV, top_N, temperature)[torch.arange(len(chunk_N), device=chunk_N.device), chunk_N]
    first_N = (p.cumsum(1) <= rest_N[:, None]).sum(1)
    last_N = (torch.arange(CHUNK, device=p.device) * (p > 0)).amax(1)
    return chunk_N * CHUNK + torch.minimum(first_N, last_N)


def scale_(x: Tensor, scale: Tensor) -> Tensor:
    """`kernels.rows.scale_`."""
    return x.mul_(scale.to(x.dtype))


def quantize(x_RH: Tensor) -> Fp8Matrix:
    """`kernels.fp8.quantize`."""
    scale = x_RH.abs().amax(1).float().clamp(min=SMALLEST) / LARGEST
    values = (x_RH / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Matrix(values, scale)


def quantized_norm(a_RH: Tensor, b_RH: Tensor | None, sum_RH: Tensor | None, weight_H: Tensor, eps: float) -> Fp8Matrix:
    """`kernels.fp8.quantized_norm`."""
    normed = torch.empty_like(a_RH)
    norm_forward(a_RH, eps, b_RH, sum_RH, (weight_H, normed))
    return quantize(normed)


def quantized_gate(x_RX: Tensor) -> Fp8Matrix:
    """`kernels.fp8.quantized_gate`."""
    h_RM = x_RX.new_empty(len(x_RX), x_RX.shape[1] // 2)
    gated_forward(x_RX, h_RM)
    return quantize(h_RM)


def product(
    x: Fp8Matrix, weight: Fp8Matrix, dtype: torch.dtype, out: Tensor | None = None, fast: bool = True
) -> Tensor:
    """`kernels.fp8.product`."""
    wide = torch.promote_types(dtype, torch.float32)
    found = (x.dequantized(wide) @ weight.dequantized(wide).t()).to(dtype)
    return found if out is None else out.copy_(found)


def transpose(values_RH: Tensor, out_HR: Tensor) -> None:
    """`kernels.fp8.transpose`."""
    out_HR.copy_(values_RH.t())


def quantize_columns(x_RH: Tensor, scale_R: Tensor, out: Fp8Matrix) -> None:
    """`kernels.fp8.quantize_columns`."""
    found = quantize((x_RH * scale_R[:, None]).t())
    out.values[:, : len(x_RH)].copy_(found.values)
    out.scale.copy_(found.scale)


def adamw(
    grad: Tensor, master: Tensor, moments: tuple[Tensor, Tensor], out: Tensor, scale: float, step: int, lr: float,
    betas: tuple[float, float], eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """`kernels.adam.adamw`."""
    g, (m, v) = grad * scale, moments
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    root = v.sqrt() / (1 - betas[1] ** step) ** 0.5 + eps
    master.mul_(1 - lr * weight_decay).sub_(lr / (1 - betas[0] ** step) * m / root)
    out.copy_(master)


OPERATORS = frozenset({
    "norm_forward", "norm_partials", "norm_backward", "rotary_forward", "rotary_backward", "gated_forward",
    "gated_backward", "shifted_sum", "scale_", "merge_forward", "merge_backward", "largest", "soft_shard", "soft_rows",
    "mixed_rows", "mixed_sums", "mixed_gradient", "teacher_rows", "quantize", "quantized_norm", "quantized_gate",
    "product", "transpose", "quantize_columns", "decode_attention", "few_rows_product", "adamw", "chunk_masses",
    "find_in_chunk", "choose_experts", "sort_rows", "gate_rows", "mix_rows",
})  # fmt: skip
"""Operators that `ops.backend` loads from here or from `ops.kernels`."""
