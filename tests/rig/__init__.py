"""A real three-node Kubernetes on one machine, to prove the workload half of the product on. See
docs/rig.md.
"""
