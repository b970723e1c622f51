"""The contract, line by line: what other programs rely on, tested from outside the package."""
