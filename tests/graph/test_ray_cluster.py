"""The RayCluster: valid for KubeRay and the API server, and what a training job needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from infra.crds import RELEASE_FILE, packaged_crds, read_crds, write_packaged
from infra.ray_cluster import ray_cluster_spec, ready_conditions, transport_environment
from infra.raycluster_spec import violations
from infra.settings import StackSettings, parse_settings
from infra.versions import KUBERAY_VERSION
from tests.graph import graphs

SHAPES = {
    "dev": graphs.dev_settings,
    "local": graphs.local_settings,
    "everything": lambda: parse_settings(graphs.EVERYTHING, "full"),
}


def _schema() -> dict[str, Any]:
    """RayCluster v1 as the API server of a real cluster knows it, but for fields that it would prune."""
    crd = next(crd for crd in packaged_crds() if crd["metadata"]["name"] == "rayclusters.ray.io")
    version = next(v for v in crd["spec"]["versions"] if v["name"] == "v1")
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return _closed(schema)


def _closed(schema: Any) -> Any:
    """Refuses fields that are not in the schema; the API server drops them silently."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if "x-kubernetes-int-or-string" in schema:
        closed = {"type": ["integer", "string"]}
    elif "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
        closed["additionalProperties"] = False
    return closed


def _spec(settings: StackSettings) -> dict[str, Any]:
    return ray_cluster_spec(settings).manifest()


@pytest.mark.parametrize("shape", SHAPES)
def test_it_fits_the_schema_of_the_pinned_crd(shape: str) -> None:
    validator = jsonschema.Draft202012Validator(_schema())
    errors = [
        f"{'/'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(_spec(SHAPES[shape]()))
    ]
    assert errors == []


def test_the_schema_check_sees_a_misspelt_field() -> None:
    spec = _spec(graphs.dev_settings())
    spec["headGroupSpec"]["rayStartParam"] = {}
    assert list(jsonschema.Draft202012Validator(_schema()).iter_errors(spec))


def test_the_crds_are_those_of_the_pinned_chart() -> None:
    """The release that they were taken from, and the operator that the tests of the rig build."""
    assert RELEASE_FILE.read_text().strip() == KUBERAY_VERSION
    module = (graphs.REPOSITORY / "tests/gotools/kuberay/go.mod").read_text()
    assert f"github.com/ray-project/kuberay/ray-operator v{KUBERAY_VERSION}" in module
    properties = _schema()["properties"]
    assert {"authOptions", "upgradeStrategy"} <= set(properties), "came with 1.5.1 and 1.6.0"


def test_crds_of_another_release_are_taken_over_from_its_folder(tmp_path: Path) -> None:
    source, target = tmp_path / "bases", tmp_path / "packaged"
    source.mkdir()
    target.mkdir()
    crd = next(crd for crd in packaged_crds() if crd["spec"]["names"]["kind"] == "RayCronJob")
    (source / "ray.io_raycronjobs.yaml").write_text(json.dumps(crd))
    assert read_crds(source) == [crd]
    (written,) = write_packaged(source, target, KUBERAY_VERSION)
    assert written.read_bytes() == (RELEASE_FILE.parent / written.name).read_bytes()
    assert (target / RELEASE_FILE.name).read_text() == f"{KUBERAY_VERSION}\n"
    with pytest.raises(FileNotFoundError, match="no YAML file"):
        read_crds(target)


@pytest.mark.parametrize("shape", SHAPES)
def test_kuberay_would_accept_it(shape: str) -> None:
    settings = SHAPES[shape]()
    assert violations(settings.ray_cluster, _spec(settings)) == []


