"""How a rank stops to watch the others when it exits."""

from __future__ import annotations

import threading

import pytest

from megatron_spec.runtime import failure


class SlowStore:
    """A rendezvous store whose one read ends well after the rank began to leave."""

    def __init__(self) -> None:
        self.reading, self.left = threading.Event(), threading.Event()
        self.left_while_reading: bool | None = None

    def check(self, keys: list[str]) -> bool:
        """True when all keys are set: never."""
        self.reading.set()
        self.left_while_reading = self.left.wait(0.5)
        return False


def test_a_rank_leaves_only_when_its_watch_has_left_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's exit kills the other threads; inside the store's C++ code that aborts the process."""
    store = SlowStore()
    monkeypatch.setattr(failure, "_store", lambda: store)
    monkeypatch.setattr(failure, "SECONDS", 0.0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "2")
    failure.watch()
    assert store.reading.wait(30)
    assert failure.leave(None)
    store.left.set()
    assert store.left_while_reading is False


def test_a_watch_that_stays_in_the_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the process ends without Python's exit."""
    store, end = SlowStore(), threading.Event()
    monkeypatch.setattr(store, "check", lambda keys: store.reading.set() or end.wait(30))
    monkeypatch.setattr(failure, "_store", lambda: store)
    monkeypatch.setattr(failure, "SECONDS", 0.0)
    monkeypatch.setattr(failure, "READ", failure.READ / 1000)
    watching = failure.FailureWatch()
    watching.start()
    assert store.reading.wait(30)
    assert not failure.leave(None)
    monkeypatch.setattr(store, "get", lambda key: b"", raising=False)
    end.set()
    watching.join(30)
    assert not watching.is_alive()
