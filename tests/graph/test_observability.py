"""Watching a stack: off unless asked for, no more open than it must be, and a dashboard of series that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infra.access import RAY_METRICS_PORT, network_policies
from infra.cost import price_graph
from infra.observability import (
    DASHBOARD,
    DCGM_FIELDS,
    EFA_COUNTERS,
    cloudwatch_configuration,
    dcgm_values,
    prometheus_values,
    ray_pod_monitor,
)
from infra.recorder import Graph
from infra.settings import OBSERVERS, SettingsError
from policy.rules import RULES, STACK_RULES
from tests.graph import graphs
from tests.graph.test_security import _seen
from training.tracking.prometheus import GAUGES

ADDON = "aws:eks/addon:Addon"
# What this project's workers show; Ray puts "ray_" before each name.
TRAINING = {f"ray_{name}" for name in GAUGES}
# Collectors of node-exporter that are on by default: meminfo, cpu, netdev.
NODE = {"node_memory_MemAvailable_bytes", "node_cpu_seconds_total", "node_network_transmit_bytes_total"}
EFA = {
    f"node_amazonefa_{name}"
    for name in (
        *("tx_bytes", "rx_bytes", "tx_pkts", "rx_pkts", "rx_drops", "send_bytes", "recv_bytes"),
        *("rdma_read_bytes", "rdma_write_bytes", "rdma_write_recv_bytes", "retrans_bytes", "retrans_pkts"),
        *("retrans_timeout_events", "unresponsive_remote_events", "impaired_remote_conn_events"),
    )
}
FUNCTIONS = {"sum", "avg", "max", "min", "count", "rate", "by"}


def _prometheus() -> Graph:
    return graphs.graph(observability="prometheus")


def _cloudwatch() -> Graph:
    return graphs.graph(observability="cloudwatch")


def _added(graph: Graph) -> set[str]:
    before = {resource.urn for resource in graphs.graph().resources}
    return {f"{r.type} {r.name}" for r in graph.resources if r.urn not in before and r.custom}


def test_nothing_watches_unless_asked_for() -> None:
    watching = re.compile(r"prometheus|dcgm|dashboard|cloudwatch|container-insights")
    assert [r.name for r in graphs.dev().resources if watching.search(r.name)] == []
    assert "metrics" not in network_policies(graphs.dev_settings())


def test_prometheus_adds_this_and_nothing_that_bills() -> None:
    k8s = "kubernetes:"
    assert _added(_prometheus()) == {
        f"{k8s}core/v1:Namespace efa-test-monitoring",
        f"{k8s}core/v1:ConfigMap efa-test-dashboard",
        f"{k8s}helm.sh/v3:Release efa-test-kube-prometheus-stack",
        f"{k8s}helm.sh/v3:Release efa-test-dcgm-exporter",
        f"{k8s}networking.k8s.io/v1:NetworkPolicy efa-test-metrics",
        f"{k8s}networking.k8s.io/v1:NetworkPolicy efa-test-monitoring-internal",
        f"{k8s}rbac.authorization.k8s.io/v1:Role efa-test-look",
        f"{k8s}rbac.authorization.k8s.io/v1:RoleBinding efa-test-look",
    }
    settings = graphs.settings(observability="prometheus")
    assert price_graph(_prometheus(), settings).hourly_usd == pytest.approx(
        price_graph(graphs.graph(), graphs.settings()).hourly_usd
    )


@pytest.mark.parametrize("shape", [_prometheus, _cloudwatch])
def test_the_rules_of_the_policy_pack_hold(shape: Any) -> None:
    seen = _seen(shape())
    broken = [found for rule in RULES for resource in seen for found in rule.violations(resource)]
    assert broken + [found for rule in STACK_RULES for found in rule.check(seen)] == []


def test_prometheus_may_scrape_the_ray_pods_and_do_nothing_else() -> None:
    policies = network_policies(graphs.settings(observability="prometheus"))
    without = network_policies(graphs.settings())
    assert {name for name in policies if name not in without} == {"metrics"}
    assert policies["metrics"] == {
        "podSelector": {"matchLabels": {"ray.io/cluster": "train"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [
                    {
                        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
                        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
                    }
                ],
                "ports": [{"port": RAY_METRICS_PORT, "protocol": "TCP"}],
            }
        ],
    }


def test_the_namespace_of_prometheus_lets_nobody_in() -> None:
    policy = _prometheus().named(
        "kubernetes:networking.k8s.io/v1:NetworkPolicy", "efa-test-monitoring-internal"
    )
    assert policy.inputs["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {}}]}],
    }
    for chart in ("kube-prometheus-stack", "dcgm-exporter"):
        release = graphs.release(_prometheus(), chart)
        assert _prometheus().depends_on(release, policy), f"{chart} starts behind the closed door"


def test_who_submits_may_look_at_the_dashboard() -> None:
    role = _prometheus().named("kubernetes:rbac.authorization.k8s.io/v1:Role", "efa-test-look")
    assert role.inputs["metadata"]["namespace"] == "monitoring"
    assert [(rule["resources"], rule["verbs"]) for rule in role.inputs["rules"]] == [
        (["services", "pods"], ["get", "list"]),
        (["pods/portforward"], ["get", "create"]),
    ]


def test_grafana_has_no_login_and_no_administrator() -> None:
    grafana = prometheus_values(graphs.settings())["grafana"]
    ini = grafana["grafana.ini"]
    assert ini["auth.anonymous"] == {"enabled": True, "org_role": "Viewer"}
    assert ini["auth"]["disable_login_form"]
    assert not ini["auth.basic"]["enabled"]
    assert ini["security"]["disable_initial_admin_creation"]
    # What a sidecar would tell Grafana through its administration has to come another way.
    assert grafana["sidecar"]["dashboards"]["skipReload"]
    assert not grafana["sidecar"]["datasources"]["enabled"]
    (source,) = grafana["datasources"]["datasources.yaml"]["datasources"]
    assert source["uid"] == "prometheus"


def test_ray_is_found_by_the_labels_of_kuberay() -> None:
    monitor = ray_pod_monitor(graphs.settings(namespace="jobs", rayCluster="big"))
    assert monitor["namespaceSelector"] == {"matchNames": ["jobs"]}
    assert monitor["selector"]["matchLabels"] == {"ray.io/cluster": "big", "ray.io/is-ray-node": "yes"}
    assert monitor["podMetricsEndpoints"][0]["port"] == "metrics"
    release = graphs.release(_prometheus(), "kube-prometheus-stack")
    assert [m["name"] for m in release.inputs["values"]["prometheus"]["additionalPodMonitors"]] == ["ray"]
    assert release.inputs["skipCrds"] is False, "the kinds of its monitors come with the chart"


def test_gpus_are_read_on_gpu_nodes_only() -> None:
    values = dcgm_values(graphs.settings())
    assert values["nodeSelector"] == {"role": "gpu"}
    assert values["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    lines = [line.split(", ", 2) for line in values["customMetrics"].splitlines()]
    assert [line[0] for line in lines] == list(DCGM_FIELDS)
    assert {line[1] for line in lines} <= {"gauge", "counter"}
    assert not any("," in line[2] and line[2].count(",") > 1 for line in lines)


def test_a_cluster_without_gpus_has_no_gpu_exporter() -> None:
    local = {
        "target": "existing",
        "kubeconfig": "/k",
        "storageUri": "s3://runs",
        "requireEfa": False,
        "gpusPerWorker": 0,
        "efaPerWorker": 0,
        "kuberay": False,
        "publicCidrs": [],
        "observability": "prometheus",
    }
    charts = {r.inputs["name"] for r in graphs.graph(**local).of_type(graphs.RELEASE)}
    assert "kube-prometheus-stack" in charts
    assert "dcgm-exporter" not in charts


def _requests(values: Any) -> Iterator[tuple[int, int]]:
    """CPU in millicores and memory in MiB of each container's requests."""
    if isinstance(values, dict):
        if "requests" in values:
            cpu, memory = values["requests"]["cpu"], values["requests"]["memory"]
            assert cpu.endswith("m")
            assert memory.endswith("Mi")
            yield int(cpu[:-1]), int(memory[:-2])
        for value in values.values():
            yield from _requests(value)
    if isinstance(values, list):
        for value in values:
            yield from _requests(value)


