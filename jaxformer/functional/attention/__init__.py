"""Attention: the formula, what each query sees, and the forms in which devices compute it."""
