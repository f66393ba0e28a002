"""The exporter: reads the coordination log continuously, and serves the state of its groups to Prometheus.

It only observes. `exporter` reads at its own interval, `topic_reader` looks up the data topics, `lag_times` turns
offsets into ages, `group_metrics` makes the values, and `definitions` lists what they mean.
"""
