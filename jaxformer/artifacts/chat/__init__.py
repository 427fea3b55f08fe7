"""Chat templates: conversations as text, as token ids, and which tokens the assistant says."""
