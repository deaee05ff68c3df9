"""Settings that hold for the life of a stack: a change of one is refused before anything is touched.

AWS cannot do such a change on a cluster that runs: an update would fail half-way, with the nodes billing. What was
deployed stands in the stack's own outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi

from infra.settings import StackSettings

OUTPUT_NAME = "fixed_settings"


def fixed_settings(settings: StackSettings) -> dict[str, Any]:
    """What a deployed AWS stack keeps until it is destroyed, by the names of the settings."""
    return {
        "accountId": settings.account_id,
        "clusterName": settings.name,
        "region": settings.region,
        "vpcCidr": settings.vpc_cidr,
        "serviceCidr": settings.service_cidr,
        "secretsEncryption": settings.secrets_encryption,
    }


def changed_settings(deployed: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One sentence for each setting that cannot become what is wanted."""
    return [
        f"{name}: this stack was deployed with {_yaml(deployed[name])}, and the settings now say {_yaml(value)}"
        for name, value in wanted.items()
        # Encryption can be turned on later, and never off again.
        if deployed.get(name) not in (None, value) and not (name == "secretsEncryption" and value)
    ]


def once_unchanged(settings: StackSettings) -> pulumi.Output[str]:
    """The region, known once nothing that holds for life has changed: the AWS provider needs it, and all else needs
    the provider.

    Fails the program with a RunError that names each changed setting.
    """
    itself = f"{pulumi.get_organization()}/{pulumi.get_project()}/{pulumi.get_stack()}"
    deployed = pulumi.StackReference("this-stack", itself).get_output(OUTPUT_NAME)

    def check(deployed: Mapping[str, Any] | None) -> str:
        changed = changed_settings(deployed or {}, fixed_settings(settings))
        if changed:
            raise pulumi.RunError(
                "AWS cannot change this on a stack that runs, and nothing was touched:\n"
                + "\n".join(f"  {sentence}" for sentence in changed)
                + f"\nSet the old value again in Pulumi.{settings.stack}.yaml; or `pulumi destroy`, then `pulumi up` with "
                "the new one; or make a second stack for it."
            )
        return settings.region

    return deployed.apply(check)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
