"""What lies on disk: a run folder, its checkpoints, a tokenizer; load and save."""
