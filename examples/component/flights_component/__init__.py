"""The deployment of the repository's `definitions.py` as a component: see `defs/flights/defs.yaml`."""
