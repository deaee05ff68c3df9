"""JobSpec: one YAML file is one job.

`load_job` reads the file, applies `--set KEY=VALUE` overrides and validates the whole. Every mistake is reported at
once, each with its file and line (or its `--set`), the key, what was found and what is allowed.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from training.data.config import DataSpec
from training.errors import UsageError
from training.redact import holds_secret, is_secret_key
from training.tracking.config import TrackingSpec


class Section(BaseModel):
    """A part of a job file: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ArchitectureSpec(Section):
    """A decoder architecture to be trained from random weights (the demo, tests and benchmarks)."""

    family: Literal["qwen2", "qwen3", "llama", "mistral", "gemma"] = "qwen2"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    vocab_size: int = Field(
        gt=0, description="rows of the embedding; with a tokenizer trained in the run, its size"
    )
    max_position_embeddings: int = Field(default=32_768, gt=0)
    rope_theta: float = Field(default=1_000_000.0, gt=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _heads_divide(self) -> ArchitectureSpec:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}: "
                "every attention head gets hidden_size / num_heads channels"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: "
                "grouped-query attention shares each key/value head among num_heads / num_kv_heads query heads"
            )
        return self


def is_commit(revision: str) -> bool:
    """Whether this names a commit of a hub repository, which never moves."""
    return len(revision) == 40 and all(digit in "0123456789abcdef" for digit in revision)


class ModelSpec(Section):
    """What is trained: a Hugging Face source, or an architecture with random weights."""

    source: str | None = Field(
        default=None, description="hub id (owner/name), s3:// prefix or folder of a Hugging Face model"
    )
    revision: str | None = Field(
        default=None, description="commit of the hub repository; a branch name moves and is refused"
    )
    architecture: ArchitectureSpec | None = None
    tokenizer: str | None = Field(
        default=None,
        description="'train' (byte-pair encoding from the data), a folder, or a hub id with its commit "
        "(owner/name@COMMIT); default: the model's own",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="dtype of the computation; auto: bfloat16 on CUDA, float32 on CPU. Masters are float32.",
    )
    float8: bool = Field(
        default=False, description="float8 matrix products in the linear layers of the blocks (CUDA >= 8.9)"
    )
    compile: bool | Literal["auto"] = Field(default="auto", description="compile each block; auto: on CUDA")

    @model_validator(mode="after")
    def _one_origin(self) -> ModelSpec:
        if (self.source is None) == (self.architecture is None):
            found = "neither" if self.source is None else "both"
            raise ValueError(f"give exactly one of source and architecture (found {found})")
        if self.architecture is not None and self.tokenizer is None:
            raise ValueError("an architecture with random weights needs a tokenizer: 'train', or a source")
        if self.revision is not None and self.source is None:
            raise ValueError("revision goes with source: an architecture with random weights has none")
        if self.source is not None and self.tokenizer == "train":
            raise ValueError(
                "tokenizer 'train' goes with architecture: the weights of a source know the ids of its own tokenizer"
            )
        return self

    @field_validator("revision")
    @classmethod
    def _pinned(cls, revision: str | None) -> str | None:
        if revision is not None and not is_commit(revision):
            raise ValueError(
                f"{revision!r} is not a commit: 40 lower-case hexadecimal digits are allowed (branches and tags move)"
            )
        return revision


