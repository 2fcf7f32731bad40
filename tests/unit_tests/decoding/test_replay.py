"""Replayed steps give the tokens of eager steps: tests on a CPU what CUDA graphs need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megatron_spec.base.direct import DirectForward
from megatron_spec.config import DecodeConfig
from megatron_spec.config.machine import Machine
from megatron_spec.decoding.costs import NoCosts
from megatron_spec.decoding.drafters import Context, Drafter, Proposal
from megatron_spec.decoding.engine import decode
from megatron_spec.decoding.replay import Replays, key_step, mapped, padded_rows, recorder_for
from megatron_spec.decoding.session import DecodeSession
from megatron_spec.decoding.verify import Drafted
from megatron_spec.planning.paths import Paths, Setting
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.cpu_recorder import CpuRecorder

WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "one row": {"batch_size": 1},
    "sampled": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "rejection": {"temperature": 0.8, "use_rejection_sampling": True},
    "typical": {"temperature": 0.8, "typical_acceptance": True},
    "tree": {"use_dynamic_tree": True, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 6},
    "relaxed": {
        "use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 3, "relaxed_delta": 1.0,
        "begin_thinking_phase_token": 5, "end_thinking_phase_token": 9,
    },
}  # fmt: skip


LONE = tiny_models.CONFIG.replace(batch_size=1)


@pytest.mark.parametrize("way", WAYS)
def test_replayed_steps_give_the_same_tokens(tiny: Any, way: str) -> None:
    config = tiny_models.CONFIG.replace(**WAYS[way])
    stops = {tiny.answers[3][9]}
    for draft in (tiny.draft, None):
        if draft is None and way in ("tree", "rejection", "typical", "relaxed"):
            continue
        recorder = CpuRecorder()
        plain = decode(tiny.base, tiny.prompts, config, stops, draft=draft)
        replayed = decode(tiny.base, tiny.prompts, config, stops, draft=draft, session=DecodeSession(recorder))
        assert [g.tokens for g in replayed] == [g.tokens for g in plain]
        assert [g.accepted_lengths for g in replayed] == [g.accepted_lengths for g in plain]
        assert recorder.recorded and recorder.replayed > recorder.recorded


@pytest.mark.parametrize("way", ["chain", "one row", "sampled", "tree", "alone", "alone, sampled"])
def test_decode_kernels_give_the_same_tokens(tiny: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their plain twins, in base, draft and sampling, eager and replayed."""
    base, draft = tiny.base, tiny.draft
    config = tiny_models.CONFIG.replace(**WAYS.get(way, {"temperature": 0.8} if "sampled" in way else {}))
    drafter = None if "alone" in way else draft
    wanted = decode(base, tiny.prompts, config, set(), draft=drafter)
    paths = Paths(Setting(Machine(kernels="plain"), base=base.config))
    direct = DirectForward(base.config, base.direct.layers, base.direct.final_norm, base.direct.tp, paths)
    monkeypatch.setattr(base, "direct", direct)
    monkeypatch.setattr(base, "paths", paths)
    monkeypatch.setattr(draft, "paths", Paths(Setting(Machine(kernels="plain"), draft=draft.config)))
    assert direct.decode is not None and draft.paths.on("draft_decode") and paths.on("sample_kernel")
    recorder = CpuRecorder()
    for session in (None, DecodeSession(recorder)):
        found = decode(base, tiny.prompts, config, set(), draft=drafter, session=session)
        assert [(g.tokens, g.accepted_lengths) for g in found] == [(g.tokens, g.accepted_lengths) for g in wanted]
    assert recorder.replayed > recorder.recorded
    if "alone" in way:
        assert recorder.recorded <= 4  # one for each batch size


