"""Training: data, tasks, the training loop and its reports."""
