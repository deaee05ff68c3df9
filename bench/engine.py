"""How long the engine takes for the whole AWS layer and its workload, against the emulated AWS.

    python -m bench.engine            prints a table and writes bench/results/engine.json

What AWS itself takes (a control plane about ten minutes) is not in it. Each run is the CLI as a user starts it; the
plugins stand in for the real ones, which start slower. `program` is the Python program alone in a fresh process. CPU
seconds stand beside the wall clock, since they say the same on a machine that does other things too.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "engine.json"
TARGET_SECONDS = {"preview": 15.0, "program": 3.0}
_PROGRAM = """
import time
started = time.perf_counter()
from infra.recorder import record
from infra.settings import parse_settings
record(parse_settings({"owner": "bench", "publicCidrs": ["81.2.69.160/32"]}, "dev"), preview=True)
print(time.perf_counter() - started, time.process_time())
"""


def main() -> int:
    from infra.program import program
    from tests.engine.conftest import BASE
    from tests.engine.harness import Engine, Stack

    seconds: dict[str, float] = {}
    seconds["program"], seconds["program, CPU"] = _program_seconds()
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        engine = Engine(Path(folder))
        with engine.fresh_account() as account:
            stack = Stack(engine, Path(folder) / "stack", program, config={**BASE, "accountId": account})
            stack.preview().require_ok()  # imports, as in any second run of a program
            for name, run in (
                ("preview", stack.preview),
                ("up", stack.up),
                ("up, nothing to do", stack.up),
                ("destroy", stack.destroy),
            ):
                before = _cpu()
                result = run().require_ok()
                seconds[name], seconds[f"{name}, CPU"] = result.seconds, _cpu() - before
                if name == "up":
                    calls, resources = len(engine.faults.calls), len(result.steps)
        engine.stop()

    report: dict[str, Any] = {
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "target_seconds": TARGET_SECONDS,
        "resources": resources,
        "aws_calls_of_an_up": calls,
        "machine": {
            "cores": os.cpu_count(),
            "load_1min": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d"),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=2) + "\n")
    for name, value in seconds.items():
        target = f"   (target {TARGET_SECONDS[name]:g} s)" if name in TARGET_SECONDS else ""
        print(f"{name:20} {value:7.2f} s{target}")
    print(f"{resources} resources, {calls} calls to AWS; written to {RESULT}")
    return 0


def _cpu() -> float:
    """CPU seconds so far, of this process (program and plugins) and of the engines that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _program_seconds() -> tuple[float, float]:
    """(wall, CPU) seconds of the program alone, imports included."""
    printed = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True
    ).stdout
    wall, cpu = printed.split()
    return float(wall), float(cpu)


if __name__ == "__main__":
    sys.exit(main())
