"""Tests that nothing is lost and nothing silently wrong (docs/durability.md)."""
