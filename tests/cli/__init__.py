"""The command line: what each command prints, returns and leaves alone."""

#: Of the store that most tests look at.
WIDTH, TOKENS, ENTRIES = 24, 6, 30
