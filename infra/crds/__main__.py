"""``python -m infra.crds FOLDER RELEASE``: take over the CRDs of a KubeRay release."""

import sys
from pathlib import Path

from infra.crds import write_packaged

for path in write_packaged(Path(sys.argv[1]), Path(__file__).parent, sys.argv[2]):
    print(path)  # noqa: T201
