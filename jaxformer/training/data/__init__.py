"""Text and pairs: where they are read from, and how they become batches of tokens."""
