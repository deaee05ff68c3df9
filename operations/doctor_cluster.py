"""What `finetune doctor` looks at in the cluster: whether it answers, and whether a job would find its GPUs and EFA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from infra.crds import packaged_crds
from infra.outputs import StackOutputs
from infra.settings import StackSettings
from infra.versions import KUBERAY_VERSION
from operations.checks import Check, fail, ok, warn
from training.errors import ContactLost, FinetuneError, UsageError
from training.submit.cluster import EFA_RESOURCE, GPU_RESOURCE, Cluster, ClusterState
from training.submit.kubectl import Kubectl, MissingError, UnreachableError
from training.submit.target import connect

CONTACT_SECONDS = 20.0
CRD_GROUP = "ray.io"


def check_cluster(target: StackOutputs, settings: StackSettings | None) -> list[Check]:
    """The cluster of a deployed stack. `settings`: the stack's, None where only its outputs are at hand."""
    try:
        with connect(target) as kubectl:
            return list(_check(kubectl, target, settings))
    except FinetuneError as error:
        return [fail("cluster access", str(error), "finetune doctor  (again, once that is mended)")]


def _check(kubectl: Kubectl, target: StackOutputs, settings: StackSettings | None) -> Iterator[Check]:
    contact = _contact(kubectl, target)
    yield contact
    if contact.status == "fail":
        return
    yield from _nodes(kubectl, target, settings)
    yield from _operator(kubectl)
    yield from _crds(kubectl)
    yield from _ray_cluster(kubectl, target)


def _contact(kubectl: Kubectl, target: StackOutputs) -> Check:
    where = target.kube.server or f"context {target.kube.context or 'current'}"
    try:
        kubectl.run(["get", "--raw", "/readyz"], timeout=CONTACT_SECONDS)
    except UnreachableError as error:
        region = f" --region {target.region}" if target.region else ""
        fix = (
            f"aws eks describe-cluster --name {target.cluster_name}{region} --query "
            "cluster.resourcesVpcConfig.publicAccessCidrs  (is your address in it? "
            f"pulumi config set --path 'publicCidrs[0]' $(curl -s https://checkip.amazonaws.com)/32 "
            f"--stack {target.stack}; pulumi up --stack {target.stack})"
            if target.kube.server
            else "kubectl config get-contexts"
        )
        return fail("cluster access", f"{where} does not answer: {error}", fix)
    except (UsageError, MissingError) as error:
        return fail(
            "cluster access",
            str(error),
            f"add your IAM role to the setting users or admins, then pulumi up --stack {target.stack}",
        )
    return ok("cluster access", f"{where} answers")


def _nodes(kubectl: Kubectl, target: StackOutputs, settings: StackSettings | None) -> Iterator[Check]:
    """GPU nodes by what they can give to pods. Reading nodes is a right that a submitter need not have."""
    try:
        nodes = kubectl.get("nodes")["items"]
    except (UsageError, MissingError):
        yield warn(
            "nodes", "these credentials may not read nodes, so they were not looked at", "ask an admin"
        )
        return
    except UnreachableError as error:
        yield fail("nodes", str(error), "finetune doctor  (again)")
        return
    selector = settings.gpu_selector if settings and not settings.on_aws else "role=gpu"
    gpu_nodes = [node for node in nodes if _has_label(node, selector)]
    ready = [node for node in gpu_nodes if _is_ready(node)]
    waiting = [node["metadata"]["name"] for node in gpu_nodes if not _is_ready(node)]
    if not gpu_nodes:
        yield warn(
            "nodes",
            f"no node has the label {selector}: the GPU group sleeps, has expired or never started",
            f"finetune wake --stack {target.stack}",
        )
        return
    facts = f"{len(ready)} of {target.num_workers} GPU nodes ready"
    if waiting or len(ready) < target.num_workers:
        not_ready = f"; not ready: {', '.join(waiting)}" if waiting else ""
        yield fail("nodes", facts + not_ready, "kubectl describe nodes -l " + selector)
    else:
        yield ok("nodes", facts)
    for resource, promised, plugin in (
        (GPU_RESOURCE, target.gpus_per_worker, "nvidia-device-plugin"),
        (EFA_RESOURCE, target.efa_per_worker, "aws-efa-k8s-device-plugin"),
    ):
        yield _allocatable(ready, resource, promised, plugin)


