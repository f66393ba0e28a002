"""The deployment of `definitions.py` as a component: see `defs/flights/defs.yaml`."""
