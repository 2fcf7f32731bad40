"""vLLM loads what is exported, says the same as this package, and accepts as many draft tokens.

Drafts: EAGLE-3 (also two layers, other captures, the whole vocabulary, EAGLE-3.1, the format of speculators), EAGLE-1,
Medusa and DFlash (whole block, causal, causal under a window) for a tiny base; the first of each for SmolLM2; draft and
base in fp8. Everything in one process of vLLM: start-up is what costs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.config import ObjectiveConfig, QuantConfig
from megatron_spec.drafts.contract import Draft
from megatron_spec.export import speculators
from megatron_spec.export.base import export_base
from megatron_spec.export.draft import export_draft
from megatron_spec.features.online import OnlineFeatures
from megatron_spec.quantization.calibrate import calibrate
from tests.engine.conftest import ROOT, engine_python, run_worker
from tests.engine.drafts import K, Setting, answered, base_logprobs, first_logits, ours, setting, train, train_on
from tests.unit_tests.base.tiny import save_tiny
from tools import get_smollm2

pytestmark = pytest.mark.engine

TOKENS = 40
BLOCK: dict[str, Any] = {"mask_token_id": 319, "capture_layer_ids": [0, 3, 6]}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3-two-layers": ("eagle3", {"num_hidden_layers": 2, "capture_layer_ids": [0, 3, 6]}),
    "eagle3-whole-vocabulary": ("eagle3", {"draft_vocab_size": 320}),
    "eagle3.1": ("eagle3.1", {"fc_norm": True, "norm_output": True}),
    "eagle3-speculators": ("eagle3", {}),
    "eagle1": ("eagle1", {}),
    "medusa": ("medusa", {}),
    "dflash": ("dflash", BLOCK),
    "dflash-causal": ("dflash", {**BLOCK, "causal": True}),
    "dflash-window": ("dflash", {**BLOCK, "causal": True, "sliding_window": 7}),
}
METHODS = {"eagle1": "eagle", "medusa": "medusa", "dflash": "dflash", "dspark": "dspark"}
SMOLLM2 = ("eagle3", "eagle1", "medusa")


def tiny_base(folder: Path) -> Path:
    save_tiny(
        folder, hidden_size=128, intermediate_size=192, num_hidden_layers=8, head_dim=32, vocab_size=320,
        max_position_embeddings=256, initializer_range=0.08, eos_token_id=1,
    )  # fmt: skip
    return folder


def prompts_of(vocab: int) -> list[list[int]]:
    return torch.randint(2, vocab, (8, 8), generator=torch.Generator().manual_seed(1)).tolist()


class Case:
    """One draft for one base: what this package finds, and the exported folder."""

    def __init__(
        self, name: str, base: Path, made: Setting, kind: str, out: Path, steps: int, **overrides: Any
    ) -> None:
        draft = train(made, kind, steps, 3e-3 if made.base.config.hidden_size < 256 else 1e-3, **overrides)
        speculate = name == "eagle3-speculators"
        export_draft(
            draft, made.reference, out, None, made.world, dtype="float32", ends=made.base, **(
                {"export_embeddings": True} if speculate else {}
            ),
        )  # fmt: skip
        if speculate:
            out = out.with_name(f"{out.name}-converted")
            speculators.convert(out.with_name(name), base, out, K)
        self.tokens, self.acceptance = ours(made, draft, TOKENS)
        self.draft_logits = first_logits(made, draft) if kind not in ("medusa", "dspark") else None
        self.answers, self.logprobs = made.answers, base_logprobs(made)
        method = METHODS.get(kind, "eagle3")
        self.request = {
            "name": name, "base": str(base), "draft": str(out), "method": method, "k": K, "prompts": made.prompts,
            "tokens": TOKENS, "dtype": "float32", "parallel": kind == "p-eagle",
        }  # fmt: skip


def fp8_cases(folder: Path, base: Path) -> dict[str, Case]:
    """SmolLM2 with drafts trained under quantisation, exported as fp8, and run by vLLM in bfloat16."""
    found = {}
    objective, alone, both = ObjectiveConfig(ttt_steps=K), QuantConfig(base="none"), QuantConfig()
    made = setting(base, prompts_of(300), TOKENS, "eagle3")
    for name, policy, served in (("fp8 draft", alone, base), ("fp8 both", both, folder / "fp8 both" / "base")):
        source = OnlineFeatures(made.base)
        if policy is both:  # the base first: the draft learns what the quantised base says
            base_only = QuantConfig(draft="none")
            calibrate(made.base, draft, source, [[made.batch]], objective, base_only, made.world)  # noqa: F821
            export_base(made.base, made.reference, served, both, made.world)
            made = answered(made.world, made.reference, made.base, made.prompts, TOKENS)
        draft = train(made, "eagle3", 20, 1e-3)
        calibrate(made.base, draft, source, [[made.batch]], objective, alone, made.world)
        train_on(made, draft, 10, 3e-4)
        out = folder / name / "draft"
        export_draft(draft, made.reference, out, policy, made.world, ends=made.base)
        found[name] = fp8_case(name, made, draft, served, out)
    return found


def fp8_case(name: str, made: Setting, draft: Draft, base: Path, folder: Path) -> Case:
    """What this package finds for the models in memory, and what vLLM is to load."""
    case = Case.__new__(Case)
    case.answers, case.draft_logits, case.logprobs = made.answers, first_logits(made, draft), base_logprobs(made)
    case.tokens, case.acceptance = ours(made, draft, TOKENS)
    case.request = {
        "name": name, "base": str(base), "draft": str(folder), "method": "eagle3", "k": K, "prompts": made.prompts,
        "tokens": TOKENS, "dtype": "bfloat16", "parallel": False,
    }  # fmt: skip
    return case


def cases(folder: Path, base: Path, kinds: dict[str, tuple[str, dict[str, Any]]], steps: int) -> dict[str, Case]:
    found = {}
    for name, (kind, overrides) in kinds.items():
        made = setting(base, prompts_of(300), TOKENS, kind, overrides.get("capture_layer_ids"))
        found[name] = Case(name, base, made, kind, folder / name, steps, **overrides)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Case], dict[str, Any]]:
    """(cases of this package, what vLLM says)."""
    engine_python("vllm")
    folder = tmp_path_factory.mktemp("engine")
    known = cases(folder / "tiny", tiny_base(folder / "base"), TINY, steps=150)
    smollm2 = ROOT / get_smollm2.DEFAULT_OUTPUT
    get_smollm2.get_model(smollm2)
    known |= fp8_cases(folder, smollm2)
    named = {f"smollm2-{kind}": (kind, {}) for kind in SMOLLM2}
    known |= cases(folder, smollm2, named, steps=20)
    requests = [case.request for case in known.values()]
    (folder / "cases.json").write_text(json.dumps(requests))
    run_worker("vllm", "vllm_worker.py", str(folder / "cases.json"), str(folder / "results.json"))
    return known, json.loads((folder / "results.json").read_text())


def logprob_gap(case: Case, found: dict[str, Any]) -> float:
    """Largest difference of the log-probabilities of the base's first tokens (those that the engine reports)."""
    pairs = zip(case.logprobs, found["logprobs"], strict=True)
    return max(abs(float(ours[int(token)]) - value) for ours, theirs in pairs for token, value in theirs.items())


