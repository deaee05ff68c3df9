"""The arithmetic of the plan against the model itself, the measured memory, and the published communication figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.training.jobs import tiny_architecture, tiny_job
from training import loss, planning
from training.hardware import hardware_of_instance
from training.job import ArchitectureSpec, load_job
from training.model import FAMILIES, CausalLM, config_of, num_parameters
from training.planning import ModelShape, activation_bytes_per_token, choose_sharding, memory_parts, predict
from training.shapes import KNOWN, shape_of

QWEN = KNOWN["Qwen/Qwen2.5-1.5B"]
JOB = load_job("training/jobs/qwen2.5-1.5b-sft.yaml", ["epochs=null", "steps=1000"])


def test_the_parameters_of_qwen_are_counted_right() -> None:
    assert QWEN.num_parameters == 1_543_714_304
    assert QWEN.block_parameters == 46_797_824
    assert QWEN.matmul_parameters == pytest.approx(1_543_569_408, rel=2e-4)


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral", "gemma"])
def test_the_shape_counts_what_the_model_has(family: str) -> None:
    architecture = ArchitectureSpec(**tiny_architecture(family=family))
    assert family in FAMILIES
    model = CausalLM(config_of(architecture, architecture.vocab_size, 1, 0))
    assert ModelShape.of_architecture(architecture).num_parameters == num_parameters(model)
    assert ModelShape.of_config(model.config.to_dict()).num_parameters == num_parameters(model)


@pytest.mark.parametrize(("every", "kib"), [(0, 1523), (2, 804), (1, 84)])
def test_activations_match_what_was_measured(every: int, kib: float) -> None:
    assert activation_bytes_per_token(QWEN, every) / 1024 == pytest.approx(kib, rel=0.02)


MEASURED = json.loads(Path("bench/results/gpu-memory.json").read_text())


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: f"{row['world_size']}x{row['tokens']}")
def test_the_memory_is_within_ten_percent_of_what_was_measured(row: dict[str, Any]) -> None:
    every = {"none": 0, "full": 1}.get(row["activation_checkpointing"], row["activation_checkpointing"])
    hardware = planning.Hardware("NVIDIA H200", 1, row["world_size"], 139.0, 989.0, 450.0, 3200.0)
    job = tiny_job(batch={"tokens_per_gpu": row["tokens"]})
    layout = planning.Sharding("full", row["reshard_after_forward"], every, "")
    assert sum(memory_parts(job, QWEN, hardware, layout).values()) == pytest.approx(row["peak_gib"], rel=0.10)


def test_the_chunk_of_the_plan_is_that_of_the_loss() -> None:
    assert planning.LOSS_CHUNK_TOKENS == loss.CHUNK_TOKENS


def test_two_g6_nodes_replicate_across_nodes_and_fit() -> None:
    prediction = predict(JOB, QWEN, hardware_of_instance("g6.12xlarge", 2))
    assert prediction.sharding.scheme == "hybrid"
    assert "replicated across nodes" in prediction.sharding.reason
    assert prediction.fits
    assert prediction.memory_parts["masters and moments"] == pytest.approx(4.31, abs=0.01)
    assert prediction.hours == pytest.approx(prediction.step_seconds * 1000 / 3600)
    assert prediction.cost_usd == pytest.approx(prediction.hours * 2 * 4.6016)  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]


@pytest.mark.parametrize(
    ("job_file", "instance", "nodes", "gib", "tokens_per_second"),
    [
        ("qwen2.5-1.5b-sft", "g6.12xlarge", 2, None, None),
        ("qwen2.5-7b-sft", "p4d.24xlarge", 2, 34.1, 43_000),
        ("qwen2.5-7b-sft", "p4d.24xlarge", 1, 33.35, None),
        ("qwen2.5-14b-sft", "p5.48xlarge", 2, 65.1, 76_800),
        ("qwen2.5-14b-sft", "p5.48xlarge", 1, 66.25, None),
    ],
)
def test_the_shipped_jobs_fit_the_types_they_are_made_for(
    job_file: str, instance: str, nodes: int, gib: float | None, tokens_per_second: float | None
) -> None:
    job = load_job(f"training/jobs/{job_file}.yaml")
    prediction = predict(job, shape_of(job), hardware_of_instance(instance, nodes))
    assert prediction.fits, prediction.sharding.reason
    # The numbers in the comments of the job files.
    assert gib is None or prediction.memory_gib == pytest.approx(gib, abs=0.05)
    assert tokens_per_second is None or prediction.tokens_per_second == pytest.approx(
        tokens_per_second, rel=2e-3
    )


def test_the_plan_of_a_job_is_told_by_the_command_line() -> None:
    from typer.testing import CliRunner

    from training.cli import app

    arguments = ["plan", "training/jobs/qwen2.5-7b-sft.yaml", "--instance", "p4d.24xlarge", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["fits"] is True


def test_what_cannot_fit_says_so() -> None:
    big = KNOWN["Qwen/Qwen2.5-14B"]
    prediction = predict(JOB, big, hardware_of_instance("g6.12xlarge", 2))
    assert not prediction.fits
    assert "nothing fits" in prediction.sharding.reason
    assert "GiB per GPU" in prediction.sharding.reason


def test_the_communication_is_that_of_the_published_figures() -> None:
    # 10.40 GB and 6.17 GB per NIC and direction: facts of the ring, for full (float32 reduce) and hybrid sharding.
    hardware = hardware_of_instance("g6.12xlarge", 2)
    job = load_job("training/jobs/qwen2.5-1.5b-sft.yaml", ["batch.accumulation=1"])
    for scheme, gigabytes in (("full", 10.40), ("hybrid", 6.17)):
        sharding = planning.Sharding(scheme, True, 1, "")  # pyright: ignore[reportArgumentType]
        _, _, across = planning.step_parts(job, QWEN, hardware, sharding)
        line = hardware.network_gbps / 8 * 1e9 * planning.NETWORK_EFFICIENCY
        assert across * line / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_every_shipped_job_has_a_shape() -> None:
    assert shape_of(JOB) == QWEN
    assert shape_of(load_job("training/jobs/demo.yaml")).num_layers == 4


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([256, 1024, 4096]),
    accumulation=st.sampled_from([1, 2, 4]),
    nodes=st.integers(1, 4),
    instance=st.sampled_from(["g6.12xlarge", "p4d.24xlarge", "p5.48xlarge", "g6e.48xlarge"]),
)
def test_a_chosen_layout_fits_or_nothing_does(
    tokens: int, accumulation: int, nodes: int, instance: str
) -> None:
    hardware = hardware_of_instance(instance, nodes)
    job = tiny_job(batch={"tokens_per_gpu": tokens * accumulation, "accumulation": accumulation})
    chosen = choose_sharding(job, QWEN, hardware)
    memory = sum(memory_parts(job, QWEN, hardware, chosen).values())
    assert (memory <= planning.USABLE_SHARE * hardware.gpu_memory_gib) != chosen.reason.startswith(
        "nothing fits"
    )
    assert chosen.scheme == "full" or nodes > 1


@pytest.mark.parametrize("steps", ["-3", "0"])
def test_a_plan_of_no_steps_is_refused(steps: str) -> None:
    from typer.testing import CliRunner

    from training.cli import app

    asked = ["plan", "training/jobs/qwen2.5-1.5b-sft.yaml", "--steps", steps]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert "Invalid value for '--steps': Input should be greater than or equal to 1" in result.output
