"""Hardware to plan on, from the catalog of instance types. Used on the laptop only: the catalog is not in the cluster."""

from __future__ import annotations

from infra.instances import INSTANCES
from infra.outputs import StackOutputs
from training.errors import UsageError
from training.planning import Hardware

PRICE_REGION = "us-east-1"


def hardware_of_instance(name: str, num_nodes: int, hourly_usd: float | None = None) -> Hardware:
    """Nodes of a catalog type. hourly_usd: price of all nodes; default: on demand in us-east-1, where it is known.

    Raises UsageError for a type that is not in the catalog.
    """
    if name not in INSTANCES:
        raise UsageError(f"--instance {name}: not in the catalog. Known: {', '.join(sorted(INSTANCES))}")
    instance = INSTANCES[name]
    price = instance.price_usd_per_hour.get(PRICE_REGION)
    return Hardware(
        gpu_name=instance.gpu_name,
        num_nodes=num_nodes,
        gpus_per_node=instance.gpus,
        gpu_memory_gib=instance.gpu_memory_gib,
        peak_tflops=instance.peak_bf16_tflops,
        in_node_gb_per_second=instance.interconnect.gb_per_second,
        network_gbps=instance.network_gbps,
        hourly_usd=hourly_usd if hourly_usd is not None else None if price is None else price * num_nodes,
    )


def hardware_of_stack(target: StackOutputs) -> Hardware:
    """The nodes of a stack, at the price of the whole stack. Raises UsageError for a stack without GPU instances."""
    if target.instance_type is None:
        raise UsageError(
            f"stack {target.stack} names no instance type (it brings its own cluster): plan with --instance TYPE"
        )
    return hardware_of_instance(target.instance_type, target.num_workers, target.hourly_usd)
