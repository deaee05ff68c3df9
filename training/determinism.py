"""The same job again with the same bits: what `deterministic: true` asks of torch, cuBLAS and the compiler.

On a CPU nothing needs to be asked. On CUDA the same versions, GPUs, number of ranks and layout are needed too: NCCL adds
up in an order that follows from them. Our own kernels have no atomic additions; the atomic maximum of the float8 scales
gives the same number in any order.
"""

from __future__ import annotations

import os

import torch

from training.errors import UsageError

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# The settings under which cuBLAS promises reproducible results (cuBLAS documentation, "Results reproducibility").
CUBLAS_SETTINGS = (":4096:8", ":16:8")


def use_deterministic_kernels(device: torch.device) -> None:
    """Makes torch choose kernels that give the same bits every time, and fail in an operation that has none.

    Raises UsageError where the environment holds a cuBLAS setting that is not reproducible.
    """
    if device.type == "cuda":
        found = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_SETTINGS[0])
        if found not in CUBLAS_SETTINGS:
            raise UsageError(
                f"deterministic: true, but {CUBLAS_VARIABLE} is {found!r} in this job's environment, with which cuBLAS is "
                f"not reproducible; allowed: {' or '.join(CUBLAS_SETTINGS)}. Take it out of runtime_env.env"
            )
        import torch._inductor.config as inductor

        # Kernels chosen by timing them would differ from run to run.
        inductor.deterministic = True
    torch.use_deterministic_algorithms(True)
