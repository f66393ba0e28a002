"""The component for topic `flights`."""
