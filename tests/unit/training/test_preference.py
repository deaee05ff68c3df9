"""Direct preference optimization: loss and gradients are those of a plain implementation, whatever the packing and the
number of ranks; a resumed run compares with the model that the first one began with.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.unit.training.jobs import VOCAB, tiny_architecture, tiny_job
from tests.unit.training.processes import run_ranks
from training import planning
from training.adapters import fingerprint
from training.attention import layout_of
from training.data.batch import IGNORE, Batch
from training.errors import UsageError
from training.job import ArchitectureSpec, JobSpec, job_from_yaml
from training.loss import linear_log_probs
from training.model import FAMILIES, CausalLM, config_of, init_weights, parameter_names
from training.optimizer import gradient_norm
from training.parallel import Sharding, begin_micro_batch, join_world, mesh_of, shard
from training.planning import ModelShape, memory_parts, step_parts
from training.preference import Preference, check_reference, dpo_loss, frozen_reference
from training.sources import ModelSource

TOKENS = 160
BETA, SMOOTHING = 0.3, 0.1
CPU = torch.device("cpu")


def pair_job(**changes: Any) -> JobSpec:
    return tiny_job(
        **{
            "data": {"source": "pairs.jsonl", "max_length": 64},
            "objective": {"kind": "dpo", "beta": BETA, "label_smoothing": SMOOTHING},
            **changes,
        }
    )


# The loss itself


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 70), chunk=st.integers(1, 80), seed=st.integers(0, 2**16), ignored=st.floats(0, 1)
)
def test_chunked_log_probabilities_and_gradients_equal_the_plain_ones(
    tokens: int, chunk: int, seed: int, ignored: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(tokens, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 11, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    plain = -F.cross_entropy(hidden @ weight.t(), targets, ignore_index=IGNORE, reduction="none")
    ours = linear_log_probs(hidden, weight, targets, chunk_tokens=chunk)
    torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad((plain * factors).sum(), (hidden, weight))
    found = torch.autograd.grad((ours * factors).sum(), (hidden, weight))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_papers() -> None:
    policy = torch.tensor([-3.0, -5.0, -2.0, -1.0], requires_grad=True)
    reference = torch.tensor([-4.0, -4.0, -2.5, -1.5])
    pairs = dpo_loss(policy, reference, beta=0.5, label_smoothing=0.0)
    assert pairs.chosen_rewards.tolist() == [0.5, 0.25]
    assert pairs.rejected_rewards.tolist() == [-0.5, 0.25]
    assert pairs.loss.item() == pytest.approx(math.log(1 + math.exp(-1.0)) + math.log(2))
    (gradient,) = torch.autograd.grad(pairs.loss, policy)
    wrong = 0.5 / (1 + math.exp(1.0))  # beta * sigmoid(-margin)
    assert gradient.tolist() == pytest.approx([-wrong, wrong, -0.25, 0.25])


@given(margin=st.floats(-50, 50), smoothing=st.floats(0, 0.49))
def test_smoothing_takes_some_pairs_to_be_the_other_way_round(margin: float, smoothing: float) -> None:
    zeros = torch.zeros(2, dtype=torch.float64)
    right, left = torch.tensor([margin, 0.0]).double(), torch.tensor([0.0, margin]).double()
    smoothed = dpo_loss(right, zeros, 1.0, smoothing).loss.item()
    expected = (1 - smoothing) * dpo_loss(right, zeros, 1.0, 0.0).loss + smoothing * dpo_loss(
        left, zeros, 1.0, 0.0
    ).loss
    assert smoothed == pytest.approx(expected.item())


def test_a_batch_of_padding_alone_has_no_loss() -> None:
    assert dpo_loss(torch.zeros(0), torch.zeros(0), BETA, SMOOTHING).loss.item() == 0.0


# Against a plain Hugging Face implementation

Sequence = tuple[list[int], int]
"""Token ids, and where the answer begins."""
PairOfIds = tuple[Sequence, Sequence]


def some_pairs(seed: int, count: int) -> list[PairOfIds]:
    rng = random.Random(seed)
    pairs: list[PairOfIds] = []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        answers = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))] for _ in range(2)]
        pairs.append(((prompt + answers[0], len(prompt)), (prompt + answers[1], len(prompt))))
    return pairs


def packed(pairs: list[PairOfIds], tokens: int = TOKENS) -> Batch:
    """The pairs in one row, padding behind them."""
    input_ids, labels, positions, borders = [], [], [], [0]
    for ids, answer in (sequence for pair in pairs for sequence in pair):
        input_ids += ids
        labels += [IGNORE] * (answer - 1) + ids[answer:] + [IGNORE]
        positions += range(len(ids))
        borders.append(len(input_ids))
    used = len(input_ids)
    if used < tokens:
        borders.append(tokens)
        positions += range(tokens - used)
    return Batch(
        input_ids=torch.tensor(input_ids + [0] * (tokens - used)),
        labels=torch.tensor(labels + [IGNORE] * (tokens - used)),
        position_ids=torch.tensor(positions),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_seqlen=max(b - a for a, b in zip(borders, borders[1:], strict=False)),
        num_supervised=sum(label != IGNORE for label in labels),
        num_tokens=used,
        num_documents=2 * len(pairs),
        num_pairs=len(pairs),
    )


def _config(**changes: Any) -> Any:
    architecture = ArchitectureSpec(**tiny_architecture(**changes))
    return config_of(architecture, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0)


def _moved(model: CausalLM, size: float = 0.02) -> None:
    """Away from the reference, by a change that no sharding alters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size).add_(size / 10)