def _allocatable(nodes: Sequence[Mapping[str, Any]], resource: str, promised: int, plugin: str) -> Check:
    found = {node["metadata"]["name"]: int(node["status"]["allocatable"].get(resource, 0)) for node in nodes}
    short = {name: count for name, count in found.items() if count < promised}
    name = f"allocatable {resource}"
    if short:
        shown = ", ".join(f"{node} has {count}" for node, count in short.items())
        return fail(
            name,
            f"{promised} a node are promised, {shown}",
            f"kubectl get pods --namespace kube-system -o wide | grep {plugin}  (one on each GPU node? its log "
            "says why not)",
        )
    return ok(name, f"{promised} on each of {len(found)} nodes" if promised else "none is asked for")


def _operator(kubectl: Kubectl) -> Iterator[Check]:
    try:
        found = kubectl.get(
            "deployments", "--all-namespaces", "--selector", "app.kubernetes.io/name=kuberay-operator"
        )["items"]
    except (UsageError, MissingError):
        yield warn(
            "KubeRay operator", "these credentials may not read it, so it was not looked at", "ask an admin"
        )
        return
    except UnreachableError as error:
        yield fail("KubeRay operator", str(error), "finetune doctor  (again)")
        return
    if not found:
        yield fail("KubeRay operator", "there is none: no RayCluster ever starts", "pulumi up")
        return
    if len(found) > 1:
        where = ", ".join(one["metadata"]["namespace"] for one in found)
        yield fail(
            "KubeRay operator",
            f"{len(found)} of them, in namespaces {where}: they fight over the same clusters",
            "pulumi config set kuberay false  (and keep the one that was there), or uninstall the other",
        )
        return
    deployment = found[0]
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    version = image.rpartition(":")[2].removeprefix("v")
    namespace = deployment["metadata"]["namespace"]
    if not deployment.get("status", {}).get("readyReplicas"):
        yield fail(
            "KubeRay operator",
            f"{image} in {namespace} is not ready",
            f"kubectl --namespace {namespace} describe pods -l app.kubernetes.io/name=kuberay-operator",
        )
    elif version != KUBERAY_VERSION and version[:1].isdigit():
        yield warn(
            "KubeRay operator",
            f"version {version} runs, this project is tested with {KUBERAY_VERSION}",
            f"pulumi config set kuberayVersion {KUBERAY_VERSION}, then pulumi up",
        )
    else:
        yield ok("KubeRay operator", f"{image} in {namespace}")


def _crds(kubectl: Kubectl) -> Iterator[Check]:
    """Fields of the CRDs in the cluster against those of the release that this project brings: Helm never upgrades
    CRDs, and a field that a CRD does not know is dropped without a word."""
    wanted = {crd["metadata"]["name"]: crd for crd in packaged_crds()}
    missing: list[str] = []
    dropped: list[str] = []
    for name, crd in wanted.items():
        try:
            live = kubectl.get("customresourcedefinitions", name)
        except MissingError:
            missing.append(name)
            continue
        except (UsageError, UnreachableError):
            yield warn(
                "KubeRay CRDs",
                "these credentials may not read them, so they were not looked at",
                "ask an admin",
            )
            return
        lost = fields_of(crd) - fields_of(live)
        if lost:
            dropped.append(
                f"{name} lacks {len(lost)} fields, such as {min(lost, key=lambda f: (f.count('.'), f))}"
            )
    if missing:
        yield fail("KubeRay CRDs", f"missing: {', '.join(missing)}", "pulumi up")
    elif dropped:
        yield fail(
            "KubeRay CRDs",
            f"older than KubeRay {KUBERAY_VERSION}: {'; '.join(dropped)}",
            "pulumi up  (it applies the CRDs; with kuberay: false, kubectl apply --server-side --force-conflicts "
            f"-k 'github.com/ray-project/kuberay/ray-operator/config/crd?ref=v{KUBERAY_VERSION}')",
        )
    else:
        yield ok("KubeRay CRDs", f"all fields of release {KUBERAY_VERSION}")


