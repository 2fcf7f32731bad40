"""Dumps of other tools: valid ones are read, others refused with the file name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_spec.config import UserError
from megatron_spec.features.dumps import dump_files, read_dump, turns_of_mask

N, H, V = 6, 4, 50


def entries(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "input_ids": torch.randint(0, V, (N,), generator=generator),
        "hidden_states": torch.randn(N, H, generator=generator, dtype=torch.float32).bfloat16(),
        "aux_hidden_states": torch.randn(N, 2 * H, generator=generator).bfloat16(),
        "loss_mask": torch.tensor([0, 1, 1, 0, 0, 1]),
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


def write(folder: Path, **changes: Any) -> Path:
    torch.save(entries(**changes), folder / "a.pt")
    return folder / "a.pt"


def test_both_formats_and_a_batch_of_one(tmp_path: Path) -> None:
    plain = read_dump(write(tmp_path), H, (1, 2), V)
    save_file(entries(), tmp_path / "b.safetensors")
    batch = {name: value[None] for name, value in entries().items()}
    torch.save({**batch, "conversation_id": "c1"}, tmp_path / "c.pt")
    for name in ("b.safetensors", "c.pt"):
        other = read_dump(tmp_path / name, H, (1, 2), V)
        for a, b in zip(vars(plain).values(), vars(other).values(), strict=True):
            assert a is b or torch.equal(a, b)
    assert plain.turns.tolist() == [0, 1, 1, 0, 0, 2] and plain.masked
    assert [p.name for p in dump_files(tmp_path)] == ["a.pt", "b.safetensors", "c.pt"]
    unmasked = read_dump(write(tmp_path, loss_mask=None), H, (1, 2), V)
    assert unmasked.turns.tolist() == [1] * N and not unmasked.masked
    assert turns_of_mask(torch.tensor([True, False, True])).tolist() == [1, 0, 2]


class Stranger:
    """A class that a safe reader must not construct."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_hidden_states": None}, "expected a tensor aux_hidden_states, found only hidden_states, input_ids"),
        ({"input_ids": [1, 2, 3]}, "expected a tensor input_ids, found a list"),
        ({"input_ids": torch.zeros(N)}, "input_ids is torch.float32, expected integers"),
        ({"hidden_states": torch.zeros(3, N, H)}, r"hidden_states has shape \[3, 6, 4\]"),
        ({"input_ids": torch.full((N,), V)}, "input_ids range from 50 to 50, expected 0 to 49"),
        ({"loss_mask": torch.ones(N - 1).long()}, "equally many rows in every entry"),
        ({"loss_mask": torch.full((N,), 2)}, r"loss_mask has \[2\], expected 0 and 1"),
        ({"hidden_states": torch.zeros(N, H + 1)}, "hidden_states has width 5, expected 4"),
        ({"aux_hidden_states": torch.zeros(N, 3 * H)}, r"\(3 captures\), expected 2 captures .* 4, layers \[1, 2\]"),
        ({"aux_hidden_states": torch.full((N, 2 * H), torch.nan)}, "aux_hidden_states has values that are not"),
        ({"input_ids": Stranger()}, "cannot be read"),
    ],
)  # fmt: skip
def test_invalid_dumps_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_dump(write(tmp_path, **changes), H, (1, 2), V)
    assert str(tmp_path / "a.pt") in str(error.value)


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="found no"):
        dump_files(tmp_path)
    write(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"as \.pt and as \.safetensors"):
        dump_files(tmp_path)
    with pytest.raises(UserError, match=r"a\.safetensors: cannot be read"):
        read_dump(tmp_path / "a.safetensors", H, (1, 2), V)
