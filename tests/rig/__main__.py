"""python -m tests.rig up | down | status | env"""

from __future__ import annotations

import argparse
import sys

from tests.gotools.build import BuildError
from tests.rig.cluster import Rig
from tests.rig.machine import RigError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rig", description="A real Kubernetes on this machine. See docs/rig.md."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start it (builds its programs the first time, about 35 minutes)")
    commands.add_parser("down", help="stop it; nothing of it stays but its logs")
    commands.add_parser("status", help="how it is: exit status 0 ready, 3 stopped, 1 anything else")
    commands.add_parser("env", help="the environment of its users, for `eval`")
    command = parser.parse_args().command
    rig = Rig()
    try:
        if command == "up":
            rig.up()
        elif command == "down":
            rig.down()
        elif command == "status":
            return _status(rig)
        else:
            print(f"export KUBECONFIG={rig.layout.kubeconfig}")
            for name, value in rig.storage_environment().items():
                print(f"export {name}={value}")
    except (RigError, BuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _status(rig: Rig) -> int:
    status = rig.status()
    print(f"{status.phase}{f': {status.text}' if status.text else ''} (state folder {rig.layout.state})")
    if status.phase == "ready":
        print(rig.kubectl("get", "nodes", "-o", "wide"))
        print(rig.kubectl("get", "pods", "--all-namespaces", "-o", "wide"))
    return {"ready": 0, "stopped": 3}.get(status.phase, 1)


if __name__ == "__main__":
    sys.exit(main())
