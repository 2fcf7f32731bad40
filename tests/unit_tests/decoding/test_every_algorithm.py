"""Drafts of every algorithm decode as trained: the text is the base's, each proposal equals recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_spec.batch import Batch, Features
from megatron_spec.config import DraftConfig, ObjectiveConfig, UserError, presets
from megatron_spec.decoding.drafters import build_drafter
from megatron_spec.decoding.engine import decode
from megatron_spec.drafts import build_draft
from megatron_spec.drafts.vocab import DraftVocab
from tests.unit_tests.decoding import tiny_models
from tests.unit_tests.decoding.test_eagle import Recorder
from tests.unit_tests.decoding.tiny_models import CONFIG, VOCAB

LENGTH = CONFIG.max_draft_len
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {
        "block_size": LENGTH + 1,
        "sliding_window": 8,
        "causal": True,
        "num_hidden_layers": 2,
        "full_attention_layers": (1,),
    },
    "dspark": {"block_size": LENGTH, "markov_rank": 8, "markov_head_type": "rnn", "causal": True},
}
KINDS = ("eagle1", "eagle3.1", "p-eagle", "eagle-mtp", "medusa", *BLOCKS)
CAPTURING = ("eagle3.1", "p-eagle", *BLOCKS)
STAGED = ("p-eagle", *BLOCKS)
MASK = VOCAB - 1
LAYOUTS = {"tp2": {}, "tp2pp2": {"pipeline_model_parallel_size": 2}}


def config_of(kind: str, base: Any) -> DraftConfig:
    if kind == "medusa":
        return presets.medusa_config(base.config, num_heads=LENGTH)
    if kind in BLOCKS:
        fixed = {"mask_token_id": MASK, "capture_layer_ids": tiny_models.CAPTURES}
        return presets.block_config(base.config, kind, fixed | BLOCKS[kind])
    overrides: dict[str, Any] = {"capture_layer_ids": tiny_models.CAPTURES} if kind in CAPTURING else {}
    if kind == "p-eagle":
        overrides["mask_token_id"] = MASK
    return presets.eagle_config(base.config, kind, overrides)


def new_draft(base: Any, kind: str) -> Any:
    draft = build_draft(config_of(kind, base), DraftVocab.full(base.config.vocab_size), base.world, torch.float32)
    draft.initialize(base, None, seed=3)
    return draft


def captures_of(kind: str) -> tuple[int, ...]:
    return tiny_models.CAPTURES if kind in CAPTURING else ()


def text_features(base: Any, text: list[int], prompt: int, end: int | None = None) -> Features:
    """Features of one text, supervised from `prompt` to `end`."""
    from megatron_spec.base.schedule import run_base

    tokens_BS = torch.tensor([text])
    turns_BS = (torch.arange(len(text)) >= prompt).int()[None]
    turns_BS[:, end if end is not None else len(text) :] = 0
    batch = Batch(tokens_BS, torch.arange(len(text))[None], turns_BS, torch.zeros_like(turns_BS))
    [(captures, state)] = run_base(base, [batch])
    return Features(batch, captures, state)


@pytest.fixture(scope="module")
def trained(tiny: Any) -> dict[str, Any]:
    """A draft of every kind, overfitted on the answer to the first prompt."""
    drafts = {}
    more = [g.tokens for g in decode(tiny.base, tiny.prompts[:2], CONFIG.replace(max_new_tokens=30), set())]
    texts = [text_features(tiny.base, p + m, len(p)) for p, m in zip(tiny.prompts, more, strict=False)]
    for kind in KINDS:
        draft = drafts[kind] = new_draft(tiny.base, kind)
        noise = {"feature_noise": 0.0, "token_weight": 1.0} if kind == "eagle1" else {}
        keep = {"row_keep": 1.0} if kind == "p-eagle" else {}  # every row is learned
        goal = ObjectiveConfig(ttt_steps=LENGTH, loss="hard_ce", **noise, **keep)
        goal = presets.objective_for(draft.config, goal)
        optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
        learned = texts if kind in BLOCKS else texts[:1]
        for _ in range(60):  # all are right after 46
            optimizer.zero_grad()
            found = [draft(f, tiny.base, goal) for f in learned]
            for losses in found:
                (losses.total / losses.rows_T[0]).backward()
            optimizer.step()
        assert all(float((x.correct_T / x.rows_T).min()) == 1.0 for x in found), kind
    return drafts


class OneRead(TorchDispatchMode):
    """Refuses products that read a weight several times."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default):  # whole in inference mode
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func == torch.ops.aten.bmm.default:
            assert args[1].shape[0] == 1 or args[1].stride(0) != 0, [x.shape for x in args]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [None, "eagle3.1", "p-eagle", "medusa", *BLOCKS])
