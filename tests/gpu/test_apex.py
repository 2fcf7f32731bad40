"""NVIDIA's apex on a GPU: its Adam, gradient norm and weight gradients against torch's and Transformer Engine's."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.config import OptimizerImpl
from megatron_spec.ops import products
from megatron_spec.runtime import optional
from megatron_spec.training import kernels
from tests.unit_tests.training.fused_adams import restored
from tests.unit_tests.training.test_kernels import Run, continued


def _why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU"
    return "apex is not installed" if importlib.util.find_spec("apex") is None else optional.apex_problem()


REASON = _why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
ENGINE = importlib.util.find_spec("transformer_engine") is not None
IMPLS: list[OptimizerImpl] = ["apex", "torch", *(["transformer_engine"] if ENGINE else [])]  # type: ignore[list-item]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with restored():
        yield


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def test_it_is_complete_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    kernels.check_kernels("apex")
    Run("apex", bf16=True)
    assert "optimizer: Adam of apex" in caplog.text and "gradient norm of apex, weight gradients of" in caplog.text
    kernels.choose("torch")
    assert kernels.described() == "Adam of torch, gradient norm of torch, weight gradients of torch"


@pytest.mark.skipif(ENGINE, reason="megatron-core takes Transformer Engine first")
def test_megatron_core_chooses_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Run("auto")
    assert "Adam of apex" in caplog.text and "gradient norm of apex" in caplog.text


@pytest.mark.parametrize("train", [{}, {"bf16": True}, {"bf16": True, "use_distributed_optimizer": True}])
@pytest.mark.parametrize("impl", IMPLS)
def test_adam(impl: OptimizerImpl, train: dict[str, Any]) -> None:
    """Six steps of each, with weight decay and clipping."""
    found, start = {}, torch.zeros(())
    for name in ("torch", impl):
        run = Run(name, **train)  # type: ignore[arg-type]
        start = run.weights()
        run.steps(0, 6)
        found[name] = run.weights() - start
    assert distance(found[impl], found["torch"]) < 1e-4


def test_gradient_norm() -> None:
    amp_C: Any = importlib.import_module("amp_C")
    applier: Any = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    tensors = [torch.randn(n, device="cuda") * n for n in (1, 5, 1000, 70001)]
    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    found, _ = applier(amp_C.multi_tensor_l2norm, overflow, [tensors], False)
    torch.testing.assert_close(found[0].double(), torch.cat(tensors).double().norm(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("before", IMPLS)
@pytest.mark.parametrize("after", IMPLS)
@pytest.mark.parametrize("distributed", [False, True])
def test_a_run_continues_with_another(
    before: OptimizerImpl, after: OptimizerImpl, distributed: bool, tmp_path: Path
) -> None:
    train = {"bf16": True, "use_distributed_optimizer": distributed}
    whole = Run("torch", **train)
    start = whole.weights()
    whole.steps(0, 6)
    found = continued(before, after, tmp_path, **train)
    assert distance(found - start, whole.weights() - start) < 1e-4


needs_products = pytest.mark.skipif(
    importlib.util.find_spec(kernels.WEIGHT_GRADIENTS) is None,
    reason=f"apex was built without {kernels.WEIGHT_GRADIENTS}",
)


@needs_products
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients(dtype: torch.dtype) -> None:
    """As near to the exact product as torch's operator, added to what is there; strided targets go to torch."""
    random = torch.Generator(device="cuda").manual_seed(1)
    x, d = (torch.randn(777, n, generator=random, device="cuda").to(dtype) for n in (256, 192))
    before = torch.randn(192, 512, generator=random, device="cuda")
    exact, found = d.double().t() @ x.double(), {}
    for impl in ("apex", "torch"):
        kernels.choose(impl)  # type: ignore[arg-type]
        assert products.adder() == impl
        whole, wide = before[:, :256].clone(), before.clone()
        products.add_product(whole, d.t(), x)
        products.add_product(wide[:, 256:], d.t(), x)
        assert torch.equal(wide[:, :256], before[:, :256])
        found[impl] = distance(whole.double() - before[:, :256], exact)
        assert distance(wide[:, 256:].double() - before[:, 256:], exact) < 1e-3
    assert found["apex"] < max(2 * found["torch"], 1e-5), found


@needs_products
def test_the_fused_unroll_takes_them() -> None:
    """Gradients of an EAGLE-3 draft, accumulated in main_grad, with either."""
    from tests.gpu import test_te_draft as drafts

    found = {}
    for impl in ("apex", "torch"):
        kernels.choose(impl)  # type: ignore[arg-type]
        called: list[int] = []
        if impl == "apex":
            module: Any = importlib.import_module(kernels.WEIGHT_GRADIENTS)

            class Counted:
                @staticmethod
                def wgrad_gemm_accum_fp32(*args: Any, module: Any = module, called: list[int] = called) -> None:
                    called.append(1)
                    module.wgrad_gemm_accum_fp32(*args)

            products.add_by(Counted)
        draft = drafts.made(drafts.DRAFTS["eagle3"], False)
        draft.paths = drafts.build_draft(
            draft.config, draft.vocab, drafts.distributed.initialize(), torch.bfloat16
        ).paths
        assert draft.paths.on("draft_fused")
        for p in draft.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        drafts.outcome(draft)
        assert bool(called) == (impl == "apex")
        found[impl] = {n: p.main_grad for n, p in draft.named_parameters() if p.main_grad.any()}
    assert found["apex"].keys() == found["torch"].keys() and found["apex"]
    for n, wanted in found["torch"].items():
        assert distance(found["apex"][n], wanted) < 1e-3, n
