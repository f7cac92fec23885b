"""Import paths of an earlier system, kept as re-exports; nothing is defined below here."""
