"""Evaluation of retrieval on the keys, values and queries of a real language model."""
