"""Errors of the data pipeline that a user can act on."""

from training.errors import UsageError


class DataError(UsageError, ValueError):
    """The data, or what the job file says about it, cannot be trained on; the message says what to change."""
