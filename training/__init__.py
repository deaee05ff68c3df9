"""Fine-tuning with FSDP on Ray: job file, training loop, checkpoints, transport verdict, submission."""