def _plain_truth(config: Any, pairs: list[PairOfIds]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss, measures and gradients by transformers alone: one pair at a time, padded, all logits held."""
    models: list[Any] = []
    for moved in (True, False):
        model = CausalLM(config)
        model.materialize(CPU)
        init_weights(model, seed=3)
        if moved:
            _moved(model)
        plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        plain.load_state_dict(model.hf.state_dict(), strict=True)
        models.append(plain)
    policy, reference = models
    sums = torch.zeros(5)
    for pair in pairs:
        longest = max(len(ids) for ids, _ in pair)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in pair])
        attended = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in pair])
        answers = torch.tensor(
            [[answer <= i < len(ids) for i in range(1, longest)] for ids, answer in pair], dtype=torch.float32
        )

        def log_probs(
            model: Any, ids: torch.Tensor = ids, attended: torch.Tensor = attended, answers: Any = answers
        ) -> torch.Tensor:
            logits = model(input_ids=ids, attention_mask=attended).logits[:, :-1]
            return (logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * answers).sum(1)

        with torch.no_grad():
            before = log_probs(reference)
        rewards = BETA * (log_probs(policy) - before)
        margin = rewards[0] - rewards[1]
        loss = -(1 - SMOOTHING) * margin.sigmoid().log() - SMOOTHING * (-margin).sigmoid().log()
        (loss / len(pairs)).backward()
        values = [loss, (margin > 0).float(), rewards[0], rewards[1], margin]
        sums += torch.stack([value.detach() for value in values])
    gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return (sums / len(pairs)).tolist(), gradients


def _ours(config: Any, batches: list[Batch], accumulation: int, scheme: str, reshard: bool) -> dict[str, Any]:
    """The same by the product's own code on this rank."""
    world = join_world()
    job = pair_job()
    sharding = Sharding(scheme, reshard, 0, reason="test")  # pyright: ignore[reportArgumentType]
    mesh = mesh_of(world, sharding.scheme)
    model = CausalLM(config)
    shard(model, job, world, sharding, mesh)
    model.materialize(world.device)
    init_weights(model, seed=3)
    _moved(model)
    source = ModelSource(config, None, None, None)  # pyright: ignore[reportArgumentType]
    job = job.model_copy(update={"seed": 3})
    reference = frozen_reference(job, source, world, sharding, mesh)
    group = None if world.size == 1 else mesh.get_group("shard")
    mark = fingerprint(parameter_names(reference), group)
    objective = Preference(job, model, reference)
    pairs = sum(batch.num_pairs for batch in batches)
    total = torch.zeros(5)
    mine = batches[world.rank * accumulation : (world.rank + 1) * accumulation]
    for index, batch in enumerate(mine):
        begin_micro_batch(model, sharding, last=index == len(mine) - 1)
        sums = objective.loss(batch, layout_of(batch, TOKENS, world.device)) / pairs
        sums[0].backward()
        total += sums.detach()
    torch.distributed.all_reduce(total)
    norm = gradient_norm(model.parameters(), group).item()
    gradients = {name: _whole(p.grad) for name, p in model.hf.named_parameters() if p.grad is not None}
    return {
        "values": total.tolist(),
        "norm": norm,
        "gradients": {name: gradient.tolist() for name, gradient in gradients.items()},
        "fingerprint": mark,
        "reference_is_sharded": all(isinstance(p, DTensor) for p in reference.parameters()),
        "reference_learns": any(p.grad is not None or p.requires_grad for p in reference.parameters()),
    }


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


CASES = [
    # world size, accumulation, scheme, ranks per node, reshard after forward
    (1, 1, "full", 1, False),
    (1, 4, "full", 1, True),
    (2, 1, "full", 2, True),
    (2, 2, "full", 2, False),
    (4, 1, "hybrid", 2, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "accumulation", "scheme", "local_size", "reshard"), CASES)
def test_loss_measures_and_gradients_equal_the_plain_ones(
    world_size: int, accumulation: int, scheme: str, local_size: int, reshard: bool
) -> None:
    config = _config()
    parts = world_size * accumulation
    pairs = some_pairs(seed=1, count=8)
    # Unequal parts: what each rank and micro-batch holds must not weigh by their number.
    cuts = [0, *(i * len(pairs) // parts + (1 if i == 1 else 0) for i in range(1, parts)), len(pairs)]
    batches = [packed(pairs[a:b], 320) for a, b in zip(cuts, cuts[1:], strict=False)]
    values, gradients = _plain_truth(config, pairs)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    results = run_ranks(
        _ours, world_size, config, batches, accumulation, scheme, reshard, local_size=local_size
    )
    for result in results:
        assert result["values"] == pytest.approx(values, rel=1e-4, abs=1e-6)
        assert result["norm"] == pytest.approx(norm, rel=1e-4)
        assert result["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                torch.tensor(result["gradients"][name]),
                gradient,
                rtol=1e-3,
                atol=1e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        assert result["reference_is_sharded"]
        assert not result["reference_learns"]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_pairs_equal_each_pair_alone(family: str) -> None:
    config = _config(family=family)
    pairs = some_pairs(seed=5, count=4)
    totals: list[torch.Tensor] = []
    gradients: list[dict[str, Any]] = []
    for batches in ([packed(pairs)], [packed([pair], 64) for pair in pairs]):
        policy, reference = CausalLM(config), CausalLM(config)
        for model in (policy, reference):
            model.materialize(CPU)
            init_weights(model, seed=3)
        _moved(policy)
        objective = Preference(pair_job(), policy, reference)
        total = torch.zeros(5)
        for batch in batches:
            sums = objective.loss(batch, layout_of(batch, TOKENS, CPU))
            sums[0].backward()
            total += sums.detach()
        totals.append(total)
        gradients.append({name: p.grad for name, p in policy.hf.named_parameters()})
    torch.testing.assert_close(totals[0], totals[1], rtol=1e-4, atol=1e-5)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5)


# The reference


def test_the_fingerprint_tells_another_model_and_not_another_dtype() -> None:
    marks: list[str] = []
    for seed, dtype in ((3, torch.float32), (3, torch.bfloat16), (4, torch.float32)):
        model = CausalLM(_config())
        model.materialize(CPU)
        init_weights(model, seed=seed)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        marks.append(fingerprint(parameter_names(model), None))
    assert marks[0] == marks[1] != marks[2]
    check_reference(marks[0], None)
    check_reference(marks[0], marks[1])
    with pytest.raises(UsageError, match=r"model.source now holds other weights .* run.resume: false"):
        check_reference(marks[0], marks[2])


def test_the_plan_counts_the_reference() -> None:
    shape = ModelShape.of_architecture(ArchitectureSpec(**tiny_architecture()))
    hardware = planning.Hardware("NVIDIA H200", 2, 4, 139.0, 989.0, 450.0, 3200.0)
    plain, pairs = tiny_job(), pair_job()
    for scheme, shards in (("full", 8), ("hybrid", 4)):
        layout = planning.Sharding(scheme, False, 0, "")  # pyright: ignore[reportArgumentType]
        without = memory_parts(plain, shape, hardware, layout)
        with_reference = memory_parts(pairs, shape, hardware, layout)
        assert with_reference.pop("reference model") == pytest.approx(
            2 * shape.num_parameters / shards / 2**30
        )
        assert with_reference == without
        more = step_parts(pairs, shape, hardware, layout)
        less = step_parts(tiny_job(data__max_length=64), shape, hardware, layout)
        assert more[0] == pytest.approx(less[0] * 4 / 3)
        assert more[1] > less[1]
        gathered = 2 * shape.num_parameters * 7 // 8 if scheme == "full" else 0
        adapters = pair_job(adapter={"rank": 4})
        assert "reference model" not in memory_parts(adapters, shape, hardware, layout)
        alone = tiny_job(data__max_length=64, adapter={"rank": 4})
        assert (
            step_parts(adapters, shape, hardware, layout)[0] > step_parts(alone, shape, hardware, layout)[0]
        )
        assert (
            step_parts(adapters, shape, hardware, layout)[1:]
            == step_parts(alone, shape, hardware, layout)[1:]
        )
        assert (more[2] - less[2]) * 400e9 * planning.NETWORK_EFFICIENCY == pytest.approx(gathered, abs=1)


# Mistakes


TEXTS = {"source": "b.jsonl", "format": "text", "weight": 1}


def _refused(**changes: Any) -> str:
    with pytest.raises(UsageError) as raised:
        pair_job(**changes)
    return str(raised.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"objective": {"kind": "supervised", "beta": 0.1}}, ["objective: beta belongs to kind dpo; found kind supervised"]),
        ({"objective": {"label_smoothing": 0.1}}, ["label_smoothing belongs to kind dpo"]),
        ({"objective": {"kind": "ppo"}}, ["objective.kind: found 'ppo'", "'supervised' or 'dpo'"]),
        ({"objective": {"kind": "dpo", "beta": 0}}, ["objective.beta: found 0", "greater than 0"]),
        ({"objective": {"kind": "dpo", "label_smoothing": 0.5}}, ["objective.label_smoothing: found 0.5", "less than 0.5"]),
        ({"objective": {"kind": "dpo", "gamma": 1}}, ["Allowed in objective: kind, beta, label_smoothing"]),
        ({"data__format": "messages"}, ["data.format messages holds no preference pairs, which objective.kind dpo needs"]),
        ({"data": {"source": "python-docs", "max_length": 64}}, ["data.source python-docs holds no", "objective.kind dpo"]),
        ({"data__mask": "all"}, ["data.mask all is impossible with objective.kind dpo", "auto and completion"]),
        ({"data__too_long": "split"}, ["data.too_long split is impossible with objective.kind dpo"]),
        ({"data__max_length": 129}, ["two sequences of data.max_length 129 do not fit 256 tokens", "objective.kind dpo"]),
        (
            {"data": {"max_length": 64, "mixture": [{"source": "a", "weight": 1}, TEXTS]}},
            ["data.mixture.1.format text holds no preference pairs", "objective.kind dpo"],
        ),
        (
            {"data__validation": {"source": {"source": "c.jsonl", "format": "text"}}},
            ["data.validation.source.format text holds no preference pairs", "objective.kind dpo"],
        ),
        (
            {"objective": {"kind": "supervised"}, "data__format": "preference"},
            ["data.format preference holds pairs", "objective.kind supervised cannot", "set objective.kind: dpo"],
        ),
    ],
)  # fmt: skip
def test_a_mistake_names_both_keys(changes: dict[str, Any], expected: list[str]) -> None:
    message = _refused(**changes)
    for part in expected:
        assert part in message