def _changes() -> Iterator[tuple[str, Any, str]]:
    def worker(spec: dict[str, Any]) -> dict[str, Any]:
        return spec["workerGroupSpecs"][0]

    def head(spec: dict[str, Any]) -> dict[str, Any]:
        return spec["headGroupSpec"]

    def env(spec: dict[str, Any]) -> list[dict[str, str]]:
        return head(spec)["template"]["spec"]["containers"][0]["env"]

    yield (
        "no head container",
        lambda s: head(s)["template"]["spec"].update(containers=[]),
        "at least one container",
    )
    yield (
        "no worker container",
        lambda s: worker(s)["template"]["spec"].update(containers=[]),
        "at least one container",
    )
    yield (
        "min over max",
        lambda s: worker(s).update(minReplicas=5),
        "minReplicas 5 is greater than maxReplicas 2",
    )
    yield "negative", lambda s: worker(s).update(minReplicas=-1), "cannot be negative"
    yield "no maximum", lambda s: worker(s).pop("maxReplicas"), "both needed without autoscaling"
    yield "both resources", lambda s: head(s).update(resources={"CPU": "1"}), "use one of them"
    yield "labels", lambda s: head(s)["rayStartParams"].update(labels="a=b"), "labels is not supported"
    yield "old Ray", lambda s: s.update(rayVersion="2.51.0"), "needs Ray 2.52.0"
    yield "no Ray version", lambda s: s.update(rayVersion="nightly"), "needs a version such as"
    yield (
        "redis",
        lambda s: env(s).append({"name": "RAY_REDIS_ADDRESS", "value": "r"}),
        "gcsFaultToleranceOptions",
    )
    yield "redis user", lambda s: env(s).append({"name": "REDIS_USERNAME", "value": "r"}), "redisUsername"
    yield "upgrade", lambda s: s.update(upgradeStrategy={"type": "Rolling"}), "Recreate or None"
    yield (
        "autoscaler by environment",
        lambda s: env(s).append({"name": "RAY_enable_autoscaler_v2", "value": "1"}),
        "needs enableInTreeAutoscaling",
    )


@pytest.mark.parametrize(("change", "words"), [c[1:] for c in _changes()], ids=[c[0] for c in _changes()])
def test_what_kuberay_rejects_is_said_before_it_is_sent(change: Any, words: str) -> None:
    spec = copy.deepcopy(_spec(graphs.dev_settings()))
    change(spec)
    assert any(words in violation for violation in violations("train", spec)), violations("train", spec)


@pytest.mark.parametrize("policy", ["Always", "OnFailure"])
def test_autoscaler_v2_wants_pods_that_do_not_restart(policy: str) -> None:
    spec = _spec(SHAPES["everything"]())
    spec["workerGroupSpecs"][0]["template"]["spec"]["restartPolicy"] = policy
    assert any("needs Never" in violation for violation in violations("train", spec))
    spec["workerGroupSpecs"][0]["suspend"] = True
    assert any("cannot be suspended" in violation for violation in violations("train", spec))


@pytest.mark.parametrize(
    ("name", "words"), [("r" * 54, "53 characters"), ("1train", "DNS-1035"), ("Train", "DNS-1035")]
)
def test_names(name: str, words: str) -> None:
    assert any(words in violation for violation in violations(name, _spec(graphs.dev_settings())))


