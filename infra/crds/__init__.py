"""KubeRay's CustomResourceDefinitions, as released, compressed.

They are applied by their own server-side step: Helm installs CRDs once and never upgrades them, and three
of them are larger than the annotation that a client-side apply writes (262144 bytes). The files are the
YAML of ``config/crd/bases`` in the Go module ``github.com/ray-project/kuberay/ray-operator``, as compact
JSON; ``python -m infra.crds FOLDER RELEASE`` writes them again from such a folder.
"""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

RELEASE_FILE = Path(__file__).parent / "release.txt"


def packaged_crds() -> list[dict[str, Any]]:
    """The CRDs of the pinned KubeRay release, in the order of their names."""
    folder = files(__name__)
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json.gz"))
    return [json.loads(gzip.decompress((folder / name).read_bytes())) for name in names]


def read_crds(folder: Path) -> list[dict[str, Any]]:
    """The CRDs in the YAML files of a folder.

    Raises:
        FileNotFoundError: the folder has no CRDs.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    documents = [
        document
        for path in sorted(folder.glob("*.y*ml"))
        for document in yaml.load_all(path.read_text(encoding="utf-8"), Loader=loader)
    ]
    crds = [d for d in documents if d and d.get("kind") == "CustomResourceDefinition"]
    if not crds:
        raise FileNotFoundError(f"{folder} has no YAML file with a CustomResourceDefinition")
    return sorted(crds, key=lambda crd: crd["metadata"]["name"])


def write_packaged(source: Path, target: Path, release: str) -> list[Path]:
    """Writes the CRDs of ``source``, KubeRay ``release``, into ``target``: the same bytes each time."""
    written: list[Path] = []
    for crd in read_crds(source):
        path = target / f"{crd['metadata']['name']}.json.gz"
        text = json.dumps(crd, separators=(",", ":"), sort_keys=True).encode()
        path.write_bytes(gzip.compress(text, compresslevel=9, mtime=0))
        written.append(path)
    (target / RELEASE_FILE.name).write_text(f"{release}\n", encoding="utf-8")
    return written
