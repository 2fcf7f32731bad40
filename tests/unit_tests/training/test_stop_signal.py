"""Effects of signals on a running loop, in this process."""

from __future__ import annotations

import signal

import pytest

from megatron_spec.training.loop import StopSignal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_is_recorded_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.received
        signal.raise_signal(number)
        assert stop.received
    assert signal.getsignal(number) is before


def test_second_ctrl_c_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), StopSignal(launcher_repeats=0.0) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_forwarded_by_a_launcher_counts_once() -> None:
    with StopSignal(launcher_repeats=3600.0) as stop:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert stop.received
