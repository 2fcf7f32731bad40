"""Adam of Transformer Engine, apex and torch: chosen, said, and exchanged in the middle of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.checkpoint import sharded
from megatron_spec.checkpoint.spec import BaseLink, CheckpointSpec
from megatron_spec.config import BaseConfig, OptimizerImpl, TrainConfig, UserError, presets
from megatron_spec.config.machine import H100, Machine
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from megatron_spec.ops import products
from megatron_spec.planning.paths import Paths, Setting
from megatron_spec.runtime import distributed, optional, platform
from megatron_spec.training import kernels
from megatron_spec.training.optimizer import build_optimizer, finish_gradients, wrap_ddp
from tests.unit_tests.training.fused_adams import MODULES, installed

IMPLS: tuple[OptimizerImpl, ...] = ("transformer_engine", "apex", "torch")
BASE = BaseConfig(
    family="llama", hidden_size=8, intermediate_size=16, num_layers=8, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, vocab_size=24, max_position_embeddings=64,
)  # fmt: skip
CONFIG = presets.eagle_config(BASE, "eagle3", {"capture_layer_ids": [1, 3, 4], "draft_vocab_size": 24})


@pytest.fixture(autouse=True)
def packages() -> Iterator[None]:
    with installed():
        yield


def gradient(p: torch.Tensor, step: int, number: int) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + number))


class Run:
    """A draft with megatron-core's DDP and optimizer, and gradients that depend on the step alone."""

    def __init__(self, impl: OptimizerImpl, **train: Any) -> None:
        self.world = distributed.initialize()
        settings = {"train_iters": 8, "lr": 3e-2, "weight_decay": 0.1, "lr_decay_style": "constant", **train}
        self.train = TrainConfig(optimizer_impl=impl, **settings)
        self.dtype = torch.bfloat16 if self.train.bf16 else torch.float32
        self.vocab = DraftVocab.full(24)
        self.draft = build_draft(CONFIG, self.vocab, self.world, self.dtype)
        with torch.no_grad():
            for i, p in enumerate(self.draft.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        self.ddp = wrap_ddp(self.draft, self.world, self.train)
        self.optimizer, self.scheduler = build_optimizer(self.ddp, self.world, self.train)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            for i, p in enumerate(self.draft.parameters()):
                p.main_grad.copy_(gradient(p, step, i))
            finish_gradients(self.ddp, self.world, torch.tensor(1.0, device=self.world.device))
            self.optimizer.step()
            self.scheduler.step(increment=1)

    def save(self, folder: Path) -> Path:
        spec = CheckpointSpec(BaseLink("base", "hf", "0" * 64, BASE), CONFIG)
        return sharded.save(folder, spec, self.draft, self.vocab, self.world, optimizer=self.optimizer)

    def load(self, folder: Path) -> None:
        sharded.load(folder, self.draft, self.world, optimizer=self.optimizer)

    def weights(self) -> torch.Tensor:
        """All master weights; those of the model would hide differences behind rounding."""
        found = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.cat([p.detach().float().flatten() for p in found])


def continued(before: OptimizerImpl, after: OptimizerImpl, folder: Path, **train: Any) -> torch.Tensor:
    """Weights after three steps of one implementation and three of another, across a checkpoint."""
    run = Run(before, **train)
    run.steps(0, 3)
    saved = run.save(folder)
    run = Run(after, **train)
    run.load(saved)
    run.steps(3, 6)
    return run.weights()


@pytest.mark.parametrize("train", [{}, {"bf16": True}, {"bf16": True, "use_distributed_optimizer": True}])
@pytest.mark.parametrize("before", IMPLS)
@pytest.mark.parametrize("after", IMPLS)
def test_a_run_continues_with_another(
    before: OptimizerImpl, after: OptimizerImpl, train: dict[str, Any], tmp_path: Path
) -> None:
    platform.activate()
    whole = Run("torch", **train)
    start = whole.weights()
    whole.steps(0, 6)
    found = continued(before, after, tmp_path, **train)
    moved = (whole.weights() - start).norm()
    assert float((found - whole.weights()).norm() / moved) < 1e-4
    other = Run(after, **train)
    other.steps(3, 6)  # its bias corrections begin anew
    assert float((other.weights() - whole.weights()).norm() / moved) > 1e-2


def test_a_second_exchange_and_none(tmp_path: Path) -> None:
    """The settings of one implementation do not stay in the groups of the next."""
    run = Run("torch", bf16=True)
    run.steps(0, 1)
    for i, impl in enumerate(("apex", "torch", "transformer_engine", "torch")):
        saved = run.save(tmp_path / str(i))
        run = Run(impl, bf16=True)  # type: ignore[arg-type]
        expected = set(run.optimizer.param_groups[0]) | ({"step"} if impl != "torch" else set())
        run.load(saved)
        assert set(run.optimizer.param_groups[0]) == expected
        run.steps(i + 1, i + 2)
    state = next(iter(run.optimizer.chained_optimizers[0].optimizer.state.values()))
    assert float(state["step"]) == 5


@pytest.mark.parametrize("impl", IMPLS)
def test_it_is_said(impl: OptimizerImpl, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: H100)
    caplog.set_level(logging.INFO)
    norm: Any = MODULES["amp_C"].multi_tensor_l2norm
    monkeypatch.setattr(norm, "__module__", "amp_C" if impl == "apex" else "transformer_engine_torch")
    kernels.choose(impl)
    title = kernels.TITLES[impl]
    own = "apex" if impl == "apex" else "torch"
    assert kernels.described() == f"Adam of {title}, gradient norm of {title}, weight gradients of {own}"
    one_pass = Paths(Setting(H100, "bfloat16"))
    assert kernels.described(one_pass).startswith(f"Adam of {title} in the first step, in one pass")


def test_auto_undoes_an_earlier_choice() -> None:
    """A second run of a process does not keep the kernels of the first."""
    kernels.choose("auto")
    names = [(module, name) for module, name, _ in kernels.assignments("torch")]
    before = [getattr(*each) for each in names]
    kernels.choose("apex")
    assert [getattr(*each) for each in names] != before
    kernels.choose("transformer_engine")
    kernels.choose("auto")
    assert all(getattr(*each) is value for each, value in zip(names, before, strict=True))


def test_the_order_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "unusable", {"transformer_engine": "nobody needs it", "apex": "there is no GPU"})
    caplog.set_level(logging.INFO, logger="megatron_spec")  # scripts that ran in this process set it
    Run("auto")
    order = "(the first of Transformer Engine (not loaded: nobody needs it), apex (there is no GPU) and torch)"
    assert [m for m in caplog.messages if m.startswith("optimizer: Adam of ")][-1].endswith(order)
    monkeypatch.setattr(optional, "unusable", {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "apex" else object())
    assert kernels.order() == "the first of Transformer Engine, apex (not installed) and torch"
    Run("torch")
    assert [m for m in caplog.messages if m.startswith("optimizer: Adam of ")][-1].endswith(" (--optimizer-impl)")


def test_weight_gradients_of_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    module = MODULES["fused_weight_gradient_mlp_cuda"]
    inner = module.wgrad_gemm_accum_fp32
    monkeypatch.setattr(module, "wgrad_gemm_accum_fp32", lambda *a: called.append(1) or inner(*a))
    monkeypatch.setattr(platform, "machine", lambda: H100)
    kernels.choose("apex")
    x, d = (torch.randn(5, n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (8, 6))
    target, wide, expected = torch.ones(6, 8), torch.ones(6, 16), 1 + d.float().t() @ x.float()
    products.add_product(target, d.t(), x)
    torch.testing.assert_close(target, expected, rtol=1e-2, atol=1e-2)
    assert called == [1]
    products.add_product(wide[:, 8:], d.t(), x)  # strided: torch
    products.add_product(torch.zeros(6, 8), d.float().t(), x.float())  # fp32: torch
    torch.testing.assert_close(wide[:, 8:], expected, rtol=1e-2, atol=2e-2)
    assert called == [1] and bool((wide[:, :8] == 1).all())
    monkeypatch.setitem(__import__("sys").modules, "fused_weight_gradient_mlp_cuda", None)
    kernels.choose("apex")
    assert products.adder() == "torch"


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.check_kernels("auto")
    kernels.check_kernels("torch")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--optimizer-impl apex: apex is not installed .docs/install.md#apex"):
        kernels.check_kernels("apex")
    with pytest.raises(UserError, match="Transformer Engine is not installed"):
        kernels.check_kernels("transformer_engine")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(platform, "machine", Machine)
    with pytest.raises(UserError, match="needs a GPU"):
        kernels.check_kernels("apex")
    monkeypatch.setitem(optional.unusable, "apex", "it was built for another torch")
    with pytest.raises(UserError, match="cannot be used here: it was built for another torch"):
        kernels.check_kernels("apex")