def fields_of(crd: Mapping[str, Any]) -> set[str]:
    """Paths of all fields that a CRD declares, `version.spec.field`, an array's items without a mark of their own."""
    found: set[str] = set()
    for version in crd["spec"]["versions"]:
        schema = version.get("schema", {}).get("openAPIV3Schema", {})
        _collect(schema, version["name"], found)
    return found


def _collect(schema: Mapping[str, Any], path: str, found: set[str]) -> None:
    for name, inner in (schema.get("properties") or {}).items():
        here = f"{path}.{name}"
        found.add(here)
        _collect(inner, here, found)
    for key in ("items", "additionalProperties"):
        inner = schema.get(key)
        if isinstance(inner, Mapping):
            _collect(inner, path, found)


def _ray_cluster(kubectl: Kubectl, target: StackOutputs) -> Iterator[Check]:
    cluster = Cluster(kubectl, target, CONTACT_SECONDS, "finetune doctor")
    try:
        state: ClusterState = cluster.state()
        if state.ready:
            yield ok("RayCluster", f"{state.name}: {state.summary()}")
        elif state.head is not None and not state.workers:
            yield warn(
                "RayCluster",
                f"{state.name}: {state.summary()}",
                f"finetune wake --stack {target.stack}  (where the GPU nodes sleep)",
            )
        else:
            yield fail(
                "RayCluster",
                f"{state.name}: {state.summary()}\n{cluster.diagnosis()}",
                f"kubectl --namespace {target.namespace} get events --sort-by .lastTimestamp",
            )
    except ContactLost as error:
        yield fail("RayCluster", str(error), "finetune doctor  (again)")
    except UsageError as error:
        yield fail("RayCluster", str(error), f"pulumi up --stack {target.stack}")


def check_storage(session: Any, target: StackOutputs) -> list[Check]:
    """The bucket of the runs, as far as it can be reached from here: pods reach it with an identity of their own."""
    url = urlsplit(target.storage_uri)
    inside = "every pod is asked before a job starts"
    ask = f"finetune submit training/jobs/demo.yaml --stack {target.stack}"
    if url.scheme != "s3":
        where = f"{target.storage_uri} is a path of the pods: not looked at from here"
        return [warn("storage", f"{where}; {inside}", ask)]
    options: dict[str, Any] = {"region_name": target.region} if target.region else {}
    if target.storage_endpoint_url:
        options["endpoint_url"] = target.storage_endpoint_url
    try:
        session.client("s3", **options).head_bucket(Bucket=url.netloc)
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in ("404", "NoSuchBucket"):
            return [
                fail("storage", f"bucket {url.netloc} does not exist", f"pulumi up --stack {target.stack}")
            ]
        return [
            warn(
                "storage",
                f"bucket {url.netloc}: these credentials may not look at it ({code}); {inside}",
                f"aws s3 ls s3://{url.netloc}",
            )
        ]
    except BotoCoreError as error:
        return [warn("storage", f"{target.storage_uri} does not answer from here ({error}); {inside}", ask)]
    return [ok("storage", f"bucket {url.netloc} answers")]


def _has_label(node: Mapping[str, Any], selector: str) -> bool:
    key, _, value = selector.partition("=")
    return node["metadata"].get("labels", {}).get(key) == value


def _is_ready(node: Mapping[str, Any]) -> bool:
    conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and not node.get("spec", {}).get("unschedulable")
