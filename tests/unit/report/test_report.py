"""The report as a reader gets it, from whole, partial, broken and hostile run folders."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.unit.report import folders
from training.report import render_report, write_report
from training.storage import open_storage


class Document(HTMLParser):
    """What of a page matters here: tags that nest right, attributes, visible text, the data of the charts."""

    VOID = frozenset(("meta", "link", "br", "img", "input", "hr"))

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.visible: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        assert not self.stack, f"never closed: {self.stack}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack[-1] == tag, f"</{tag}> closes {self.stack}"
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.scripts.append((self.tags[-1][1], data))
        elif not self.stack or self.stack[-1] != "style":
            self.visible.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.visible).split())

    def charts(self) -> dict[str, dict[str, object]]:
        keys = [attributes["data-chart"] for tag, attributes in self.tags if "data-chart" in attributes]
        data = [json.loads(code) for attributes, code in self.scripts if attributes.get("type")]
        return {str(key): one for key, one in zip(keys, data, strict=True)}


def page(folder: Path) -> Document:
    return Document(render_report(open_storage(folder)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return page(folders.restarted_run(tmp_path_factory.mktemp("run")))


def test_headline_says_how_it_went(whole: Document) -> None:
    assert "qwen2.5-1.5b-sft succeeded" in whole.text
    assert "In 400 steps the loss went from 2.381 to 1.184" in whole.text
    assert "held-out data from 2.413 to 1.265 (−48 %)" in whole.text
    for figure in ("27.4k", "35 min 44 s 1 restart", "$5.69", "34.2 %", "19.1 GiB"):
        assert figure in whole.text
    assert "EFA carried the collectives All 8 ranks use Libfabric" in whole.text


def test_every_chart_is_there_with_its_words(whole: Document) -> None:
    assert set(whole.charts()) == {"loss", "seconds", "speed", "memory", "learning-rate", "grad-norm"}
    labels = [attributes.get("aria-label") or "" for tag, attributes in whole.tags if tag == "svg"]
    assert any(label.startswith("Loss in per supervised token") for label in labels)


def test_restart_is_marked_on_every_chart_and_its_repeated_steps_are_told(whole: Document) -> None:
    marks = [
        attributes for tag, attributes in whole.tags if tag == "line" and attributes.get("class") == "restart"
    ]
    assert len(marks) == len(whole.charts())
    assert "The restart before step 201 repeated 37 steps (dotted)." in whole.text


def test_tables_hold_data_checkpoints_attempts_ranks_versions_and_counters(whole: Document) -> None:
    for told in (
        "no answer 71",
        "part-00.jsonl:812",
        "48,210",
        "31 rows were cut to max_length 4096.",
        "99.8 % of their tokens are not padding",
        "step-00000400.9e42f6c8 complete, latest, best 1.265 8 17.2 GiB",
        "step-00000237.5d0c1b7a incomplete",
        "Training waited 7.60 s for checkpoints in all.",
        "5d0c1b7a the beginning 8 2 rank 5 on ray-worker-gpu-m9d4c: WorkerDied: killed (SIGKILL)",
        "9e42f6c8 step-00000200.5d0c1b7a 8 2 succeeded",
        "Sharding in a node, replicated across nodes",
        "2.13.0+cu130",
        "2.37 TiB",
        "yes 6 % above the need",
        "Selected provider is efa",
    ):
        assert told in whole.text


def test_prediction_stands_beside_measurement(whole: Document) -> None:
    assert "Memory of rank 0 18.8 GiB 19.1 GiB +1.8 %" in whole.text
    assert "Wall time 28 min 12 s 35 min 44 s +27 %" in whole.text
    assert "limited by: compute" in whole.text


def test_comparison_tells_ratio_spread_and_expectation(whole: Document) -> None:
    assert "EFA made 1.39 times the steps of TCP (95 % interval 1.31 to 1.50)" in whole.text
    assert "No expectation: the run recorded no expected bytes." in whole.text
    assert "seconds per step 4.202 5.848" in whole.text


def test_page_loads_nothing_and_lets_no_foreign_code_run(whole: Document) -> None:
    for tag, attributes in whole.tags:
        assert tag not in ("iframe", "object", "embed", "img", "base", "form")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert "src" not in attributes
        if "href" in attributes:
            assert str(attributes["href"]).startswith(("#", "data:"))
    policy = next(a["content"] for tag, a in whole.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    executable = [code for attributes, code in whole.scripts if attributes.get("type") != "application/json"]
    assert len(executable) == 1


HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(1)>'"&{{ 7 * 7 }}"""


