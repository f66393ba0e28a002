"""A coordinated group under faults: coordinators and members in processes of their own, three real brokers.

`scenario` draws from a seed what happens, `run` lets it happen, `checkers` compares what members believed (`journal`)
with the coordination log as the plain second reader reads it. Coordinators and members are processes (`worker`);
proxies of `tests.faults` stand between some of them and the brokers. Nothing of this is part of the library.
"""
