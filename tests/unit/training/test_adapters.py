"""Adapters compute what peft computes, leave the frozen weights alone, and come out merged and in peft's format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.unit.training.jobs import (
    VOCAB,
    ragged_batch,
    read_losses,
    tiny_architecture,
    tiny_job,
)
from tests.unit.training.processes import run_ranks
from training import adapters
from training.attention import layout_of
from training.data.batch import Batch
from training.errors import UsageError
from training.job import BLOCK_LINEARS, AdapterSpec, ArchitectureSpec, JobSpec, load_job
from training.kernels import qkv, swiglu
from training.model import (
    FAMILIES,
    CausalLM,
    base_parameters,
    config_of,
    init_adapters,
    init_weights,
    num_parameters,
    parameter_names,
)
from training.optimizer import ShardedAdamW, gradient_norm
from training.parallel import begin_micro_batch, compute_dtype, join_world, mesh_of, release_gathered, shard
from training.planning import ModelShape, Sharding, memory_parts, predict
from training.shapes import KNOWN
from training.storage import open_storage
from training.traffic import parameter_groups

TOKENS = 64
CPU = torch.device("cpu")
LORA = AdapterSpec(rank=4, alpha=6)
DORA = AdapterSpec(kind="dora", rank=4, alpha=6)
KINDS = pytest.mark.parametrize("spec", [LORA, DORA], ids=["lora", "dora"])


def _config(family: str = "qwen2") -> Any:
    architecture = ArchitectureSpec(**tiny_architecture(family=family))
    return config_of(architecture, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0)


def _fill(model: CausalLM) -> None:
    init_weights(model, seed=3)
    init_adapters(model, seed=3)


def _adapted(spec: AdapterSpec, family: str = "qwen2", *, moved: bool = True) -> CausalLM:
    """A whole model with adapters; moved: with values that none has before it is trained."""
    model = CausalLM(_config(family))
    adapters.attach(model, model.blocks, spec, torch.float32)
    model.materialize(CPU)
    _fill(model)
    if moved:
        torch.manual_seed(7)
        for name, parameter in parameter_names(model).items():
            if adapters.is_adapter_parameter(name) or name.endswith("bias"):
                with torch.no_grad():
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _plain(model: CausalLM) -> Any:
    """The model that was adapted, by transformers alone."""
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", dtype=torch.float32)
    plain.load_state_dict(
        {name: p.detach().clone() for name, p in base_parameters(model).items()}, strict=False
    )
    return plain


def _peft(model: CausalLM, spec: AdapterSpec) -> PeftModel:
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]
        use_dora=spec.kind == "dora",
        target_modules=list(spec.targets),
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(_plain(model), config)
    tensors = {
        f"base_model.model.{path}.{name}": tensor.detach()
        for path, layer in adapters.adapted_linears(model.hf).items()
        for name, tensor in layer.peft_tensors(lambda tensor: tensor).items()
    }
    assert tensors.keys() == get_peft_model_state_dict(theirs).keys()
    loaded = set_peft_model_state_dict(theirs, tensors)
    assert not loaded.unexpected_keys
    return theirs  # pyright: ignore[reportReturnType]


def _logits(model: CausalLM, batch: Batch) -> Tensor:
    return model.hidden_states(batch, layout_of(batch, TOKENS, CPU)) @ model.hf.lm_head.weight.t()


# Against peft


@KINDS
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_and_gradients_are_those_of_peft(spec: AdapterSpec, family: str) -> None:
    ours = _adapted(spec, family)
    theirs = _peft(ours, spec)
    batch = ragged_batch(seed=2, tokens=24, num_documents=1, supervised=0.8)
    mine, wanted = _logits(ours, batch), theirs(input_ids=batch.input_ids[None]).logits[0]
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(mine, _plain(ours)(input_ids=batch.input_ids[None]).logits[0], atol=1e-2)

    ours(batch, layout_of(batch, TOKENS, CPU)).backward()
    nn.functional.cross_entropy(wanted, batch.labels, reduction="sum").backward()
    gradients = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }
    trained = {name: p for name, p in parameter_names(ours).items() if p.requires_grad}
    assert len(gradients) == len(trained) == 2 * 7 * (3 if spec.kind == "dora" else 2)
    for name, parameter in trained.items():
        assert adapters.is_adapter_parameter(name)
        other = name.replace("magnitude_offset", "lora_magnitude_vector.weight")
        torch.testing.assert_close(
            parameter.grad, gradients[other], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["lora", "dora"]),
    rank=st.integers(1, 12),
    alpha=st.floats(0.1, 40),
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_the_merged_layer_computes_what_the_adapted_one_does(
    kind: str, rank: int, alpha: float, sizes: tuple[int, int], bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(*sizes, bias=bias)
    layer_type = adapters.LoRALinear if kind == "lora" else adapters.DoRALinear
    layer = layer_type(linear, AdapterSpec(kind=kind, rank=rank, alpha=alpha))  # pyright: ignore[reportArgumentType]
    for parameter in (layer.lora_A.weight, layer.lora_B.weight, getattr(layer, "magnitude_offset", None)):
        if parameter is not None:
            nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, sizes[0])
    merged = nn.functional.linear(x, layer.merged_weight(lambda tensor: tensor.detach()), linear.bias)
    scale = merged.detach().abs().max() + 1
    torch.testing.assert_close(layer(x) / scale, merged / scale, rtol=1e-3, atol=1e-4)


@KINDS
def test_an_untrained_adapter_changes_nothing_to_the_bit(spec: AdapterSpec) -> None:
    model = _adapted(spec, moved=False)
    batch = ragged_batch(seed=2, tokens=24, num_documents=2)
    with torch.no_grad():
        adapted = _logits(model, batch)
        with adapters.adapters_disabled(model):
            assert torch.equal(adapted, _logits(model, batch))
    for layer in adapters.adapted_linears(model).values():
        assert torch.equal(layer.merged_weight(lambda tensor: tensor.detach()), layer.weight)


@KINDS
def test_adapters_can_be_disabled_and_come_back(spec: AdapterSpec) -> None:
    model = _adapted(spec.model_copy(update={"dropout": 0.5}))
    batch = ragged_batch(seed=2, tokens=24, num_documents=1)
    with torch.no_grad():
        wanted = _plain(model)(input_ids=batch.input_ids[None]).logits[0]
        with adapters.adapters_disabled(model):
            torch.testing.assert_close(_logits(model.train(), batch), wanted, rtol=1e-4, atol=1e-5)
        assert not torch.equal(_logits(model, batch), _logits(model, batch)), "dropout acts while training"
        model.eval()
        again = _logits(model, batch)
        assert torch.equal(again, _logits(model, batch))
        assert not torch.allclose(again, wanted, atol=1e-2)


def test_bfloat16_neither_moves_an_untrained_dora_nor_loses_a_small_step() -> None:
    """Rounded to bfloat16, a magnitude would be off by up to 0.4 %, and a step of 0.1 % would be lost."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
    layer = adapters.DoRALinear(linear, DORA)
    for parameter in (layer.lora_B.weight, layer.magnitude_offset):
        nn.init.zeros_(parameter)
    layer.to(torch.bfloat16)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, linear.weight))
        layer.lora_B.weight.normal_(std=0.02)
        before = layer(x).float()
        layer.magnitude_offset.copy_(1e-3 * linear.weight.float().norm(dim=1))
        growth = ((layer(x).float() - before) * before.sign()).sum() / before.abs().sum()
    assert float(growth) == pytest.approx(1e-3, rel=0.2)