def test_the_settings_reserve_what_the_charts_request() -> None:
    """A head or worker that fills its node to the last core has to be refused, not left pending."""
    settings = graphs.settings()
    values = prometheus_values(settings)
    system = list(_requests(values))
    node = list(_requests(values["prometheus-node-exporter"]))
    gpu = [*node, *_requests(dcgm_values(settings))]
    observers = OBSERVERS["prometheus"]
    assert sum(cpu for cpu, _ in system) <= observers.system_cpu_millis
    assert sum(memory for _, memory in system) <= observers.system_memory_mib
    assert sum(cpu for cpu, _ in gpu) <= observers.gpu_cpu_millis
    assert sum(memory for _, memory in gpu) <= observers.gpu_memory_mib


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"observability": "grafana"}, "one of none, prometheus, cloudwatch"),
        ({"observability": "prometheus", "namespace": "monitoring"}, "another one than monitoring"),
        ({"observability": "prometheus", "headCpu": 3.0}, "leaves 2.92 cores for the head"),
        ({"observability": "prometheus", "headScratchGib": 25}, "23 GiB at most"),
        (
            {"observability": "cloudwatch", "gpuInstanceType": "g6.8xlarge"},
            "GiB for the worker beside observability cloudwatch. Set it to",
        ),
        (
            {
                "observability": "cloudwatch",
                "target": "existing",
                "kubeconfig": "/k",
                "storageUri": "s3://runs",
                "requireEfa": False,
            },
            "the CloudWatch add-on is one of EKS. Set it to prometheus or to none",
        ),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        graphs.settings(**values)


