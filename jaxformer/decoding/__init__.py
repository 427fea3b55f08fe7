"""Generation, with one loop for every model that can start a cache and advance it."""
