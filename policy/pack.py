"""The rules as a policy pack of Pulumi."""

from __future__ import annotations

from typing import cast

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyPack,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)

from policy.rules import RULES, STACK_RULES, Rule, Seen, StackRule


def create_pack() -> PolicyPack:
    """Registers the pack with the engine that runs this."""
    return PolicyPack("efa-finetune", policies())


def policies() -> list[Policy]:
    """All rules, as the engine calls them."""
    return [*(_resource_policy(rule) for rule in RULES), *(_stack_policy(rule) for rule in STACK_RULES)]


def _level(mandatory: bool) -> EnforcementLevel:
    return EnforcementLevel.MANDATORY if mandatory else EnforcementLevel.ADVISORY


def _resource_policy(rule: Rule) -> Policy:
    def validate(args: ResourceValidationArgs, report: ReportViolation) -> None:
        provider = args.provider.name if args.provider else ""
        for violation in rule.violations(Seen(args.resource_type, args.name, args.props, provider)):
            report(violation, None)

    return ResourceValidationPolicy(rule.name, rule.description, validate, _level(rule.mandatory))


def _stack_policy(rule: StackRule) -> Policy:
    def validate(args: StackValidationArgs, report: ReportViolation) -> None:
        resources = [
            Seen(
                resource.resource_type,
                resource.name,
                resource.props,
                resource.provider.name if resource.provider else "",
            )
            for resource in args.resources
        ]
        for violation in rule.check(resources):
            report(violation, None)

    return cast("Policy", StackValidationPolicy(rule.name, rule.description, validate, _level(True)))