class OptimizerSpec(Section):
    """AdamW with decoupled weight decay (arXiv:1711.05101) on float32 masters."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=2e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)

    @field_validator("betas")
    @classmethod
    def _betas(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"{list(betas)}: each beta lies in [0, 1)")
        return betas


# The linear layers of a block, by the names that all supported families give them.
BLOCK_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class AdapterSpec(Section):
    """Low-rank adapters, trained beside the frozen weights of the model (training/adapters.py)."""

    kind: Literal["lora", "dora"] = "lora"
    rank: int = Field(default=16, gt=0)
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="the low-rank product is scaled by alpha / rank; default: twice the rank",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="on the input of the low-rank product, while training"
    )
    targets: tuple[str, ...] = Field(
        default=BLOCK_LINEARS, description="linear layers of the blocks that get an adapter; default: all"
    )
    merge: bool = Field(
        default=True, description="write the whole merged model to export/, besides export/adapter/"
    )

    @property
    def resolved_alpha(self) -> float:
        return 2 * self.rank if self.alpha is None else self.alpha

    @property
    def scaling(self) -> float:
        """The low-rank product is multiplied with it."""
        return self.resolved_alpha / self.rank

    @field_validator("targets")
    @classmethod
    def _known(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        allowed = f"allowed: {', '.join(BLOCK_LINEARS)}"
        unknown = [target for target in targets if target not in BLOCK_LINEARS]
        if unknown:
            raise ValueError(f"no linear layer of a block is called {', '.join(unknown)}; {allowed}")
        twice = sorted({target for target in targets if targets.count(target) > 1})
        if twice or not targets:
            found = f"{', '.join(twice)} is given twice" if twice else "none is given"
            raise ValueError(f"{found}; {allowed}, each once")
        return targets


class ScheduleSpec(Section):
    """Learning rate over the steps: linear warm-up, then the shape named by kind."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int | None = Field(default=None, ge=0, description="default: 3 % of the steps")
    decay_fraction: float = Field(
        default=0.2, gt=0, le=1, description="last part of the steps in which wsd decays"
    )
    min_ratio: float = Field(default=0.1, ge=0, le=1, description="last learning rate over the highest one")


class BatchSpec(Section):
    """Batch size in tokens."""

    tokens_per_gpu: int = Field(
        default=8192, gt=0, description="tokens per GPU (per worker on CPU) and optimizer step"
    )
    accumulation: int = Field(default=1, gt=0, description="micro-batches these tokens are split into")

    @property
    def micro_batch_tokens(self) -> int:
        return self.tokens_per_gpu // self.accumulation

    @model_validator(mode="after")
    def _divides(self) -> BatchSpec:
        if self.tokens_per_gpu % self.accumulation:
            raise ValueError(
                f"tokens_per_gpu {self.tokens_per_gpu} is not a multiple of accumulation {self.accumulation}"
            )
        return self


class ParallelSpec(Section):
    """How parameters, gradients and optimizer state are sharded over the ranks."""

    sharding: Literal["auto", "full", "hybrid"] = Field(
        default="auto", description="full: over all ranks; hybrid: in a node, replicated across nodes"
    )
    num_workers: int | None = Field(
        default=None, gt=0, description="ranks; default: every GPU of the stack, two on a laptop"
    )
    min_workers: int | None = Field(
        default=None, gt=0, description="the job may go on with as few ranks after a node is lost"
    )
    reshard_after_forward: bool | Literal["auto"] = "auto"
    activation_checkpointing: Literal["auto", "none", "full"] | int = Field(
        default="auto", description="none, full, or an integer k: every k-th block; auto: by the memory model"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _consistent(self) -> ParallelSpec:
        k = self.activation_checkpointing
        if isinstance(k, int) and k < 1:
            raise ValueError(
                f"activation_checkpointing {k}: 'auto', 'none', 'full' or an integer >= 1 is allowed"
            )
        if (
            self.min_workers is not None
            and self.num_workers is not None
            and self.min_workers > self.num_workers
        ):
            raise ValueError(f"min_workers {self.min_workers} is greater than num_workers {self.num_workers}")
        return self


class CheckpointSpec(Section):
    """When checkpoints are written, and how many are kept."""

    every: int = Field(
        default=200,
        gt=0,
        description="optimizer steps between two checkpoints; the last step always writes one",
    )
    keep: int = Field(
        default=2, gt=0, description="complete checkpoints that are kept; the best one is kept besides"
    )
    asynchronous: bool = Field(default=True, alias="async", description="write while training goes on")
    export: Literal["last", "best"] = Field(
        default="last", description="the weights that are exported; best: of the lowest held-out loss"
    )

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, populate_by_name=True)


