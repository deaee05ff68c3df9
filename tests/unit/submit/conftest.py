from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tenacity import wait_fixed

from tests.unit.submit.fake_cluster import FakeCluster
from training.submit import bundle, ending, job_client
from training.submit import cluster as cluster_module
from training.submit.bundle import code_files
from training.submit.cluster import Cluster
from training.submit.job_client import JobClient

JOB = """
name: tiny
model:
  architecture:
    {hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 1, vocab_size: 512}
  tokenizer: train
data: {source: python-docs, max_length: 128}
batch: {tokens_per_gpu: 256}
parallel: {num_workers: 2}
steps: 4
"""


CODE = dict(code_files())  # read once: the digest must not move when a file of the checkout is saved


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    cluster = FakeCluster(tmp_path / "cluster")
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job_client, "BUNDLE_FOLDER", str(cluster.root / "bundles"))
    monkeypatch.setattr(job_client, "DASHBOARD_PORT", cluster.port)
    monkeypatch.setattr(cluster_module, "wait_exponential_jitter", lambda **_: wait_fixed(0.05))
    for module in (bundle, ending):
        monkeypatch.setattr(module, "code_files", lambda: CODE.items())
    yield cluster
    cluster.close()


@pytest.fixture
def client(fake: FakeCluster) -> JobClient:
    return JobClient(
        Cluster(fake.kubectl, fake.outputs(), contact_seconds=30.0, come_back="finetune status tiny")
    )


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(JOB)
    return path
