"""``python -m infra.crds FOLDER``: take over the CRDs of a KubeRay release."""

import sys
from pathlib import Path

from infra.crds import write_packaged

for path in write_packaged(Path(sys.argv[1]), Path(__file__).parent):
    print(path)  # noqa: T201