def test_a_verification_reads_the_head_once(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product for all rows of a step, by the kernel that gives a row the same bits in a step of one."""
    base = tiny.base
    paths = Paths(Setting(Machine(kernels="plain"), base=base.config))
    direct = DirectForward(base.config, base.direct.layers, base.direct.final_norm, base.direct.tp, paths)
    monkeypatch.setattr(base, "direct", direct)
    assert direct.decode is not None
    by_kernel, by_torch, head, logits = [], [], direct.decode.head, base.logits
    monkeypatch.setattr(direct.decode, "head", lambda x, w: by_kernel.append(len(x)) or head(x, w))
    monkeypatch.setattr(base, "logits", lambda x: by_torch.append(x.shape[:2].numel()) or logits(x))
    for config, draft, most in ((LONE, tiny.draft, 4), (LONE, None, 1)):
        by_kernel.clear(), by_torch.clear()
        found = decode(base, tiny.prompts[:2], config, set(), draft=draft)
        assert [g.tokens for g in found] == tiny.answers[:2]
        assert len(by_kernel) == sum(g.num_base_forwards - 1 for g in found) and max(by_kernel) == most
        assert by_torch == [1, 1] or draft is not None  # prefills; a draft with the base's head calls it, too
    by_kernel.clear()
    decode(base, tiny.prompts[:4], tiny_models.CONFIG.replace(batch_size=4), set(), draft=tiny.draft)
    assert (
        max(by_kernel, default=0) <= 12
    )  # four sequences are more than the kernels take, those left at the end are not


class Order(NoCosts):
    """The order of the phases."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


def test_a_step_starts_before_the_previous_one_is_read(tiny: Any) -> None:
    """With a lookup too: the device finds the match. Phases are one by one where they are timed."""
    order: dict[str, list[str]] = {}
    for name, threshold, apart in (("chain", None, False), ("lookup", 2, False), ("timed", None, True)):
        costs = Order()
        costs.apart = apart  # type: ignore[misc]
        config = tiny_models.CONFIG.replace(sa_threshold=threshold)
        session = DecodeSession(CpuRecorder())
        found = decode(tiny.base, tiny.prompts[:1], config, set(), draft=tiny.draft, costs=costs, session=session)
        assert [g.tokens for g in found] == tiny.answers[:1]
        order[name] = costs.names
    assert order["chain"][:5] == ["prefill", "cycle", "read", "cycle", "read"]
    assert order["lookup"] == order["chain"]
    assert order["timed"][:6] == ["prefill", "read", "draft", "base", "observe", "read"]


class Last(Drafter):
    """Proposes the last token again; reads values on the host, so it is never replayed."""

    def prepare_draft_tokens(self, context: Context, count: int) -> Proposal:
        assert len(context.lengths) == context.tokens_BL.shape[0]
        last = [context.tokens_BL[i, n - 1] for i, n in enumerate(context.lengths)]
        return Proposal(torch.stack(last)[:, None].expand(-1, count).contiguous())


@pytest.mark.parametrize("kind", ["user", "NGram", "DraftTarget", "medusa", "medusa tree", "medusa choices"])
def test_every_other_drafter(tiny: Any, kind: str) -> None:
    from megatron_spec.commands.convert import new_draft
    from megatron_spec.config import presets
    from megatron_spec.drafts.vocab import DraftVocab

    draft: Any = {"user": Last(), "DraftTarget": tiny.base}.get(kind)
    options: dict[str, Any] = {"decoding_type": kind} if kind in ("NGram", "DraftTarget") else {}
    if kind.startswith("medusa"):
        heads = presets.medusa_config(tiny.base.config, num_heads=3)
        draft = new_draft(tiny.base, heads, DraftVocab.full(tiny_models.VOCAB), tiny.base.world, torch.float32, seed=1)
        options = {
            "medusa tree": {"use_dynamic_tree": True},
            "medusa choices": {"medusa_choices": "[[0], [1], [0, 0]]"},
        }.get(kind, {})
    if kind == "DraftTarget":
        options["speculative_model"] = "folder"
    config, recorder = tiny_models.CONFIG.replace(**options), CpuRecorder()
    plain = decode(tiny.base, tiny.prompts, config, set(), draft=draft)
    replayed = decode(tiny.base, tiny.prompts, config, set(), draft=draft, session=DecodeSession(recorder))
    assert [g.tokens for g in plain] == tiny.answers == [g.tokens for g in replayed]
    assert [g.accepted_lengths for g in replayed] == [g.accepted_lengths for g in plain]
    assert recorder.replayed > recorder.recorded > 0


def test_unrecordable_steps_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    replays, recorder = Replays(CpuRecorder()), torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        recorder.add_(float(x.sum()))  # the host reads a value
        return recorder * 2

    results = [replays.run("step", step, torch.full((2,), float(i))).tolist() for i in range(6)]
    assert results == [[2.0 * 2 * sum(range(i + 1))] * 3 for i in range(6)]
    assert caplog.text.count("runs without a CUDA graph") == 1


def test_the_tape_fails_where_a_graph_would() -> None:
    """A value from the host stays constant in replays, so the other tests would fail."""
    replays, count = Replays(CpuRecorder()), [0]

    def step() -> torch.Tensor:
        count[0] += 1
        return torch.ones(2) * count[0]

    assert [replays.run("step", step)[0].item() for _ in range(5)] == [1, 2, 3, 3, 3]


def test_few_shapes_occur() -> None:
    for most in (1, 64, 65, 500, 4096, 131072):
        assert key_step(most) >= 64 and -(-most // key_step(most)) <= 8
    assert [padded_rows(n, 12) for n in (1, 2, 3, 5, 9, 12)] == [1, 2, 4, 8, 12, 12]
    assert [padded_rows(n, 999) for n in (33, 65, 96, 97, 193, 400, 700, 800)] == [64, 96, 96, 128, 256, 512, 768, 999]


def test_mapped_reaches_every_tensor() -> None:
    tensor = torch.ones(2, 1)
    found = mapped((Drafted(tensor, tensor.bool(), None, 3), [tensor], "x"), lambda t: t[:1])
    assert found[0].tokens_BN.shape == (1, 1) and found[0].depth == 3 and found[1][0].shape == (1, 1)


def test_no_graphs_without_a_gpu(tiny: Any) -> None:
    if not torch.cuda.is_available():
        assert recorder_for(tiny.base) is None and DecodeConfig().cuda_graphs
