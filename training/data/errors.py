"""Errors of the data pipeline that a user can act on."""


class DataError(ValueError):
    """The data, or what the job file says about it, cannot be trained on; the message says what to change."""
