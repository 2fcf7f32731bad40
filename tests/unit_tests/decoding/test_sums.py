"""Settings of cuBLAS in decoding, on a CPU, where they can be set but do nothing."""

from __future__ import annotations

import pytest
import torch

from megatron_spec.decoding import sums

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def state() -> list[bool]:
    matmul = torch.backends.cuda.matmul
    return [
        getattr(matmul, f"allow_{kind}_reduced_precision_reduction{end}")
        for kind in sums.HALF
        for end in ("", "_split_k")
    ]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Libraries that were asked for; None: which one it is."""
    if not sums.can_be_undivided():
        pytest.skip("this torch cannot leave split-K out")
    found: list[str | None] = []
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_blas_library", lambda library=None: (found.append(library), "before")[1]
    )
    return found


def test_settings_are_as_before_afterwards(asked: list[str | None]) -> None:
    before = state()
    with pytest.raises(ValueError, match="inside"), sums.undivided():
        assert state() == [False] * 4 and asked == [None, "cublaslt"]
        raise ValueError("inside")
    assert state() == before and asked == [None, "cublaslt", "before"]


@pytest.mark.parametrize("on", [False, True])
def test_only_half_precision_on_a_gpu(on: bool, asked: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "UNDIVIDED", on)
    for device, dtype in ((CPU, torch.bfloat16), (CUDA, torch.float32), (CUDA, torch.float64)):
        with sums.of_decoding(device, dtype):
            assert not asked
    with sums.of_decoding(CUDA, torch.bfloat16):
        assert ("cublaslt" in asked) is on
