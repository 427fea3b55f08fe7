"""Chat templates: conversations as text and token ids, with masks of the assistant's tokens."""
