"""`finetune image`: the digest behind the tag of the image, asked of its registry, and the setting that pins it.

A tag can be moved; a digest cannot. This speaks the registry API (distribution specification 1.1) and needs neither
Docker nor credentials for a public image.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.settings import DIGEST, SettingsError, StackSettings, read_settings_file
from training.errors import UsageError

SECONDS = 30.0
# An index where the image has several platforms: its digest is right on each of them.
ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)


@dataclass(frozen=True)
class Resolved:
    """The digest of a tag now, and the one that the stack has."""

    stack: str
    image: str
    tag: str
    digest: str
    pinned: str | None

    @property
    def command(self) -> str | None:
        """What pins the digest; None where it is pinned already."""
        if self.pinned == self.digest:
            return None
        return f"pulumi config set imageDigest {self.digest} --stack {self.stack}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "image": self.image,
            "tag": self.tag,
            "digest": self.digest,
            "pinned": self.pinned,
            "command": self.command,
        }

    def render(self) -> str:
        lines = [f"{self.image}:{self.tag}", f"is       {self.digest}", f"pinned:  {self.pinned or 'no'}"]
        if self.command is None:
            return "\n".join([*lines, "Nothing to change."])
        effect = "Then pulumi up: the pods of the RayCluster are replaced, so no job may run."
        return "\n".join([*lines, f"Change:  {self.command}", effect])


def resolve_settings_file(path: Path) -> Resolved:
    """The digest of the image of a settings file.

    Raises UsageError for a broken file, or a registry that does not know the tag or does not answer.
    """
    try:
        settings: StackSettings = read_settings_file(path)
    except SettingsError as error:
        raise UsageError(str(error)) from None
    digest = digest_of(settings.image, settings.image_tag)
    return Resolved(settings.stack, settings.image, settings.image_tag, digest, settings.image_digest)


def digest_of(image: str, tag: str) -> str:
    """The digest of `image:tag`. Raises UsageError."""
    registry, _, repository = image.partition("/")
    if not repository or not re.search(r"[.:]|^localhost$", registry):
        raise UsageError(f"image = {image}: the registry is missing, as in public.ecr.aws/NAME/REPOSITORY")
    # Plain http on this machine only, as container engines do.
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{repository}/manifests/{urllib.parse.quote(tag)}"
    try:
        try:
            digest = _ask(url, None)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            digest = _ask(url, _token(error.headers.get("WWW-Authenticate", ""), repository))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise UsageError(f"{image}:{tag}: the registry has no such tag; correct imageTag") from None
        if error.code in (401, 403):
            raise UsageError(
                f"{image}: the registry wants credentials ({error.code}). Look the digest up with an engine that is "
                f"logged in: docker buildx imagetools inspect {image}:{tag}"
            ) from None
        raise UsageError(f"{url}: the registry answers {error.code}; try again later") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UsageError(f"{registry}: the registry does not answer ({reason})") from None
    if not DIGEST.fullmatch(digest):
        raise UsageError(f"{url}: no digest in the answer (Docker-Content-Digest: {digest!r})")
    return digest


def _ask(url: str, token: str | None) -> str:
    headers = {"Accept": ACCEPT, **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, method="HEAD", headers=headers)  # noqa: S310 - built above, http or https
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310 - built above, http or https
        return answer.headers.get("Docker-Content-Digest", "")


def _token(challenge: str, repository: str) -> str:
    """An anonymous token from where the registry's challenge says."""
    parts = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = parts.pop("realm", "")
    if not challenge.startswith("Bearer ") or not re.match(
        r"https://|http://(localhost|127\.0\.0\.1)[:/]", realm
    ):
        raise ValueError(f"it asks for a login that is not known here: {challenge!r}")
    parts.setdefault("scope", f"repository:{repository}:pull")
    query = urllib.parse.urlencode({key: parts[key] for key in ("service", "scope") if key in parts})
    with urllib.request.urlopen(f"{realm}?{query}", timeout=SECONDS) as answer:  # noqa: S310 - checked above
        document = json.loads(answer.read())
    return document.get("token") or document["access_token"]
