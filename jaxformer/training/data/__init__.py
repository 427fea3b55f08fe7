"""Reading of text and pairs, splits, tokenisation and batches."""
