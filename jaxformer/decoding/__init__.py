"""Text generation: one decoding loop for every autoregressive model with a cache."""
