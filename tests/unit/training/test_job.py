"""Every mistake in a job file names its place, the key, what was found and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.training.jobs import tiny_job
from training.errors import ExitStatus, UsageError
from training.job import job_from_yaml, load_job

GOOD = """\
name: demo
model:
  source: ./model
data:
  source: ./data.jsonl
  max_length: 128
batch:
  tokens_per_gpu: 1024
steps: 100
"""


def _error(tmp_path: Path, text: str, *overrides: str) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        load_job(path, overrides)
    assert raised.value.status == ExitStatus.USAGE
    return str(raised.value).replace(str(path), "job.yaml")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("steps: 100", "stepz: 100"),
            ["job.yaml:9: unknown key stepz", "Did you mean steps?", "Allowed in a job: name, model"],
        ),
        (
            ("  source: ./model", "  sauce: ./model"),
            ["job.yaml:3: unknown key model.sauce", "Did you mean model.source?"],
        ),
        (("steps: 100", "steps: many"), ["job.yaml:9: steps: found 'many'", "valid integer"]),
        (("steps: 100", "steps: 0"), ["job.yaml:9: steps: found 0", "greater than 0"]),
        (("steps: 100", "steps: 100\nepochs: 2"), ["exactly one of steps and epochs (found both)"]),
        (("steps: 100\n", ""), ["exactly one of steps and epochs (found neither)"]),
        (
            ("max_length: 128", "max_length: 4096"),
            ["job.yaml:6: data.max_length 4096 is longer than a micro-batch of 1024 tokens"],
        ),
        (("name: demo", "name: Demo_1"), ["job.yaml:1: name: found 'Demo_1'", "pattern"]),
        (("name: demo\n", ""), ["name is missing"]),
        (
            ("tokens_per_gpu: 1024", "tokens_per_gpu: 1024\n  accumulation: 3"),
            ["1024 is not a multiple of accumulation 3"],
        ),
        (
            ("  source: ./model", "  source: a/b\n  revision: main"),
            ["job.yaml:4: model.revision", "40 lower-case hexadecimal digits"],
        ),
        (("steps: 100", "steps: 100\nsteps: 200"), ["job.yaml:10: steps stands twice (first on line 9)"]),
        (("steps: 100", "steps: [1"), ["not valid YAML"]),
        (
            ("steps: 100", "steps: 100\nruntime_env:\n  pip: [peft]"),
            ["job.yaml:11: runtime_env.pip", "peft: pin each package as name==version"],
        ),
        (
            ("steps: 100", "steps: 100\nschedule:\n  warmup_steps: 100"),
            ["job.yaml:11: schedule.warmup_steps 100 must be less than steps 100"],
        ),
        (
            ("steps: 100", "steps: 100\ncheckpoint:\n  export: best"),
            ["checkpoint.export best needs held-out documents", "set data.validation"],
        ),
        (
            (
                "  max_length: 128",
                (
                    "  max_length: 128\n  validation: {count: 9}\ncheckpoint: {export: best, every: 50}\n"
                    "evaluation: {every: 20}"
                ),
            ),
            ["a checkpoint every 50 steps", "every 20 leave", "a multiple of evaluation.every"],
        ),
        (
            ("steps: 100", "steps: 100\nresilience:\n  exclude_node_after: 0"),
            ["resilience.exclude_node_after: found 0", "greater than 0"],
        ),
        (
            ("steps: 100", "steps: 100\nparallel:\n  activation_checkpointing: sometimes"),
            ["parallel.activation_checkpointing", "found 'sometimes'"],
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], expected: list[str]) -> None:
    assert change[0] in GOOD
    message = _error(tmp_path, GOOD.replace(*change))
    for part in expected:
        assert part in message


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    message = _error(
        tmp_path,
        GOOD.replace("steps: 100", "steps: 0\nseeed: 1").replace("max_length: 128", "max_length: no"),
    )
    assert message.startswith("3 problems in the job:")


def test_an_override_is_named_as_the_place(tmp_path: Path) -> None:
    assert "--set steps=-1: steps: found -1" in _error(tmp_path, GOOD, "steps=-1")
    assert "--set optimizer.lr=1: unknown key optimizer.lr" in _error(tmp_path, GOOD, "optimizer.lr=1")
    assert "expected KEY=VALUE" in _error(tmp_path, GOOD, "steps")
    assert "steps is 100, not a section" in _error(tmp_path, GOOD, "steps.more=1")


def test_overrides_take_any_yaml_value(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD)
    job = load_job(
        path,
        [
            "optimizer.learning_rate=1e-5",
            "evaluation.prompts=[a, b]",
            "model.compile=false",
            "checkpoint.async=false",
        ],
    )
    assert job.optimizer.learning_rate == 1e-5
    assert job.evaluation.prompts == ("a", "b")
    assert job.model.compile is False
    assert job.checkpoint.asynchronous is False


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such job file"):
        load_job(tmp_path / "nothing.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        load_job(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(UsageError, match="found an empty file"):
        load_job(tmp_path / "empty.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_job(tmp_path / "bytes.yaml")


@pytest.mark.parametrize("path", sorted(Path("training/jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_jobs_are_valid_and_round_trip(path: Path) -> None:
    job = load_job(path)
    assert job_from_yaml(job.dump_yaml()) == job


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**32 - 1),
            "steps": st.integers(3, 10**9),
            "optimizer": st.fixed_dictionaries(
                {
                    "learning_rate": st.floats(1e-9, 10),
                    "betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
                }
            ),
            "runtime_env": st.fixed_dictionaries({"env": st.dictionaries(st.text(), st.text(), max_size=3)}),
        },
    )
)
def test_a_resolved_job_reads_back_as_itself(changes: dict[str, object]) -> None:
    job = tiny_job(**changes)
    assert job_from_yaml(job.dump_yaml()) == job


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_document_crashes_the_reader(document: object) -> None:
    with pytest.raises(UsageError):
        job_from_yaml(yaml.safe_dump(document))


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
@pytest.mark.parametrize("value", ["fa1afe1fa1afe1", 123456])
def test_a_secret_variable_is_refused_without_its_value(name: str, value: str | int) -> None:
    with pytest.raises(UsageError) as error:
        tiny_job(runtime_env={"env": {name: value}})
    assert f"runtime_env.env: {name} looks like a secret" in str(error.value)
    assert f"jobSecrets ({name}=SECRET" in str(error.value)
    assert str(value) not in str(error.value)


def test_a_value_that_looks_like_a_token_is_refused_under_any_name() -> None:
    token = "hf_" + "a" * 34
    with pytest.raises(UsageError, match="COLOUR looks like a secret") as error:
        tiny_job(runtime_env={"env": {"COLOUR": token}})
    assert token not in str(error.value)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "RAY_AUTH_MODE", "NCCL_DEBUG", "HF_TOKEN_PATH"])
def test_a_variable_without_a_secret_is_not_taken_for_one(name: str) -> None:
    assert tiny_job(runtime_env={"env": {name: "1"}}).runtime_env.env == {name: "1"}


def test_a_variable_that_looks_like_a_number_stays_a_text() -> None:
    job = tiny_job(runtime_env={"env": {"A": "1e100"}})
    assert job_from_yaml(job.dump_yaml()).runtime_env.env == {"A": "1e100"}


def test_credentials_in_the_address_of_a_tracker_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tracking\.mlflow\.uri: .*MLFLOW_TRACKING_USERNAME") as error:
        tiny_job(tracking={"mlflow": {"uri": "https://me:pass12345@host", "experiment": "e"}})
    assert "pass12345" not in str(error.value)