def test_every_product_reads_its_weight_once(tiny: Any, kind: str | None, batch: int) -> None:
    draft = None if kind is None else new_draft(tiny.base, kind)
    config = CONFIG.replace(max_new_tokens=12, batch_size=batch)
    tiny.base.capture(captures_of(kind or ""))
    with OneRead():
        found = decode(tiny.base, tiny.prompts[:batch], config, set(), draft=draft)
    assert [len(g.tokens) for g in found] == [12] * batch


@torch.no_grad()
def block_from_scratch(base: Any, draft: Any, text: list[int]) -> tuple[list[int], list[float]]:
    """(draft tokens, confidences) of the block of the last token, by training's own forward on the text so far."""
    from megatron_spec.drafts.anchors import BlockPlan

    a = len(text) - 1
    f = text_features(base, [*text, 0], a)  # the only place where a token of the same turn follows
    plan = BlockPlan.of(f.batch, draft.config, 1)
    states = draft.states(f, plan, base)[draft.config.first_slot :]
    if draft.config.algorithm == "dflash":
        return draft.logits(states[None], base)[0].argmax(-1).tolist(), []
    known, m, here = [text[-1]], [], [torch.zeros(1, dtype=torch.long)]
    for k in range(LENGTH):
        m.append(draft.markov(torch.tensor(known[-1:])))
        latent = draft.markov_head.steps(m, states[: k + 1].split(1), here * (k + 1), 1)
        logits = draft.logits(states[None, k : k + 1], base)[0] + draft.markov_logits(latent[-1:])
        known.append(int(logits.argmax()))
    sure = [float(x) for x in draft.confidence(states, torch.cat(m)).sigmoid()]
    return known[1:], sure


@torch.no_grad()
def drafts_from_scratch(base: Any, draft: Any, text: list[int]) -> list[int]:
    """All draft tokens of the last row, by training's own forward, rerun after each appended token."""
    if draft.config.algorithm in BLOCKS:
        return block_from_scratch(base, draft, text)[0]
    if hasattr(draft, "heads"):
        f = text_features(base, text, 0)
        return [int(draft.logits(f.state_SBH[-2:-1], i, base).argmax()) for i in range(LENGTH)]
    from megatron_spec.drafts.contract import shift
    from megatron_spec.ops.ttt_attention import TrainingTimeTest
    from megatron_spec.ops.visibility import Visibility

    f = text_features(base, text[:-1], 0)
    drafted: list[int] = []
    attention = TrainingTimeTest(Visibility.of(f.batch))
    hidden: Tensor = draft.start(f.captures_SBC, f.state_SBH)
    S = len(text) - 1
    for k in range(LENGTH):
        tokens = torch.tensor([text + drafted + [0] * LENGTH])
        embedding = base.embed(shift(tokens, 1 + k, 1)[:, :S])
        if k and hasattr(draft, "mask_hidden"):  # it reads neither its own tokens nor its own states
            embedding = base.embed(torch.full((1, S), MASK))
            hidden = (draft.mask_hidden.flatten() @ draft.fc.weight.t()).expand_as(hidden)
        hidden, normed = draft.layer_step(hidden, embedding, f.batch.positions_BS + k, attention)
        drafted.append(int(draft.logits(normed, base)[-1, 0].argmax()))
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_the_base_and_drafts_equal_training(tiny: Any, trained: dict[str, Any], kind: str) -> None:
    recorder = Recorder(build_drafter(trained[kind], tiny.base))
    found = decode(tiny.base, tiny.prompts, CONFIG, set(), draft=recorder)
    assert [g.tokens for g in found] == tiny.answers
    assert set(found[0].accepted_lengths[:-1]) == {LENGTH}  # every drafted token of the learned answer
    assert any(a < LENGTH for g in found[1:] for a in g.accepted_lengths)
    for text, drafts in recorder.notes[::5]:
        count = len(drafts)
        assert drafts == drafts_from_scratch(tiny.base, trained[kind], text)[:count], f"after {len(text)} tokens"


