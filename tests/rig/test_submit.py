"""`finetune submit` on a real Kubernetes with the real KubeRay: what happens to a job happens here for real."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse

import pexpect
import pytest
import yaml

from infra.outputs import StackOutputs
from tests.rig.deployment import Deployment
from tests.rig.submit_cli import (
    STEPS,
    Finetune,
    Result,
    copy_of_the_product,
    delete_runs,
    metrics,
    names,
    read_text,
    tiny,
    wait_until,
)
from tests.rig.submit_proxy import DroppingProxy

LONG = (
    4000  # steps of a job that is still running whenever a test looks; it is stopped, or its pods are taken
)


# In a terminal some words have colours between them.
STEP = r"step .{0,20}\d+/"


@pytest.fixture(scope="module")
def submit_stack(_deployment: Deployment) -> Deployment:
    """The stack with EFA interfaces, as far as Kubernetes can tell; deployed once for all tests of this file."""
    _deployment.settings = {**_deployment.original, "efaPerWorker": "1"}
    _deployment.ensure_up()
    delete_runs(_deployment)
    return _deployment


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_product(tmp_path_factory.mktemp("code"))


@pytest.fixture
def finetune(
    submit_stack: Deployment, code: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Finetune]:
    """The command line on a stack that is ready and runs no job: each test sees its jobs to their end, and what one
    that fails has left is stopped."""
    wait_until("head and both workers are ready", lambda: ready_pods(submit_stack) == 3, 300)
    tool = Finetune(submit_stack, tmp_path, submit_stack.outputs_file, code)
    failed_before = request.session.testsfailed
    yield tool
    if not submit_stack.is_up or request.session.testsfailed == failed_before:
        return
    for job in tool.run("list").document["jobs"]:
        if job["status"] in ("pending", "running"):
            tool.run("stop", job["submission_id"], "--now")


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Result]:
    """The run that nothing happened to, for the tests that compare with it."""
    return {}


def ready_pods(stack: Deployment) -> int:
    conditions = [
        {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
        for pod in stack.pods().values()
        if "deletionTimestamp" not in pod["metadata"]
    ]
    return sum(condition.get("Ready") == "True" for condition in conditions)


def workers(stack: Deployment) -> list[str]:
    return sorted(
        n for n, p in stack.pods().items() if p["metadata"]["labels"]["ray.io/node-type"] == "worker"
    )


def delete_pod(stack: Deployment, name: str) -> None:
    stack.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=false")


def ended(terminal: pexpect.spawn[str]) -> int | None:
    """The exit status of a command in a terminal."""
    terminal.expect(pexpect.EOF)
    terminal.close()
    return terminal.exitstatus


def final_loss(result: Result) -> float:
    return float(result.document["last_loss"])


@pytest.mark.timeout(900)
def test_a_job_over_two_nodes(finetune: Finetune, undisturbed: dict[str, Result]) -> None:
    stack = finetune.stack
    scratch = "/tmp/scratch-of-the-job"
    result = finetune.submit("undisturbed", runtime_env__env__FINETUNE_SCRATCH=scratch).result()
    assert result.status == 0, result.words
    undisturbed["result"] = result
    summary, run_uri = result.document, result.document["run"]
    assert (summary["status"], summary["world_size"], summary["nodes"], summary["restarts"]) == (
        "succeeded",
        2,
        2,
        0,
    )
    assert run_uri == f"{stack.rig.storage_uri}/runs/undisturbed"
    found = names(stack, run_uri)
    assert {"job.yaml", "metrics.jsonl", "summary.json", "transport.json", "report.html"} <= set(found)
    assert any(name.startswith("checkpoints/step-00000160.") and name.endswith("/COMPLETE") for name in found)
    ranks = json.loads(
        read_text(stack, run_uri, next(name for name in found if name.endswith("/ranks.json")))
    )
    assert sorted(rank["host"] for rank in ranks) == workers(stack)
    assert (finetune.folder / "runs" / summary["submission_id"] / "report.html").is_file()
    assert "tokens a step" in result.words
    # The environment of the job file reached the workers, and what the pods know of secrets reached nobody.
    for worker in workers(stack):
        stack.kubectl("exec", worker, "--", "test", "-d", f"{scratch}/finetune/undisturbed")
    secret = stack.rig.storage_environment()["AWS_SECRET_ACCESS_KEY"]
    assert secret not in result.words + json.dumps(summary) + read_text(stack, run_uri, "job.yaml")

    # The same submit again is the same job.
    again = finetune.submit("undisturbed", runtime_env__env__FINETUNE_SCRATCH=scratch).result()
    assert (again.status, again.document["submission_id"]) == (0, summary["submission_id"])
    assert [job["name"] for job in finetune.run("list").document["jobs"]].count("undisturbed") == 1

    # What one rank said, found by its address and process.
    status = finetune.run("status", "undisturbed")
    assert (status.status, status.document["steps"]) == (0, STEPS)
    lines = finetune.run("logs", "undisturbed", "--rank", "1").document["lines"]
    assert len(lines) < len(finetune.run("logs", "undisturbed").document["lines"])


@pytest.mark.timeout(600)
def test_efa_that_is_required_and_not_there_is_no_success(finetune: Finetune) -> None:
    result = finetune.submit("transport", "--require-transport", "efa", steps=4).result()
    assert result.status in (13, 14), result.words
    assert "efa is required" in result.document["reason"] or "unknown" in result.document["reason"]
    accepted = finetune.submit("transport", "--require-transport", "any", steps=4).result()
    assert accepted.status == 0, accepted.words


@pytest.mark.timeout(900)
def test_a_deleted_worker_comes_back_and_training_goes_on_to_the_same_loss(
    finetune: Finetune, undisturbed: dict[str, Result]
) -> None:
    running = finetune.submit("disturbed")
    running.wait_for(r"checkpoint step-00000\d+\.")
    delete_pod(finetune.stack, workers(finetune.stack)[0])
    result = running.result()
    assert result.status == 0, result.words
    assert result.document["restarts"] == 1
    steps = [line["step"] for line in metrics(finetune.stack, result.document["run"])]
    assert steps == sorted(set(steps)), "each step stands once"
    assert steps[-1] == STEPS
    assert final_loss(result) == pytest.approx(final_loss(undisturbed["result"]), rel=1e-6)


@pytest.mark.timeout(900)
def test_a_deleted_head_is_15_and_the_same_submit_resumes(finetune: Finetune) -> None:
    stack = finetune.stack
    running = finetune.submit("headless")
    running.wait_for(r"checkpoint step-00000\d+\.")
    delete_pod(stack, stack.head_pod())
    lost = running.result()
    assert lost.status == 15, lost.words
    assert "finetune status headless-" in lost.words
    wait_until("head and both workers are ready", lambda: ready_pods(stack) == 3, 300)
    status = finetune.run("status", "headless")
    assert status.status == 15
    assert "newest complete checkpoint step-" in status.document["reason"]
    resumed = finetune.submit("headless").result()
    assert resumed.status == 0, resumed.words
    assert resumed.document["resumed_from"].startswith("step-")
    assert resumed.document["steps"] == STEPS


@pytest.mark.timeout(900)
def test_a_killed_submitter_and_a_cut_stream_change_nothing(finetune: Finetune, tmp_path: Path) -> None:
    running = finetune.submit("orphan", steps=400)
    running.wait_for(r"training starts")
    running.kill()
    seen = finetune.run("status", "orphan")
    assert seen.status == 130, seen.words
    assert seen.document["status"] == "running"

    proxy, outputs = behind_proxy(finetune.stack.outputs(), tmp_path)
    try:
        through = replace(finetune, folder=tmp_path / "through", outputs=outputs)
        through.folder.mkdir()
        followed = through.submit("orphan", steps=400).result()
        assert followed.status == 0, followed.words
        assert followed.document["submission_id"] == seen.document["submission_id"]
        log = through.run("logs", "orphan").document["lines"]
        assert proxy.cut >= 3, "the proxy was in the way"
    finally:
        proxy.close()
    assert log == finetune.run("logs", "orphan").document["lines"]


@pytest.mark.timeout(600)
def test_a_job_that_raises_is_10_with_the_first_failing_rank_first(finetune: Finetune) -> None:
    result = finetune.submit(
        "raises",
        steps=8,
        optimizer__learning_rate="1.0e+30",
        optimizer__max_grad_norm="1.0e+30",
        resilience__max_failures="0",
    ).result()
    assert result.status == 10, result.words
    failure = result.document["failure"]
    assert failure["rank"] in (0, 1)
    assert failure["host"] in workers(finetune.stack)
    assert "not finite" in failure["error"] or "NonFinite" in failure["error"], failure
    last = result.words[result.words.index("First failure: rank") :]
    assert len(last.splitlines()) < 80, "no wall of logs"
    shown = finetune.run("logs", "raises", "--first-failure").document["lines"]
    assert shown[
        0
    ] == f"First failure: rank {failure['rank']} on {failure['host']}" or "NonFinite" in "\n".join(shown)


@pytest.mark.timeout(600)
def test_a_job_that_is_stopped_is_11(finetune: Finetune) -> None:
    running = finetune.submit("stopped", steps=LONG)
    running.wait_for(r"step +\d+/")
    stopped = finetune.run("stop", "stopped")
    assert stopped.status == 0, stopped.words
    result = running.result(120)
    assert result.status == 11, result.words
    assert result.document["checkpoint"].startswith("step-")


@pytest.mark.timeout(900)
def test_ctrl_c_in_a_terminal_asks_and_does_what_is_answered(finetune: Finetune) -> None:
    submit = ["submit", str(finetune.code / "training/jobs/demo.yaml"), *tiny("asked", LONG)]

    terminal = finetune.in_terminal(*submit)
    terminal.expect(r"Submit\?")
    terminal.sendline("n")
    terminal.expect("Not submitted")
    assert ended(terminal) == 2
    assert finetune.run("list").document["jobs"] == [] or finetune.run("status", "asked").status == 2

    terminal = finetune.in_terminal(*submit)
    terminal.expect(r"Submit\?")
    terminal.sendline("y")
    terminal.expect(STEP)
    terminal.sendcontrol("c")
    terminal.expect("Leave the job running, stop it, or go on following")
    terminal.sendline("detach")
    terminal.expect("goes on without this terminal")
    terminal.expect("finetune logs asked-")
    assert ended(terminal) == 130
    assert finetune.run("status", "asked").document["status"] == "running"

    terminal = finetune.in_terminal(*submit)
    terminal.expect("This job is under way as asked-")
    terminal.expect(STEP)
    terminal.sendcontrol("c")
    terminal.expect("Leave the job running")
    terminal.sendline("follow")
    terminal.expect(STEP)
    terminal.sendcontrol("c")
    terminal.expect("Leave the job running")
    terminal.sendline("stop")
    terminal.expect("stopped on request after step")
    assert ended(terminal) == 11


@pytest.mark.timeout(900)
def test_compare_runs_both_legs_and_claims_nothing_that_was_not_proven(finetune: Finetune) -> None:
    """Gloo carries the collectives here: neither leg can prove a transport, so the comparison is no success."""
    demo = str(finetune.code / "training/jobs/demo.yaml")
    result = finetune.run("compare", demo, "--yes", *tiny("compared", 12), seconds=600)
    assert result.status in (13, 14), result.words
    report = result.document
    assert report["efa"]["verdict"] != "efa"
    assert any("the EFA leg" in problem for problem in report["problems"])
    assert report["ratio_low"] <= report["ratio"] <= report["ratio_high"]
    assert report["efa"]["tokens_per_gpu_per_step"] == pytest.approx(
        report["tcp"]["tokens_per_gpu_per_step"], rel=0.01
    )
    assert "EFA made " in result.words
    assert "Not a comparison of EFA with TCP: the EFA leg" in " ".join(result.words.split())
    runs = f"{finetune.stack.rig.storage_uri}/runs"
    legs = {
        leg: yaml.safe_load(read_text(finetune.stack, f"{runs}/compared-{leg}", "job.yaml"))
        for leg in ("efa", "tcp")
    }
    assert legs["tcp"]["runtime_env"]["env"]["NCCL_NET"] == "Socket"
    assert "NCCL_NET" not in legs["efa"]["runtime_env"]["env"]
    page = finetune.folder / "runs" / "compared-efa-compared" / "report.html"
    assert "compar" in page.read_text().lower()


@pytest.mark.timeout(600)
def test_probe_measures_between_the_nodes_and_judges_only_known_lines(finetune: Finetune) -> None:
    result = finetune.run("probe", "--size", "1", "--size", "4", seconds=400)
    assert result.status == 0, result.words
    probed = result.document
    assert (probed["world_size"], probed["num_nodes"], probed["backend"]) == (2, 2, "gloo")
    assert probed["verdict"] == "not judged"
    assert {(m["collective"], m["scope"], m["payload_bytes"]) for m in probed["measurements"]} == {
        (collective, "world", size * 2**20)
        for collective in ("all_gather", "reduce_scatter")
        for size in (1, 4)
    }
    assert all(m["bus_gb_per_second"] > 0 for m in probed["measurements"])
    assert "bus GB/s" in result.words


@pytest.mark.timeout(600)
def test_rays_own_stopped_is_11_and_no_success(finetune: Finetune) -> None:
    running = finetune.submit("killed", steps=LONG)
    name = running.wait_for(r"submitted as (killed-\w+)").split()[-1]
    stack = finetune.stack
    address = "--address=http://127.0.0.1:8265"
    stack.kubectl(
        "exec", stack.head_pod(), "--", "ray", "job", "stop", address, "--no-wait", name, seconds=120
    )
    result = running.result(120)
    assert (result.status, result.document["ray_status"]) == (11, "STOPPED"), result.words
    assert finetune.run("status", "killed").status == 11


@pytest.mark.timeout(600)
def test_packages_reach_the_workers_or_are_said_to_be_absent_in_pips_words(finetune: Finetune) -> None:
    stack = finetune.stack
    absent = "absent @ file:///nowhere/absent-1.0-py3-none-any.whl"
    result = finetune.submit("packages", steps=4, runtime_env__pip=json.dumps([absent])).result(300)
    assert result.status == 2, result.words
    assert "ERROR: Could not install packages" in result.document["reason"]
    assert "/nowhere/absent-1.0-py3-none-any.whl" in result.document["reason"]

    make = f"import base64; open('/tmp/{WHEEL}', 'wb').write(base64.b64decode('{base64.b64encode(wheel()).decode()}'))"
    stack.kubectl("exec", stack.head_pod(), "--", "python", "-c", make)
    present = f"rigextra @ file:///tmp/{WHEEL}"
    result = finetune.submit("packages", steps=4, runtime_env__pip=json.dumps([present])).result(300)
    assert result.status == 0, result.words
    for worker in workers(stack):
        find = "ls /tmp/ray/session_latest/runtime_resources/working_dir_files/*/rigextra.py"
        stack.kubectl("exec", worker, "--", "sh", "-c", find)


@pytest.mark.timeout(600)
def test_data_that_no_worker_can_read_is_2_before_anything_is_queued(finetune: Finetune) -> None:
    before = finetune.run("list").document["jobs"]
    result = finetune.submit("unreadable", data__source="s3://finetune/no/such/data").result()
    assert result.status == 2, result.words
    assert (
        "data.source s3://finetune/no/such/data: there is no object under this prefix"
        in result.document["reason"]
    )
    assert finetune.run("list").document["jobs"] == before


@pytest.mark.timeout(600)
def test_a_cordoned_node_is_12_with_pod_event_and_advice(finetune: Finetune) -> None:
    stack = finetune.stack
    name, pod = next((n, p) for n, p in stack.pods().items() if n == workers(stack)[0])
    node = pod["spec"]["nodeName"]
    stack.rig.kubectl("cordon", node)
    try:
        delete_pod(stack, name)
        wait_until("the new pod is pending", lambda: ready_pods(stack) == 2)
        result = finetune.submit("cordoned", "--resources", "25", steps=4).result()
    finally:
        stack.rig.kubectl("uncordon", node)
    assert result.status == 12, result.words
    reason = result.document["reason"]
    assert "1 of 2 workers ready" in reason
    assert "FailedScheduling" in reason or "not scheduled" in reason
    assert f"kubectl uncordon {node}" in reason
    wait_until("head and both workers are ready", lambda: ready_pods(stack) == 3, 300)


@pytest.mark.timeout(900)
def test_a_destroy_asks_and_takes_everything_also_while_a_job_runs(finetune: Finetune) -> None:
    """The last test: it leaves no stack."""
    stack = finetune.stack
    running = finetune.submit("destroyed", steps=LONG)
    running.wait_for(r"step +\d+/")

    terminal = stack.destroy_in_terminal()
    terminal.expect("Do you want to perform this destroy")
    terminal.send("no\r")
    terminal.expect("declined")
    assert ended(terminal) != 0
    assert finetune.run("status", "destroyed").document["status"] == "running"

    terminal = stack.destroy_in_terminal()
    terminal.expect("Do you want to perform this destroy")
    terminal.send("yes\r")
    assert ended(terminal) == 0, terminal.before
    stack.forget()
    lost = running.result(300)
    assert lost.status == 15, lost.words
    wait_until("nothing of the stack is left", lambda: stack.objects() - stack.before == set(), 60)
    assert stack.before - stack.objects() == set()


WHEEL = "rigextra-1.0-py3-none-any.whl"


def wheel() -> bytes:
    """The smallest package that pip takes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("rigextra.py", "VALUE = 1\n")
        archive.writestr(
            "rigextra-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: rigextra\nVersion: 1.0\n"
        )
        tag = "Wheel-Version: 1.0\nGenerator: rig\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("rigextra-1.0.dist-info/WHEEL", tag)
        archive.writestr("rigextra-1.0.dist-info/RECORD", "")
    return data.getvalue()


def behind_proxy(outputs: StackOutputs, folder: Path) -> tuple[DroppingProxy, Path]:
    """Outputs whose kubeconfig goes through a proxy that cuts connections."""
    assert outputs.kube.kubeconfig_path is not None
    config = yaml.safe_load(Path(outputs.kube.kubeconfig_path).read_text())
    cluster = config["clusters"][0]["cluster"]
    server = urlparse(cluster["server"])
    assert server.hostname is not None
    assert server.port is not None
    proxy = DroppingProxy((server.hostname, server.port))
    cluster |= {"server": f"https://127.0.0.1:{proxy.port}", "tls-server-name": server.hostname}
    kubeconfig = folder / "kubeconfig-through-proxy"
    kubeconfig.write_text(yaml.safe_dump(config))
    changed = outputs.model_copy(
        update={"kube": outputs.kube.model_copy(update={"kubeconfig_path": str(kubeconfig)})}
    )
    path = folder / "outputs-through-proxy.json"
    path.write_text(changed.model_dump_json())
    return proxy, path
