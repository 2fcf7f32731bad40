"""Tokens on disk: equal to those in memory, cached until something changes, complete or absent."""

import json
import pickle
import threading

import numpy as np
import pytest
import torch

from megatron_spec.config import UserError
from megatron_spec.data import tokenise, workers
from megatron_spec.data.chat import ChatEncoder
from megatron_spec.data.conversations import read_conversations
from megatron_spec.data.loader import BatchLoader, ConversationDataset
from megatron_spec.data.store import Block, TokenStore, runs_of
from megatron_spec.data.tokenise import open_tokens
from megatron_spec.data.workers import ordered_map, usable_cpus
from megatron_spec.runtime import files
from tests.unit_tests.data.chat_fixtures import (
    CHATML,
    FORGETS_THINKING,
    make_tokenizer,
    slow_to_show,
    talk,
    write_lines,
)

TALKS = [
    talk(("user", f"q{i}"), ("assistant", "é" * (i % 5) + "a"), ("user", "and"), ("assistant", "b" * (i % 7) + "c"))
    for i in range(60)
]


@pytest.fixture
def path(tmp_path):
    return write_lines(tmp_path / "d.jsonl", TALKS)


def keys(path):
    folder = path.with_name("d.jsonl.tokens")
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_store_equals_the_encoder(path, monkeypatch):
    tokenizer = make_tokenizer(CHATML)
    monkeypatch.setattr(tokenise, "PIECE", 500)  # several pieces
    data = ConversationDataset(path, tokenizer, 70)
    encoder = ChatEncoder(tokenizer)
    expected = [encoder.encode(c) for c in read_conversations(path)]
    assert len(data) == len(expected) and data.store.meta["tokens"] == sum(map(len, expected))
    assert max(map(len, expected)) > 70
    for i, whole in enumerate(expected):
        assert data[i].tokens.tolist() == whole.tokens[:70].tolist() and data[i].tokens.dtype == torch.int64
        assert data[i].turns.tolist() == whole.turns[:70].tolist() and data[i].where == whole.where
    assert data.lengths.tolist() == [min(len(s), 70) for s in expected]
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[3].tokens, data[3].tokens)
    for packing in (False, True):
        rows = BatchLoader(data, 2, 4, packing=packing).step(8)
        assert all(row.tokens_BS.shape[1] <= 70 for row in rows)


def test_tokens_that_another_machine_just_wrote_are_found(path, monkeypatch):
    """Else a rank would write them anew, while others read them."""
    folder = open_tokens(path, make_tokenizer(CHATML)).folder
    monkeypatch.setattr(tokenise, "_build", lambda *_: pytest.fail("they are written again"))
    with slow_to_show(folder.parent):
        assert len(open_tokens(path, make_tokenizer(CHATML))) == 60


def test_files_do_not_depend_on_the_number_of_processes_and_threads(path, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenise, "PIECE", 300)
    monkeypatch.setattr(tokenise, "tokeniser_threads", lambda: 3)
    one = open_tokens(path, make_tokenizer(CHATML), cache=tmp_path / "one")
    two = open_tokens(path, make_tokenizer(CHATML), cache=tmp_path / "two", workers=2)
    monkeypatch.setattr(tokenise, "tokeniser_threads", lambda: 1)
    three = open_tokens(path, make_tokenizer(CHATML), cache=tmp_path / "three")
    for file in ("tokens.bin", "lengths.bin", "runs.bin", "run_counts.bin", "meta.json"):
        assert len({(store.folder / file).read_bytes() for store in (one, two, three)}) == 1
    path.write_text(path.read_text().replace('"q41"', '" "'))
    with pytest.raises(UserError, match=r"d.jsonl line 42, message 0: empty content"):
        open_tokens(path, make_tokenizer(CHATML), cache=tmp_path / "two", workers=2)
    assert len([p for p in (tmp_path / "two").iterdir() if not p.name.startswith(".")]) == 1


def test_tokens_are_cached_until_something_changes(path, monkeypatch):
    tokenizer = make_tokenizer(CHATML)
    open_tokens(path, tokenizer)
    built = []
    real = tokenise._build
    monkeypatch.setattr(tokenise, "_build", lambda *a: built.append(1) or real(*a))
    open_tokens(path, make_tokenizer(CHATML))
    assert built == []
    open_tokens(path, make_tokenizer(FORGETS_THINKING))
    open_tokens(path, tokenizer, stop_token_ids=[3])
    other = make_tokenizer(CHATML)
    other.add_tokens(["q1"])
    open_tokens(path, other)
    assert len(built) == 3
    write_lines(path, TALKS[:5])
    assert len(open_tokens(path, tokenizer)) == 5 and len(built) == 4
    assert len(keys(path)) == 5


