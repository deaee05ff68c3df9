"""Entry point of ``pulumi up``."""

from infra.program import program

program()