@pytest.mark.parametrize("kind", BLOCKS)
def test_memorised_block_is_fully_accepted_after_reload(
    tiny: Any, trained: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """An off-by-one slot, a different mask or a lost row would break the run of accepted blocks."""
    from megatron_spec.checkpoint.base_import import inspect_base
    from megatron_spec.export.draft import export_draft
    from megatron_spec.export.load import load_exported_draft

    base, reference = tiny.base, inspect_base(tiny.folder)
    folder = export_draft(
        trained[kind], reference, tmp_path / "draft", None, base.world, dtype="float32", ends=base
    )  # fmt: skip
    draft = load_exported_draft(folder, base.config, base.world, torch.float32)
    found = decode(base, tiny.prompts[:2], CONFIG, set(), draft=draft)
    assert [g.tokens for g in found] == tiny.answers[:2]
    assert [g.accepted_lengths for g in found] == [[LENGTH] * 6] * 2  # one token, then four a step


@pytest.mark.parametrize("threshold", [0.3, 0.6, 1.0])
def test_block_is_truncated_below_the_confidence_threshold(
    tiny: Any, trained: dict[str, Any], threshold: float
) -> None:
    draft = trained["dspark"]
    head = draft.confidence_head.proj
    kept = head.weight.data.clone(), head.bias.data.clone()
    random = torch.Generator().manual_seed(1)
    head.weight.data.copy_(torch.randn(head.weight.shape, generator=random) * 0.1)
    head.bias.data.fill_(1.0)
    config = CONFIG.replace(confidence_threshold=threshold, max_new_tokens=12)
    recorder = Recorder(build_drafter(draft, tiny.base, config))
    [found] = decode(tiny.base, tiny.prompts[2:3], config, set(), draft=recorder)
    assert found.tokens == tiny.answers[2][:12]
    expected = []
    for text, _ in recorder.notes:
        product = torch.tensor(block_from_scratch(tiny.base, draft, text)[1]).cumprod(0)
        room = len(tiny.prompts[2]) + 12 - len(text) - 1  # the bonus token is the last one
        expected.append(min(int((product >= threshold).sum()), room))
    head.weight.data, head.bias.data = kept
    assert found.drafted_lengths[: len(expected)] == expected and not any(found.drafted_lengths[len(expected) :])
    assert set(expected) == {0} if threshold == 1.0 else len(set(expected)) > 1, expected


def test_dspark_without_a_confidence_head_decodes_the_same(tiny: Any, trained: dict[str, Any]) -> None:
    whole = trained["dspark"]
    config = whole.config.replace(confidence_head=False)
    draft = build_draft(config, DraftVocab.full(VOCAB), tiny.base.world, torch.float32)
    draft.load_state_dict({n: x for n, x in whole.state_dict().items() if "confidence_head" not in n})
    found = decode(tiny.base, tiny.prompts, CONFIG, set(), draft=draft)
    assert [g.tokens for g in found] == tiny.answers
    with_head = decode(tiny.base, tiny.prompts, CONFIG, set(), draft=whole)
    assert [g.accepted_lengths for g in found] == [g.accepted_lengths for g in with_head]
    with pytest.raises(UserError, match=r"--confidence-threshold 0\.3, but the draft has no confidence head"):
        build_drafter(draft, tiny.base, CONFIG.replace(confidence_threshold=0.3))


def of_few_tokens(tiny: Any, whole: Any) -> Any:
    """The draft of every third token that is not in the first answer; its head and W2 have the rows of the others."""
    kept = sorted({*range(0, VOCAB, 3), *tiny.answers[0]})
    vocab = DraftVocab(torch.tensor(kept), VOCAB)
    draft = build_draft(whole.config.replace(draft_vocab_size=len(kept)), vocab, tiny.base.world, torch.float32)
    draft.initialize(tiny.base)
    w2 = "markov_head.markov_w2.weight"
    values = {n: x[kept] if n == w2 else x for n, x in whole.state_dict().items()}
    missing, unexpected = draft.load_state_dict(values, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return draft


@pytest.mark.parametrize("kind", BLOCKS)
def test_few_tokens_are_proposed_as_by_the_whole_head(tiny: Any, trained: dict[str, Any], kind: str) -> None:
    """The text is the base's; what the whole draft proposes of the kept tokens is proposed, and nothing else."""
    draft = of_few_tokens(tiny, trained[kind])
    recorder = Recorder(build_drafter(draft, tiny.base))
    found = decode(tiny.base, tiny.prompts, CONFIG, set(), draft=recorder)
    assert [g.tokens for g in found] == tiny.answers
    assert set(found[0].accepted_lengths[:-1]) == {LENGTH}
    kept, agreed = draft.vocab.target_ids.tolist(), 0
    for text, drafts in recorder.notes[::3]:
        whole = drafts_from_scratch(tiny.base, trained[kind], text)[: len(drafts)]
        assert {*drafts} <= {*kept}
        if {*whole} <= {*kept}:
            agreed += 1
            assert drafts == whole
    assert agreed > 1
    hot = CONFIG.replace(temperature=0.8, use_rejection_sampling=True, max_new_tokens=8)
    assert [len(g.tokens) for g in decode(tiny.base, tiny.prompts[:2], hot, set(), draft=draft, seeds=[0, 1])] == [8, 8]


def test_sampling_with_a_block_draft_keeps_the_bases_distribution(tiny: Any, trained: dict[str, Any]) -> None:
    """Tokens of 2000 draws: accepted with the Markov head's own distribution, or drawn from what is left."""
    base, count, prompt = tiny.base, 2000, tiny.prompts[0]
    hot = CONFIG.replace(
        temperature=0.8, use_rejection_sampling=True, max_new_tokens=3, batch_size=count, max_draft_len=2
    )
    found = decode(base, [prompt] * count, hot, set(), draft=trained["dspark"], seeds=list(range(count)))
    texts = torch.tensor([g.tokens for g in found])
    steps = [g.accepted_lengths for g in found]
    assert 0.05 < sum(s[-1] > 0 for s in steps) / count < 0.95
    with torch.no_grad():
        first = (tiny.model(torch.tensor([prompt])).logits[0, -1] / 0.8).softmax(-1)
        V = len(first)
        after = torch.tensor([[*prompt, t] for t in range(V)])
        second = (tiny.model(after).logits[:, -1] / 0.8).softmax(-1)
        likely = (first[:, None] * second > 1e-5).nonzero()
        third = tiny.model(torch.cat([after[likely[:, 0]], likely[:, 1:]], 1)).logits[:, -1]
        weight = (first[:, None] * second)[tuple(likely.t())]
        exact = weight @ (third / 0.8).softmax(-1)
    for column, expected in ((1, first @ second), (2, exact / weight.sum())):
        seen = torch.bincount(texts[:, column], minlength=V)
        often = expected * count >= 5
        gaps = (seen - expected * count)[often].square() / (expected * count)[often]
        freedom = int(often.sum()) - 1
        assert float(gaps.sum()) < freedom + 5 * (2 * freedom) ** 0.5, (column, float(gaps.sum()), freedom)


def test_medusa_proposes_no_more_than_its_heads(tiny: Any, trained: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--max-draft-len {LENGTH + 2}: the draft has {LENGTH} Medusa heads"):
        decode(tiny.base, tiny.prompts[:2], CONFIG.replace(max_draft_len=LENGTH + 2), set(), draft=trained["medusa"])


def prepare_parallel(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A base in `folder`, and for every kind of draft its weights and its results in one process."""
    from megatron_spec.runtime import distributed

    tiny_models.save_tiny(folder, vocab_size=VOCAB)
    weights, alone = {}, {}
    for kind in KINDS:
        base = tiny_models.load(folder, distributed.initialize(), captures_of(kind))
        draft = new_draft(base, kind)
        with torch.no_grad():
            for n, p in draft.named_parameters():
                if "linear" in n or "markov" in n:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))) * 0.05)
        weights[kind] = tiny_models.whole_weights(draft)
        alone[kind] = answers(base, draft)
    return weights, alone


def answers(base: Any, draft: Any) -> list[Any]:
    """Tokens and accepted lengths, greedy and with rejection sampling, which compares whole distributions."""
    hot = CONFIG.replace(temperature=1.2, use_rejection_sampling=True, max_new_tokens=8)
    prompts, found = tiny_models.prompts()[:3], []
    for config, seeds in ((CONFIG, None), (hot, [1, 2, 3])):
        found += decode(base, prompts, config, set(), draft=draft, seeds=seeds)
    return [(g.tokens, g.accepted_lengths) for g in found]


def parallel(folder: str, weights: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Answers and accepted lengths of every kind under tensor parallelism of two, of some in two stages too."""
    from megatron.core import parallel_state

    from megatron_spec.config import ParallelConfig
    from megatron_spec.runtime import distributed

    found: dict[str, Any] = {}
    for layout, sizes in LAYOUTS.items():
        world = distributed.initialize(ParallelConfig(tensor_model_parallel_size=2, **sizes))
        for kind in weights if layout == "tp2" else STAGED:
            base = tiny_models.load(folder, world, captures_of(kind))
            draft = new_draft(base, kind)
            tiny_models.set_weights(draft, weights[kind])
            found[f"{kind}, {layout}"] = answers(base, draft)
        parallel_state.destroy_model_parallel()
    return found
