"""What the components of the workload layer share: how they reach the cluster and what they vanish with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pulumi
import pulumi_kubernetes as k8s


@dataclass(frozen=True)
class ClusterTarget:
    """The cluster that the workload goes to.

    ``deleted_with`` is the control plane where this stack owns it: once that is being destroyed, its
    objects need no call to an API server that may be unreachable. ``ready`` is what must exist before the
    first pod.
    """

    provider: k8s.Provider
    deleted_with: pulumi.Resource | None = None
    ready: Sequence[pulumi.Resource] = field(default_factory=tuple)

    def child(
        self,
        parent: pulumi.Resource,
        depends_on: Sequence[pulumi.Resource] = (),
        timeouts: pulumi.CustomTimeouts | None = None,
        replace_on_changes: list[str] | None = None,
    ) -> pulumi.ResourceOptions:
        """Options of an object in the cluster."""
        return pulumi.ResourceOptions(
            parent=parent,
            provider=self.provider,
            depends_on=list(depends_on),
            deleted_with=self.deleted_with,
            custom_timeouts=timeouts,
            replace_on_changes=replace_on_changes,
        )

    def component(self) -> pulumi.ResourceOptions:
        return pulumi.ResourceOptions(providers={"kubernetes": self.provider})
