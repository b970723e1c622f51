"""Clients: HybridMem attached to the programs that run language models."""
