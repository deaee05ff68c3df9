"""Runs one of the plugins as a process of its own, as the engine starts a plugin: `plugin_main.py aws`.

It prints its port and serves until it is killed. The environment says where the emulated AWS is (AWS_ENDPOINT_URL, and
the account as AWS_ACCESS_KEY_ID), and at which call to die (DIE_AT=CreateVpc).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import boto3
import botocore.session

from tests.engine import eks_plugin, kubernetes_plugin
from tests.engine.aws_plugin import server as aws_plugin
from tests.engine.aws_plugin.base import Cloud
from tests.engine.wire import Served


def main(name: str) -> None:
    if name == "aws":
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        core = botocore.session.get_session()
        core.register("before-call", _die)
        plugin = aws_plugin.Aws(
            lambda region: Cloud(boto3.Session(botocore_session=core, region_name=region), endpoint, region),
            has_credentials=lambda: "AWS_ACCESS_KEY_ID" in os.environ,
        )
    elif name == "eks":
        plugin = eks_plugin.Eks()
    else:
        plugin = kubernetes_plugin.Kubernetes(lambda cluster: None)
    served = Served(plugin)
    print(served.port, flush=True)
    served.wait()


def _die(model: Any, **_: Any) -> None:
    if model.name == os.environ.get("DIE_AT"):
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
