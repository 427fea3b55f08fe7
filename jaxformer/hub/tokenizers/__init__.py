"""Tokenizers in the files of other libraries."""
