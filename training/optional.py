"""Packages that the image does not have and a job may ask for; they come by the job's runtime_env."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OptionalPackage:
    """A package that a part of the job file needs.

    key: that part. module: what is imported. requirement: the pinned distribution that is tested, for messages.
    distributions: all that bring the module.
    """

    key: str
    module: str
    requirement: str
    distributions: tuple[str, ...]

    def problem(self, promised: Sequence[str] = ()) -> str | None:
        """Why the package is missing here, with the lines that bring it; None where it is installed or promised.

        promised: requirements that will be installed before the job starts.
        """
        if importlib.util.find_spec(self.module) is not None:
            return None
        if any(_distribution(requirement) in self.distributions for requirement in promised):
            return None
        return (
            f"{self.key} needs the package {self.module}, which is not installed: the image does not have it. Add it "
            f"to the job file, and the job brings it along:\n  runtime_env:\n    pip: [{self.requirement}]"
        )


def missing_packages(packages: Sequence[OptionalPackage], promised: Sequence[str] = ()) -> list[str]:
    """The problems of those that are neither installed nor promised."""
    return [problem for package in packages if (problem := package.problem(promised)) is not None]


def _distribution(requirement: str) -> str:
    """The normalized name of a requirement (PEP 503)."""
    name = re.match(r"[A-Za-z0-9._-]*", requirement.strip())
    return re.sub(r"[-_.]+", "-", name[0] if name else "").lower()
