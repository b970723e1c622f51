"""Commands that check a store."""
