"""Weights: streamed from safetensors into the shards, tied, with rotary buffers; export loads back as itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.unit.training.jobs import VOCAB, ragged_batch, tiny_architecture, tiny_job
from tests.unit.training.processes import run_ranks
from training.attention import layout_of
from training.errors import UsageError
from training.job import ArchitectureSpec
from training.model import FAMILIES, CausalLM, config_from_folder, config_of, init_weights, load_weights
from training.parallel import join_world, mesh_of, shard
from training.planning import Sharding


def _save(folder: Path, family: str = "qwen2", tied: bool = True) -> Any:
    architecture = ArchitectureSpec(**tiny_architecture(family=family, tie_embeddings=tied))
    config = config_of(architecture, vocab_size=VOCAB, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.save_pretrained(folder, max_shard_size="40KB")
    return plain


def _load(folder: Path) -> CausalLM:
    model = CausalLM(config_from_folder(folder))
    model.materialize(torch.device("cpu"))
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_streamed_weights_equal_those_of_from_pretrained(tmp_path: Path, family: str, tied: bool) -> None:
    plain = _save(tmp_path, family, tied)
    model = _load(tmp_path)
    batch = ragged_batch(seed=2, tokens=24, num_documents=1)
    with torch.no_grad():
        expected = plain.model(input_ids=batch.input_ids[None]).last_hidden_state[0]
        hidden = model.hidden_states(batch, layout_of(batch, 24, torch.device("cpu")))
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
    assert (model.hf.lm_head.weight is model.hf.model.embed_tokens.weight) == tied


def _sharded_sum(folder: str) -> dict[str, Any]:
    from training.model import parameter_names

    world = join_world()
    model = CausalLM(config_from_folder(Path(folder)))
    shard(model, tiny_job(), world, Sharding("full", True, 0, "test"), mesh_of(world, "full"))
    model.materialize(world.device)
    load_weights(model, Path(folder))
    local = sum(parameter.to_local().numel() for parameter in parameter_names(model).values())
    whole = {name: parameter.full_tensor() for name, parameter in parameter_names(model).items()}
    return {"local": local, "whole": {name: tensor.sum().item() for name, tensor in whole.items()}}


@pytest.mark.slow
def test_each_rank_holds_its_shard_and_together_they_are_the_model(tmp_path: Path) -> None:
    plain = _save(tmp_path)
    results = run_ranks(_sharded_sum, 3, str(tmp_path))
    total = sum(parameter.numel() for parameter in plain.parameters())
    assert sum(result["local"] for result in results) == total
    assert max(result["local"] for result in results) < total / 2
    for name, parameter in plain.named_parameters():
        assert results[0]["whole"][name] == pytest.approx(parameter.sum().item(), rel=1e-4, abs=1e-4)


def test_random_weights_do_not_depend_on_the_order_or_number_of_ranks() -> None:
    config = config_of(ArchitectureSpec(**tiny_architecture()), VOCAB, 1, 0)
    models = []
    for _ in range(2):
        model = CausalLM(config)
        model.materialize(torch.device("cpu"))
        init_weights(model, seed=9)
        models.append(model)
        torch.rand(7)
    for (name, first), (_, second) in zip(*(m.hf.named_parameters() for m in models), strict=True):
        assert torch.equal(first, second), name


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    _save(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    gone = "model.layers.0.mlp.up_proj.weight"
    file = content["weight_map"].pop(gone)
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = file
    index.write_text(json.dumps(content))
    with pytest.raises(UsageError) as raised:
        _load(tmp_path)
    assert f"missing {gone}" in str(raised.value)
    assert "not part of the model model.layers.9.mlp.up_proj.weight" in str(raised.value)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    _save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(
        UsageError, match=r"mlp\.\w+_proj\.weight has shape \[.*\], the configuration says \[.*\]"
    ):
        _load(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    _save(tmp_path)
    for path in tmp_path.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"found pytorch_model\.bin: pickled weights are refused"):
        _load(tmp_path)


def test_an_unsupported_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(
        UsageError, match=r"model type 'gpt2' is not supported; supported: qwen2, qwen3, llama"
    ):
        config_from_folder(tmp_path)