def test_a_large_file_is_hashed_once_for_all_processes(path, tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr(tokenise, "sha256_of", lambda p: hashed.append(p) or files.sha256_of(p))
    monkeypatch.setattr(tokenise, "REMEMBER_FROM", 1)
    first = [tokenise.content_hash(path, cache) for cache in (None, None, tmp_path / "cache", tmp_path / "cache")]
    assert set(first) == {files.sha256_of(path)} and len(hashed) == 2
    write_lines(path, TALKS[:5])
    assert tokenise.content_hash(path) == files.sha256_of(path) != first[0] and len(hashed) == 3
    (tmp_path / "file").touch()  # no folder can be made there
    assert tokenise.content_hash(path, tmp_path / "file") == files.sha256_of(path)


def test_concurrent_processes_tokenise_once(path, monkeypatch):
    built = []
    real = tokenise._build
    monkeypatch.setattr(tokenise, "_build", lambda *a: built.append(1) or real(*a))
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(len(open_tokens(path, make_tokenizer(CHATML))))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [60] * 4 and built == [1]


def test_failed_runs_leave_nothing_and_damage_is_detected(path, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tokenise.StoreWriter, "append", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(UserError, match=r"cannot be written.*no space left.*--data-cache-path"):
            open_tokens(path, make_tokenizer(CHATML))
    assert [k for k in keys(path) if not k.startswith(".")] == []
    store = open_tokens(path, make_tokenizer(CHATML))
    with (store.folder / "tokens.bin").open("r+b") as file:
        file.truncate(10)
    with pytest.raises(UserError, match=r"is damaged \(tokens\)"):
        open_tokens(path, make_tokenizer(CHATML))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% generation %}{% for m in messages %}{{ m['content'] }}{% endfor %}{% endgeneration %}", "every token"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}{% generation %}{% endgeneration %}", "marks no token"),
    ],
)
def test_empty_and_full_masks_are_refused_with_their_line(path, template, words):
    with pytest.raises(UserError, match=rf"d.jsonl line 1: .*{words}"):
        open_tokens(path, make_tokenizer(template))
    assert [k for k in keys(path) if not k.startswith(".")] == []


def test_runs_and_blocks():
    turns = np.array([0, 1, 1, 0, 2, 3, 3], dtype=np.int32)
    assert runs_of(turns).tolist() == [[1, 3, 1], [4, 5, 2], [5, 7, 3]]
    assert runs_of(np.array([1, 0], dtype=np.int32)).tolist() == [[0, 1, 1]]
    runs = np.concatenate([runs_of(turns), runs_of(turns[:3])])
    block = Block(
        np.arange(10), np.array([7, 3]), np.array([1, 2]), runs, np.array([3, 1]), np.array([2]), np.array([1, 0])
    )
    for cut, expected in ((9, ([1, 2, 4, 5, 6, 8, 9], [0] * 5 + [1] * 2)), (5, ([1, 2, 4, 8, 9], [0] * 3 + [1] * 2))):
        tokens, sample = block.supervised(cut)
        assert (tokens.tolist(), sample.tolist()) == expected


def test_ranges_cover_the_store(path):
    store = open_tokens(path, make_tokenizer(CHATML))
    for size in (1, 100, 1000, 10**6):
        ranges = list(store.ranges(size))
        assert [a for a, _ in ranges] == [0, *[b for _, b in ranges[:-1]]] and ranges[-1][1] == 60
        assert np.concatenate([store.block(*r).tokens for r in ranges]).tolist() == store.block(0, 60).tokens.tolist()
    assert isinstance(store, TokenStore) and json.loads((store.folder / "meta.json").read_text())["samples"] == 60


def test_processes_only_for_data_that_is_worth_them(path, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tokenise, "usable_cpus", lambda: 3)
    size = path.stat().st_size
    for i, (parallel, each, said) in enumerate(
        [
            (size + 1, 1, " threads)"),
            (size, size, " threads)"),
            (size, size // 2, "2 processes)"),
            (1, 1, "3 processes)"),
        ]
    ):
        monkeypatch.setattr(tokenise, "PARALLEL_FROM", parallel)
        monkeypatch.setattr(tokenise, "PER_PROCESS", each)
        caplog.clear()
        with caplog.at_level("INFO"):
            open_tokens(path, make_tokenizer(CHATML), cache=tmp_path / str(i))
        [line] = [r.getMessage() for r in caplog.records if "tokens/s" in r.getMessage()]
        assert line.endswith(said)


def test_processors_of_a_container(tmp_path, monkeypatch):
    """Its share of time counts, not the machine's processors."""
    monkeypatch.setattr(workers, "CGROUPS", tmp_path)
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(128)))
    assert usable_cpus() == 128
    (tmp_path / "cpu").mkdir()
    for quota, expected in (("-1", 128), ("250000", 3), ("0", 128)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert usable_cpus() == expected
    for text, expected in (("max 100000", 128), ("1600000 100000", 16), ("50000 100000", 1), ("odd", 128)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert usable_cpus() == expected


def make_doubler(by):
    return lambda x: x * by if x != 13 else 1 // 0


def test_ordered_map_is_lazy():
    read = []

    def pieces():
        for i in range(12):
            read.append(i)
            yield i

    found = ordered_map(make_doubler, (2,), pieces(), 0)
    assert next(found) == 0 and read == [0] and list(found) == [2 * i for i in range(1, 12)]
    many = ordered_map(make_doubler, (3,), iter(range(10**9)), 2)
    assert [next(many) for _ in range(13)] == [3 * i for i in range(13)]
    with pytest.raises(ZeroDivisionError):
        next(many)
