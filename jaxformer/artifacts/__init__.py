"""Files on disk: run folders, checkpoints, saved models and tokenizers."""