class HarnessSpec(Section):
    """Tasks of lm-evaluation-harness, run on the exported model at the end."""

    tasks: tuple[str, ...] = Field(min_length=1, description="names of tasks, such as hellaswag")
    limit: int | None = Field(default=None, gt=0, description="examples of each task; default: all")
    num_fewshot: int | None = Field(default=None, ge=0, description="default: the task's own")
    batch_size: int = Field(default=8, gt=0)
    apply_chat_template: bool = Field(default=False, description="ask as a chat, by the model's template")


class EvaluationSpec(Section):
    """Held-out loss and sample answers."""

    every: int = Field(
        default=200,
        gt=0,
        description="optimizer steps between two evaluations; the first comes before any update",
    )
    max_batches: int = Field(default=50, gt=0, description="micro-batches per rank and evaluation")
    prompts: tuple[str, ...] = Field(default=(), description="answered by the exported model at the end")
    max_new_tokens: int = Field(default=64, gt=0)
    harness: HarnessSpec | None = None


class ResilienceSpec(Section):
    """What happens when something breaks."""

    max_failures: int = Field(
        default=3, ge=0, description="restarts of the worker group before the job fails"
    )
    exclude_node_after: int | None = Field(
        default=2,
        gt=0,
        description="failures that one node is to blame for before the job goes on without it; null: never",
    )
    step_timeout_seconds: float = Field(
        default=600.0, gt=0, description="a rank that makes no step for so long is reported as hung"
    )
    non_finite: Literal["stop", "skip"] = Field(
        default="stop", description="what a NaN or infinite loss or gradient does"
    )
    loss_spike: Literal["ignore", "skip", "rollback", "stop"] = "ignore"
    spike_factor: float = Field(
        default=3.0, gt=1, description="a spike is a loss above this multiple of the running median"
    )


class TransportSpec(Section):
    """The network transport that must have carried the collectives."""

    require: Literal["efa", "any"] | None = Field(
        default=None, description="default: what the stack requires"
    )


class RuntimeEnvSpec(Section):
    """What is added to the unmodified image for this job."""

    pip: tuple[str, ...] = Field(default=(), description="requirements with pinned versions (name==version)")
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("env", mode="before")
    @classmethod
    def _no_secrets(cls, env: Any) -> Any:
        variables = cast("dict[Any, Any]", env) if isinstance(env, dict) else {}
        for name, value in variables.items():
            if is_secret_key(str(name)) or holds_secret(str(value)):
                raise ValueError(
                    f"{name} looks like a secret, and a job file is copied to the run folder and shown by Ray. On a "
                    f"stack, put it into a Kubernetes Secret and name that in the setting jobSecrets ({name}=SECRET; "
                    f"docs/security.md); for `finetune local`, export {name} in the shell"
                )
        return env

    @field_validator("pip")
    @classmethod
    def _pins(cls, pip: tuple[str, ...]) -> tuple[str, ...]:
        loose = [requirement for requirement in pip if "==" not in requirement and "@" not in requirement]
        if loose:
            raise ValueError(
                f"{', '.join(loose)}: pin each package as name==version, so that a later run gets the same one"
            )
        return pip