@pytest.mark.parametrize("instance", ["g5.8xlarge", "g6.8xlarge", "g6.12xlarge", "p5.48xlarge"])
def test_the_exporters_fit_beside_the_workers_of_the_catalog(instance: str) -> None:
    assert graphs.settings(observability="prometheus", gpuInstanceType=instance, gpuDiskGib=400)


# CloudWatch


def test_cloudwatch_adds_the_addon_and_what_it_may_do() -> None:
    assert _added(_cloudwatch()) == {
        "aws:cloudwatch/logGroup:LogGroup efa-test-container-insights",
        "aws:iam/role:Role efa-test-cloudwatch",
        "aws:iam/rolePolicy:RolePolicy efa-test-cloudwatch",
        "aws:eks/podIdentityAssociation:PodIdentityAssociation efa-test-cloudwatch",
        f"{ADDON} efa-test-amazon-cloudwatch-observability",
    }
    report = price_graph(_cloudwatch(), graphs.settings(observability="cloudwatch"))
    assert any("by observation" in use for use in report.by_use)
    assert not any("by observation" in use for use in price_graph(graphs.graph(), graphs.settings()).by_use)


def test_the_agent_may_write_to_its_own_log_group_only() -> None:
    graph = _cloudwatch()
    policy = json.loads(graph.named("aws:iam/rolePolicy:RolePolicy", "efa-test-cloudwatch").inputs["policy"])
    statements = {statement["Sid"]: statement for statement in policy["Statement"]}
    arn = "arn:aws:cloudwatch:us-west-2:123456789012:efa-test-container-insights"  # as the recorder makes it
    assert statements["Report"]["Resource"] == [arn, f"{arn}:log-stream:*"]
    assert set(statements["Report"]["Action"]) == {
        "logs:CreateLogStream",
        "logs:DescribeLogStreams",
        "logs:PutLogEvents",
    }
    assert set(statements["NamesOfVolumes"]["Action"]) == {"ec2:DescribeTags", "ec2:DescribeVolumes"}
    trust = json.loads(graph.named("aws:iam/role:Role", "efa-test-cloudwatch").inputs["assumeRolePolicy"])
    assert trust["Statement"][0]["Condition"]["StringEquals"] == {
        "aws:RequestTag/eks-cluster-name": "efa-test",
        "aws:RequestTag/kubernetes-namespace": "amazon-cloudwatch",
        "aws:RequestTag/kubernetes-service-account": "cloudwatch-agent",
    }
    association = graph.named(
        "aws:eks/podIdentityAssociation:PodIdentityAssociation", "efa-test-cloudwatch"
    ).inputs
    assert (association["namespace"], association["serviceAccount"]) == (
        "amazon-cloudwatch",
        "cloudwatch-agent",
    )


def test_the_addon_comes_after_its_credentials_its_log_group_and_a_node() -> None:
    graph = _cloudwatch()
    addon = graph.named(ADDON, "efa-test-amazon-cloudwatch-observability")
    group = graph.named("aws:cloudwatch/logGroup:LogGroup", "efa-test-container-insights")
    assert group.inputs == {
        "name": "/aws/containerinsights/efa-test/performance",
        "retentionInDays": 30,
    }
    for needed in (
        group,
        graph.named("aws:iam/rolePolicy:RolePolicy", "efa-test-cloudwatch"),
        graph.named("aws:eks/podIdentityAssociation:PodIdentityAssociation", "efa-test-cloudwatch"),
        graphs.system_group(graph),
    ):
        assert graph.depends_on(addon, needed), needed.name
    assert re.fullmatch(r"v\d+\.\d+\.\d+-eksbuild\.\d+", addon.inputs["addonVersion"])


def test_the_addon_sends_metrics_and_no_logs_or_traces() -> None:
    configuration = cloudwatch_configuration(graphs.settings())
    assert configuration["containerInsights"] == {"enabled": True}
    for paid in ("otelContainerInsights", "containerLogs", "applicationSignals"):
        assert configuration[paid] == {"enabled": False}
    assert configuration["manager"]["applicationSignals"]["autoMonitor"] == {"monitorAllServices": False}
    addon = _cloudwatch().named(ADDON, "efa-test-amazon-cloudwatch-observability")
    assert json.loads(addon.inputs["configurationValues"]) == configuration


# The dashboard


def _dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def _queries() -> list[str]:
    return [target["expr"] for panel in _dashboard()["panels"] for target in panel.get("targets", [])]


