"""Submission of a job to a stack, without an open port: everything goes through short `kubectl exec`
calls.
"""
