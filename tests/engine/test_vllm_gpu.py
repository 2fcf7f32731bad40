"""vLLM on a GPU (MEGATRON_SPEC_ENGINES/vllm, 0.25 or later) accepts drafts of whole blocks as this package does.

In bfloat16, in which its attention lets a slot see the slots after it. vLLM's CPU build runs DFlash (test_vllm.py), but
neither DSpark nor P-EAGLE: both need Triton, which that build lacks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.engine.conftest import engine_python, run_worker
from tests.engine.test_vllm import BLOCK, Case, cases, tiny_base

pytestmark = [
    pytest.mark.engine,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM on a GPU"),
]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", BLOCK),
    "dflash-causal": ("dflash", {**BLOCK, "causal": True}),
    "dspark": ("dspark", {**BLOCK, "markov_rank": 16}),
    "p-eagle": ("p-eagle", {**BLOCK, "num_hidden_layers": 2}),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Case], dict[str, Any]]:
    """(cases of this package, what vLLM says)."""
    engine_python("vllm")
    folder = tmp_path_factory.mktemp("engine")
    known = cases(folder / "tiny", tiny_base(folder / "base"), KINDS, steps=150)
    requests = [case.request | {"dtype": "bfloat16"} for case in known.values()]
    (folder / "cases.json").write_text(json.dumps(requests))
    run_worker("vllm", "vllm_worker.py", str(folder / "cases.json"), str(folder / "results.json"))
    return known, json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", KINDS)
def test_engine_accepts_as_we_do(run: tuple[dict[str, Case], dict[str, Any]], name: str) -> None:
    """Rounding in bfloat16 lets texts part from those that the draft has learned by heart, so figures are compared."""
    known, results = run
    case, found = known[name], results[name]
    assert "error" not in found, found
    same = [a[0] == b[0] for a, b in zip(case.answers, found["tokens"], strict=True)]  # the anchor of the first block
    assert sum(same) >= 6, same
    if case.draft_logits is not None:
        mine, engine = case.draft_logits[same], torch.tensor(found["draft_logits"])[same]
        said = mine.isfinite()  # P-EAGLE has a draft vocabulary
        assert torch.equal(engine.isfinite(), said)
        assert float((engine[said] - mine[said]).norm() / mine[said].norm()) < 0.1  # rounding; float32 agrees to 1e-6
    stats, length = case.acceptance, 1 + found["counters"]["accepted_tokens"] / found["counters"]["drafts"]
    assert stats.acceptance_length is not None and stats.acceptance_length > 1.5, stats
    assert length - 1 > 0.6 * (stats.acceptance_length - 1), (length, stats.acceptance_length)
