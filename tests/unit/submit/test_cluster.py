from __future__ import annotations

import pytest

from tests.unit.submit.fake_cluster import FakeCluster, pod
from training.errors import UsageError
from training.submit.cluster import Cluster
from training.submit.job_client import JobClient

UNSCHEDULED = {
    "conditions": [
        {"type": "Ready", "status": "False"},
        {
            "type": "PodScheduled",
            "status": "False",
            "message": "0/3 nodes are available: 1 node(s) were unschedulable, 2 Insufficient "
            "nvidia.com/gpu.",
        },
    ]
}


def cluster_of(fake: FakeCluster) -> Cluster:
    return Cluster(fake.kubectl, fake.outputs(), contact_seconds=30.0)


def test_ready_needs_the_head_and_every_worker(fake: FakeCluster) -> None:
    assert cluster_of(fake).state().ready
    for index in range(3):
        before = fake.objects["pods"][index]
        fake.objects["pods"][index] = pod(
            before["metadata"]["name"], before["metadata"]["labels"]["ray.io/node-type"], ready=False
        )
        fake.save()
        state = cluster_of(fake).state()
        assert not state.ready
        assert state.summary() in ("head not ready, 2 of 2 workers ready", "head ready, 1 of 2 workers ready")
        fake.objects["pods"][index] = before


def test_a_terminating_pod_does_not_count(fake: FakeCluster) -> None:
    fake.objects["pods"][2]["metadata"]["deletionTimestamp"] = "2026-12-01T00:00:00Z"
    fake.save()
    assert not cluster_of(fake).state().ready


def test_workers_of_several_hosts_and_suspended_groups_are_counted(fake: FakeCluster) -> None:
    fake.objects["rayclusters.ray.io"][0]["spec"]["workerGroupSpecs"] = [
        {"replicas": 2, "numOfHosts": 3},
        {"replicas": 5, "suspend": True},
    ]
    fake.save()
    assert cluster_of(fake).state().desired_workers == 6


def test_an_absent_raycluster_is_named(fake: FakeCluster) -> None:
    fake.objects["rayclusters.ray.io"] = []
    fake.save()
    with pytest.raises(UsageError, match=r"no RayCluster training in namespace training.*pulumi up"):
        cluster_of(fake).state()


def test_a_cordoned_node_is_diagnosed_with_pod_event_and_advice(fake: FakeCluster) -> None:
    fake.objects["pods"][2] = pod("worker-1", "worker", ready=False, **UNSCHEDULED)
    fake.objects["nodes"] = [{"metadata": {"name": "gpu-2"}, "spec": {"unschedulable": True}}]
    fake.objects["events"] = [
        {
            "type": "Warning",
            "reason": "FailedScheduling",
            "message": "1 node(s) were unschedulable",
            "involvedObject": {"name": "worker-1"},
        }
    ]
    fake.save()
    text = cluster_of(fake).diagnosis()
    assert "worker pod worker-1: Pending" in text
    assert "event FailedScheduling: 1 node(s) were unschedulable" in text
    assert "`kubectl uncordon gpu-2`" in text
    assert "worker-0" not in text


def test_without_the_right_to_read_nodes_the_diagnosis_still_comes(fake: FakeCluster) -> None:
    fake.objects["pods"][2] = pod("worker-1", "worker", ready=False, **UNSCHEDULED)
    fake.objects["denied"] = ["nodes"]  # type: ignore[assignment]
    fake.save()
    assert "kubectl uncordon NODE" in cluster_of(fake).diagnosis()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {"containerStatuses": [
                {"name": "ray", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}}
            ]},
            ["container ray: ImagePullBackOff Back-off", "The image cannot be pulled"],
        ),
        (
            {"initContainerStatuses": [{"name": "wait-gcs-ready", "state": {"running": {}}}]},
            ["still waits for the head", "Workers wait for the head"],
        ),
        (
            {"containerStatuses": [{"name": "ray", "state": {"waiting": {"reason": "CrashLoopBackOff"}},
              "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]},
            ["ended with 137 (OOMKilled)", "raise its memory"],
        ),
        ({"reason": "Evicted", "message": "low on ephemeral-storage"}, ["Evicted: low on", "larger disks"]),
    ],
)  # fmt: skip
def test_troubles_of_a_pod_are_told_with_what_to_do(
    fake: FakeCluster, status: dict[str, object], words: list[str]
) -> None:
    fake.objects["pods"][1] = pod("worker-0", "worker", ready=False, **status)
    fake.save()
    text = cluster_of(fake).diagnosis()
    assert all(word in text for word in words), text


def test_an_invalid_raycluster_shows_the_operators_event(fake: FakeCluster) -> None:
    fake.objects["pods"] = []
    fake.objects["events"] = [
        {
            "type": "Warning",
            "reason": "InvalidRayClusterSpec",
            "message": "minReplicas > maxReplicas",
            "involvedObject": {"name": "training"},
        }
    ]
    fake.save()
    text = cluster_of(fake).diagnosis()
    assert "no head pod exists" in text
    assert "2 worker pod(s) do not exist" in text
    assert "InvalidRayClusterSpec: minReplicas > maxReplicas" in text
    assert "KubeRay refuses" in text


def test_the_client_fixture_reaches_the_head(client: JobClient) -> None:
    assert client.cluster.on_head(["sh", "-c", "echo $POD"]).text() == "head-0\n"
