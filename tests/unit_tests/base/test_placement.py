from __future__ import annotations

import pytest

from megatron_spec.base.placement import check_captures, check_parallel, layers_per_stage, place
from megatron_spec.base.relay import shapes_adjuster
from megatron_spec.config import BaseConfig, ParallelConfig, UserError


def pp(size: int, first: int | None = None, last: int | None = None) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=size,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )


@pytest.mark.parametrize(
    ("layers", "parallel", "counts"),
    [
        (6, pp(1), [6]),
        (6, pp(3), [2, 2, 2]),
        (7, pp(3), [3, 2, 2]),
        (8, pp(3, first=2), [2, 3, 3]),
        (8, pp(3, last=1), [4, 3, 1]),
        (9, pp(4, first=1, last=3), [1, 3, 2, 3]),
        (5, pp(2, first=2, last=3), [2, 3]),
    ],
)
def test_layers_per_stage(layers: int, parallel: ParallelConfig, counts: list[int]) -> None:
    assert layers_per_stage(layers, parallel) == counts


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (pp(5), "greater than the base's 4 layers"),
        (pp(2, first=4), "leave at least one"),
        (pp(2, first=1, last=2), "together exactly 4"),
        (pp(3, first=0), "leave at least one"),
        (pp(1, first=2), "one pipeline stage"),
    ],
)
def test_impossible_splits_are_refused(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layers_per_stage(4, parallel)


def test_captures_are_relayed_to_the_last_stage() -> None:
    stages = place(7, pp(3), (1, 3, 6))
    assert [(s.first, s.count, s.captures_in, s.captures_own) for s in stages] == [
        (0, 3, (), (1,)),
        (3, 2, (1,), (3,)),
        (5, 2, (1, 3), (6,)),
    ]
    assert stages[-1].captures_out == (1, 3, 6)


@pytest.mark.parametrize("ids", [(0, 4), (-1, 2), (1, 1), (2, 1)])
def test_bad_capture_ids_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="capture_layer_ids"):
        check_captures(4, ids)


def test_relayed_shapes_grow_with_captures() -> None:
    receive, send = shapes_adjuster(1, 3)([(8, 2, 16)], [(8, 2, 16)])
    assert (receive, send) == ([(8, 2, 32)], [(8, 2, 64)])


def base(**values: int) -> BaseConfig:
    return BaseConfig(
        **{
            "family": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "vocab_size": 83,
            "max_position_embeddings": 64,
            **values,
        }
    )  # type: ignore[arg-type]


def test_check_parallel() -> None:
    check_parallel(base(), ParallelConfig(tensor_model_parallel_size=3))
    check_parallel(base(), ParallelConfig(tensor_model_parallel_size=6))  # two ranks share a key/value head
    with pytest.raises(UserError, match="does not divide the base's num_attention_heads 6"):
        check_parallel(base(), ParallelConfig(tensor_model_parallel_size=4))
    with pytest.raises(UserError, match="num_key_value_heads 3"):
        check_parallel(base(), ParallelConfig(tensor_model_parallel_size=2))
    with pytest.raises(UserError, match="intermediate_size 50"):
        check_parallel(base(intermediate_size=50), ParallelConfig(tensor_model_parallel_size=3))
