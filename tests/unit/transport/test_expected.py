"""The figures are those of the communication model for Qwen2.5-1.5B on 2 nodes of 4 GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from training.transport.expected import ParameterGroup, Scheme, expected_bytes_per_node

LAYERS = [ParameterGroup(num_parameters=46_797_824, resharded=True)] * 28
ROOT = ParameterGroup(num_parameters=1_543_714_304 - 28 * 46_797_824, resharded=False)
MODEL = [*LAYERS, ROOT]


def expected(scheme: Scheme, **settings: Any) -> int:
    world: dict[str, Any] = {"world_size": 8, "gpus_per_node": 4, "num_steps": 1}
    return expected_bytes_per_node(MODEL, scheme=scheme, **(world | settings))


@pytest.mark.parametrize(
    ("scheme", "reduce_bytes", "gigabytes"),
    [("full", 4, 10.40), ("full", 2, 7.70), ("hybrid", 4, 6.17), ("hybrid", 2, 3.09)],
)
def test_one_step_of_the_model(scheme: Scheme, reduce_bytes: int, gigabytes: float) -> None:
    assert expected(scheme, reduce_bytes=reduce_bytes) / 1e9 == pytest.approx(gigabytes, abs=0.006)


def test_kept_groups_are_gathered_once_per_step() -> None:
    kept = [ParameterGroup(num_parameters=1_543_714_304, resharded=False)]

    def of(**settings: Any) -> float:
        size = {"world_size": 8, "gpus_per_node": 4, "num_steps": 1}
        return expected_bytes_per_node(kept, scheme="full", **(size | settings)) / 1e9

    gather, reduce = 2.701, 5.403
    assert of() == pytest.approx(gather + reduce, abs=0.005)
    assert of(accumulation=4) == pytest.approx(gather + 4 * reduce, abs=0.005)
    assert of(accumulation=4, kept_between_microbatches=False) == pytest.approx(
        4 * (gather + reduce), abs=0.005
    )
    assert of(num_forward_only=50) == of()


def test_steps_multiply_and_accumulation_repeats_only_full_sharding() -> None:
    assert expected("full", num_steps=7) == pytest.approx(7 * expected("full"), abs=8)
    assert expected("full", accumulation=4) == pytest.approx(4 * expected("full"), abs=8)
    assert expected("hybrid", accumulation=4) == expected("hybrid")
    assert expected("hybrid", accumulation=4, reduce_every_microbatch=True) == 4 * expected("hybrid")


def test_evaluation_gathers_the_resharded_groups_once_per_pass() -> None:
    """The root stays gathered from one pass to the next, so that it is counted with the training step
    alone.
    """
    gathered = 28 * 46_797_824 * 2 * 7 // 8
    assert expected("full", num_forward_only=3) - expected("full") == pytest.approx(3 * gathered, abs=8)
    assert expected("hybrid", num_forward_only=3) == expected("hybrid")


def test_one_node_sends_nothing() -> None:
    assert expected("full", world_size=4) == 0
    assert expected("hybrid", world_size=2) == 0


def test_uneven_world_is_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4 GPUs"):
        expected("full", world_size=6)