# Which layers


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_linear_layers_of_a_block_are_the_ones_that_can_be_named(family: str) -> None:
    architecture = ArchitectureSpec(**tiny_architecture(family=family))
    model = CausalLM(_config(family))
    shape = ModelShape.of_architecture(architecture)
    for block in model.blocks:
        found = {
            name.rpartition(".")[2]: (module.in_features, module.out_features)
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear)
        }
        assert found == shape.linears
        assert tuple(shape.linears) == BLOCK_LINEARS


@given(
    kind=st.sampled_from(["lora", "dora"]),
    rank=st.integers(1, 9),
    targets=st.lists(st.sampled_from(BLOCK_LINEARS), min_size=1, unique=True),
)
@settings(max_examples=15, deadline=None)
def test_the_plan_counts_the_adapters_that_the_model_gets(kind: str, rank: int, targets: list[str]) -> None:
    job = tiny_job(adapter={"kind": kind, "rank": rank, "targets": targets})
    assert job.adapter is not None
    assert job.model.architecture is not None
    model = CausalLM(_config())
    adapters.attach(model, model.blocks, job.adapter, torch.bfloat16)
    shape = ModelShape.of_config(model.config.to_dict())
    trained = num_parameters(model, trainable_only=True)
    assert trained == shape.num_layers * shape.adapter_parameters(job.adapter)
    assert num_parameters(model) == shape.num_parameters + trained
    adapted = {path.rpartition(".")[2] for path in adapters.adapted_linears(model)}
    assert adapted == set(targets)
    assert {p.dtype for p in base_parameters(model).values()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    groups = parameter_groups(model, Sharding("full", True, 0, ""))
    assert [group.num_reduced for group in groups] == [trained // 2, trained // 2, 0]


def test_our_fused_operations_leave_adapted_layers_alone() -> None:
    model = _adapted(AdapterSpec(targets=("v_proj", "down_proj")))
    for block in model.blocks:
        assert not swiglu.use(block.mlp)  # pyright: ignore[reportArgumentType]
        assert not qkv.use(block.self_attn)  # pyright: ignore[reportArgumentType]


@KINDS
def test_fused_operations_beside_adapted_layers_give_the_same_gradients(spec: AdapterSpec) -> None:
    for targets, use, part in (
        (("q_proj", "o_proj"), swiglu.use, "mlp"),
        (("gate_proj", "down_proj"), qkv.use, "self_attn"),
    ):
        found: list[list[Tensor]] = []
        for fused in (False, True):
            model = _adapted(spec.model_copy(update={"targets": targets}))
            for block in model.blocks:
                assert not fused or use(getattr(block, part))
            batch = ragged_batch(seed=2, tokens=24, num_documents=3)
            loss = model(batch, layout_of(batch, TOKENS, CPU))
            loss.backward()
            assert all(p.grad is None for p in base_parameters(model).values())
            found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        for plain, fast in zip(*found, strict=True):
            torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


# Sharded


def _sharded(
    spec: AdapterSpec,
    batches: list[Batch],
    scheme: str,
    reshard: bool,
    checkpoint_every: int,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Loss and gradients of two steps on this rank's share, whether frozen weights kept their bits, and bytes held."""
    world, job = join_world(), tiny_job(model__dtype=dtype)
    model = CausalLM(_config())
    sharding = Sharding(scheme, reshard, checkpoint_every, reason="test")  # pyright: ignore[reportArgumentType]
    mesh = mesh_of(world, sharding.scheme)
    adapters.attach(model, model.blocks, spec, compute_dtype(job, CPU))
    shard(model, job, world, sharding, mesh)
    model.materialize(CPU)
    _fill(model)
    group = None if world.size == 1 else mesh.get_group("shard")
    before = {name: _bits(parameter) for name, parameter in base_parameters(model).items()}
    mark = adapters.fingerprint(base_parameters(model), group)
    optimizer = ShardedAdamW(model.hf, tiny_job(optimizer__learning_rate=1e-2).optimizer)
    assert all(adapters.is_adapter_parameter(name) for name in optimizer.parameters)
    supervised = sum(batch.num_supervised for batch in batches)
    mine = batches[world.rank :: world.size]
    steps: list[dict[str, Any]] = []
    for _ in range(2):
        total = torch.zeros(())
        for index, batch in enumerate(mine):
            begin_micro_batch(model, sharding, last=index == len(mine) - 1)
            loss = model(batch, layout_of(batch, TOKENS, world.device)) / supervised
            loss.backward()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        working = optimizer.working_weights()
        norm = gradient_norm(working.values(), group)
        grads = {name: _whole(p.grad).numpy() for name, p in working.items() if p.grad is not None}
        steps.append({"loss": total.item(), "norm": norm.item(), "grads": grads})
        optimizer.step(1e-2, norm)
        optimizer.zero_grad()
    release_gathered(model)
    after = {name: _bits(parameter) for name, parameter in base_parameters(model).items()}
    kept = all(torch.equal(before[name], after[name]) for name in before)
    assert adapters.fingerprint(base_parameters(model), group) == mark
    state = [*optimizer.parameters.values(), *optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    return {
        "steps": steps,
        "kept": kept,
        "fingerprint": mark,
        "frozen_bytes": _held(base_parameters(model).values()),
        "state_bytes": _held(state),
    }


def _bits(parameter: nn.Parameter) -> Tensor:
    return parameter.data.to_local().clone().view(torch.int16)  # pyright: ignore[reportCallIssue]


def _held(tensors: Iterable[Any]) -> int:
    return sum(tensor.to_local().nbytes for tensor in tensors)


SHARDINGS = [
    # world size, scheme, ranks per node, reshard after forward, activation checkpointing
    (2, "full", 2, True, 0),
    (4, "full", 4, False, 1),
    (4, "hybrid", 2, True, 2),
]


@pytest.mark.slow
@KINDS
def test_loss_and_gradients_do_not_depend_on_the_ranks_and_frozen_weights_stay(spec: AdapterSpec) -> None:
    spec = spec.model_copy(update={"rank": 2})  # of A, two of four ranks then hold no row
    batches = [ragged_batch(seed, TOKENS, num_documents=1 + seed % 4) for seed in range(8)]
    (alone,) = run_ranks(_sharded, 1, spec, batches, "full", False, 0)
    assert alone["kept"]
    assert alone["steps"][1]["loss"] < alone["steps"][0]["loss"]
    for world_size, scheme, local_size, reshard, every in SHARDINGS:
        found = run_ranks(_sharded, world_size, spec, batches, scheme, reshard, every, local_size=local_size)
        for rank in found:
            assert rank["kept"]
            assert rank["fingerprint"] == alone["fingerprint"]
            for step, wanted in zip(rank["steps"], alone["steps"], strict=True):
                assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
                assert step["norm"] == pytest.approx(wanted["norm"], rel=1e-4)
                assert step["grads"].keys() == wanted["grads"].keys()
                for name, gradient in wanted["grads"].items():
                    assert step["grads"][name] == pytest.approx(gradient, rel=1e-3, abs=1e-6), name


@pytest.mark.slow
@KINDS
def test_bfloat16_trains_beside_frozen_weights_of_two_bytes(spec: AdapterSpec) -> None:
    batches = [ragged_batch(seed, TOKENS, num_documents=1 + seed % 4) for seed in range(4)]
    (exact,) = run_ranks(_sharded, 1, spec, batches, "full", False, 0)
    found = run_ranks(_sharded, 2, spec, batches, "full", True, 1, "bfloat16")
    shape = ModelShape.of_config(_config().to_dict())
    num_trained = shape.num_layers * shape.adapter_parameters(spec)
    assert sum(rank["frozen_bytes"] for rank in found) == 2 * shape.num_parameters
    assert sum(rank["state_bytes"] for rank in found) == 12 * num_trained
    assert all(rank["kept"] for rank in found)
    assert {rank["fingerprint"] for rank in found} == {exact["fingerprint"]}
    for step, wanted in zip(found[0]["steps"], exact["steps"], strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=2e-3)
    # Of the first step only: the matrices A have no gradient there, because B is zero.
    for name, gradient in exact["steps"][0]["grads"].items():
        mine = found[0]["steps"][0]["grads"][name]
        assert np.linalg.norm(mine - gradient) <= 0.05 * np.linalg.norm(gradient), name


def test_the_fingerprint_sees_a_changed_weight_and_swapped_rows() -> None:
    weights = {"a": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(4))}
    first = adapters.fingerprint(weights, None)
    assert adapters.fingerprint(dict(weights), None) == first
    swapped = {**weights, "a": nn.Parameter(weights["a"].detach().flip(0))}
    assert adapters.fingerprint(swapped, None) != first
    with torch.no_grad():
        weights["b"][2] *= 1.01
    assert adapters.fingerprint(weights, None) != first


# A whole run


def _train(job_yaml: str, run: str, work: str) -> dict[str, Any]:
    from training.job import job_from_yaml
    from training.loop import train

    return train(job_from_yaml(job_yaml), open_storage(run), Path(work)).__dict__


def _run(job: JobSpec, run: Path, world_size: int = 2) -> dict[str, Any]:
    return run_ranks(_train, world_size, job.dump_yaml(), str(run), str(run.with_name(f"{run.name}-work")))[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, as a full fine-tune exports it."""
    run = tmp_path_factory.mktemp("base") / "run"
    _run(tiny_job(steps=3), run)
    return run / "export"


def _job(base: Path, steps: int, *, micro_batches: int = 1, dropout: float = 0.0, **adapter: Any) -> JobSpec:
    return tiny_job(
        steps=steps,
        model={"source": str(base)},
        adapter={"rank": 4, "dropout": dropout, **adapter},
        optimizer={"learning_rate": 1e-2},
        schedule={"kind": "constant", "warmup_steps": 1},
        batch={"tokens_per_gpu": 256 * micro_batches, "accumulation": micro_batches},
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Six steps of DoRA with dropout on two ranks, never stopped."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    result = _run(_job(base, 6, kind="dora", dropout=0.1), run)
    assert result["last_loss"] < result["first_loss"]
    assert 0 < result["trainable_parameters"] < result["parameters"] / 2
    return run


def _tokens(base: Path) -> Tensor:
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    return torch.tensor([tokenizer("A class statement defines a class object.")["input_ids"]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_both_exports_give_the_same_logits(
    tmp_path: Path, base: Path, uninterrupted: Path, kind: str
) -> None:
    run = uninterrupted
    if kind == "lora":
        run = tmp_path / "run"
        _run(_job(base, 4, targets=["q_proj", "v_proj", "down_proj"]), run)
    tokens = _tokens(base)
    with torch.no_grad():
        merged: Any = AutoModelForCausalLM.from_pretrained(run / "export", dtype=torch.float32)
        theirs: Any = AutoPeftModelForCausalLM.from_pretrained(run / "export/adapter", dtype=torch.float32)
        before: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        on_base: Any = PeftModel.from_pretrained(before, run / "export/adapter")
        logits = merged(tokens).logits
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(on_base(tokens).logits, logits, rtol=1e-4, atol=1e-4)
        with on_base.disable_adapter():
            assert not torch.allclose(on_base(tokens).logits, logits, atol=1e-2)
    assert len(AutoTokenizer.from_pretrained(run / "export/adapter")) == len(
        AutoTokenizer.from_pretrained(base)
    )
    _assert_only_targets_moved(
        base, run / "export", {"q_proj", "v_proj", "down_proj"} if kind == "lora" else set(BLOCK_LINEARS)
    )


def _assert_only_targets_moved(base: Path, export: Path, targets: set[str]) -> None:
    (before,), (after,) = ([load_file(f) for f in folder.glob("*.safetensors")] for folder in (base, export))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        moved = name.split(".")[-2] in targets and name.endswith("weight")
        assert torch.equal(tensor, after[name]) != moved, name


@pytest.mark.slow
def test_resume_is_bit_equal_and_a_checkpoint_holds_adapters_only(
    tmp_path: Path, base: Path, uninterrupted: Path
) -> None:
    run = tmp_path / "run"
    _run(_job(base, 3, kind="dora", dropout=0.1), run)
    assert _run(_job(base, 6, kind="dora", dropout=0.1), run)["resumed_from"].startswith("step-00000003.")
    assert read_losses(run) == read_losses(uninterrupted)
    mine, wanted = (load_file(r / "export/adapter/adapter_model.safetensors") for r in (run, uninterrupted))
    assert all(torch.equal(mine[name], tensor) for name, tensor in wanted.items())
    (newest,) = (run / "checkpoints").glob("step-00000006.*")
    names = FileSystemReader(newest).read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("model.")]
    assert weights
    assert all(adapters.is_adapter_parameter(name) for name in weights)


@pytest.mark.slow
def test_four_ranks_go_on_with_two_and_with_one(tmp_path: Path, base: Path) -> None:
    _run(_job(base, 6), tmp_path / "whole", 4)
    run = tmp_path / "run"
    for steps, world_size in ((2, 4), (4, 2), (6, 1)):
        _run(_job(base, steps, micro_batches=4 // world_size), run, world_size)
    assert read_losses(run) == pytest.approx(read_losses(tmp_path / "whole"), rel=2e-5)


@pytest.mark.slow
def test_a_checkpoint_of_other_adapters_or_weights_is_refused(
    tmp_path: Path, base: Path, uninterrupted: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    with pytest.raises(AssertionError) as raised:
        _run(_job(base, 8, kind="dora", rank=8), run, 1)
    message = str(raised.value)
    assert "UsageError: checkpoint step-00000006." in message
    assert "trains dora of rank 4" in message
    assert "this job dora of rank 8" in message
    assert "run.resume: false" in message
    other = tmp_path / "other"
    shutil.copytree(base, other)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="beside weights with checksum"):
        _run(_job(other, 8, kind="dora"), run, 1)


@pytest.mark.slow
def test_without_merging_only_the_adapter_is_exported(tmp_path: Path, base: Path) -> None:
    run = tmp_path / "run"
    _run(_job(base, 2, alpha=4), run, 1)
    assert (run / "export/model.safetensors.index.json").is_file()
    _run(_job(base, 4, merge=False, alpha=4), run, 1)
    assert [path.name for path in (run / "export").iterdir()] == ["adapter"]
    config = json.loads((run / "export/adapter/adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == 4
    assert config["base_model_name_or_path"] == str(base)
    assert (
        AutoPeftModelForCausalLM.from_pretrained(run / "export/adapter")(_tokens(base))
        .logits.isfinite()
        .all()
    )


# The job file


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "adapter.targets=[q_proj, qproj]",
            ["adapter.targets", "called qproj", "allowed: q_proj, k_proj, v_proj"],
        ),
        ("adapter.targets=[lm_head]", ["called lm_head; allowed: q_proj"]),
        ("adapter.targets=[]", ["adapter.targets: none is given; allowed: q_proj"]),
        ("adapter.targets=[q_proj, q_proj]", ["adapter.targets: q_proj is given twice"]),
        ("adapter.rank=0", ["adapter.rank: found 0", "greater than 0"]),
        ("adapter.dropout=1", ["adapter.dropout: found 1", "less than 1"]),
        ("adapter.kind=ia3", ["adapter.kind: found 'ia3'", "'lora' or 'dora'"]),
        ("adapter.r=8", ["unknown key adapter.r", "Allowed in adapter: kind, rank, alpha"]),
        ("adapter=lora", ["--set adapter=lora: adapter: found 'lora'"]),
    ],
)
def test_mistakes_are_named(override: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        load_job("training/jobs/demo.yaml", [override])
    for part in (f"--set {override}", *parts):
        assert part in str(raised.value)


def test_impossible_combinations_are_named() -> None:
    with pytest.raises(
        UsageError, match=r"--set model\.float8=true: model\.float8 goes with a full fine-tune only"
    ):
        load_job("training/jobs/demo.yaml", ["adapter.rank=8", "model.float8=true"])
    with pytest.raises(UsageError, match=r"evaluation\.prompts are answered by the merged export"):
        load_job("training/jobs/demo.yaml", ["adapter.merge=false"])


def test_one_setting_is_enough() -> None:
    assert load_job("training/jobs/demo.yaml").adapter is None
    spec = load_job("training/jobs/demo.yaml", ["adapter.rank=8"]).adapter
    assert spec == AdapterSpec(kind="lora", rank=8)
    assert spec is not None
    assert (spec.resolved_alpha, spec.scaling, spec.targets) == (16, 2, BLOCK_LINEARS)
    assert load_job("training/jobs/demo.yaml", ["adapter.kind=dora"]).adapter == AdapterSpec(kind="dora")
    assert load_job("training/jobs/demo.yaml", ["adapter={}"]).adapter == AdapterSpec()
    job = load_job("training/jobs/demo.yaml", ["adapter.alpha=8", "adapter.targets=[v_proj]"])
    assert yaml.safe_load(job.dump_yaml())["adapter"]["targets"] == ["v_proj"]


# The plan


def test_the_plan_of_an_adapter_needs_less_memory_and_network() -> None:
    from training.hardware import hardware_of_instance

    qwen, hardware = KNOWN["Qwen/Qwen2.5-1.5B"], hardware_of_instance("g6.12xlarge", 2)
    path = "training/jobs/qwen2.5-1.5b-sft.yaml"
    fixed = [
        "parallel.sharding=hybrid",
        "parallel.reshard_after_forward=true",
        "parallel.activation_checkpointing=full",
    ]
    full, lora, dora = (
        predict(load_job(path, [*fixed, *more]), qwen, hardware)
        for more in ([], ["adapter.rank=16"], ["adapter.kind=dora", "adapter.dropout=0.1"])
    )
    assert full.trainable_parameters == full.parameters == qwen.num_parameters
    assert lora.trainable_parameters == 18_464_768
    assert lora.parameters == qwen.num_parameters + 18_464_768
    # 12 and 2 bytes a parameter over the four ranks of a node
    assert lora.memory_parts["masters and moments"] == pytest.approx(12 * 18_464_768 / 4 / 2**30)
    assert lora.memory_parts["frozen weights"] == pytest.approx(2 * qwen.num_parameters / 4 / 2**30)
    assert lora.memory_gib < full.memory_gib - 4
    assert lora.memory_gib < dora.memory_gib < full.memory_gib
    # Across nodes, only gradients go, once a step: in float32 like the full one's.
    assert lora.step_parts["cross_node"] / full.step_parts["cross_node"] == pytest.approx(
        18_464_768 / qwen.num_parameters
    )
    assert 0.6 < lora.step_parts["compute"] / full.step_parts["compute"] < 0.8
    parts = memory_parts(load_job(path, fixed), qwen, hardware, full.sharding)
    assert parts == full.memory_parts
    assert "frozen weights" not in parts


def _train_on_s3(job_yaml: str, run: str, work: str, environment: dict[str, str]) -> dict[str, Any]:
    os.environ.update(environment)  # ranks are forked from a server that was started before
    return _train(job_yaml, run, work)


@pytest.mark.slow
def test_a_run_on_s3_resumes_there_and_leaves_what_a_run_in_a_folder_does(
    tmp_path: Path, base: Path, uninterrupted: Path
) -> None:
    """Two ranks upload their parts; both exports arrive whole."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            boto3.client("s3").create_bucket(Bucket="runs")
            for steps in (3, 6):
                job = _job(base, steps, kind="dora", dropout=0.1).dump_yaml()
                work = str(tmp_path / "work")
                result = run_ranks(_train_on_s3, 2, job, "s3://runs/one", work, environment)[0]
            assert result["resumed_from"].startswith("step-00000003.")
            storage = open_storage("s3://runs/one")
            for name in (
                "export/adapter/adapter_model.safetensors",
                "export/model-00001-of-00001.safetensors",
            ):
                storage.download(name, tmp_path / name)
                mine, wanted = load_file(tmp_path / name), load_file(uninterrupted / name)
                assert mine.keys() == wanted.keys()
                assert all(torch.equal(mine[key], tensor) for key, tensor in wanted.items())
            here = {str(path.relative_to(uninterrupted)) for path in (uninterrupted / "export").rglob("*.*")}
            assert {name for name in storage.list() if name.startswith("export/")} == here
    finally:
        server.stop()


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
