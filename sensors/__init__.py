"""This deployment's own sensors, built from the library's factories."""