def _series(query: str) -> set[str]:
    """Names of the series in a PromQL query of the kind that the dashboard has."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", " ", query)
    return set(re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", bare)) - FUNCTIONS


def test_every_query_asks_for_series_that_something_shows() -> None:
    known = TRAINING | NODE | EFA | set(DCGM_FIELDS)
    asked = {name for query in _queries() for name in _series(query)}
    assert asked - known == set()
    assert all(_series(query) for query in _queries())


@pytest.mark.parametrize(
    "series",
    [
        "ray_finetune_loss",
        "ray_finetune_eval_loss",
        "ray_finetune_tokens_per_second",
        "ray_finetune_step_seconds",
        "ray_finetune_grad_norm",
        "ray_finetune_checkpoint_seconds",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "node_amazonefa_tx_bytes",
        "node_amazonefa_rx_bytes",
        "node_amazonefa_retrans_pkts",
    ],
)
def test_the_dashboard_shows(series: str) -> None:
    assert any(series in _series(query) for query in _queries())


def test_training_series_are_asked_for_by_run() -> None:
    for query in _queries():
        for name in _series(query) & TRAINING:
            assert f'{name}{{run=~"$run"}}' in query
    (variable,) = _dashboard()["templating"]["list"]
    assert variable["name"] == "run"
    assert _series(re.sub(r"label_values\((\w+), run\)", r"\1", variable["query"])) <= TRAINING


def test_panels_have_their_place() -> None:
    dashboard = _dashboard()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "prometheus"
            assert panel["description"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_dashboard_is_a_config_map_that_grafana_looks_for() -> None:
    dashboard = _prometheus().named("kubernetes:core/v1:ConfigMap", "efa-test-dashboard")
    assert dashboard.inputs["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboard.inputs["metadata"]["namespace"] == "monitoring"
    assert json.loads(dashboard.inputs["data"]["training.json"]) == _dashboard()
    assert len(json.dumps(dashboard.inputs["data"])) < 1 << 20, "a ConfigMap holds 1 MiB"


# The EFA counters


def _device(root: Path, name: str, vendor: str, counters: dict[str, int]) -> None:
    port = root / name / "ports" / "1" / "hw_counters"
    port.mkdir(parents=True)
    (root / name / "device").mkdir()
    (root / name / "device" / "vendor").write_text(f"{vendor}\n")
    for counter, value in counters.items():
        (port / counter).write_text(f"{value}\n")


def _collect(tmp_path: Path) -> str:
    shell = ["sh", "-c", EFA_COUNTERS.read_text(), "efa-counters"]
    written = tmp_path / "efa.prom"
    subprocess.run([*shell, str(tmp_path / "infiniband"), str(written), "0"], check=True, capture_output=True)
    assert [path.name for path in tmp_path.glob("efa.prom*")] == ["efa.prom"]
    return written.read_text()


def test_efa_counters_become_series_by_device(tmp_path: Path) -> None:
    all_counters = {name.removeprefix("node_amazonefa_"): index for index, name in enumerate(sorted(EFA))}
    _device(tmp_path / "infiniband", "rdmap0s26", "0x1d0f", all_counters)
    # An older driver counts fewer things, and a device of another vendor is none of ours.
    _device(tmp_path / "infiniband", "rdmap0s27", "0x1d0f", {"tx_bytes": 2**63})
    _device(tmp_path / "infiniband", "mlx5_0", "0x15b3", all_counters)

    families = {family.name: family for family in text_string_to_metric_families(_collect(tmp_path))}

    assert {f"{name}" for name in families} == EFA
    assert {family.type for family in families.values()} == {"counter"}
    sent = {sample.labels["device"]: sample.value for sample in families["node_amazonefa_tx_bytes"].samples}
    assert sent == {"rdmap0s26": all_counters["tx_bytes"], "rdmap0s27": 2**63}
    (received,) = families["node_amazonefa_rx_bytes"].samples
    assert received.labels == {"device": "rdmap0s26", "port": "1"}


def test_a_node_without_efa_has_an_empty_file(tmp_path: Path) -> None:
    assert _collect(tmp_path) == ""


def test_the_reader_of_the_counters_lies_beside_node_exporter() -> None:
    values = prometheus_values(graphs.settings())["prometheus-node-exporter"]
    (sidecar,) = values["sidecars"]
    assert sidecar["command"] == ["/bin/sh", "-c", EFA_COUNTERS.read_text(), "efa-counters"]
    folder = sidecar["args"][1].rpartition("/")[0]
    assert f"--collector.textfile.directory={folder}" in values["extraArgs"]
    assert values["sidecarVolumeMount"] == [{"name": "textfiles", "mountPath": folder, "readOnly": False}]
    assert sidecar["volumeMounts"] == [{"name": "sys", "mountPath": "/host/sys", "readOnly": True}]
