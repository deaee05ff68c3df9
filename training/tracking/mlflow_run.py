"""MLflow: one run for all attempts of a job, over the client's own API, without MLflow's global state."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from training.optional import OptionalPackage
from training.tracking.config import MlflowSpec
from training.tracking.feed import OpenedRun, Record, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient

PACKAGE = OptionalPackage(
    key="tracking.mlflow",
    module="mlflow",
    requirement="mlflow-skinny==3.17.2",  # tested 2026-12
    distributions=("mlflow-skinny", "mlflow"),
)
# Limits of one request of MLflow's REST API (runs/log-batch).
MAX_METRICS = 1000
MAX_PARAMETERS = 100
MAX_PARAMETER_LENGTH = 6000
# Defaults of this process. MLflow would send usage statistics, and hold a failing request for minutes.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}


class MlflowTracker(Tracker):
    """Credentials come from the environment (MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD)."""

    name = "mlflow"

    def __init__(self, spec: MlflowSpec, run_name: str) -> None:
        self.spec = spec
        self.run_name = run_name
        self._run_id = ""

    def open(self, run_id: str | None, parameters: Mapping[str, Any]) -> OpenedRun:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # The registry is not used; without a URI of its own the client would look for one behind the tracking URI.
        client = self._client = MlflowClient(tracking_uri=self.spec.uri, registry_uri=self.spec.uri)
        if run_id is not None:
            self._run_id = run_id
            client.update_run(run_id, status="RUNNING")
        else:
            experiment = client.get_experiment_by_name(self.spec.experiment)
            experiment_id = (
                experiment.experiment_id if experiment else client.create_experiment(self.spec.experiment)
            )
            self._run_id = client.create_run(experiment_id, run_name=self.run_name).info.run_id
            all_parameters = [
                Param(name, str(value)[:MAX_PARAMETER_LENGTH]) for name, value in parameters.items()
            ]
            for some in _chunks(all_parameters, MAX_PARAMETERS):
                client.log_batch(self._run_id, params=some)
        return OpenedRun(self._run_id, self._url(client))

    def _url(self, client: MlflowClient) -> str | None:
        if not self.spec.uri.startswith(("http://", "https://")):
            return None
        experiment = client.get_run(self._run_id).info.experiment_id
        return f"{self.spec.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run_id}"

    def log(self, records: Sequence[Record]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), int(record["time"] * 1000), int(record["step"]))
            for record in records
            for name, value in record.items()
            if name not in ("step", "time")
        ]
        for some in _chunks(metrics, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if succeeded else "FAILED")


def _chunks(items: Sequence[Any], size: int) -> list[list[Any]]:
    iterator = iter(items)
    return list(iter(lambda: list(itertools.islice(iterator, size)), []))
