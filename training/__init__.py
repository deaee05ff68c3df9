"""Fine-tuning with FSDP on Ray: the job file, the training loop, its checkpoints, its transport verdict and its submission."""
