"""Reading text and pairs, splitting, tokenisation and batching."""
