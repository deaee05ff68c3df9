"""From a JSONL file of conversations to packed, answer-masked rows: tokens per second against the peers.

    python -m bench.data_packing [--conversations 6000] [--repeats 3] [--output bench/results/data_packing.json]

Every contender runs in a process of its own that is kept to two cores, from the file to packs that a trainer can
read, with nothing cached, by turns:

- this product: training.data.pipeline.build
- TRL: load_dataset("json") and SFTTrainer's own preparation (assistant_only_loss, packing by best-fit decreasing)
- rows: Hugging Face datasets alone, load_dataset("json") and a map that applies the chat template with the assistant
  mask row by row, as in the documentation of chat templates; no packing
- batches: the same with a batched map

Besides wall time, processor time is reported.
Every contender is judged by its best run, since other work may disturb one, and a
peer is run with one and with two worker processes and judged by its better figure. TRL is not a dependency;
where it is not installed, point PYTHONPATH to a folder that holds it (`pip install --target FOLDER --no-deps
trl==1.9.2 accelerate psutil`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ROW = 2048
VOCAB = 16_384
CONTENDERS = ("product", "trl-1", "trl-2", "rows-1", "rows-2", "batches-1", "batches-2")


def write_inputs(folder: Path, conversations: int) -> None:
    """Conversations of one to four turns from the built-in documentation pairs, and a tokenizer trained on these."""
    from training.data import python_docs
    from training.data.tokenizer import save_tokenizer, train_bpe

    save_tokenizer(train_bpe(python_docs.texts(), VOCAB), folder / "tokenizer")
    pairs = python_docs.pairs()
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(conversations):
            turns = [
                dict(message) for pair in draw.sample(pairs, draw.randint(1, 4)) for message in pair.messages
            ]
            turns[0]["content"] = f"({number}) {turns[0]['content']}"
            stream.write(json.dumps({"messages": turns}) + "\n")


def product(folder: Path) -> dict[str, Any]:
    from training.data.config import DataSpec
    from training.data.pipeline import build
    from training.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    spec = DataSpec(source=str(folder / "rows.jsonl"), max_length=ROW, on_bad_row="stop")
    start = Clock()
    bundle = build(
        spec,
        tokenizer,
        seed=0,
        tokens_per_batch=ROW,
        rank=0,
        world_size=1,
        work_dir=folder / "work" / str(os.getpid()),
    )
    spent = start.spent()
    report = bundle.report
    assert report.packs_per_epoch is not None
    return _result(spent, report.train_tokens, report.train_supervised_tokens, report.packs_per_epoch)


def trl(folder: Path, workers: int) -> dict[str, Any]:
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    from training.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=ROW,
        packing=True,
        assistant_only_loss=True,
        dataset_num_proc=None if workers == 1 else workers,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer: Any = SimpleNamespace(
        chat_template=tokenizer.chat_template, completion_only_loss=False, _is_vision_dataset=False
    )
    start = Clock()
    dataset = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    packed = SFTTrainer._prepare_dataset(trainer, dataset, tokenizer, config, True, None, "train")
    spent = start.spent()
    rows = packed.with_format("arrow")[:]
    tokens = len(rows["input_ids"].combine_chunks().values)
    labels = rows["labels"].combine_chunks().values.to_numpy()
    firsts = rows["seq_lengths"].combine_chunks().values
    assert len(firsts) == len(dataset)
    return _result(spent, tokens, int((labels != -100).sum()), len(packed))


def datasets_alone(folder: Path, workers: int, *, batched: bool) -> dict[str, Any]:
    from datasets import load_dataset

    from training.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer"))

    def tokenize(batch: dict[str, Any]) -> dict[str, Any]:
        encoded = tokenizer.apply_chat_template(
            batch["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    start = Clock()
    dataset = load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train")
    mapped = dataset.map(
        tokenize, batched=batched, num_proc=None if workers == 1 else workers, remove_columns=["messages"]
    )
    spent = start.spent()
    rows = mapped.with_format("arrow")[:]
    masks = rows["assistant_masks"].combine_chunks().values.to_numpy()
    return _result(spent, len(masks), int(masks.sum()), 0)


class Clock:
    """Wall and processor seconds since it was made, those of finished child processes included."""

    def __init__(self) -> None:
        self._start = (time.perf_counter(), self._processor())

    @staticmethod
    def _processor() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system

    def spent(self) -> tuple[float, float]:
        return time.perf_counter() - self._start[0], self._processor() - self._start[1]


def _result(spent: tuple[float, float], tokens: int, supervised: int, rows: int) -> dict[str, Any]:
    seconds, processor_seconds = spent
    return {
        "seconds": round(seconds, 3),
        "processor_seconds": round(processor_seconds, 3),
        "tokens": tokens,
        "supervised": supervised,
        "rows": rows,
        "tokens_per_second": round(tokens / seconds),
        "tokens_per_processor_second": round(tokens / processor_seconds),
    }


def run_contender(name: str, folder: Path) -> dict[str, Any]:
    kind, _, workers = name.partition("-")
    match kind:
        case "product":
            return product(folder)
        case "trl":
            return trl(folder, int(workers))
        case _:
            return datasets_alone(folder, int(workers), batched=kind == "batches")


def in_own_process(name: str, folder: Path) -> dict[str, Any]:
    """One contender on the first two cores, with an empty cache."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        environment = {
            **os.environ,
            "HF_DATASETS_CACHE": cache,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
            # With several workers every one of them would start as many threads as there are cores.
            "TOKENIZERS_PARALLELISM": "false" if name.endswith("-2") else "true",
        }
        done = subprocess.run(
            [sys.executable, __file__, "--contender", name, "--folder", str(folder)],
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]),
        )
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def packing_alone(documents: int) -> dict[str, Any]:
    """Best-fit decreasing by itself, over the same lengths."""
    import numpy as np
    from datasets import Dataset
    from trl import pack_dataset

    from training.data.packing import best_fit_decreasing

    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, documents), 2, ROW).astype(np.int64)
    start = time.perf_counter()
    ours = best_fit_decreasing(lengths, ROW)
    seconds = time.perf_counter() - start
    dataset = Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
    start = time.perf_counter()
    theirs = pack_dataset(dataset, ROW, "bfd", {"batch_size": documents})
    peer_seconds = time.perf_counter() - start
    return {
        "documents": documents,
        "product": {"seconds": round(seconds, 4), "rows": ours.num_packs},
        "trl": {
            "seconds": round(peer_seconds, 4),
            "rows": len(theirs),
            "note": "one batch; it also copies the tokens",
        },
        "row_efficiency": round(float(lengths.sum()) / (ours.num_packs * ROW), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=6000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--contender", choices=(*CONTENDERS, "packing"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender == "packing":
        print(json.dumps(packing_alone(50_000)))
        return
    if arguments.contender:
        print(json.dumps(run_contender(arguments.contender, arguments.folder)))
        return

    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, arguments.conversations)
        for _ in range(arguments.repeats):
            for name in CONTENDERS:
                runs[name].append(in_own_process(name, folder))
                print(name, runs[name][-1], file=sys.stderr)
        packing = in_own_process("packing", folder)

    wall, processor = (
        {name: max(run[key] for run in found) for name, found in runs.items()}
        for key in ("tokens_per_second", "tokens_per_processor_second")
    )
    product_run, trl_run = runs["product"][0], runs["trl-1"][0]
    # A document's first token is nobody's target, so the two count the same learnt tokens.
    assert product_run["tokens"] == trl_run["tokens"], (product_run, trl_run)
    assert product_run["supervised"] == trl_run["supervised"], (product_run, trl_run)
    result = {
        "what": f"JSONL conversations to packed rows of {ROW} tokens, answers only, two cores, nothing cached",
        "date": datetime.date.today().isoformat(),
        "command": f"python -m bench.data_packing --conversations {arguments.conversations} "
        f"--repeats {arguments.repeats}",
        "machine": {
            "cpu": _cpu(),
            "cores": 2,
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("trl", "datasets", "transformers", "tokenizers", "numpy")
        },
        "conversations": arguments.conversations,
        "tokens": product_run["tokens"],
        "tokens_per_second": wall,
        "tokens_per_processor_second": processor,
        "ratios": {peer: _ratio(wall, peer) for peer in ("trl", "rows", "batches")},
        "ratios_by_processor_time": {peer: _ratio(processor, peer) for peer in ("trl", "rows", "batches")},
        "rows": {"product": product_run["rows"], "trl": trl_run["rows"]},
        "packing_alone": packing,
        "runs": runs,
        "goal": "at least 2 times the tokens per second of TRL and of Hugging Face datasets",
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text + "\n", encoding="utf-8")


def _ratio(speed: dict[str, float], peer: str) -> float:
    """Ours over the peer's better one."""
    return round(speed["product"] / max(speed[f"{peer}-1"], speed[f"{peer}-2"]), 2)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
