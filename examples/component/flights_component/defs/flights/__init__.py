"""The topic `flights`."""
