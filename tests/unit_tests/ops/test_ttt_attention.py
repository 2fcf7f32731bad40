"""Merged trunk-and-branches attention against explicit S x (k+1)S masks, and its backward against differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_spec.ops import attention
from megatron_spec.ops.plain import attention as plain
from megatron_spec.ops.ttt_attention import TrainingTimeTest, merged_attention
from megatron_spec.ops.visibility import Visibility

DOCUMENTS = {
    "one": torch.zeros(2, 7, dtype=torch.int32),
    "packed": torch.tensor([[0, 0, 0, 1, 1, 2, -1], [0, 0, 0, 0, 1, 1, 1]], dtype=torch.int32),
    "padded": torch.tensor([[0, 0, 0, 0, -1, -1, -1], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.int32),
}


def tensors(branches: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 2, heads, 4)] + [(7, 2, kv_heads, 4)] * 2 * (1 + branches)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def pairs(flat: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


@pytest.mark.parametrize("documents", list(DOCUMENTS))
@pytest.mark.parametrize(("branches", "heads", "kv_heads"), [(0, 4, 2), (1, 4, 4), (3, 4, 2), (2, 6, 2), (2, 3, 1)])
@pytest.mark.parametrize("plain_trunk", [False, True])
def test_equals_reference(
    documents: str, branches: int, heads: int, kv_heads: int, plain_trunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and every gradient, also with the trunk attention of devices without flash attention."""
    if plain_trunk:
        monkeypatch.setattr(attention, "KERNELS", (attention.SCORES,))
    ids = DOCUMENTS[documents]
    q, k, v, *rest = tensors(branches, heads, kv_heads)
    found = merged_attention(q, (k, v), pairs(tuple(rest)), Visibility(None if documents == "one" else ids))
    expected = plain.merged_attention(q, (k, v), pairs(tuple(rest)), ids)
    if documents == "padded":  # rows of padding may see anything: they are never read
        found, expected = found[:4], expected[:4]
    torch.testing.assert_close(found, expected)
    seed = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    for a, b in zip(
        torch.autograd.grad(found, (q, k, v, *rest), seed),
        torch.autograd.grad(expected, (q, k, v, *rest), seed),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("branches", [0, 2])
def test_gradcheck(branches: int) -> None:
    visibility = Visibility(DOCUMENTS["packed"])
    assert torch.autograd.gradcheck(
        lambda q, k, v, *rest: merged_attention(q, (k, v), pairs(rest), visibility), tensors(branches), fast_mode=True
    )


@pytest.mark.parametrize("detach", [False, True])
def test_layers_and_steps_are_kept_apart(detach: bool) -> None:
    """Step k of a layer sees steps 0..k of that layer; `detach` cuts the gradient of all but the last."""
    q, *rest = tensors(3)
    steps = pairs(tuple(rest))
    attention = TrainingTimeTest(Visibility.causal(), detach)
    for i, (k, v) in enumerate(steps):
        other = attention(1, q, v, k)
        out = attention(0, q, k, v)
        torch.testing.assert_close(out, plain.merged_attention(q, steps[0], steps[1 : i + 1], DOCUMENTS["one"]))
        assert not torch.allclose(out, other)
    grads = torch.autograd.grad(out.sum(), rest, allow_unused=True)
    assert [g is not None for g in grads] == [not detach] * 6 + [True] * 2


def test_saves_nothing_quadratic() -> None:
    """Causal rows: no saved tensor has S x S elements."""
    S = 256
    q, k, v = (torch.randn(S, 1, h, 8, requires_grad=True) for h in (2, 1, 1))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        merged_attention(q, (k, v), [(k, v), (k, v)], Visibility.causal())
    assert sizes and max(sizes) < S * S
