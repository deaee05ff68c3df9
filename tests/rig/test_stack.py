"""The workload half of the program, deployed for real: what is applied, what an edit does, what a destroy
leaves.
"""

from __future__ import annotations

import time
from typing import Any

from infra.ray_cluster import ray_cluster_spec
from infra.settings import read_settings_file
from tests.rig import layout
from tests.rig.deployment import Deployment

# What may differ between AWS and a cluster that somebody brings: names and sizes, and where the store is.
_SIZES = ("image", "cpu", "memory", "ephemeral-storage", "sizeLimit")
_STORE_VARIABLES = (
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
)


def test_everything_of_the_stack_is_there(stack: Deployment) -> None:
    appeared = stack.objects() - stack.before
    namespace, cluster = stack.namespace, stack.typed_settings().ray_cluster
    assert {
        f"Namespace <none> {namespace}",
        f"ServiceAccount {namespace} {stack.typed_settings().service_account}",
        f"NetworkPolicy {namespace} default-deny",
        f"NetworkPolicy {namespace} ray-internal",
        f"NetworkPolicy {namespace} storage",
        f"RayCluster {namespace} {cluster}",
        f"Service {namespace} {cluster}-head-svc",
        "CustomResourceDefinition <none> rayclusters.ray.io",
        "Deployment kuberay-operator kuberay-operator",
    } <= appeared
    assert not any(item.startswith("DaemonSet") for item in appeared), "device plugins are off"


def test_ray_runs_on_three_nodes(stack: Deployment) -> None:
    assert sorted(pod["spec"]["nodeName"] for pod in stack.pods().values()) == ["gpu-1", "gpu-2", "system-1"]
    status = stack.kubectl("exec", stack.head_pod(), "--", "ray", "status")
    assert status.count("1 node_") == 3 or "2 workers" in status, status


def test_ray_is_started_by_kuberay_and_not_by_the_entrypoint_of_the_image(stack: Deployment) -> None:
    for name, pod in stack.pods().items():
        container = pod["spec"]["containers"][0]
        assert container["command"] == ["/bin/bash", "-c", "--"]
        assert container["args"][0].startswith("ulimit -n 65536; ray start"), container["args"]
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["/bin/sh", "-c", "ray stop"]
        stack.kubectl("exec", name, "--", "test", "!", "-e", "/tmp/image-entrypoint-ran")


def test_what_is_applied_is_what_is_applied_on_aws(stack: Deployment) -> None:
    applied = _ray_cluster(stack)["spec"]
    ours = ray_cluster_spec(stack.typed_settings()).manifest()
    assert _missing(ours, applied) == []

    aws = ray_cluster_spec(read_settings_file(layout.REPOSITORY / "Pulumi.dev.yaml")).manifest()
    with_gpus = {**stack.original, "gpusPerWorker": "4", "efaPerWorker": "1"}
    del with_gpus["requireEfa"]
    stack.settings = with_gpus
    local = ray_cluster_spec(stack.typed_settings()).manifest()
    assert _comparable(local) == _comparable(aws)


def test_a_second_up_changes_nothing(stack: Deployment) -> None:
    changes = stack.preview().change_summary
    assert {str(getattr(kind, "value", kind)) for kind, count in changes.items() if count} == {"same"}


def test_an_edit_of_the_settings_replaces_the_pods(stack: Deployment) -> None:
    before = {pod["metadata"]["uid"] for pod in stack.pods().values()}
    stack.settings = {
        **stack.original,
        "imageTag": layout.RAY_IMAGE_REBUILT.rpartition(":")[2],
        "gpusPerWorker": "4",
        "efaPerWorker": "1",
    }
    stack.up()
    pods = stack.pods()
    assert len(pods) == 3
    assert not before & {pod["metadata"]["uid"] for pod in pods.values()}
    for name, pod in pods.items():
        assert pod["spec"]["containers"][0]["image"] == layout.RAY_IMAGE_REBUILT
        stack.kubectl("exec", name, "--", "test", "-e", "/etc/rebuilt")
    workers = [p for p in pods.values() if p["metadata"]["labels"]["ray.io/node-type"] == "worker"]
    assert {pod["spec"]["nodeName"] for pod in workers} == {"gpu-1", "gpu-2"}
    for pod in workers:
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
        assert pod["spec"]["containers"][0]["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"


def test_destroy_leaves_the_cluster_as_it_was(stack_as_it_is: Deployment) -> None:
    stack = stack_as_it_is
    stack.destroy()
    deadline = time.monotonic() + 30
    while (left := stack.objects() - stack.before) and time.monotonic() < deadline:
        time.sleep(1)  # The garbage collector follows within seconds.
    assert left == set()
    assert stack.before - stack.objects() == set()


def _ray_cluster(stack: Deployment) -> dict[str, Any]:
    return stack.rig.get("raycluster", stack.typed_settings().ray_cluster, "--namespace", stack.namespace)


def _missing(wanted: Any, found: Any, path: str = "spec") -> list[str]:
    """What of `wanted` is not in `found`; what the API server added beside it does not count."""
    if isinstance(wanted, dict):
        return [
            problem
            for key, value in wanted.items()
            for problem in (
                _missing(value, found[key], f"{path}.{key}") if key in found else [f"{path}.{key} is missing"]
            )
        ]
    if isinstance(wanted, list | tuple):
        if len(wanted) != len(found):
            return [f"{path} has {len(found)} entries, not {len(wanted)}"]
        pairs = enumerate(zip(wanted, found, strict=True))
        return [problem for i, (a, b) in pairs for problem in _missing(a, b, f"{path}[{i}]")]
    return [] if wanted == found else [f"{path} is {found!r}, not {wanted!r}"]


def _comparable(spec: Any) -> Any:
    """Without what may differ, and without the stack's name in the labels."""
    if isinstance(spec, dict):
        return {
            key: ("size" if key in _SIZES else _comparable(value))
            for key, value in spec.items()
            if key != "efa-finetune/stack"
        }
    if isinstance(spec, list | tuple):
        variables = [
            item for item in spec if not (isinstance(item, dict) and item.get("name") in _STORE_VARIABLES)
        ]
        return [_comparable(item) for item in variables]
    return spec
