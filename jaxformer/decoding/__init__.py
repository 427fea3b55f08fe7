"""One loop that generates from any model that can start a cache and advance it."""
