"""Readers and writers of tokenizers in the formats of other libraries."""
