"""IAM documents that more than one component writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def trust(
    service: str, actions: Sequence[str] = ("sts:AssumeRole",), condition: Mapping[str, Any] | None = None
) -> str:
    """A trust policy: ``service`` may assume the role, under ``condition``."""
    statement: dict[str, Any] = {
        "Effect": "Allow",
        "Principal": {"Service": service},
        "Action": list(actions),
    }
    if condition:
        statement["Condition"] = condition
    return document([statement])


def pod_trust(cluster: str, namespace: str, service_account: str) -> str:
    """A trust policy for EKS Pod Identity that holds for one service account of one cluster only."""
    return trust(
        "pods.eks.amazonaws.com",
        ("sts:AssumeRole", "sts:TagSession"),
        {
            "StringEquals": {
                "aws:RequestTag/eks-cluster-name": cluster,
                "aws:RequestTag/kubernetes-namespace": namespace,
                "aws:RequestTag/kubernetes-service-account": service_account,
            }
        },
    )


def document(statements: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": list(statements)})
