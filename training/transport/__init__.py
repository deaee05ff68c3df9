"""Proof of which network carried a job's collectives: NCCL logs, EFA counters, the verdict, the probe."""
