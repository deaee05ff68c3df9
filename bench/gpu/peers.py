"""Ours and what users would pick instead, in one process on one GPU, in alternating order.

Our trainer stays in memory and is timed again between the peers, so that a drift of the device shows. Every variant
has the same shape, batches (8 x 2048 random tokens), initial weights, learning rate and clipping. Needs trl,
liger-kernel and torchtitan.
"""

from __future__ import annotations

import statistics
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2 import modeling_qwen2

from bench.gpu.ours import QWEN, Ours, clean, emit, environment, intervals, make_job, mark, peak_gib, summary
from training.model import parameter_names

TOKENS, LENGTH, ROWS = 16_384, 2_048, 8
WARMUP, TIMED = 3, 9
STEPS = WARMUP + TIMED


class Bench:
    def __init__(self) -> None:
        clean()
        self.ours = Ours(make_job())
        self.tokenizer = self.ours.trainer.source.tokenizer
        names = parameter_names(self.ours.trainer.model)
        self.weights = {name: p.data.to_local().to("cpu", copy=True) for name, p in names.items()}  # pyright: ignore
        loader = Ours.batches(make_job())
        self.batches = [next(loader) for _ in range(STEPS)]

    def time_ours(self, first: bool = False) -> None:
        before = len(self.ours.losses())
        seconds = self.ours.steps(STEPS if first else TIMED + 1)
        loss = statistics.mean(self.ours.losses()[before:]) if first else None
        emit("peer", name="ours", **summary(seconds[-TIMED:], TOKENS), peak_gib=peak_gib() if first else None,
             mean_loss=loss)  # fmt: skip

    def time_peer(self, name: str, run: Callable[[], tuple[list[Any], float | None, int]]) -> None:
        """run -> marks at the end of every step, mean loss, tokens per step."""
        clean()
        before = torch.cuda.memory_allocated()
        unpatched = (dict(vars(modeling_qwen2)), modeling_qwen2.Qwen2ForCausalLM.forward)
        try:
            marks, loss, tokens = run()
            seconds = intervals(marks)[-TIMED:]
            emit("peer", name=name, **summary(seconds, tokens), peak_gib=peak_gib(before), mean_loss=loss)
        except BaseException as error:
            traceback.print_exc()
            emit("peer", name=name, error=f"{type(error).__name__}: {error}"[:300])
        # Liger replaces classes and functions of the module for everybody.
        vars(modeling_qwen2).update(unpatched[0])
        modeling_qwen2.Qwen2ForCausalLM.forward = unpatched[1]
        torch._dynamo.reset()
        clean()

    # Hugging Face

    def hugging_face_model(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM, Qwen2Config

        config = Qwen2Config(
            vocab_size=QWEN["vocab_size"], hidden_size=QWEN["hidden_size"], tie_word_embeddings=True,
            intermediate_size=QWEN["intermediate_size"], num_hidden_layers=QWEN["num_layers"],
            num_attention_heads=QWEN["num_heads"], num_key_value_heads=QWEN["num_kv_heads"],
            max_position_embeddings=QWEN["max_position_embeddings"],
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            bos_token_id=None, eos_token_id=2, pad_token_id=1,
        )  # fmt: skip
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[name])
        return model

    def rows(self) -> list[list[int]]:
        return [row for batch in self.batches for row in batch.input_ids.view(ROWS, LENGTH).tolist()]

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {
            "output_dir": "/tmp/peer", "max_steps": STEPS, "per_device_train_batch_size": ROWS, "bf16": True,
            "learning_rate": 1e-5, "lr_scheduler_type": "constant", "max_grad_norm": 1.0, "weight_decay": 0.0,
            "adam_beta2": 0.95, "optim": "adamw_torch_fused", "save_strategy": "no", "report_to": [],
            "disable_tqdm": True, "gradient_checkpointing": False, **changes,
        }  # fmt: skip

    def trainer(
        self, dtype: torch.dtype = torch.bfloat16, **changes: Any
    ) -> tuple[list[Any], float | None, int]:
        from datasets import Dataset
        from transformers import Trainer, TrainingArguments

        rows = self.rows()
        data = Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")
        arguments = TrainingArguments(**self.arguments(**changes))
        return self.run_trainer(
            _in_order(Trainer)(self.hugging_face_model(dtype), arguments, train_dataset=data), TOKENS
        )

    def trl(
        self, documents: list[list[int]] | None = None, dtype: torch.dtype = torch.bfloat16, **changes: Any
    ) -> tuple[list[Any], float | None, int]:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_dict({"input_ids": documents or self.rows()})
        arguments = SFTConfig(**self.arguments(max_length=LENGTH, packing=True, **changes))
        trainer = _in_order(SFTTrainer)(
            self.hugging_face_model(dtype), arguments, train_dataset=data,
            processing_class=self.tokenizer,
        )  # fmt: skip
        packed = trainer.train_dataset.with_format(None)
        lengths = [len(row) for row in packed["input_ids"]][: STEPS * ROWS]
        return self.run_trainer(trainer, round(sum(lengths) / len(lengths) * ROWS))

    def run_trainer(self, trainer: Any, tokens: int) -> tuple[list[Any], float | None, int]:
        from transformers import TrainerCallback

        marks: list[Any] = []

        class Marks(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                marks.append(mark())

        trainer.add_callback(Marks())
        loss = trainer.train().training_loss
        return marks, loss, tokens

    # torchtitan

    def torchtitan(self, tuned: bool) -> tuple[list[Any], float | None, int]:
        """torchtitan's Qwen model without the norm of queries and keys (which Qwen2.5 does not have; it has no biases
        either), by its own compile, loss and clipping. As shipped: its FSDP wrapping, weights freed after the forward.
        tuned: the tied embedding in one group, weights kept."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from torchtitan.components.loss import cross_entropy_loss
        from torchtitan.config.job_config import Compile
        from torchtitan.distributed import utils as dist_utils
        from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division
        from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp
        from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

        arguments = Qwen3ModelArgs(
            dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, vocab_size=151_936, head_dim=128, hidden_dim=8960,
            qk_norm=False, max_seq_len=LENGTH, enable_weight_tying=True,
        )  # fmt: skip
        with torch.device("meta"):
            model = Qwen3Model(arguments)
        apply_compile(model, Compile(enable=True), False)
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
        if tuned:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model.layers.values():
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            disable_fsdp_gradient_division(model)
        else:
            apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
        model.to_empty(device="cuda")
        model.rope_cache.copy_(model._precompute_rope_cache())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.to_local().copy_(self.weights[_hugging_face_name(name)])
        loss_function = torch.compile(cross_entropy_loss)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        marks: list[Any] = []
        losses: list[Tensor] = []
        for batch in self.batches:
            ids, labels = (x.view(ROWS, LENGTH).cuda() for x in (batch.input_ids, batch.labels))
            optimizer.zero_grad()
            logits = model(ids)
            loss = loss_function(logits, labels) / batch.num_supervised
            del logits
            loss.backward()
            dist_utils.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
            optimizer.step()
            losses.append(loss.detach())
            marks.append(mark())
        return marks, float(torch.stack(losses).mean()), TOKENS


def _hugging_face_name(name: str) -> str:
    name = name.replace("_orig_mod.", "")
    for mine, theirs in {
        "tok_embeddings.": "model.embed_tokens.", "output.": "model.embed_tokens.", "layers.": "model.layers.",
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
    }.items():  # fmt: skip
        name = name.replace(mine, theirs)
    return "model.norm.weight" if name == "norm.weight" else name


def _in_order(trainer: type) -> type:
    """The same trainer without shuffling, so that every variant sees the same batches."""

    class InOrder(trainer):  # pyright: ignore
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset if dataset is None else dataset)

    return InOrder


PEERS: dict[str, Callable[[Bench], tuple[list[Any], float | None, int]]] = {
    "TRL wrapped packing + Liger, bf16 weights": lambda bench: bench.trl(
        packing_strategy="wrapped", use_liger_kernel=True
    ),
    "torchtitan 0.2.2": lambda bench: bench.torchtitan(tuned=False),
    "HF Trainer, bf16 weights": lambda bench: bench.trainer(),
    "HF Trainer, torch_compile, bf16 weights": lambda bench: bench.trainer(torch_compile=True),
    "TRL default (bfd packing, checkpointing), bf16 weights": lambda bench: bench.trl(
        gradient_checkpointing=True
    ),
    "torchtitan 0.2.2, tied group, no reshard": lambda bench: bench.torchtitan(tuned=True),
    "HF Trainer + Liger, fp32 weights and autocast": lambda bench: bench.trainer(
        torch.float32, use_liger_kernel=True
    ),
}


def main(names: list[str]) -> None:
    emit("environment", **environment())
    bench = Bench()
    bench.time_ours(first=True)
    for name, run in PEERS.items():
        if names and not any(wanted in name for wanted in names):
            continue
        bench.time_peer(name, lambda run=run: run(bench))
        bench.time_ours()
    bench.ours.close()


if __name__ == "__main__":
    main(sys.argv[1:])
