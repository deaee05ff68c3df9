"""`deterministic: true`: what is asked of torch and cuBLAS, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from training.determinism import CUBLAS_VARIABLE, use_deterministic_kernels
from training.errors import UsageError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    import torch._inductor.config as inductor

    before = inductor.deterministic
    yield
    inductor.deterministic = before
    torch.use_deterministic_algorithms(False)


def test_on_cuda_torch_the_compiler_and_cublas_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    import torch._inductor.config as inductor

    monkeypatch.setenv(CUBLAS_VARIABLE, ":16:8")
    use_deterministic_kernels(torch.device("cuda"))
    assert os.environ[CUBLAS_VARIABLE] == ":16:8"
    monkeypatch.delenv(CUBLAS_VARIABLE)
    use_deterministic_kernels(torch.device("cuda"))
    assert os.environ[CUBLAS_VARIABLE] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled()
    assert inductor.deterministic


def test_a_cublas_setting_that_is_not_reproducible_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, ":0:0")
    with pytest.raises(UsageError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0'.*allowed: :4096:8 or :16:8"):
        use_deterministic_kernels(torch.device("cuda"))
    assert not torch.are_deterministic_algorithms_enabled()
