"""What a stack tells its users: ``StackOutputs``, exported as the stack output ``training``.

The CLI reads it with ``pulumi stack output training --json`` or from a file. It holds no secret: the
cluster is reached by an exec plugin or by a kubeconfig file of the user. This module imports nothing of
Pulumi.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
OUTPUT_NAME = "training"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KubeAccess(_Model):
    """How to reach the Kubernetes API: either a kubeconfig of the user, or server, CA and an exec command."""

    kubeconfig_path: str | None = None
    context: str | None = None
    server: str | None = None
    certificate_authority_data: str | None = Field(
        default=None, description="base64 of the CA certificate (PEM)"
    )
    exec_command: tuple[str, ...] | None = Field(
        default=None, description="prints an ExecCredential, e.g. aws eks get-token --cluster-name NAME"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        by_exec = (self.server, self.certificate_authority_data, self.exec_command)
        if any(by_exec) and not all(by_exec):
            raise ValueError(
                "server, certificate_authority_data and exec_command belong together: give all three"
            )
        if all(by_exec) and self.kubeconfig_path:
            raise ValueError(
                "give either kubeconfig_path or server, certificate_authority_data and exec_command"
            )
        return self

    def kubeconfig(self, name: str) -> dict[str, Any] | None:
        """The kubeconfig that reaches the cluster by the exec command, None where the user's own file
        does."""
        if self.exec_command is None:
            return None
        command, *args = self.exec_command
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": name,
                    "cluster": {
                        "server": self.server,
                        "certificate-authority-data": self.certificate_authority_data,
                    },
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "exec": {
                            "apiVersion": "client.authentication.k8s.io/v1beta1",
                            "command": command,
                            "args": args,
                            "interactiveMode": "Never",
                        }
                    },
                }
            ],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }


class StackOutputs(_Model):
    """Everything a command needs to know of a stack. A reader refuses another ``schema_version``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    stack: str
    cluster_name: str
    region: str | None = None
    kube: KubeAccess
    namespace: str
    service_account: str
    ray_cluster: str
    ray_version: str
    image: str = Field(
        description="the image reference of head and workers, with the digest where one is set"
    )
    image_digest: str | None = None
    num_workers: int = Field(ge=0)
    gpus_per_worker: int = Field(ge=0)
    efa_per_worker: int = Field(ge=0)
    instance_type: str | None = None
    worker_cpu: str = Field(description="CPU of a worker, a Kubernetes quantity")
    worker_memory: str = Field(description="memory of a worker, a Kubernetes quantity")
    storage_uri: str = Field(
        description="where data, checkpoints and reports go: s3://bucket or a mounted path"
    )
    storage_endpoint_url: str | None = Field(
        default=None, description="S3-compatible endpoint other than AWS's"
    )
    required_transport: Literal["efa", "any"]
    transport_env: dict[str, str]
    hourly_usd: float | None = Field(
        default=None, description="on-demand price of the whole stack; None: unknown"
    )
    expires: str | None = Field(default=None, description="ISO 8601 with offset: when the GPU nodes go")
    gpudirect: bool = False
