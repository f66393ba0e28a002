"""One folder for each component."""
