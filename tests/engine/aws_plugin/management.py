"""CloudWatch Logs, EventBridge Scheduler, Budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Cloud, Resource, Values, register, tag_list, upper


@register
class LogGroup(Resource):
    token = "aws:cloudwatch/logGroup:LogGroup"
    replace_on = ("name", "namePrefix", "logGroupClass")
    name_property = "name"
    name_limit = 512
    defaults: ClassVar[Mapping[str, Any]] = {"skipDestroy": False, "retentionInDays": 0}
    gone = ("ResourceNotFoundException",)

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.logs.create_log_group(
            logGroupName=inputs["name"],
            tags=inputs.get("tagsAll") or {"managed": "pulumi"},
            **({"kmsKeyId": inputs["kmsKeyId"]} if inputs.get("kmsKeyId") else {}),
        )
        return inputs["name"]

    def finish(self, cloud: Cloud, id: str, inputs: Values) -> None:
        if inputs.get("retentionInDays"):
            cloud.logs.put_retention_policy(logGroupName=id, retentionInDays=int(inputs["retentionInDays"]))

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values | None:
        listed = cloud.logs.describe_log_groups(logGroupNamePrefix=id)["logGroups"]
        for one in listed:
            if one["logGroupName"] == id:
                return {"arn": one["arn"].removesuffix(":*"), "logGroupClass": "STANDARD"}
        return None

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        if new.get("retentionInDays"):
            cloud.logs.put_retention_policy(logGroupName=id, retentionInDays=int(new["retentionInDays"]))
        elif old.get("retentionInDays"):
            cloud.logs.delete_retention_policy(logGroupName=id)

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.logs.untag_resource(resourceArn=state["arn"], tagKeys=removed)
        if added:
            cloud.logs.tag_resource(resourceArn=state["arn"], tags=added)

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        if not state.get("skipDestroy"):
            cloud.logs.delete_log_group(logGroupName=id)


@register
class Schedule(Resource):
    token = "aws:scheduler/schedule:Schedule"
    replace_on = ("name", "namePrefix", "groupName")
    name_property = "name"
    name_limit = 64
    defaults: ClassVar[Mapping[str, Any]] = {
        "groupName": "default",
        "scheduleExpressionTimezone": "UTC",
        "state": "ENABLED",
    }
    gone = ("ResourceNotFoundException",)

    def _arguments(self, inputs: Values) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "Name": inputs["name"],
            "GroupName": inputs["groupName"],
            "ScheduleExpression": inputs["scheduleExpression"],
            "ScheduleExpressionTimezone": inputs["scheduleExpressionTimezone"],
            "State": inputs["state"],
            "FlexibleTimeWindow": _integers(upper(inputs["flexibleTimeWindow"])),
            "Target": upper(inputs["target"]),
        }
        retry = arguments["Target"].get("RetryPolicy")
        if retry:
            arguments["Target"]["RetryPolicy"] = _integers(retry)
        for ours, theirs in (
            ("description", "Description"),
            ("actionAfterCompletion", "ActionAfterCompletion"),
        ):
            if inputs.get(ours):
                arguments[theirs] = inputs[ours]
        return arguments

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.scheduler.create_schedule(**self._arguments(inputs))
        return f"{inputs['groupName']}/{inputs['name']}"

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        group, name = id.split("/", 1)
        found = cloud.scheduler.get_schedule(GroupName=group, Name=name)
        return {"arn": found["Arn"], "actionAfterCompletion": inputs.get("actionAfterCompletion") or "NONE"}

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        cloud.scheduler.update_schedule(**self._arguments(new))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        group, name = id.split("/", 1)
        cloud.scheduler.delete_schedule(GroupName=group, Name=name)


def _integers(values: dict[str, Any]) -> dict[str, Any]:
    return {key: int(value) if isinstance(value, float) else value for key, value in values.items()}


@register
class Budget(Resource):
    token = "aws:budgets/budget:Budget"
    replace_on = ("name", "namePrefix", "accountId", "budgetType")
    name_property = "name"
    name_limit = 100
    gone = ("NotFoundException",)

    def _budget(self, inputs: Values) -> dict[str, Any]:
        budget: dict[str, Any] = {
            "BudgetName": inputs["name"],
            "BudgetType": inputs["budgetType"],
            "TimeUnit": inputs["timeUnit"],
        }
        if inputs.get("limitAmount"):
            budget["BudgetLimit"] = {"Amount": str(inputs["limitAmount"]), "Unit": inputs["limitUnit"]}
        if inputs.get("costFilters"):
            budget["CostFilters"] = {one["name"]: one["values"] for one in inputs["costFilters"]}
        return budget

    def create(self, cloud: Cloud, inputs: Values) -> str:
        cloud.budgets.create_budget(
            AccountId=cloud.account,
            Budget=self._budget(inputs),
            NotificationsWithSubscribers=[_notification(one) for one in inputs.get("notifications") or []],
            ResourceTags=tag_list(inputs.get("tagsAll") or {}),
        )
        return f"{cloud.account}:{inputs['name']}"

    def read(self, cloud: Cloud, id: str, inputs: Values) -> Values:
        account, name = id.split(":", 1)
        cloud.budgets.describe_budget(AccountId=account, BudgetName=name)
        return {
            "arn": f"arn:aws:budgets::{account}:budget/{name}",
            "accountId": account,
            "timePeriodStart": inputs.get("timePeriodStart") or "2026-01-01_00:00",
            "costFilters": inputs.get("costFilters") or [],
            "costTypes": inputs.get("costTypes") or {},
        }

    def update(self, cloud: Cloud, id: str, old: Values, new: Values) -> None:
        account, name = id.split(":", 1)
        if self._budget(old) != self._budget(new):
            cloud.budgets.update_budget(AccountId=account, NewBudget=self._budget(new))
        before = [_notification(one) for one in old.get("notifications") or []]
        after = [_notification(one) for one in new.get("notifications") or []]
        for one in [one for one in before if one not in after]:
            cloud.budgets.delete_notification(
                AccountId=account, BudgetName=name, Notification=one["Notification"]
            )
        for one in [one for one in after if one not in before]:
            cloud.budgets.create_notification(AccountId=account, BudgetName=name, **one)

    def retag(self, cloud: Cloud, id: str, state: Values, removed: list[str], added: dict[str, str]) -> None:
        if removed:
            cloud.budgets.untag_resource(ResourceARN=state["arn"], ResourceTagKeys=removed)
        if added:
            cloud.budgets.tag_resource(ResourceARN=state["arn"], ResourceTags=tag_list(added))

    def delete(self, cloud: Cloud, id: str, state: Values) -> None:
        account, name = id.split(":", 1)
        cloud.budgets.delete_budget(AccountId=account, BudgetName=name)


def _notification(values: Values) -> dict[str, Any]:
    addresses = [("EMAIL", one) for one in values.get("subscriberEmailAddresses") or []]
    addresses += [("SNS", one) for one in values.get("subscriberSnsTopicArns") or []]
    return {
        "Notification": {
            "NotificationType": values["notificationType"],
            "ComparisonOperator": values["comparisonOperator"],
            "Threshold": float(values["threshold"]),
            "ThresholdType": values["thresholdType"],
        },
        "Subscribers": [{"SubscriptionType": kind, "Address": address} for kind, address in addresses],
    }
