"""Attention: the formula, masks, scores, and implementations for CPU, GPU and TPU."""
