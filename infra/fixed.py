"""Settings that hold for the life of a stack, and Kubernetes' version, which goes on by one: another change of
them is refused before anything is touched.

AWS cannot do it on a cluster that runs: an update would fail half-way, with the nodes billing. What was deployed
stands in the stack's own outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from tenacity import retry, retry_if_exception_message, stop_after_attempt, wait_exponential

from infra.settings import StackSettings
from infra.versions import KUBERNETES_VERSIONS

OUTPUT_NAME = "fixed_settings"
READ_OUTPUTS = "pulumi:pulumi:readStackOutputs"


def fixed_settings(settings: StackSettings) -> dict[str, Any]:
    """What a deployed AWS stack keeps until it is destroyed, by the names of the settings."""
    return {
        "accountId": settings.account_id,
        "clusterName": settings.name,
        "region": settings.region,
        "vpcCidr": settings.vpc_cidr,
        "serviceCidr": settings.service_cidr,
        "secretsEncryption": settings.secrets_encryption,
        "kubernetesVersion": settings.kubernetes_version,
    }


def changed_settings(deployed: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One sentence for each setting that cannot become what is wanted."""
    return [
        f"{name}: this stack was deployed with {_yaml(deployed[name])}, and the settings now say {_yaml(value)}"
        + _next_step(name, deployed[name])
        for name, value in wanted.items()
        if deployed.get(name) not in (None, value) and not _possible(name, deployed[name], value)
    ]


def _possible(name: str, deployed: Any, wanted: Any) -> bool:
    """Encryption can be turned on later, and never off again; EKS takes the next minor version and none before."""
    if name == "kubernetesVersion":
        return wanted == _next_minor(deployed)
    return name == "secretsEncryption" and wanted


def _next_step(name: str, deployed: Any) -> str:
    if name != "kubernetesVersion":
        return ""
    following = _next_minor(deployed)
    step = (
        f"set {following}, run pulumi up, then the next" if following in KUBERNETES_VERSIONS else "leave it"
    )
    return f". EKS goes up by one minor version at a time and never back: {step}"


def _next_minor(version: str) -> str:
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"


def once_unchanged(settings: StackSettings) -> pulumi.Output[str]:
    """The region, known once nothing that holds for life has changed: the AWS provider needs it, and all else needs
    the provider.

    Fails the program with a RunError that names each changed setting.
    """
    itself = f"{pulumi.get_organization()}/{pulumi.get_project()}/{pulumi.get_stack()}"

    def check(outputs: Mapping[str, Any]) -> str:
        changed = changed_settings(outputs.get(OUTPUT_NAME) or {}, fixed_settings(settings))
        if changed:
            raise pulumi.RunError(
                "AWS cannot change this on a stack that runs, and nothing was touched:\n"
                + "\n".join(f"  {sentence}" for sentence in changed)
                + f"\nSet the old value again in Pulumi.{settings.stack}.yaml; or `pulumi destroy`, then `pulumi up` with "
                "the new one; or make a second stack for it."
            )
        return settings.region

    return pulumi.Output.from_input(deployed_outputs(itself)).apply(check)


@retry(
    retry=retry_if_exception_message(match=r"(?s).*failed to load checkpoint"),
    wait=wait_exponential(multiplier=0.1, max=0.8),
    stop=stop_after_attempt(5),
    reraise=True,
)
async def deployed_outputs(stack: str) -> Mapping[str, Any]:
    """The outputs of a stack as its state has them; none where it has never been deployed.

    A state in a folder is read while the engine writes it, and what lies beside it (`.json.attrs`) is for a moment an
    empty file: it is read again.
    """
    # Not a StackReference: that is a resource with a copy of the outputs, which a drift check would find outdated.
    read = await pulumi.runtime.invoke_async(READ_OUTPUTS, {"name": stack})
    return read.get("outputs") or {}


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
