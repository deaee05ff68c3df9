"""Property-based tests here are about results, not about the speed of a loaded machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("graph", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("graph")
