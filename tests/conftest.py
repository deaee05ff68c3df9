"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# No test judges time: the machines that run them are shared and noisy.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
