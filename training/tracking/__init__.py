"""Where the numbers of a run go besides metrics.jsonl and TensorBoard."""