class ObjectiveSpec(Section):
    """What the model learns from: answers to imitate, or pairs of which one answer is preferred."""

    kind: Literal["supervised", "dpo"] = Field(
        default="supervised",
        description="supervised fine-tuning, or direct preference optimization (arXiv:2305.18290)",
    )
    beta: float | None = Field(
        default=None,
        gt=0,
        description="dpo: how strongly the model is held to the one it started from; default 0.1",
    )
    label_smoothing: float | None = Field(
        default=None,
        ge=0,
        lt=0.5,
        description="dpo: share of the pairs whose order is taken to be wrong; default 0",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        if isinstance(values, dict) and cast("dict[str, Any]", values).get("kind") == "dpo":
            given = {key: value for key, value in cast("dict[str, Any]", values).items() if value is not None}
            return {"beta": 0.1, "label_smoothing": 0.0, **given}
        return cast("Any", values)

    @model_validator(mode="after")
    def _of_the_kind(self) -> ObjectiveSpec:
        for name in ("beta", "label_smoothing"):
            if self.kind == "supervised" and getattr(self, name) is not None:
                raise ValueError(f"{name} belongs to kind dpo; found kind supervised")
        return self


class RunSpec(Section):
    """Where the run folder is."""

    path: str | None = Field(
        default=None,
        description="folder or s3:// prefix; default: runs/NAME, on a stack STORAGE_URI/runs/NAME",
    )
    resume: bool = Field(
        default=True,
        description="go on from the newest complete checkpoint of the run folder; "
        "false: what an earlier run left there is removed first",
    )


class JobSpec(Section):
    """One job."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,51}[a-z0-9])?$")
    model: ModelSpec
    data: DataSpec
    adapter: AdapterSpec | None = Field(
        default=None,
        description="train adapters (rank, targets, ...) and not the weights; default: all weights",
    )
    objective: ObjectiveSpec = ObjectiveSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    batch: BatchSpec = BatchSpec()
    parallel: ParallelSpec = ParallelSpec()
    steps: int | None = Field(default=None, gt=0)
    epochs: int | None = Field(default=None, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**32)
    deterministic: bool = Field(
        default=False, description="the same bits again on the same GPUs and number of ranks; slower"
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    resilience: ResilienceSpec = ResilienceSpec()
    transport: TransportSpec = TransportSpec()
    runtime_env: RuntimeEnvSpec = RuntimeEnvSpec()
    run: RunSpec = RunSpec()
    tracking: TrackingSpec = TrackingSpec()

    @model_validator(mode="after")
    def _possible(self) -> JobSpec:
        if self.evaluation.harness is not None and self.adapter is not None and not self.adapter.merge:
            raise ValueError(
                "evaluation.harness needs a whole model, which adapter.merge false does not export: set adapter.merge "
                "to true"
            )
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else "both"
            raise ValueError(f"give exactly one of steps and epochs (found {found})")
        if self.data.max_length > self.batch.micro_batch_tokens:
            raise ValueError(
                f"data.max_length {self.data.max_length} is longer than a micro-batch of {self.batch.micro_batch_tokens} tokens "
                f"(batch.tokens_per_gpu {self.batch.tokens_per_gpu} / batch.accumulation {self.batch.accumulation}): "
                "raise batch.tokens_per_gpu, or lower batch.accumulation or data.max_length"
            )
        if self.objective.kind == "supervised":
            self.data.refuse_pairs()
        elif 2 * self.data.max_length > self.batch.micro_batch_tokens:
            raise ValueError(
                f"objective.kind dpo keeps both answers of a pair in one micro-batch: two sequences of data.max_length "
                f"{self.data.max_length} do not fit {self.batch.micro_batch_tokens} tokens (batch.tokens_per_gpu "
                f"{self.batch.tokens_per_gpu} / batch.accumulation {self.batch.accumulation}): raise "
                "batch.tokens_per_gpu, or lower batch.accumulation or data.max_length"
            )
        else:
            self.data.for_pairs()
        architecture = self.model.architecture
        if architecture is not None and self.data.max_length > architecture.max_position_embeddings:
            raise ValueError(
                f"data.max_length {self.data.max_length} exceeds model.architecture.max_position_embeddings "
                f"{architecture.max_position_embeddings}"
            )
        self._best_is_known()
        warmup = self.schedule.warmup_steps
        if warmup is not None and self.steps is not None and warmup >= self.steps:
            raise ValueError(f"schedule.warmup_steps {warmup} must be less than steps {self.steps}")
        if self.adapter is not None:
            self._possible_with_adapter(self.adapter)
        return self

    def _possible_with_adapter(self, adapter: AdapterSpec) -> None:
        if self.model.float8:
            raise ValueError(
                "model.float8 goes with a full fine-tune only: adapted layers compute in bfloat16. "
                "Set model.float8: false, or leave adapter out"
            )
        if self.evaluation.prompts and not adapter.merge:
            raise ValueError(
                "evaluation.prompts are answered by the merged export, and adapter.merge is false: "
                "set adapter.merge: true, or leave the prompts out"
            )

    @property
    def training_data(self) -> DataSpec:
        """The data section as the objective reads it."""
        return self.data.for_pairs() if self.objective.kind == "dpo" else self.data

    def _best_is_known(self) -> None:
        if self.checkpoint.export != "best":
            return
        if self.data.validation is None:
            raise ValueError(
                "checkpoint.export best needs held-out documents to tell which checkpoint is best: set data.validation "
                "(fraction, count or source), or checkpoint.export: last"
            )
        if self.checkpoint.every % self.evaluation.every:
            raise ValueError(
                f"checkpoint.export best: a checkpoint every {self.checkpoint.every} steps and an evaluation every "
                f"{self.evaluation.every} leave checkpoints without a held-out loss: make checkpoint.every a multiple of "
                "evaluation.every"
            )

    def dump_yaml(self) -> str:
        """The resolved job, as it stands in the run folder's job.yaml."""
        return yaml.dump(
            self.model_dump(mode="json", by_alias=True, exclude_none=True),
            Dumper=_Dumper,
            sort_keys=False,
            allow_unicode=True,
        )


class _Dumper(yaml.SafeDumper):
    """Writes Unicode as it is, but for the line breaks of YAML 1.1 beside the usual ones, which a reader would fold."""


def _represent_text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = '"' if any(mark in value for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


# Loading: every problem is named with its place.


class _Places:
    """Where each key of the job stands: a line of the file, or a --set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[tuple[str, ...], int] = {}
        self.overrides: dict[tuple[str, ...], str] = {}

    def of(self, key: tuple[str, ...]) -> str:
        for length in range(len(key), -1, -1):
            if key[:length] in self.overrides:
                return f"--set {self.overrides[key[:length]]}"
            if key[:length] in self.lines:
                return f"{self.path}:{self.lines[key[:length]]}"
        return str(self.path)


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Reads a job file and applies `KEY.SUBKEY=VALUE` overrides (values are YAML).

    Raises UsageError that lists every problem with its place, the key, what was found and what is allowed.
    """
    path = Path(path)
    places = _Places(path)
    document = _read(path, places)
    for override in overrides:
        _apply_override(document, override, places)
    return _validate(document, places)


def job_from_yaml(text: str, name: str = "job.yaml") -> JobSpec:
    """A resolved job (the run folder's job.yaml), without overrides. Raises UsageError."""
    places = _Places(Path(name))
    return _validate(_parse(text, places), places)


def _read(path: Path, places: _Places) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = sorted(str(job) for job in Path("training/jobs").glob("*.yaml"))
        raise UsageError(
            f"{path}: no such job file." + (f" Shipped ones: {', '.join(shipped)}" if shipped else "")
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; a job is one YAML file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start}): a job file is UTF-8 YAML") from None
    return _parse(text, places)


def _parse(text: str, places: _Places) -> dict[str, Any]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None or not isinstance(root, yaml.MappingNode):
            raise UsageError(
                f"{places.path}: a job file is a mapping of keys (name, model, data, ...); found {_kind(root)}"
            )
        _record_lines(root, (), places)
        return cast("dict[str, Any]", yaml.safe_load(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{places.path}:{mark.line + 1}" if mark is not None else str(places.path)
        raise UsageError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


def _kind(node: yaml.Node | None) -> str:
    if node is None:
        return "an empty file"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a plain value"


def _record_lines(node: yaml.Node, key: tuple[str, ...], places: _Places) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            inner = (*key, str(key_node.value))
            line = key_node.start_mark.line + 1
            if inner in places.lines:
                raise UsageError(
                    f"{places.path}:{line}: {'.'.join(inner)} stands twice (first on line {places.lines[inner]}): "
                    "YAML would silently take the last; keep one"
                )
            places.lines[inner] = line
            _record_lines(value_node, inner, places)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            places.lines[(*key, str(index))] = item.start_mark.line + 1
            _record_lines(item, (*key, str(index)), places)


def _apply_override(document: dict[str, Any], override: str, places: _Places) -> None:
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise UsageError(f"--set {override}: expected KEY=VALUE, as in --set optimizer.learning_rate=1e-5")
    try:
        value = _yaml_value(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {override}: the value is not valid YAML: {error}") from None
    key = tuple(dotted.split("."))
    target = document
    for depth, part in enumerate(key[:-1]):
        if target.get(part) is None:
            target[part] = {}
        inner = target[part]
        if not isinstance(inner, dict):
            raise UsageError(
                f"--set {override}: {'.'.join(key[: depth + 1])} is {inner!r}, not a section with keys of its own"
            )
        target = cast("dict[str, Any]", inner)
    target[key[-1]] = value
    places.overrides[key] = override


def _yaml_value(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):  # YAML 1.1 reads 1e-5 (no dot) as a string
        try:
            return float(value) if "e" in value.lower() and value[0] in "+-.0123456789" else value
        except ValueError:
            return value
    return value


def _floats(value: Any) -> Any:
    """YAML 1.1 reads 2e-5 as a string; the same reading as for --set, over a whole document."""
    if isinstance(value, dict):
        # Environment variables are texts, whatever they look like.
        return {
            key: item if key == "env" else _floats(item)
            for key, item in cast("dict[str, Any]", value).items()
        }
    if isinstance(value, list):
        return [_floats(item) for item in cast("list[Any]", value)]
    return _yaml_value(value) if isinstance(value, str) and _looks_like_exponent(value) else value


def _looks_like_exponent(text: str) -> bool:
    mantissa, separator, exponent = text.lower().partition("e")
    return bool(separator) and mantissa.lstrip("+-").isdigit() and exponent.lstrip("+-").isdigit()


def _validate(document: dict[str, Any], places: _Places) -> JobSpec:
    try:
        return JobSpec.model_validate(_floats(document))
    except ValidationError as error:
        problems = [_explain(cast("Mapping[str, Any]", problem), places) for problem in error.errors()]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise UsageError(f"{count} in the job:\n" + "\n".join(f"  {problem}" for problem in problems))


def _explain(problem: Mapping[str, Any], places: _Places) -> str:
    key = tuple(str(part) for part in problem["loc"])
    section, names = _fields_at(key[:-1])
    shown = ".".join(key) or "the job"
    found = problem["input"]
    match problem["type"]:
        case "extra_forbidden":
            close = difflib.get_close_matches(key[-1], names, n=1)
            hint = f" Did you mean {'.'.join((*key[:-1], close[0]))}?" if close else ""
            return f"{places.of(key)}: unknown key {shown}.{hint} Allowed in {section}: {', '.join(names)}"
        case "missing":
            return f"{places.of(key[:-1])}: {shown} is missing"
        case "value_error":
            text = str(problem["msg"]).removeprefix("Value error, ")
            place = places.of(_first_key_named(text, key, places))
            return f"{place}: {shown}: {text}" if key else f"{place}: {text}"
        case _:
            text = str(problem["msg"])
            return f"{places.of(key)}: {shown}: found {_shown(found)}; {text[0].lower()}{text[1:]}"


def _first_key_named(text: str, section: tuple[str, ...], places: _Places) -> tuple[str, ...]:
    """An impossible combination is reported on its section: the first key that its text names is where to look."""
    for word in text.replace(",", " ").replace("(", " ").split():
        for key in ((*section, *word.split(".")), tuple(word.split("."))):
            if key in places.lines or key in places.overrides:
                return key
    return section


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fields_at(key: Sequence[str]) -> tuple[str, list[str]]:
    """The name of the section at `key` and the keys allowed in it."""
    model: type[BaseModel] = JobSpec
    for part in key:
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        inner = _model_in(field.annotation) if field is not None else None
        if inner is None:
            continue
        model = inner
    names = [field.alias or name for name, field in model.model_fields.items()]
    return (".".join(key) or "a job"), names


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as SourceSpec | None or tuple[Source, ...]."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    for argument in typing.get_args(annotation):
        model = _model_in(argument)
        if model is not None:
            return model
    return None
