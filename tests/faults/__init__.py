"""Groups of real members under faults, on a real Kafka of three brokers.

`scenario` draws from a seed what happens, `run` lets it happen, `checkers` compares the recorded log with what the
members wrote into their journals, by the simulator's checkers. Members are processes (`worker`); `proxy` stands between
them and the brokers (`cluster`). Nothing of this is part of the library.
"""
