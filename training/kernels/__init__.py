"""Fused operations for CUDA. Each has a plain PyTorch path beside it, which every other device takes.

What each one gains on an H200 stands in docs/performance.md.
"""
