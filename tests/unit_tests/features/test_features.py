"""Features online and offline, over layouts, in one spawned world of two ranks."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_spec.config import ParallelConfig, UserError
from megatron_spec.data.chat import Sample
from megatron_spec.features.store import FeatureStore, FeatureWriter, SampleFeatures, StoreManifest
from tests.unit_tests.base.tiny import save_tiny
from tests.unit_tests.data.chat_fixtures import slow_to_show
from tests.worlds import run_world

CAPTURES = (0, 2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


class Samples:
    """Seven random samples of different lengths."""

    seq_length = 16

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(5)
        tokens = [torch.randint(83, (n,), generator=g) for n in (9, 4, 16, 7, 11, 5, 6)]
        self.samples = [Sample(t, (torch.arange(len(t)) >= 2).int()) for t in tokens]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]


def manifest(fingerprint: str = "sha256:0", **changes: Any) -> StoreManifest:
    return StoreManifest(
        **{
            "base_fingerprint": fingerprint,
            "capture_layer_ids": CAPTURES,
            "hidden_size": 32,
            "dtype": "float32",
            "template_hash": "t",
            "num_samples": 7,
            "seq_length": 16,
            "samples_per_shard": 3,
            **changes,
        }
    )


def _same_teacher(base: Any, world: Any, online: Any, offline: Any, draft_size: int) -> bool:
    """The stored argmax gives the same teacher as the product with the whole vocabulary."""
    from megatron_spec.drafts.linear import enter
    from megatron_spec.drafts.teacher import TeacherHead
    from megatron_spec.drafts.vocab import DraftVocab

    assert online.argmax_of(torch.tensor([0])) is None
    head = TeacherHead(base, DraftVocab(torch.arange(83)[:: 83 // draft_size][:draft_size], 83), world.tp)
    rows = (online.batch.documents_BS >= 0).t().flatten().nonzero()[:, 0]
    state = enter(online.state_SBH, world.tp, world.parallel.sequence_parallel).flatten(0, 1)[rows]
    plain, told = head(state, 0.7), head(state, 0.7, offline.argmax_of(rows))
    return (
        torch.allclose(plain.logits_UD, told.logits_UD, atol=1e-5)
        and torch.allclose(plain.lse_U, told.lse_U, atol=1e-5)
        and all(torch.equal(getattr(plain, n), getattr(told, n)) for n in ("argmax_U", "label_U", "in_vocab_U"))
        and bool(told.in_vocab_U.all()) == (draft_size == 83)
    )


def cut(batch: Any, length: int) -> Any:
    """The first columns of a batch."""
    names = ("tokens_BS", "positions_BS", "turns_BS", "documents_BS")
    return dataclasses.replace(batch, **{n: getattr(batch, n)[:, :length].contiguous() for n in names})


def _own_cases(root: Path, layout: str, world: Any) -> dict[str, Any]:
    from megatron_spec.checkpoint.base_import import inspect_base, load_base
    from megatron_spec.data.packing import build_batch
    from megatron_spec.features.ahead import FeaturesAhead
    from megatron_spec.features.offline import OfflineFeatures, extract
    from megatron_spec.features.online import OnlineFeatures

    dataset = Samples()
    reference = inspect_base(root / "base")
    base = load_base(reference, world, CAPTURES)
    # Rank 0 alone would overtake: a shard of an earlier, killed run lies in the folder of pp2.
    store_folder, m = root / layout, manifest(reference.fingerprint)
    written = [extract(base, dataset, store_folder, m, micro_batch_size=2)]
    if layout == "pp2" and world.rank == 0:
        (store_folder / "features-00001.safetensors").unlink()
    torch.distributed.barrier()
    written.append(extract(base, dataset, store_folder, m, micro_batch_size=2))
    ids = [((0, 1), (6,)), ((2,), (6, 1)), ((3,), (4,)), ((5, 1, 6), (0,))]  # some rows hold several samples
    batches = [
        build_batch([[dataset[i] for i in row] for row in chosen], 16, world.device, sample_ids=chosen)
        for chosen in ids
    ]
    online = OnlineFeatures(base).features(batches)
    store = FeatureStore(store_folder, {"base_fingerprint": reference.fingerprint, "capture_layer_ids": CAPTURES})
    offline = OfflineFeatures(store, world).features(batches)
    rows = 16 // world.tp_size
    gap = 0.0
    for a, b in zip(online, offline, strict=True):
        first = rows * world.tp_rank
        real = (a.batch.documents_BS >= 0).t()[first : first + rows, :, None]
        gap = max(
            gap,
            float(((a.captures_SBC - b.captures_SBC) * real).abs().max()),
            float(((a.state_SBH - b.state_SBH) * real).abs().max()),
        )
    same_teacher = [
        _same_teacher(base, world, a, b, size) for a, b in zip(online, offline, strict=True) for size in (83, 40)
    ]
    # steps of different lengths go through the pipeline together
    steps = [batches[:2], [cut(b, 12) for b in batches[2:]], batches[2:]]
    stream = FeaturesAhead(OnlineFeatures(base), steps, world.pp_size, ahead=3)
    one_by_one = [feature for _ in steps for feature in stream.step()[1]]
    at_once = [f for step in steps for f in OnlineFeatures(base).features(step)]
    grouped = [
        a.batch.sample_ids == b.batch.sample_ids
        and torch.equal(a.captures_SBC, b.captures_SBC)
        and torch.equal(a.state_SBH, b.state_SBH)
        for a, b in zip(at_once, one_by_one, strict=True)
    ]
    found: dict[str, Any] = {
        "same teacher": same_teacher, "grouped": grouped, "gap": gap, "written": written,
        "owned": [f.batch.sample_ids for f in online],
        "owned offline": [f.batch.sample_ids for f in offline], "shape": tuple(online[0].captures_SBC.shape),
    }  # fmt: skip
    for name, source in (("online", OnlineFeatures(base)), ("offline", OfflineFeatures(store, world))):
        try:
            source.features(batches[:3])
        except UserError as e:
            found[f"three batches {name}"] = str(e)
    try:
        extract(base, dataset, store_folder, manifest("sha256:other"), 2)
    except UserError as e:
        found["other base"] = str(e)
    return found


def _cases(root: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    from megatron_spec.runtime import distributed

    found: dict[str, Any] = {}
    for layout, values in LAYOUTS.items():
        world = distributed.initialize(ParallelConfig(**values))
        found[layout] = _own_cases(Path(root), layout, world)
        parallel_state.destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    save_tiny(folder / "base", num_hidden_layers=4)
    return folder


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    return run_world(2, _cases, str(root))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offline_equals_online(found: list[dict[str, Any]], layout: str) -> None:
    for rank in found:
        assert rank[layout]["gap"] < 1e-4
        assert rank[layout]["shape"] == ((8 if layout == "tp2sp" else 16), 2, 64)


def test_pipeline_ranks_own_every_other_micro_batch(found: list[dict[str, Any]]) -> None:
    assert found[0]["pp2"]["owned"] == found[0]["pp2"]["owned offline"] == [((0, 1), (6,)), ((3,), (4,))]
    assert found[1]["pp2"]["owned"] == found[1]["pp2"]["owned offline"] == [((2,), (6, 1)), ((5, 1, 6), (0,))]
    for source in ("online", "offline"):
        assert "3 micro-batches" in found[0]["pp2"][f"three batches {source}"]
        assert f"three batches {source}" not in found[0]["dp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_argmax_gives_the_same_teacher(found: list[dict[str, Any]], layout: str) -> None:
    for rank in found:
        assert rank[layout]["same teacher"] == [True] * (4 if layout == "pp2" else 8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_features_computed_ahead_are_bit_equal(found: list[dict[str, Any]], layout: str) -> None:
    for rank in found:
        assert rank[layout]["grouped"] == [True] * (3 if layout == "pp2" else 6)


class Recorded:
    """A source that returns the requested numbers and records the order."""

    def __init__(self, pp_size: int) -> None:
        self.pp_size = pp_size
        self.calls: list[list[int]] = []
        self.following: list[list[int]] = []

    def features(self, batches: Any, following: Any = ()) -> Any:
        self.calls.append(list(batches))
        self.following.append(list(following))
        return batches[self.pp_size - 1 :: self.pp_size]  # what the last pipeline rank owns


class Started(Recorded):
    """Works in a thread; what it returns is taken by the thread that needs it."""

    def start(self, batches: Any) -> Any:
        assert threading.current_thread().name.startswith("features")
        found = self.features(batches)

        def arrived() -> Any:
            assert threading.current_thread() is threading.main_thread()
            return found

        return arrived


@pytest.mark.parametrize(("pp_size", "ahead", "expected"), [
    (1, 0, [[0], [1], [2], [3], [4], [5]]),
    (1, 4, [[0, 1, 2, 3], [4, 5]]),
    (2, 0, [[0, 1, 2, 3, 4, 5]]),
    (2, 2, [[0, 1, 2, 3], [4, 5]]),
    (2, 1 << 62, [[0, 1, 2, 3, 4, 5]]),
])  # fmt: skip
def test_groups_span_steps_and_run_lazily(pp_size: int, ahead: int, expected: list[list[int]]) -> None:
    from megatron_spec.features.ahead import FeaturesAhead

    source = Recorded(pp_size)
    stream = FeaturesAhead(source, [[0, 1], [2, 3], [4, 5]], pp_size, ahead)  # type: ignore[arg-type, list-item]
    drawn = []
    for _ in range(3):
        batches, features, count = stream.step()
        before = len(source.calls)
        drawn += [next(features)]
        assert len(source.calls) <= before + 1, "nothing runs before it is needed"
        drawn += list(features)
        assert count == len(batches) // pp_size
    assert drawn == list(range(6))[pp_size - 1 :: pp_size] and source.calls == expected
    with pytest.raises(StopIteration):
        stream.step()


def test_a_source_that_looks_ahead_is_told_what_follows() -> None:
    from megatron_spec.features.ahead import FeaturesAhead

    source = Recorded(2)
    source.lookahead = 3  # type: ignore[attr-defined]
    stream = FeaturesAhead(source, [[0, 1], [2, 3], [4, 5], [6, 7]], 2, ahead=1)  # type: ignore[arg-type, list-item]
    assert [list(stream.step()[1]) for _ in range(4)] == [[1], [3], [5], [7]]
    assert source.calls == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert source.following == [[2, 3, 4], [4, 5, 6], [6, 7], []]


def test_prepared_features_are_those_of_the_next_step() -> None:
    from megatron_spec.features.ahead import FeaturesAhead

    source = Recorded(1)
    stream = FeaturesAhead(source, [[0, 1], [2, 3], [4, 5]], 1, ahead=3)  # type: ignore[arg-type, list-item]
    drawn = []
    for calls in ([[0, 1, 2]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], [3, 4, 5]]):
        drawn += list(stream.step()[1])
        assert source.calls == calls
        stream.prepare()
    assert drawn == list(range(6)) and source.calls == [[0, 1, 2], [3, 4, 5]]
    lazy = FeaturesAhead(source, [[0], [1]], 1)  # type: ignore[list-item, arg-type]
    source.calls.clear()
    assert list(lazy.step()[1]) == [0]
    lazy.prepare()
    lazy.prepare()
    assert source.calls == [[0], [1]] and not lazy.drained
    assert list(lazy.step()[1]) == [1]
    lazy.prepare()
    assert lazy.drained and source.calls == [[0], [1]], "there is no further step"


def test_reader_keeps_its_bound() -> None:
    from megatron_spec.features.ahead import FeaturesAhead

    source = Started(1)
    stream = FeaturesAhead(source, [[i] for i in range(9)], 1, ahead=3)  # type: ignore[list-item, arg-type]
    for i in range(9):
        assert list(stream.step()[1]) == [i]
        stream.prepare()
        assert len(source.calls) <= min(9, i + 3)
    stream.close()


@pytest.mark.parametrize("size", [0, 3])
def test_pipeline_ranks_need_equally_many_micro_batches(size: int) -> None:
    from megatron_spec.features.ahead import FeaturesAhead

    with pytest.raises(UserError, match=f"found {size} micro-batches"):
        FeaturesAhead(Recorded(2), [list(range(size))], 2).step()  # type: ignore[arg-type, list-item]


def test_only_missing_shards_need_disk_space(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_spec.commands import features as chain
    from megatron_spec.runtime import files

    per_token = (2 + 1) * 32 * 4 + 16
    (store / "features-00001.safetensors").unlink()  # samples 3, 4, 5 of 7, 11 and 5 tokens
    free = 23 * per_token
    monkeypatch.setattr(files, "free_space", lambda _: free)
    chain.check_disk(str(store), manifest(), Samples())
    with pytest.raises(UserError, match=r"new/store cannot be written: .*about 22.7 KiB .* or use fewer conversations"):
        chain.check_disk(str(tmp_path / "new" / "store"), manifest(), Samples())
    free -= 1
    with pytest.raises(UserError, match="no space left"):
        chain.check_disk(str(store), manifest(), Samples())
    for shard in FeatureWriter(store, manifest()).pending():
        (store / f"features-{shard:05d}.safetensors").touch()
    free = 0
    chain.check_disk(str(store), manifest(), Samples())


def test_extraction_resumes(found: list[dict[str, Any]]) -> None:
    assert [rank["pp2"]["written"] for rank in found] == [[3, 1], [3, 1]]
    assert [rank["dp2"]["written"] for rank in found] == [[3, 0], [3, 0]]
    assert "base_fingerprint" in found[0]["dp2"]["other base"] and "base_fingerprint" in found[1]["dp2"]["other base"]


def test_layouts_write_equal_stores(found: list[dict[str, Any]], root: Path) -> None:
    assert found
    stores = [FeatureStore(root / layout) for layout in LAYOUTS]
    for i, sample in enumerate(Samples().samples):
        first, *others = [store.features_of(i) for store in stores]
        assert first.tokens.tolist() == sample.tokens.tolist() and first.turns.tolist() == sample.turns.tolist()
        assert first.captures.shape == (len(sample), 64) and first.state.shape == (len(sample), 32)
        for other in others:
            torch.testing.assert_close(other.captures, first.captures, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(other.state, first.state, atol=1e-4, rtol=1e-4)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    writer = FeatureWriter(tmp_path / "store", manifest())
    for shard in writer.pending():
        samples = [Samples()[i] for i in writer.manifest.samples_of(shard)]
        values = [
            SampleFeatures(s.tokens, s.turns, torch.ones(len(s), 64), torch.zeros(len(s), 32), s.tokens)
            for s in samples
        ]
        writer.write(shard, values)
    return tmp_path / "store"


def test_store_is_a_dataset(store: Path) -> None:
    dataset, read = Samples(), FeatureStore(store)
    assert len(read) == 7 and read.seq_length == 16
    assert all(torch.equal(read[i].tokens, dataset[i].tokens) for i in range(7))
    assert read.lengths.tolist() == [len(dataset[i]) for i in range(7)]
    assert sorted(p.name for p in store.iterdir()) == [
        "features-00000.safetensors", "features-00001.safetensors", "features-00002.safetensors", "manifest.json",
    ]  # fmt: skip
    with pytest.raises(UserError, match="sample 7"):
        read[7]


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"base_fingerprint": "sha256:1"}, "base_fingerprint: found 'sha256:0', expected 'sha256:1'"),
        ({"capture_layer_ids": (1, 2)}, "capture_layer_ids"),
        (
            {"capture_layer_ids": [0, 2], "dtype": "bfloat16"},
            r"do not match this run \(dtype: found 'float32', expected 'bfloat16'\)",
        ),
        ({"template_hash": "u"}, "template_hash"),
    ],
)
def test_mismatched_store_is_refused(store: Path, expected: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FeatureStore(store, expected)
    raw = json.loads((store / "manifest.json").read_text())
    (store / "manifest.json").write_text(json.dumps({**raw, "convention": "post-norm"}))
    with pytest.raises(UserError, match="convention"):
        FeatureStore(store)


def test_incomplete_and_damaged_stores_are_refused(store: Path) -> None:
    shard = store / "features-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(UserError, match=r"features-00001\.safetensors is damaged"):
        FeatureStore(store).features_of(4)
    shard.unlink()
    with pytest.raises(UserError, match=r"1 of 3 shards are missing \(features-00001"):
        FeatureStore(store)
    with pytest.raises(UserError, match="started with other settings"):
        FeatureWriter(store, manifest(dtype="bfloat16"))


def test_shards_that_another_machine_just_wrote_are_found(store: Path) -> None:
    with slow_to_show(store, "features-"):
        assert len(FeatureStore(store)) == len(FeatureStore(store).lengths)
        assert FeatureWriter(store, manifest()).pending() == []


def test_rows_that_differ_from_the_stored_sample_are_refused(store: Path) -> None:
    from types import SimpleNamespace

    from megatron_spec.data.packing import build_batch
    from megatron_spec.features.offline import OfflineFeatures

    dataset = Samples()
    alone = SimpleNamespace(pp_size=1, pp_rank=0, parallel=ParallelConfig(), device=torch.device("cpu"))
    source = OfflineFeatures(FeatureStore(store), alone)  # type: ignore[arg-type]
    good = build_batch([[dataset[3]]], 8, "cpu", sample_ids=((3,),))
    assert source.features([good])[0].captures_SBC[:, 0, 0].tolist() == [1.0] * 7 + [0.0]
    for index, length in ((2, 16), (1, 8)):
        bad = build_batch([[dataset[3]]], length, "cpu", sample_ids=((index,),))
        with pytest.raises(UserError, match=f"sample {index} of the data differs"):
            source.features([bad])
    two = [[dataset[3], dataset[1]]]
    packed = source.features([build_batch(two, 16, "cpu", sample_ids=((3, 1),))])[0]
    assert packed.captures_SBC[:, 0, 0].tolist() == [1.0] * 11 + [0.0] * 5
    for wrong, index in (((3, 6), 6), ((3,), 3), ((1, 3), 1)):
        with pytest.raises(UserError, match=f"sample {index} of the data differs"):
            source.features([build_batch(two, 16, "cpu", sample_ids=(wrong,))])
