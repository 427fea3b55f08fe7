"""Import and export of models in the formats of Hugging Face, and export to GGUF."""