def test_the_head_has_no_gpu_takes_no_tasks_and_keeps_its_dashboard_to_itself() -> None:
    head = _spec(graphs.dev_settings())["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "127.0.0.1"}
    (container,) = head["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert container["ports"] == [{"name": "gcs-server", "containerPort": 6379}]
    assert container["resources"]["requests"] == {"cpu": "2", "memory": "8192Mi", "ephemeral-storage": "20Gi"}
    assert head["template"]["spec"]["nodeSelector"] == {"role": "system"}


def test_tokens_guard_the_cluster_and_an_edit_replaces_the_pods() -> None:
    spec = _spec(graphs.dev_settings())
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["upgradeStrategy"] == {"type": "Recreate"}
    assert spec["rayVersion"] == "2.58.0"


def test_workers_are_nodes() -> None:
    spec = _spec(graphs.dev_settings())
    (group,) = spec["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"] == {
        "cpu": "40",
        "memory": "163840Mi",
        "ephemeral-storage": "100Gi",
        "nvidia.com/gpu": "4",
        "vpc.amazonaws.com/efa": "1",
    }
    (term,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes["shm"] == {"medium": "Memory", "sizeLimit": "65536Mi"}
    assert volumes["ray"] == {"sizeLimit": "100Gi"}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"/dev/shm", "/tmp/ray", "/tmp/nccl"}


def test_the_transport_environment_of_efa() -> None:
    assert transport_environment(graphs.dev_settings()) == {
        "FI_PROVIDER": "efa",
        "NCCL_NET": "Libfabric",
        "NCCL_NET_PLUGIN": "ofi",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": "/tmp/nccl/%h.%p.log",
        "NCCL_SHM_USE_CUDA_MEMCPY": "1",
        "FI_EFA_USE_HUGE_PAGE": "0",
    }


def test_the_transport_environment_of_other_nodes() -> None:
    nvlink = transport_environment(graphs.settings(gpuInstanceType="p5.48xlarge"))
    assert nvlink["NCCL_NET"] == "Libfabric"
    assert "NCCL_SHM_USE_CUDA_MEMCPY" not in nvlink
    without = transport_environment(graphs.settings(gpuInstanceType="g6.xlarge", requireEfa=False))
    assert (without["FI_PROVIDER"], without["NCCL_NET"], without["NCCL_NET_PLUGIN"]) == (
        "tcp",
        "Socket",
        "none",
    )


def _container(spec: dict[str, Any]) -> dict[str, Any]:
    return spec["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]


def test_the_keys_of_a_local_store_come_from_its_secret() -> None:
    env = {entry["name"]: entry for entry in _container(_spec(graphs.local_settings()))["env"]}
    assert env["AWS_ENDPOINT_URL"]["value"] == "http://10.0.0.5:9000"
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert env[key] == {"name": key, "valueFrom": {"secretKeyRef": {"name": "storage", "key": key}}}


def test_the_hub_token_comes_from_a_secret() -> None:
    spec = _spec(graphs.settings(hubSecret="hub"))
    for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]):
        env = {entry["name"]: entry for entry in group["template"]["spec"]["containers"][0]["env"]}
        assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}


def test_the_keys_of_a_tracker_come_from_secrets() -> None:
    spec = _spec(
        graphs.settings(hubSecret="hub", jobSecrets=["WANDB_API_KEY=trackers", "MLFLOW_TRACKING_TOKEN=ml"])
    )
    for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]):
        env = {entry["name"]: entry for entry in group["template"]["spec"]["containers"][0]["env"]}
        for name, secret in (
            ("WANDB_API_KEY", "trackers"),
            ("MLFLOW_TRACKING_TOKEN", "ml"),
            ("HF_TOKEN", "hub"),
        ):
            assert env[name] == {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}


def test_lustre_is_mounted_in_head_and_workers() -> None:
    spec = _spec(SHAPES["everything"]())
    for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0]):
        pod = group["template"]["spec"]
        assert {"name": "fsx", "persistentVolumeClaim": {"claimName": "fsx"}} in pod["volumes"]
        assert {"name": "fsx", "mountPath": "/fsx"} in pod["containers"][0]["volumeMounts"]
    volume = graphs.everything().of_type("kubernetes:core/v1:PersistentVolume")[0].inputs["spec"]
    assert volume["persistentVolumeReclaimPolicy"] == "Retain"
    assert volume["csi"]["driver"] == "fsx.csi.aws.com"


def test_it_is_awaited() -> None:
    annotations = graphs.ray_cluster(graphs.dev()).inputs["metadata"]["annotations"]
    conditions = json.loads(annotations["pulumi.com/waitFor"])
    assert conditions == ready_conditions(graphs.dev_settings())
    assert conditions[:2] == ["condition=RayClusterProvisioned", "condition=HeadPodReady"]
    assert conditions[2] == "jsonpath={.status.readyWorkerReplicas}=2"


def test_a_chart_on_disk_needs_no_repository(tmp_path: Any) -> None:
    from infra.recorder import record

    settings = parse_settings(
        {
            **graphs.MINIMAL,
            "kuberayChart": f"{tmp_path}/kuberay-operator",
            "kuberayImage": "registry:5000/op:1.6.2",
        },
        "test",
    )
    operator = graphs.release(record(settings), "kuberay-operator").inputs
    assert operator["chart"] == f"{tmp_path}/kuberay-operator"
    assert "repositoryOpts" not in operator
    assert operator["values"]["image"] == {
        "repository": "registry:5000/op",
        "tag": "1.6.2",
        "pullPolicy": "IfNotPresent",
    }
