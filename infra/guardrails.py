"""What stops the bill when nobody looks: an expiry that needs no laptop, and a budget."""

from __future__ import annotations

import json
from datetime import UTC

import pulumi
import pulumi_aws as aws

from infra.iam import document, trust
from infra.node_groups import GpuNodes
from infra.settings import PROJECT, StackSettings

# An EventBridge Scheduler target that calls an AWS API itself; there is no function to run.
UPDATE_NODE_GROUP = "arn:aws:scheduler:::aws-sdk:eks:updateNodegroupConfig"


class Guardrails(pulumi.ComponentResource):
    """Expiry: at the given time EventBridge Scheduler scales the GPU group to zero. Budget: mails at 80 and
    100 %."""

    def __init__(
        self,
        name: str,
        settings: StackSettings,
        gpu_nodes: GpuNodes,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        super().__init__("efa:infra:Guardrails", name, None, opts)
        self._name = name
        self._settings = settings
        self._child = pulumi.ResourceOptions(parent=self)
        if settings.expires:
            self._create_expiry(gpu_nodes.group)
        if settings.budget_monthly_usd:
            self._create_budget()
        self.register_outputs({})

    def _create_expiry(self, group: aws.eks.NodeGroup) -> None:
        settings = self._settings
        assert settings.expires is not None
        role = aws.iam.Role(
            f"{self._name}-expiry", assume_role_policy=trust("scheduler.amazonaws.com"), opts=self._child
        )
        policy = aws.iam.RolePolicy(
            f"{self._name}-expiry", role=role.name, policy=group.arn.apply(_may_scale), opts=self._child
        )
        aws.scheduler.Schedule(
            f"{self._name}-expiry",
            description=f"Scales the GPU nodes of {settings.name} to zero",
            schedule_expression=f"at({settings.expires.astimezone(UTC):%Y-%m-%dT%H:%M:%S})",
            schedule_expression_timezone="UTC",
            flexible_time_window=aws.scheduler.ScheduleFlexibleTimeWindowArgs(mode="OFF"),
            target=aws.scheduler.ScheduleTargetArgs(
                arn=UPDATE_NODE_GROUP,
                role_arn=role.arn,
                input=pulumi.Output.all(
                    cluster=group.cluster_name, group=group.node_group_name, size=settings.gpu_count
                ).apply(_scale_to_zero),
                # An update in progress refuses another one: try again for a day.
                retry_policy=aws.scheduler.ScheduleTargetRetryPolicyArgs(
                    maximum_event_age_in_seconds=86400, maximum_retry_attempts=185
                ),
            ),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[policy]),
        )

    def _create_budget(self) -> None:
        settings = self._settings
        aws.budgets.Budget(
            f"{self._name}-monthly",
            budget_type="COST",
            time_unit="MONTHLY",
            limit_amount=str(settings.budget_monthly_usd),
            limit_unit="USD",
            cost_filters=[
                aws.budgets.BudgetCostFilterArgs(name="TagKeyValue", values=[f"user:project${PROJECT}"])
            ],
            notifications=[
                aws.budgets.BudgetNotificationArgs(
                    comparison_operator="GREATER_THAN",
                    notification_type=kind,
                    threshold=threshold,
                    threshold_type="PERCENTAGE",
                    subscriber_email_addresses=list(settings.budget_emails),
                )
                for kind, threshold in (("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100))
            ],
            opts=self._child,
        )


def _may_scale(group_arn: str) -> str:
    return document([{"Effect": "Allow", "Action": "eks:UpdateNodegroupConfig", "Resource": group_arn}])


def _scale_to_zero(group: dict[str, str | int]) -> str:
    """Input of the call, with the names of the API's own parameters."""
    return json.dumps(
        {
            "ClusterName": group["cluster"],
            "NodegroupName": group["group"],
            "ScalingConfig": {"MinSize": 0, "MaxSize": group["size"], "DesiredSize": 0},
        }
    )
