"""TrackingSpec: the `tracking` section of a job file."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator


class MlflowSpec(BaseModel):
    """A run of an MLflow server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str = Field(
        min_length=1, description="tracking URI, such as https://mlflow.example.com or databricks"
    )
    experiment: str = Field(min_length=1, description="made where it does not exist")

    @field_validator("uri")
    @classmethod
    def _no_credentials(cls, uri: str) -> str:
        parts = urlsplit(uri)
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "the URI holds credentials, and a job file is copied to the run folder: give them as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD from a Kubernetes Secret (setting jobSecrets)"
            )
        return uri


class WandbSpec(BaseModel):
    """A run of Weights & Biases."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    project: str = Field(min_length=1)
    entity: str | None = Field(default=None, description="team or user; default: the key's own")
    mode: Literal["online", "offline"] = Field(
        default="online",
        description="offline: the files stay in wandb/ of the run folder, for a later `wandb sync`",
    )


class TrackingSpec(BaseModel):
    """Experiment trackers, besides metrics.jsonl and TensorBoard, which every run has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mlflow: MlflowSpec | None = None
    wandb: WandbSpec | None = None