def test_a_mistake_names_its_line() -> None:
    text = "name: a\nmodel: {source: ./m}\ndata:\n  source: a.jsonl\n  format: text\nsteps: 1\nobjective:\n  kind: dpo\n"
    with pytest.raises(UsageError, match=r"job.yaml:5: data.format text holds no preference pairs"):
        job_from_yaml(text)


def test_the_resolved_job_says_what_was_left_out() -> None:
    job = pair_job(objective={"kind": "dpo"})
    assert (job.objective.beta, job.objective.label_smoothing) == (0.1, 0.0)
    assert job_from_yaml(job.dump_yaml()) == job
    assert job.training_data.format == "preference"
    assert tiny_job().training_data is not None
    assert job_from_yaml(tiny_job().dump_yaml()) == tiny_job()


# Whole runs


def _write_pairs(path: Path, count: int = 120) -> None:
    """Questions whose polite answers are preferred."""
    subjects = ("cat", "dog", "car", "sky", "sea", "sun", "map", "hat")
    rows = [
        {
            "prompt": f"Where is the {subjects[n % 8]} number {n}?",
            "chosen": f"The {subjects[n % 8]} is over there, thank you for asking.",
            "rejected": f"Go and find the {subjects[n % 8]} yourself.",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _run_job(pairs: Path, steps: int, **changes: Any) -> JobSpec:
    return pair_job(
        **{
            "data": {"source": str(pairs), "max_length": 96, "validation": {"count": 12}},
            "objective": {"kind": "dpo", "beta": 0.5},
            "batch": {"tokens_per_gpu": 512},
            "schedule": {"kind": "constant", "warmup_steps": 1},
            "steps": steps,
            **changes,
        }
    )


def _train(job_yaml: str, run: str, work: str) -> dict[str, Any]:
    from training.loop import Hooks, train
    from training.storage import open_storage

    events: list[dict[str, Any]] = []
    result = train(job_from_yaml(job_yaml), open_storage(run), Path(work), Hooks(event=events.append))
    return {"result": result.__dict__, "events": events}


def _lines(run: Path) -> dict[int, dict[str, float]]:
    """What a step came to, without times and memory."""
    names = ("loss", "grad_norm", "reward_accuracy", "chosen_reward", "rejected_reward", "reward_margin")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wanted = (*names, "eval_loss", *(f"eval_{name}" for name in names[2:]))
    return {line["step"]: {name: line[name] for name in wanted if name in line} for line in lines}


@pytest.mark.slow
def test_a_run_learns_the_preference_and_a_resumed_one_is_bit_equal(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    _write_pairs(pairs)

    def attempt(steps: int, run: str) -> dict[str, Any]:
        job = _run_job(pairs, steps).dump_yaml()
        return run_ranks(_train, 2, job, str(tmp_path / run / "run"), str(tmp_path / run / "work"))[0]

    whole = attempt(12, "whole")
    lines = _lines(tmp_path / "whole" / "run")
    # Before any update policy and reference are one: no reward, and a coin's loss.
    assert lines[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["eval_reward_margin"] == pytest.approx(0.0, abs=1e-6)
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[12]["loss"] < 0.5
    assert lines[12]["reward_accuracy"] > 0.9
    assert lines[12]["eval_reward_accuracy"] > 0.9
    assert lines[12]["eval_loss"] < 0.5
    for line in lines.values():
        if "loss" in line:
            margin = line["chosen_reward"] - line["rejected_reward"]
            assert line["reward_margin"] == pytest.approx(margin, rel=1e-4, abs=1e-5)
    assert whole["result"]["measures"]["eval_reward_accuracy"] > 0.9
    assert whole["result"]["data"]["pairs"] is True
    evaluations = [event for event in whole["events"] if event["event"] == "evaluation"]
    assert evaluations[-1]["eval_reward_accuracy"] > 0.9

    attempt(3, "parts")
    resumed = attempt(12, "parts")
    assert resumed["result"]["resumed_from"].startswith("step-00000003.")
    assert _lines(tmp_path / "parts" / "run") == lines

    # One rank with two micro-batches has the same pairs in every step.
    job = _run_job(pairs, 12, batch={"tokens_per_gpu": 1024, "accumulation": 2}).dump_yaml()
    run_ranks(_train, 1, job, str(tmp_path / "one" / "run"), str(tmp_path / "one" / "work"))
    for step, line in _lines(tmp_path / "one" / "run").items():
        assert line == pytest.approx(lines[step], rel=2e-3, abs=1e-4)


@pytest.mark.slow
def test_with_adapters_the_reference_is_the_model_without_them(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    _write_pairs(pairs)
    adapter = {"rank": 8, "dropout": 0.1}

    def attempt(steps: int, run: str) -> dict[str, Any]:
        job = _run_job(pairs, steps, adapter=adapter, optimizer={"learning_rate": 2e-2})
        assert not planning.holds_reference(job)
        folder = tmp_path / run
        return run_ranks(_train, 2, job.dump_yaml(), str(folder / "run"), str(folder / "work"))[0]

    attempt(12, "whole")
    lines = _lines(tmp_path / "whole" / "run")
    assert lines[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["eval_reward_margin"] == 0.0
    assert lines[12]["eval_reward_accuracy"] > 0.9
    assert lines[12]["loss"] < lines[1]["loss"]
    attempt(3, "parts")
    assert attempt(12, "parts")["result"]["resumed_from"].startswith("step-00000003.")
    assert _lines(tmp_path / "parts" / "run") == lines


@pytest.mark.slow
def test_a_source_that_changed_since_the_run_began_is_refused_on_resume(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    _write_pairs(pairs, 40)
    first = tiny_job(steps=3)
    run_ranks(_train, 1, first.dump_yaml(), str(tmp_path / "sft"), str(tmp_path / "work"))
    model = {"source": str(tmp_path / "sft" / "export")}
    run = str(tmp_path / "dpo")
    run_ranks(_train, 1, _run_job(pairs, 3, model=model).dump_yaml(), run, str(tmp_path / "work"))
    again = tiny_job(steps=6)
    run_ranks(_train, 1, again.dump_yaml(), str(tmp_path / "sft"), str(tmp_path / "work"))
    with pytest.raises(AssertionError, match=r"model.source now holds other weights"):
        run_ranks(_train, 1, _run_job(pairs, 6, model=model).dump_yaml(), run, str(tmp_path / "work"))
