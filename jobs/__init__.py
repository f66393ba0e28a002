"""This deployment's own jobs, built from the library's factories."""