def test_all_text_of_the_run_is_escaped(tmp_path: Path) -> None:
    folder = folders.restarted_run(tmp_path)
    folders.write_json(folder, "samples.json", [{"prompt": HOSTILE, "answer": HOSTILE}])
    summary = folders.summary(
        name=HOSTILE,
        status="failed",
        device=HOSTILE,
        versions={HOSTILE: HOSTILE},
        error={"rank": 3, "host": HOSTILE, "message": HOSTILE},
        transport={"verdict": HOSTILE, "reason": HOSTILE},
    )
    summary["data"] = {**folders.DATA_REPORT, "warnings": [HOSTILE]}
    folders.write_json(folder, "summary.json", summary)
    folders.write_json(folder, "transport.json", folders.transport(HOSTILE, reason=HOSTILE))
    (folder / "job.yaml").write_text(yaml.safe_dump({"name": HOSTILE, "model": {"source": HOSTILE}}))
    text = render_report(open_storage(folder))
    assert "<img" not in text
    assert "alert(1)</script>" not in text
    document = Document(text)
    assert len([1 for tag, _ in document.tags if tag == "script"]) == 7  # six charts' data and the page's own
    assert document.text.count(" ".join(HOSTILE.split())) > 8


def test_secrets_never_reach_the_page(tmp_path: Path) -> None:
    folder = folders.restarted_run(tmp_path)
    token = "hf_" + "a1B2" * 8
    job = yaml.safe_load(folders.JOB)
    job["runtime_env"]["env"] |= {
        "HF_TOKEN": token,
        "WANDB_API_KEY": "0123456789abcdef",
        "MY_SERVICE_KEY": "open-sesame-42",
        "DB_URL": "postgres://user:pa55word@db/x",
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    message = f"401 for {token}: MY_SERVICE_KEY=open-sesame-42, key open-sesame-42, AKIAABCDEFGHIJKLMNOP"
    folders.write_json(
        folder, "summary.json", folders.summary(status="failed", error={"rank": 0, "message": message})
    )
    text = html.unescape(render_report(open_storage(folder)))
    for secret in (token, "0123456789abcdef", "open-sesame-42", "pa55word", "AKIAABCDEFGHIJKLMNOP"):
        assert secret not in text
    assert "HF_TOKEN: '[redacted]'" in text
    assert "TOKENIZERS_PARALLELISM: 'false'" in text
    assert "tokens_per_gpu: 16384" in text


def _with_hang(folder: Path, **changes: object) -> Path:
    folders.restarted_run(folder)
    stack = '  File "/site/training/data/loader.py", line 7, in __next__\n    row = next(rows)\n'
    report = {"rank": 5, "host": "worker-1", "step": 240, "phase": "data", "stack": stack}
    report |= {"timeout_seconds": 600.0, **changes}
    folders.write_json(folder, f"hangs/{folders.ATTEMPTS[0]}/rank-5.json", report)
    return folder


def test_an_attempt_that_hung_names_the_rank_and_its_frames(tmp_path: Path) -> None:
    folder = _with_hang(tmp_path)
    excluded = {"node_id": "ab12", "host": "worker-1", "reasons": ["CUDA error", "CUDA error"]}
    best = {"checkpoint": f"step-00000300.{folders.ATTEMPTS[1]}", "eval_loss": 1.2}
    folders.write_json(folder, "summary.json", folders.summary(excluded_nodes=[excluded], exported=best))
    shown = page(folder).text
    assert "rank 5 on worker-1 made no progress for 600 s: it is in step 241 (data)" in shown
    assert "loader.py" in shown
    assert "worker-1 was left out after repeated failures" in shown
    assert "complete, exported" in shown
    assert "perplexity 3.54" in shown


@pytest.mark.parametrize("value", [None, {}, [], "x", 10**400, float("nan"), -1])
@pytest.mark.parametrize("key", ["rank", "step", "stack", "phase", "timeout_seconds"])
def test_a_hang_report_of_any_content_leaves_a_page(tmp_path: Path, key: str, value: object) -> None:
    assert "restart" in page(_with_hang(tmp_path, **{key: value})).text


def test_failed_run_names_rank_host_and_message(tmp_path: Path) -> None:
    error = {
        "rank": 5,
        "host": "ray-worker-gpu-m9d4c",
        "message": "CUDA out of memory.\nTried to allocate 2 GiB",
    }
    folders.write_json(tmp_path, "summary.json", folders.summary(status="failed", error=error))
    told = page(tmp_path).text
    assert (
        "The job failed on rank 5 (ray-worker-gpu-m9d4c) CUDA out of memory. Tried to allocate 2 GiB" in told
    )


@pytest.mark.parametrize(
    ("verdict", "title"),
    [
        ("efa", "EFA carried the collectives"),
        ("tcp", "TCP carried the collectives, not EFA"),
        ("mixed", "Some ranks used EFA and others did not"),
        ("none", "Nothing crossed between nodes"),
        ("unknown", "Which network carried the collectives is not known"),
    ],
)
def test_verdict_in_plain_words_with_its_reason(tmp_path: Path, verdict: str, title: str) -> None:
    folders.write_json(tmp_path, "transport.json", {"verdict": verdict, "reason": "Because of line 7."})
    assert f"{title} Because of line 7." in page(tmp_path).text


@pytest.mark.parametrize(
    "part",
    ["summary.json", "metrics.jsonl", "job.yaml", "transport.json", "samples.json",
     "nccl/9e42f6c8/ranks.json",
     "failures/5d0c1b7a/rank-5.json", "attempts/9e42f6c8.json", "prediction.json", "comparison.json"],
)  # fmt: skip
def test_each_part_may_be_missing_or_broken(tmp_path: Path, part: str) -> None:
    folder = folders.restarted_run(tmp_path)
    (folder / part).write_text("{ [ nonsense\n")
    told = page(folder).text
    assert part.rpartition("/")[2] in told, "a broken part is named"
    (folder / part).write_bytes(b"\xff\xfe")
    page(folder)
    (folder / part).write_text("null")
    page(folder)
    (folder / part).unlink()
    told = page(folder).text
    if part in ("summary.json", "metrics.jsonl", "job.yaml", "transport.json"):
        assert f"There is no {part}." in told
    elif part == "samples.json":
        assert "The run ended before its exported model could answer the prompts of the job." in told


def test_only_metrics_of_a_run_that_goes_on(tmp_path: Path) -> None:
    folders.write_lines(tmp_path, "metrics.jsonl", folders.metric_lines(12))
    document = page(tmp_path)
    assert "no summary yet" in document.text
    assert "There is no summary.json. The run is still going on" in document.text
    assert "In 12 steps the loss went from" in document.text
    assert "loss" in document.charts()


def test_empty_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        render_report(open_storage(tmp_path))


@pytest.mark.parametrize("steps", [0, 1, 2, 10])
def test_few_steps(tmp_path: Path, steps: int) -> None:
    folders.write_lines(tmp_path, "metrics.jsonl", folders.metric_lines(steps))
    document = page(tmp_path)
    places = document.charts()["loss"]["places"]
    assert isinstance(places, list)
    assert len(places) == steps + 1  # and the evaluation before the first


def test_hundred_thousand_steps_stay_a_small_page(tmp_path: Path) -> None:
    pattern = folders.metric_lines(1_000)[1:]
    lines = [{**pattern[step % 1_000], "step": step} for step in range(100_000)]
    folders.write_lines(tmp_path, "metrics.jsonl", lines)
    text = render_report(open_storage(tmp_path))
    assert len(text) < 900_000
    document = Document(text)
    assert "Each column of the charts is 200 steps" in document.text
    assert "steps 0 to 199" in text


def test_loss_that_is_not_finite_is_told(tmp_path: Path) -> None:
    lines = folders.metric_lines(40)
    lines[31]["loss"] = float("nan")
    lines[32]["loss"] = float("inf")
    folders.write_lines(tmp_path, "metrics.jsonl", lines)
    assert "2 steps have no finite loss; the first is step 31." in page(tmp_path).text


def test_half_a_line_is_left_out_and_told(tmp_path: Path) -> None:
    folders.write_lines(tmp_path, "metrics.jsonl", folders.metric_lines(5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    told = page(tmp_path).text
    assert (
        "metrics.jsonl: 1 line could not be read as a JSON object with a step and is left out (line 7)"
        in told
    )


def test_unknown_utilization_says_why(tmp_path: Path) -> None:
    folders.write_json(
        tmp_path, "summary.json", folders.summary(mfu=None, mfu_reason="no peak is known for this CPU")
    )
    assert "Model FLOP utilization – no peak is known for this CPU" in page(tmp_path).text


def test_write_report_writes_the_page_into_the_folder(tmp_path: Path) -> None:
    storage = open_storage(folders.restarted_run(tmp_path))
    write_report(storage)
    assert Document(storage.read_text("report.html")).text.startswith("qwen2.5-1.5b-sft: succeeded")


def test_preference_pairs_have_their_figure_charts_and_numbers(tmp_path: Path) -> None:
    lines = folders.metric_lines(20, evaluate_every=10)
    for line in lines:
        step = line["step"]
        rewards = {"chosen_reward": step / 10, "rejected_reward": -step / 20, "reward_margin": 3 * step / 20}
        measures = {"reward_accuracy": min(1.0, step / 16), **rewards}
        if "loss" in line:
            line.update(measures)
        if "eval_loss" in line:
            line.update({f"eval_{name}": 0.9 * value for name, value in measures.items()})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = page(tmp_path)
    assert "Pairs in the preferred order 90.0 % held-out pairs" in document.text
    assert {"reward-accuracy", "rewards"} <= set(document.charts())
    assert "margin 3" in document.text
    labels = [attributes.get("aria-label") or "" for tag, attributes in document.tags if tag == "svg"]
    assert any(label.startswith("Loss in per pair") for label in labels)
    for column in ("Pairs in order", "Held-out pairs in order", "Reward margin"):
        assert column in document.text
