"""Assets of claimed batches, data topics as assets, and checks."""
