"""Commands that run something of their own."""