@pytest.mark.parametrize("name", [*TINY, *(f"smollm2-{kind}" for kind in SMOLLM2)])
def test_engine_agrees(run: tuple[dict[str, Case], dict[str, Any]], name: str) -> None:
    known, results = run
    case, found = known[name], results[name]
    assert "error" not in found, found
    assert found["tokens"] == case.answers == case.tokens  # greedy text is that of the base alone
    assert logprob_gap(case, found) < 2e-3
    if case.draft_logits is not None:
        engine = torch.tensor(found["draft_logits"])
        said = case.draft_logits.isfinite()
        assert torch.equal(engine.isfinite(), said)
        gap = (engine[said] - case.draft_logits[said]).abs().max()
        assert gap < 2e-3 * case.draft_logits[said].abs().max(), gap
    counters, stats = found["counters"], case.acceptance
    length = 1 + counters["accepted_tokens"] / counters["drafts"]
    assert stats.acceptance_length is not None and stats.acceptance_length > 1.2, stats
    # Both count the last step of an answer differently: vLLM drafts beyond max_tokens.
    assert math.isclose(length, stats.acceptance_length, rel_tol=0.05), (length, stats)


@pytest.mark.parametrize("name", ["fp8 draft", "fp8 both"])
def test_fp8_loads(run: tuple[dict[str, Case], dict[str, Any]], name: str) -> None:
    """Rounding in bfloat16 lets texts part from those that the draft has learned by heart, so figures are compared."""
    known, results = run
    case, found = known[name], results[name]
    assert "error" not in found, found
    assert logprob_gap(case, found) < 1.5  # of a base that computes in bfloat16
    assert case.draft_logits is not None
    same = [a[0] == b[0] for a, b in zip(case.answers, found["tokens"], strict=True)]  # the draft reads that token
    assert sum(same) >= 3, same
    mine, engine = case.draft_logits[same], torch.tensor(found["draft_logits"])[same]
    said = mine.isfinite()
    assert torch.equal(engine.isfinite(), said)
    gap = float((engine[said] - mine[said]).norm() / mine[said].norm())
    assert gap < 0.15, gap  # another head or scale: above 1
    stats, length = case.acceptance, 1 + found["counters"]["accepted_tokens"] / found["counters"]["drafts"]
    assert stats.acceptance_length is not None and stats.acceptance_length > 1.3, stats
    assert length - 1 > 0.25 * (stats.acceptance_length - 1), (length, stats.acceptance_length)
