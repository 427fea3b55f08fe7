"""From configs to models as values."""
