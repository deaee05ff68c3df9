"""`finetune doctor` on a real Kubernetes: its CRDs as the API server keeps them, its operator, its RayCluster."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.rig.deployment import Deployment


def test_a_healthy_cluster(stack: Deployment) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "training.cli", "doctor", "--json", "--outputs", str(stack.outputs_file)],
        env=stack.environment(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    in_the_cluster = ("cluster access", "nodes", "KubeRay operator", "KubeRay CRDs", "RayCluster")
    assert {name: checks[name]["status"] for name in in_the_cluster} == dict.fromkeys(in_the_cluster, "ok")
    assert checks["RayCluster"]["detail"] == "train: head ready, 2 of 2 workers ready"
